"""Which key a query sees, as one function of positions: shared by the oracle and the exact path."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Masking(NamedTuple):
    """Everything that hides keys or adds to logits. A pytree: None where not given.

    Attributes:
        attn_mask: bool (True = attend) or additive float (nats), 4-D, each dimension that of
            [B, H, S_q, S_k] or 1.
        key_lengths: int32 [B]; keys at or beyond it are hidden.
        query_segments, key_segments: int32 [B, S_q], [B, S_k]; a query sees keys of its segment.
    """

    attn_mask: jax.Array | None = None
    key_lengths: jax.Array | None = None
    query_segments: jax.Array | None = None
    key_segments: jax.Array | None = None


def hidden_threshold(dtype: Any) -> float:
    """An additive bias at or below this hides its key, as -inf does."""
    return float(jnp.finfo(dtype).min) / 2


def visible_by(mask: jax.Array) -> jax.Array:
    """bool: what a boolean or an additive mask lets through. A NaN bias hides nothing."""
    if mask.dtype == jnp.bool_:
        return mask
    return ~(mask <= hidden_threshold(mask.dtype))


def apply_masking(
    logits: jax.Array,
    masking: Masking,
    *,
    query_start: jax.Array | int,
    query_length: int,
    causal: bool,
    window: int | None,
) -> jax.Array:
    """Add the bias and set hidden logits to -inf.

    Args:
        logits: float32 or float64 [B, H, rows, S_k], nats; the rows are queries ``query_start`` on.
        query_length: S_q of the whole problem: causal masks align its last query with the last key.
        window: a query sees keys at most this many positions away from its own.
    """
    rows, key_length = logits.shape[-2:]
    query_position = query_start + jnp.arange(rows)[:, None] + (key_length - query_length)
    key_position = jnp.arange(key_length)[None, :]
    visible = jnp.ones((1, 1, 1, 1), bool)
    if causal:
        visible = visible & (key_position <= query_position)
    if window is not None:
        visible = visible & (jnp.abs(key_position - query_position) <= window)
    if masking.key_lengths is not None:
        visible = visible & (key_position < masking.key_lengths[:, None, None, None])
    if masking.query_segments is not None and masking.key_segments is not None:
        segments = _rows_of(masking.query_segments[:, None, :, None], query_start, rows)
        visible = visible & (segments == masking.key_segments[:, None, None, :])
    mask = masking.attn_mask
    if mask is not None:
        mask = _rows_of(mask, query_start, rows)
        visible = visible & visible_by(mask)
        if mask.dtype != jnp.bool_:
            logits = logits + jnp.where(visible, mask.astype(logits.dtype), 0)
    return jnp.where(visible, logits, -jnp.inf)


def pad_query_rows(masking: Masking, rows: int) -> Masking:
    """Masking whose per-query parts have ``rows`` rows; the added rows are never used."""
    mask, segments = masking.attn_mask, masking.query_segments
    if mask is not None and mask.shape[2] != 1:
        added = rows - mask.shape[2]
        mask = jnp.pad(mask, ((0, 0), (0, 0), (0, added), (0, 0)))
    if segments is not None:
        segments = jnp.pad(segments, ((0, 0), (0, rows - segments.shape[1])))
    return masking._replace(attn_mask=mask, query_segments=segments)


def _rows_of(array: jax.Array, start: jax.Array | int, rows: int) -> jax.Array:
    """``rows`` rows of axis -2 from ``start``; one row stands for all."""
    if array.shape[-2] == 1:
        return array
    return jax.lax.dynamic_slice_in_dim(array, start, rows, axis=-2)
