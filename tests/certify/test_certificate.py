"""The public certificate: field cases, edges of input, validation, JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import certify
from certify.certificate import Certificate
from tests.certify import emulator, families
from tests.certify.checks_bounds import UNCAPPED
from tests.certify.families import SCALE, call_arrays, draw
from tests.certify.measures import head_errors, kernel_logits, kernel_query

FIELDS = ("certified", "stabilizer", "error_bound", "gap", "budget", "bound_used")


def ordinary(rows: int = 20, keys: int = 100, dim: int = 16, heads: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(41)
    head = families.gaussian(3.0)
    drawn = [draw(head, rng, rows, keys, dim) for _ in range(heads)]
    return [array.values for array in call_arrays(drawn, "float32")]


def run(query: Any, key: Any, value: Any = None, **arguments: Any) -> Certificate:
    return certify.certify(query, key, value, scale=SCALE, **arguments)


def test_one_bad_head_is_alone() -> None:
    """Field case 11: 24 heads, one of +-5,000 bits. Catches bounds pooled over heads."""
    rng = np.random.default_rng(42)
    heads = [draw(families.gaussian(3.0), rng, 64, 512, 64) for _ in range(24)]
    heads[7] = draw(families.opposite(5000.0), rng, 64, 512, 64)
    heads[7][1][::3] *= np.float32(0.3)
    certificate = run(*call_arrays(heads, "bfloat16"), bounds="blocks")
    assert certificate.certified[0, :, 0].tolist() == [head != 7 for head in range(24)]


def test_batch_elements_are_apart() -> None:
    """Field case 13: two prompts, one with a sink head that cannot be proved without sentinels."""
    rng = np.random.default_rng(43)
    plain = [draw(families.gaussian(3.0), rng, 64, 512, 64) for _ in range(3)]
    sinks = [plain[0], draw(families.sink("mixed"), rng, 64, 512, 64), plain[2]]
    batches = [call_arrays(heads, "float32") for heads in (plain, sinks)]
    query, key, value = (
        np.concatenate([batch[part].values for batch in batches]) for part in range(3)
    )
    without = run(query, key, value, bounds="blocks")
    assert without.certified[:, :, 0].tolist() == [[True] * 3, [True, False, True]]
    assert run(query, key, value).certified.all()


def centred_gate(query: np.ndarray, key: np.ndarray) -> tuple[bool, np.ndarray, np.ndarray]:
    """The published gate: centred keys, m = ceil(|q| max|k|) - 88, accepted up to 213 bits."""
    centred = key - key.mean(axis=0)
    bound = np.linalg.norm(query, axis=1) * np.max(np.linalg.norm(centred, axis=1))
    return bool(np.max(bound) <= 213.0), np.ceil(bound) - 88.0, centred


def test_products_that_flush() -> None:
    """Field case 14: opposite outliers orthogonal to the queries, |v| of 0.02.

    The gate that bounds only the largest probability accepts the head, and its output is 0. Catches
    a theorem without the term of V.
    """
    rng = np.random.default_rng(44)
    head = draw(families.orthogonal_outliers, rng, 32, 600, 64)
    query = kernel_query(head[0], "float32")
    value = np.broadcast_to(head[2].astype(np.float64), (32, *head[2].shape))

    accepts, stabilizer, centred = centred_gate(
        query.astype(np.float64), head[1].astype(np.float64)
    )
    assert accepts
    logits = query.astype(np.float64) @ centred.T
    theirs = emulator.attend(logits, value, stabilizer, emulator.CUT_OFFS_ONLY)
    assert np.all(theirs.row_sum > 0) and np.all(theirs.out == 0)

    errors, certificate = head_errors([head], "float32", "eight")
    assert certificate.certified.all()
    assert np.max(errors) <= np.max(certificate.error_bound) <= certificate.tolerance
    assert np.max(errors) < 1e-3


def test_one_key_is_exact() -> None:
    """A single key: S and L agree to the slack. Catches a division by n - 1 or an empty block."""
    query, key, value = ordinary(keys=1)
    certificate = run(query, key, value)
    assert certificate.certified.all() and np.max(certificate.gap) < 0.01
    for bounds in UNCAPPED:
        assert run(query, key, value, bounds=bounds).certified.all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("argument", [0, 1, 2])
def test_not_finite_never_certifies(bad: float, argument: int) -> None:
    """Catches a maximum or a comparison that loses a NaN. A bad query spoils its own row only."""
    arrays = ordinary()
    arrays[argument][0, 7, 0, 3] = bad
    certificate = run(*arrays, block_q=4)
    if argument == 0:
        assert certificate.certified[0, 0].tolist() == [True, False, True, True, True]
        assert np.isnan(certificate.stabilizer[0, 0]).nonzero()[0].tolist() == [7]
    else:
        assert not certificate.certified.any()
        assert np.isposinf(certificate.error_bound).all()
    assert not np.isnan(certificate.gap).any() and not np.isnan(certificate.margin).any()


def test_zero_values_are_certified() -> None:
    """V = 0 gives exact zeros. Catches log2(0) in the budget."""
    query, key, value = ordinary()
    certificate = run(query, key, np.zeros_like(value))
    assert certificate.certified.all() and np.all(certificate.error_bound <= certificate.tolerance)


@pytest.mark.parametrize(("size", "certified"), [(1e-40, False), (2.0**-126, False), (1e-30, True)])
def test_tiny_values(size: float, certified: bool) -> None:
    """Subnormal values read as 0, which is an error of 100%: not certified, while 1e-30 is."""
    query, key, value = ordinary()
    tiny = (np.sign(value) * np.float32(size)).astype(np.float32)
    assert run(query, key, tiny).certified.all() == certified


def test_huge_values_leave_room() -> None:
    """max|v| near overflow narrows the budget but does not end it. Catches V in h_max twice."""
    query, key, value = ordinary()
    huge = (np.sign(value) * np.float32(3e38 / 2)).astype(np.float32)
    certificate = run(query, key, huge)
    assert certificate.certified.all() and 95 < certificate.budget.min() < 105


def test_no_value_means_one() -> None:
    """value=None stands for max|v| = 1. Catches a silent other choice."""
    query, key, value = ordinary()
    ones = np.ones_like(value)
    left, right = run(query, key), run(query, key, ones)
    for name in FIELDS:
        assert np.array_equal(getattr(left, name), getattr(right, name)), name


def test_tolerance_moves_verdicts_one_way() -> None:
    """A looser tolerance certifies what a tighter one does. Catches a budget of the wrong sign."""
    rng = np.random.default_rng(45)
    heads = [
        draw(families.gaussian(bits), rng, 64, 512, 64) for bits in np.linspace(10.0, 60.0, 17)
    ]
    arrays = call_arrays(heads, "bfloat16")
    before = np.zeros((1, 17, 1), bool)
    for tolerance in (2.0**-15, 2.0**-12, 2.0**-6, 0.5):
        now = run(*arrays, tolerance=tolerance).certified
        assert np.all(now | ~before)
        before = now
    assert 0 < before.sum() < 17


def test_blocks_of_rows() -> None:
    """Shapes for S_q that block_q does not divide. Catches a dropped tail."""
    query, key, value = ordinary(rows=37)
    certificate = run(query, key, value, block_q=8)
    assert certificate.certified.shape == (1, 1, 5)
    assert certificate.stabilizer.shape == certificate.gap.shape == (1, 1, 37)


def test_bfloat16_arrays_are_read_by_name() -> None:
    """ml_dtypes arrays, float16, lists of rows. Catches bits read as numbers."""
    query, key, value = ordinary()
    half = [array.astype(ml_dtypes.bfloat16) for array in (query, key, value)]
    single = [array.astype(np.float32) for array in half]
    exact = kernel_logits(kernel_query(single[0][0, :, 0], "bfloat16"), single[1][0, :, 0], "exact")
    sums = emulator.log_sum_exp(exact)
    certificate = run(*half)
    # The middle of the interval tells S + L, which no wrong reading of the bits would give.
    room = 125.0 - np.log2(np.max(np.abs(single[2])))
    low = certificate.budget[0, 0] + 1.5 - room
    assert np.all(np.abs(certificate.stabilizer[0, 0] - (sums - room / 2 + low / 2)) < 8.0)
    assert run(*(array.astype(np.float16) for array in (query, key, value))).certified.all()


def test_inputs_are_not_modified() -> None:
    """Field case 10 for the certifier: centring must work on copies."""
    arrays = ordinary()
    copies = [array.copy() for array in arrays]
    run(*arrays)
    assert all(np.array_equal(a, b) for a, b in zip(arrays, copies, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: ((q[0], k, v), {}), "query: got shape"),
        (lambda q, k, v: ((q, k[..., :8], v), {}), "key: got shape"),
        (lambda q, k, v: ((q, k, v[:, :50]), {}), "value: got shape"),
        (lambda q, k, v: ((q[:, :0], k, v), {}), "above 0"),
        (lambda q, k, v: ((q, k.astype(np.float16), v), {}), "key: got dtype float16"),
        (lambda q, k, v: ((q.astype(np.float64), k, v), {}), "query: got dtype float64"),
        (lambda q, k, v: (("text", k, v), {}), "query: got dtype"),
        (lambda q, k, v: ((q, k, v), {"tolerance": 1e-9}), "tolerance"),
        (lambda q, k, v: ((q, k, v), {"bounds": "cube"}), "bounds: got 'cube'"),
        (lambda q, k, v: ((q, k, v), {"bounds": "soft cap"}), "without logits_soft_cap"),
        (lambda q, k, v: ((q, k, v), {"logits_soft_cap": 0.0}), "logits_soft_cap: got 0.0"),
        (lambda q, k, v: ((q, k, v), {"causal": 1}), "causal: got 1"),
        (lambda q, k, v: ((q, k, v), {"window": -1}), "window: got -1"),
        (lambda q, k, v: ((q, k, v), {"segment_ids": np.zeros(3, int)}), "segment_ids: got shapes"),
        (lambda q, k, v: ((q, k, v), {"attn_mask": np.ones((3, 5), bool)}), "must broadcast"),
        (lambda q, k, v: ((q, k, v), {"attn_mask": np.ones(100)}), "attn_mask: got dtype float64"),
        (
            lambda q, k, v: ((q, k, v), {"attn_mask": np.full(100, np.nan, np.float32)}),
            "attn_mask: holds NaN",
        ),
        (lambda q, k, v: ((q, k, v), {"block_q": 0}), "block_q"),
        (lambda q, k, v: ((q, k, v), {"block_q": 1.5}), "block_q"),
        (lambda q, k, v: ((q, k, v), {"statistics_block": -1}), "statistics_block"),
        (lambda q, k, v: ((q, k, v), {"key_lengths": [101]}), "key_lengths"),
        (lambda q, k, v: ((q, k, v), {"key_lengths": [1, 2]}), "key_lengths"),
        (lambda q, k, v: ((q, k, v), {"key_lengths": [1.5]}), "key_lengths"),
        (lambda q, k, v: ((np.repeat(q, 3, 2), np.repeat(k, 2, 2), v), {}), "multiple"),
    ],
)
def test_bad_input_is_named(change: Any, message: str) -> None:
    """Catches input that is silently bent into shape."""
    positional, named = change(*ordinary())
    with pytest.raises(ValueError, match=message):
        run(*positional, **named)


@pytest.mark.parametrize("scale", [math.nan, math.inf, "1", True])
def test_bad_scale_is_named(scale: Any) -> None:
    """Catches a scale that turns every logit into NaN."""
    query, key, value = ordinary()
    with pytest.raises(ValueError, match="scale"):
        certify.certify(query, key, value, scale=scale)


def test_default_scale() -> None:
    """scale=None is head_dim ** -0.5. Catches a scale applied twice or not at all."""
    query, key, value = ordinary(dim=16)
    left = certify.certify(query, key, value)
    right = certify.certify(query, key, value, scale=0.25)
    assert np.array_equal(left.stabilizer, right.stabilizer)


def test_progress_counts_heads() -> None:
    """Catches a bar that never ends."""
    seen: list[tuple[int, int]] = []
    run(*ordinary(heads=3), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_json_round_trip() -> None:
    """Bit for bit, NaN and inf included. Catches numbers printed with too few digits."""
    query, key, value = ordinary(rows=37)
    query[0, 5] = np.nan
    certificate = run(query, key, value, block_q=8)
    text = certificate.to_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    copy = Certificate.from_json(text)
    for name in FIELDS:
        left, right = getattr(certificate, name), getattr(copy, name)
        assert left.dtype == right.dtype and left.tobytes() == right.tobytes(), name
    assert (copy.tolerance, copy.block_q) == (certificate.tolerance, certificate.block_q)


def _broken(text: str, change: str) -> str:
    document = json.loads(text)
    if change == "version":
        document["version"] = 99
    elif change == "array":
        del document["arrays"]["gap"]
    elif change == "length":
        document["arrays"]["gap"]["shape"] = [1, 1, 99]
    elif change == "base64":
        document["arrays"]["gap"]["base64"] = "!!!"
    elif change == "shape":
        document["block_q"] = 7
    elif change == "tolerance":
        document["tolerance"] = "x"
    elif change == "list":
        return "[1, 2]"
    return json.dumps(document) if change != "syntax" else text[:50]


@pytest.mark.parametrize(
    "change",
    ["version", "array", "length", "base64", "shape", "tolerance", "list", "syntax"],
)
def test_broken_json_is_refused(change: str) -> None:
    """Catches a file of a newer release, or half a file, that is read as something else."""
    text = run(*ordinary(rows=37), block_q=8).to_json()
    with pytest.raises(ValueError):
        Certificate.from_json(_broken(text, change))
