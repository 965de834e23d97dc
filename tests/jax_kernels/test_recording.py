"""Bounds recorded on the device: the certifier's own functions, so its own numbers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import certify
from certify.bounds import RECORDED_BOUNDS
from jax_kernels import attention, record_bounds
from tests.jax_kernels.oracle import random_inputs

SHAPE = (2, 300, 300, 4, 2, 64)


def _arguments() -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(3)
    bias = (5 * rng.standard_normal((1, 4, 300, 300))).astype(np.float32)
    bias[..., ::7], bias[..., 5] = -np.inf, -10000.0
    segments = np.sort(rng.integers(0, 5, (2, 300))).astype(np.int32)
    return {
        "none": {},
        "causal": {"causal": True},
        "window": {"window": 20},
        "segments": {"segment_ids": segments},
        "boolean": {"attn_mask": rng.random((2, 1, 300, 300)) < 0.3},
        "bias": {"attn_mask": bias},
        "capped": {"logits_soft_cap": 20.0, "causal": True},
        "lengths": {"causal": True, "key_lengths": np.array([120, 0], np.int32)},
    }


def _gaps(record: np.ndarray) -> dict[str, np.ndarray]:
    lanes = dict(zip(certify.RECORD_FIELDS, np.moveaxis(record, -1, 0), strict=True))
    return {name: lanes[f"upper:{name}"] - lanes[f"lower:{name}"] for name in RECORDED_BOUNDS}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", list(_arguments()))
def test_device_and_certifier_record_the_same(name: str, dtype: str) -> None:
    """Catches: a mask, row order or rounding of the device's record that is not the certifier's.

    Gaps are compared and not S and L, since two rows can tie for the largest gap.
    """
    arrays = random_inputs(SHAPE, dtype)
    arguments = _arguments()[name]
    _, lse = attention(*arrays, return_lse=True, **arguments)
    found = np.asarray(record_bounds(*arrays, block_q=128, lse=lse, **arguments))
    expected = certify.record(*arrays, block_q=128, lse=np.asarray(lse), **arguments)
    assert found.shape == expected.shape == (2, 4, 3, len(certify.RECORD_FIELDS))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    ours, theirs = _gaps(found), _gaps(expected)
    for family in RECORDED_BOUNDS:
        np.testing.assert_allclose(ours[family], theirs[family], rtol=3e-5, atol=0.05)
    for lane in ("value_low", "value_high", "value_ratio", "visible_rows"):
        index = certify.RECORD_FIELDS.index(lane)
        np.testing.assert_array_equal(found[..., index], expected[..., index])
    if name != "lengths":  # the host leaves hidden keys out of n, the device processes them
        first = certify.RECORD_FIELDS.index("num_keys")
        np.testing.assert_allclose(found[..., first:], expected[..., first:], rtol=1e-4)


def test_record_repeats_the_kernels_certificate() -> None:
    """Catches: a record whose bounds, values or row sums are not those that the kernel saw."""
    query, key, value = random_inputs((1, 600, 1500, 2, 2, 128), "bfloat16")
    query = query * jnp.array([3.0, 30.0], jnp.bfloat16)[:, None]
    _, lse, found = attention(query, key, value, return_lse=True, return_certificate=True)
    record = np.asarray(record_bounds(query, key, value, lse=lse))
    lanes = dict(zip(certify.RECORD_FIELDS, np.moveaxis(record, -1, 0), strict=True))
    gap = lanes["upper:auto"] - lanes["lower:auto"]
    np.testing.assert_allclose(gap, np.asarray(found["gap"]), rtol=1e-5, atol=1e-2)
    for lane, field in (("row_sum_log2_min", "row_sum_min"), ("row_sum_log2_max", "row_sum_max")):
        measured = np.log2(np.asarray(found[field], np.float64))
        run = np.isfinite(measured)
        np.testing.assert_allclose(lanes[lane][run], measured[run], atol=2e-2)


def test_no_query_sees_a_key() -> None:
    """Catches: a worst row picked among rows that see nothing."""
    arrays = random_inputs((1, 64, 128, 1, 1, 64), "float32")
    record = np.asarray(record_bounds(*arrays, key_lengths=jnp.zeros(1, jnp.int32)))
    lanes = dict(zip(certify.RECORD_FIELDS, record[0, 0, 0], strict=True))
    assert lanes["visible_rows"] == 0
    assert np.isnan([lanes["upper:auto"], lanes["value_low"]]).all()
