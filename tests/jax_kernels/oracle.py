"""The oracle in numpy float64, written apart from the package, and the yardstick for tolerances."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any


def float64_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    scale: float | None = None,
    bias: np.ndarray | None = None,
    soft_cap: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Out [B, S_q, H, D] and lse [B, H, S_q] by the definition; bias [B, H, S_q, S_k] in nats."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (query, key, value))
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    q, k, v = (np.moveaxis(x, 2, 1) for x in (q, k, v))
    logits = q @ np.swapaxes(k, 2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    if bias is not None:
        logits = logits + bias
    largest = np.max(logits, axis=-1, keepdims=True)
    largest = np.where(np.isneginf(largest), 0.0, largest)
    weights = np.exp(logits - largest)
    row_sum = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (largest + np.log(row_sum))[..., 0]
    weights = weights / np.where(row_sum == 0, 1.0, row_sum)
    return np.moveaxis(weights @ v, 1, 2), lse


def plain_low_precision(
    query: Array, key: Array, value: Array, scale: float | None = None
) -> Array:
    """Ordinary attention: logits and softmax in float32, probabilities cast to the input dtype."""
    group = query.shape[2] // key.shape[2]
    dtype = query.dtype
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    logits = logits * (query.shape[3] ** -0.5 if scale is None else scale)
    weights = jax.lax.reduce_precision(jax.nn.softmax(logits, axis=-1), *_format(dtype))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value).astype(dtype)


def _format(dtype: Any) -> tuple[int, int]:
    bits = jnp.finfo(dtype)
    return bits.nexp, bits.nmant


def assert_as_good_as_plain(
    out: Array, query: Array, key: Array, value: Array, scale: float | None = None
) -> None:
    """Root mean square error <= 1.5 x plain attention + 2^-9 of the output; max <= 2 x + 2^-8 V.

    For float32 the terms in 2^-9 and 2^-8 are 2^-20 and 2^-19.
    """
    exact, _ = float64_attention(query, key, value, scale=scale)
    got = np.asarray(out).astype(np.float64)
    assert got.shape == exact.shape
    assert np.isfinite(got).all()
    plain = np.asarray(plain_low_precision(query, key, value, scale)).astype(np.float64)
    ours, theirs = got - exact, plain - exact
    unit = 2.0**-9 if jnp.dtype(out.dtype).itemsize == 2 else 2.0**-20

    def rms(array: np.ndarray) -> float:
        return float(np.sqrt(np.mean(array**2)))

    assert rms(ours) <= 1.5 * rms(theirs) + unit * rms(exact)
    largest_value = float(np.max(np.abs(np.asarray(value).astype(np.float64))))
    assert np.abs(ours).max() <= 2 * np.abs(theirs).max() + 2 * unit * largest_value


def random_inputs(
    shape: tuple[int, int, int, int, int, int],
    dtype: Any,
    *,
    seed: int = 0,
    query_scale: float = 1.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gaussian query, key, value for (batch, S_q, S_k, heads, key heads, head_dim)."""
    batch, query_length, key_length, heads, key_heads, head_dim = shape
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((batch, query_length, heads, head_dim)) * query_scale
    key, value = (rng.standard_normal((batch, key_length, key_heads, head_dim)) for _ in range(2))

    def cast(array: np.ndarray) -> jax.Array:
        return jnp.asarray(array, jnp.float32).astype(dtype)

    return cast(query), cast(key), cast(value)
