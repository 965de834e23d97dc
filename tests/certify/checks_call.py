"""Checks of certify() from its tensors: hidden keys, heads, blocks, the whole way."""

from __future__ import annotations

import numpy as np

import certify
from tests.certify import families
from tests.certify.emulator import ORDERS
from tests.certify.families import FAMILIES, SCALE, call_arrays
from tests.certify.measures import (
    ALLOWED,
    head_errors,
)


def check_certified_calls() -> None:
    """From the tensors to the output: certified rows obey E <= tolerance on the machine."""
    rng = np.random.default_rng(20)
    certified = 0
    for index, (name, family) in enumerate(FAMILIES.items()):
        dtype = ("bfloat16", "float32")[index % 2]
        head = families.draw(family, rng, 8, 150, 16)
        size = np.float32(2.0 ** rng.uniform(-30.0, 30.0))
        head = (head[0], head[1], head[2][:, :3] * size)
        errors, certificate = head_errors([head], dtype, ORDERS[index % 4])
        sure = np.isfinite(certificate.error_bound[0])
        certified += int(sure.sum())
        assert np.all(certificate.error_bound[0][sure] <= certificate.tolerance)
        assert np.all(errors[sure] <= certificate.error_bound[0][sure] * ALLOWED), name
    assert certified > 80, f"only {certified} rows were certified"


def check_hidden_keys() -> None:
    """key_lengths: keys that a row does not see have no say, not even a hidden NaN."""
    rng = np.random.default_rng(21)
    query, key, value = (
        a[None, :, None] for a in families.draw(families.gaussian(3.0), rng, 16, 300, 16)
    )
    key = np.concatenate([key, key])
    value = np.concatenate([value * np.float32(1e-6), value * np.float32(1e-6)])
    value[0, 200:] = 100.0
    key[0, 250:] = np.nan
    query = np.concatenate([query, query])
    whole = certify.certify(query, key, value, scale=SCALE, key_lengths=np.array([200, 300]))
    alone = certify.certify(query[:1], key[:1, :200], value[:1, :200], scale=SCALE)
    for name in ("certified", "stabilizer", "error_bound", "gap", "budget", "bound_used"):
        assert np.array_equal(getattr(whole, name)[0], getattr(alone, name)[0], equal_nan=True), (
            name
        )
    other = certify.certify(query[1:], key[1:], value[1:], scale=SCALE)
    assert np.array_equal(whole.gap[1], other.gap[0]), "a batch element has a say in another"
    nothing = certify.certify(query, key, value, scale=SCALE, key_lengths=np.array([0, 300]))
    assert np.all(nothing.certified[0]) and np.all(nothing.error_bound[0] == 0)


def check_grouped_heads() -> None:
    """Fewer key heads: every query head is judged against its own group's keys and values."""
    rng = np.random.default_rng(22)
    kinds = (families.gaussian(1.0), families.gaussian(60.0), families.gaussian(10.0))
    heads = [families.draw(kind, rng, 20, 200, 16) for kind in kinds]
    query, key, value = call_arrays(heads, "float32")
    value.values[:, :, 2] *= np.float32(1e-9)
    more = np.concatenate([query.values, query.values[::-1, ::-1]], axis=2)[
        :, :, [0, 3, 1, 4, 2, 5]
    ]
    grouped = certify.certify(more, key.values, value.values, scale=SCALE)
    assert 0 < np.mean(grouped.certified) < 1, "the heads do not differ"
    for head in range(6):
        one = slice(head // 2, head // 2 + 1)
        alone = certify.certify(
            more[:, :, head : head + 1], key.values[:, :, one], value.values[:, :, one], scale=SCALE
        )
        for name in ("certified", "stabilizer", "error_bound", "gap", "budget", "bound_used"):
            left, right = getattr(grouped, name)[0, head], getattr(alone, name)[0, 0]
            assert np.array_equal(left, right, equal_nan=True), f"{name} of head {head}"


def check_blocks_need_every_row() -> None:
    """One row that cannot be proved takes its query block with it, and no other block."""
    rng = np.random.default_rng(23)
    head = families.draw(families.gaussian(3.0), rng, 40, 300, 16)
    head[0][13] *= np.float32(1e4)
    query, key, value = call_arrays([head], "bfloat16")
    certificate = certify.certify(query, key, value, scale=SCALE, block_q=16)
    assert certificate.certified.tolist() == [[[False, True, True]]]
    assert np.isnan(certificate.stabilizer[0, 0]).nonzero()[0].tolist() == [13]
