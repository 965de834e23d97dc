"""The kernel and the numpy certifier evaluate the same formulas: verdicts and bounds must agree."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import certify
from jax_kernels import BlockSizes, attention
from tests.jax_kernels.oracle import random_inputs

BLOCKS = BlockSizes(256, 512)
CERTIFIED = certify.VERDICTS.index("certified")


def _family(name: str, dtype: str, head_dim: int) -> dict[str, Any]:
    query, key, value = random_inputs(
        (2, 300, 1500, 2, 1 if head_dim == 128 else 2, head_dim), dtype
    )
    if name == "sink":
        key = key.at[:, 40].set(12.0)
    elif name == "wide":
        query = query * 12
    elif name == "wild":
        query = query.at[1, :, 1].multiply(1000)
    elif name == "offset":
        key = key + 20
    elif name == "small values":
        value = value * 1e-20
    return {"query": query.astype(dtype), "key": key.astype(dtype), "value": value.astype(dtype)}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["plain", "sink", "wide", "wild", "offset", "small values"])
def test_kernel_and_certifier_agree(name: str, dtype: str, head_dim: int) -> None:
    """Catches: statistics, padding or row order of the kernel that differ from the certifier's."""
    inputs = _family(name, dtype, head_dim)
    _, found = attention(**inputs, block_sizes=BLOCKS, return_certificate=True)
    expected = certify.certify(**inputs, block_q=BLOCKS.block_q)
    verdict = np.asarray(found["verdict"])
    np.testing.assert_array_equal(verdict == CERTIFIED, expected.certified)
    starts = np.arange(0, 300, BLOCKS.block_q)
    gap = np.maximum.reduceat(expected.gap, starts, axis=-1)
    np.testing.assert_allclose(np.asarray(found["gap"]), gap, rtol=2e-5, atol=2e-3)
    budget = np.maximum.reduceat(expected.budget, starts, axis=-1)
    np.testing.assert_allclose(np.asarray(found["budget"]), budget, atol=1e-3)
    np.testing.assert_array_equal(np.asarray(found["bound_used"]), expected.bound_used)
    proved = np.maximum.reduceat(np.nan_to_num(expected.error_bound), starts, axis=-1)
    measured = np.asarray(found["error_bound"])
    assert (measured[expected.certified] <= proved[expected.certified] * (1 + 1e-5)).all()


def test_nothing_certified_is_ever_recomputed() -> None:
    """Catches: a certificate and a check that disagree, up to the very edge of the budget."""
    query, key, value = random_inputs((1, 256, 1100, 2, 2, 128), "bfloat16")
    for factor in np.linspace(9.0, 14.0, 11):
        scaled = (query * factor).astype(jnp.bfloat16)
        _, found = attention(scaled, key, value, block_sizes=BLOCKS, return_certificate=True)
        fits = np.asarray(found["gap"]) <= np.asarray(found["budget"])
        np.testing.assert_array_equal(np.asarray(found["verdict"]) == CERTIFIED, fits)
