"""Promises from weights: statistics of the keys drop out, the check and recomputation stay."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import certify
from jax_kernels import BlockSizes, attention
from tests.jax_kernels.oracle import float64_attention, random_inputs

BLOCKS = BlockSizes(256, 512)
CERTIFIED, VERIFIED, RECOMPUTED = (
    certify.VERDICTS.index(name) for name in ("certified", "verified", "recomputed")
)


def _largest_logits(query: jax.Array, key: jax.Array) -> np.ndarray:
    """[H], bits: the largest |logit| of each query head."""
    group = query.shape[2] // key.shape[2]
    keys = np.repeat(np.asarray(key, np.float64), group, axis=2)
    logits = np.einsum("bqhd,bkhd->bhqk", np.asarray(query, np.float64), keys)
    scale = query.shape[3] ** -0.5 * math.log2(math.e)
    return np.abs(logits * scale).max(axis=(0, 2, 3))


def _inputs(dtype: str, shape: tuple[int, int, int, int, int, int]) -> dict[str, Any]:
    query, key, value = random_inputs(shape, dtype)
    return {"query": query, "key": key, "value": value}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "shape", [(2, 300, 1500, 2, 2, 64), (1, 300, 1500, 3, 3, 64), (1, 300, 1100, 4, 2, 128)]
)
def test_kept_promise_certifies(shape: tuple[int, int, int, int, int, int], dtype: str) -> None:
    """Catches: a bound of another head, a group that is padded wrongly, a budget without it."""
    inputs = _inputs(dtype, shape)
    promise = (_largest_logits(inputs["query"], inputs["key"]) + 0.1).astype(np.float32)
    promise += np.arange(shape[3], dtype=np.float32)
    out, found = attention(**inputs, promise=promise, block_sizes=BLOCKS, return_certificate=True)
    plain, expected = attention(**inputs, block_sizes=BLOCKS, return_certificate=True)
    assert (np.asarray(found["verdict"]) == CERTIFIED).all()
    names = {certify.BOUND_NAMES[code] for code in np.unique(found["bound_used"])}
    assert names == {"weights"}
    gap = np.broadcast_to(2 * promise[None, :, None], found["gap"].shape)
    np.testing.assert_allclose(np.asarray(found["gap"]), gap, atol=1e-2)
    np.testing.assert_array_equal(np.asarray(found["budget"]), np.asarray(expected["budget"]))
    exact, _ = float64_attention(inputs["query"], inputs["key"], inputs["value"])
    error = np.abs(np.asarray(out, np.float64) - exact).max()
    usual = np.abs(np.asarray(plain, np.float64) - exact).max()
    assert error <= 2 * usual + 2.0**-12 * np.abs(np.asarray(inputs["value"], np.float64)).max()


@pytest.mark.parametrize("factor", [30.0, 500.0])
def test_broken_promise_costs_time_only(factor: float) -> None:
    """Logits far beyond what is promised. Catches: a promise that is believed."""
    inputs = _inputs("bfloat16", (1, 300, 1500, 2, 2, 128))
    inputs["query"] = (inputs["query"] * factor).astype(jnp.bfloat16)
    promise = np.full(2, 1.0, np.float32)
    out, found = attention(**inputs, promise=promise, block_sizes=BLOCKS, return_certificate=True)
    verdict = np.asarray(found["verdict"])
    assert (verdict == RECOMPUTED).any(), "the case is too tame to tell"
    online = attention(**inputs, path="online", block_sizes=BLOCKS)
    exact, _ = float64_attention(inputs["query"], inputs["key"], inputs["value"])
    error = np.abs(np.asarray(out, np.float64) - exact).max()
    usual = np.abs(np.asarray(online, np.float64) - exact).max()
    assert error <= 2 * usual + 2.0**-8


@pytest.mark.parametrize("size", [1e-36, 3e38, 0.0])
def test_window_of_values_is_checked(size: float) -> None:
    """A promise speaks of logits only. Catches: max|v| left out where statistics are dropped."""
    inputs = _inputs("float32", (1, 256, 1100, 1, 1, 128))
    inputs["value"] = jnp.clip(inputs["value"], -1, 1) * size
    promise = _largest_logits(inputs["query"], inputs["key"]).astype(np.float32) + 60.0
    out, found = attention(**inputs, promise=promise, block_sizes=BLOCKS, return_certificate=True)
    expected = certify.certify(**inputs, block_q=BLOCKS.block_q)
    budget = float(np.max(expected.budget))
    np.testing.assert_allclose(np.asarray(found["budget"]), budget, atol=1e-3)
    certified = (np.asarray(found["verdict"]) == CERTIFIED).all()
    assert certified == (float(np.max(found["gap"])) <= budget)
    assert np.isfinite(np.asarray(out)).all()


def test_partial_promise_takes_statistics() -> None:
    """A head without a bound. Catches: one that is certified by another head's."""
    inputs = _inputs("bfloat16", (1, 256, 1100, 2, 2, 128))
    promise = np.array([20.0, np.inf], np.float32)
    _, found = attention(**inputs, promise=promise, block_sizes=BLOCKS, return_certificate=True)
    _, expected = attention(**inputs, block_sizes=BLOCKS, return_certificate=True)
    for name, array in expected.items():
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(array))


def test_traced_promise_without_a_bound_is_checked() -> None:
    """An infinite bound inside jit. Catches: a stabilizer that is infinite, a NaN that passes."""
    inputs = _inputs("bfloat16", (1, 256, 1100, 2, 2, 128))
    run = jax.jit(
        lambda promise: attention(
            **inputs, promise=promise, block_sizes=BLOCKS, return_certificate=True
        )
    )
    out, found = run(jnp.array([30.0, jnp.inf]))
    verdict = np.asarray(found["verdict"])[0, :, 0]
    assert verdict[0] == CERTIFIED and verdict[1] in (VERIFIED, RECOMPUTED)
    exact, _ = float64_attention(inputs["query"], inputs["key"], inputs["value"])
    assert np.abs(np.asarray(out, np.float64) - exact).max() < 2.0**-6


def test_gradients_pass_a_promise_by() -> None:
    """Catches: a promise that breaks differentiation or takes a gradient."""
    inputs = _inputs("float32", (1, 128, 1100, 1, 1, 64))

    def loss(promise: jax.Array | None, query: jax.Array) -> jax.Array:
        out = attention(query, inputs["key"], inputs["value"], promise=promise)
        return jnp.sum(out**2)

    with_promise = jax.grad(loss, argnums=(0, 1))(jnp.array([60.0]), inputs["query"])
    without = jax.grad(loss, argnums=1)(None, inputs["query"])
    assert float(jnp.abs(with_promise[0]).max()) == 0.0
    np.testing.assert_allclose(np.asarray(with_promise[1]), np.asarray(without), atol=1e-4)
