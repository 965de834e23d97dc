"""A lemma of certify/PROOF.md about the kernel itself, in interpret mode."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

import certify
from certify import theorem
from certify.arithmetic import arithmetic_for
from jax_kernels import BlockSizes, attention
from tests.certify import emulator

KEYS, SIZE = 1500, 2.0**-112
CERTIFIED, RECOMPUTED = (certify.VERDICTS.index(name) for name in ("certified", "recomputed"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_certified_head_beside_a_recomputed_one(dtype: str) -> None:
    """Heads of 64 channels are redone in pairs; one that was certified keeps its bound.

    One key lies 14.3 bits above the others, whose products with values of 2^-112 fall below 2^-126
    where the largest weight is 1. Catches: online softmax that flushes what the fixed stabilizer
    does not, and a recomputed head that loses its small values.
    """
    rng = np.random.default_rng(91)
    query = np.zeros((1, 128, 2, 64), np.float32)
    key, value = (np.zeros((1, KEYS, 2, 64), np.float32) for _ in range(2))
    query[:, :, 0, 0], key[:, 0, 0, 0] = 8.0 * 14.3 * math.log(2.0), 1.0
    value[:, :, 0], value[:, 0, 0] = SIZE, -SIZE
    query[:, :, 1] = 2000.0 * rng.standard_normal((1, 128, 64))
    key[:, :, 1], value[:, :, 1] = rng.standard_normal((2, KEYS, 64))
    inputs = [jnp.asarray(array, dtype) for array in (query, key, value)]
    out, found = attention(
        *inputs, block_sizes=BlockSizes(128, 512), tolerance=2.0**-10, return_certificate=True
    )
    verdict = np.asarray(found["verdict"])[0, :, 0]
    assert verdict.tolist() == [CERTIFIED, RECOMPUTED]
    bits = [np.asarray(part.astype(jnp.float32), np.float64)[0, :, 0] for part in inputs]
    logits = bits[0][:1] @ bits[1].T / (8.0 * math.log(2.0))
    exact = emulator.oracle(logits, bits[2][None])
    error = np.max(np.abs(np.asarray(out.astype(jnp.float32), np.float64)[0, :, 0] - exact)) / SIZE
    bound = float(np.asarray(found["error_bound"])[0, 0, 0])
    assert error <= bound + theorem.rounding_error(KEYS, arithmetic_for(dtype))
