"""The plain definition of attention in float32 or float64: the oracle beside the kernels."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jax_kernels.masks import Masking, apply_masking
from jax_kernels.validation import masking_from, validate_shapes


def reference_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    segment_ids: object = None,
    key_lengths: jax.Array | None = None,
    window: int | None = None,
    attn_mask: jax.Array | None = None,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """softmax(scale * Q K^T + bias) V in full, at the highest precision that is switched on.

    Args:
        query: [B, S_q, H, D]; key, value: [B, S_k, H_kv, D]; H a multiple of H_kv.

    Returns:
        [B, S_q, H, D] in float32 (float64 where jax's x64 mode is on), and with ``return_lse`` the
        log-sum-exp [B, H, S_q] in nats. Rows without a visible key give 0 and -inf.
    """
    validate_shapes(query, key, value)
    masking = masking_from(query, key, segment_ids, key_lengths, attn_mask)
    wide = jnp.promote_types(jnp.float32, jnp.zeros((), float).dtype)
    query, key, value = (x.astype(wide) for x in (query, key, value))
    logits = scaled_logits(query, key, scale, logits_soft_cap)
    logits = mask_all_rows(logits, masking, causal=causal, window=window)
    largest = jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf)
    largest = jnp.where(jnp.isneginf(largest), 0, largest)
    weights = jnp.exp(logits - largest)
    row_sum = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(row_sum == 0, 1, row_sum)
    out = weighted_values(weights, value)
    if not return_lse:
        return out
    return out, (largest + jnp.log(row_sum))[..., 0]


def mask_all_rows(
    logits: jax.Array, masking: Masking, *, causal: bool, window: int | None
) -> jax.Array:
    """``apply_masking`` for logits of all queries."""
    return apply_masking(
        logits,
        masking,
        query_start=0,
        query_length=logits.shape[-2],
        causal=causal,
        window=window,
    )


def scaled_logits(
    query: jax.Array, key: jax.Array, scale: float | None, logits_soft_cap: float | None
) -> jax.Array:
    """Logits [B, H, S_q, S_k] in nats, float32 or wider; key heads are shared by query heads."""
    batch, rows, heads, head_dim = query.shape
    key_heads = key.shape[2]
    grouped = query.reshape(batch, rows, key_heads, heads // key_heads, head_dim)
    logits = jnp.einsum(
        "bqhgd,bkhd->bhgqk",
        grouped,
        key,
        precision="highest",
        preferred_element_type=jnp.promote_types(query.dtype, jnp.float32),
    )
    logits = logits.reshape(batch, heads, rows, key.shape[1])
    logits = logits * (head_dim**-0.5 if scale is None else scale)
    if logits_soft_cap is None or math.isinf(logits_soft_cap):
        return logits
    return logits_soft_cap * jnp.tanh(logits / logits_soft_cap)


def weighted_values(weights: jax.Array, value: jax.Array) -> jax.Array:
    """Sum of values [B, S_q, H, D] under weights [B, H, S_q, S_k], float32 or wider."""
    batch, heads, rows, key_length = weights.shape
    key_heads = value.shape[2]
    grouped = weights.reshape(batch, key_heads, heads // key_heads, rows, key_length)
    out = jnp.einsum(
        "bhgqk,bkhd->bqhgd",
        grouped,
        value,
        precision="highest",
        preferred_element_type=jnp.promote_types(value.dtype, jnp.float32),
    )
    return out.reshape(batch, rows, heads, value.shape[-1])
