"""Attention with the true row maximum, in chunks of queries: every mask, bounded memory, plain XLA.

Masked and soft-capped calls come here, and the gradient of every call. The dtype rules are those of
ordinary low-precision attention: logits and sums in float32, probabilities cast to the input dtype.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from certify.arithmetic import SMALLEST_NORMAL
from jax_kernels.config import computed_in
from jax_kernels.masks import Masking, apply_masking, pad_query_rows, visible_by
from jax_kernels.reference import scaled_logits, weighted_values

CHUNK_ELEMENTS = 2**25
"""Logits held at a time (float32: 128 MB)."""


@dataclass(frozen=True)
class ExactSettings:
    """Static arguments: scale (None: head_dim**-0.5), masks by position, soft cap (nats)."""

    scale: float | None = None
    causal: bool = False
    window: int | None = None
    logits_soft_cap: float | None = None


class _Chunks(NamedTuple):
    rows: int
    number: int

    @property
    def padded(self) -> int:
        return self.rows * self.number


def _chunks_for(query: jax.Array, key_length: int) -> _Chunks:
    batch, query_length, heads, _ = query.shape
    rows = max(8, CHUNK_ELEMENTS // max(1, batch * heads * key_length) // 8 * 8)
    rows = min(rows, max(query_length, 1))
    return _Chunks(rows, -(-max(query_length, 1) // rows))


def _split(array: jax.Array, chunks: _Chunks, axis: int, fill: float = 0.0) -> jax.Array:
    """[count, ..., rows, ...]: ``array`` padded along ``axis`` and cut into chunks of queries."""
    width = [(0, 0)] * array.ndim
    width[axis] = (0, chunks.padded - array.shape[axis])
    padded = jnp.pad(array, width, constant_values=fill)
    shape = (*array.shape[:axis], chunks.number, chunks.rows, *array.shape[axis + 1 :])
    return jnp.moveaxis(padded.reshape(shape), axis, 0)


def _join(pieces: jax.Array, axis: int, length: int) -> jax.Array:
    """The inverse of ``_split``, without the padding."""
    joined = jnp.moveaxis(pieces, 0, axis)
    shape = (*joined.shape[:axis], -1, *joined.shape[axis + 2 :])
    return jax.lax.slice_in_dim(joined.reshape(shape), 0, length, axis=axis)


def _seen_keys(masking: Masking, query: jax.Array, key: jax.Array) -> jax.Array | None:
    """bool [B or 1, S_k, 1, 1]: keys that some query sees; None where nothing hides keys.

    What lies at the others may be NaN (padding), so it is set to 0 before it is multiplied. A NaN
    at a key hidden from some queries only reaches all of them, as in torch.
    """
    seen = []
    if masking.key_lengths is not None:
        seen.append(jnp.arange(key.shape[1])[None, :] < masking.key_lengths[:, None])
    if masking.attn_mask is not None:
        visible = jnp.any(visible_by(masking.attn_mask), axis=(1, 2))
        seen.append(jnp.broadcast_to(visible, (visible.shape[0], key.shape[1])))
    if masking.query_segments is not None and masking.key_segments is not None:
        same = masking.query_segments[:, :, None] == masking.key_segments[:, None, :]
        seen.append(jnp.any(same, axis=1))
    return functools.reduce(jnp.logical_and, seen)[:, :, None, None] if seen else None


def _without_unseen(array: jax.Array, seen: jax.Array | None) -> jax.Array:
    return array if seen is None else jnp.where(seen, array, jnp.zeros((), array.dtype))


def _masked_logits(
    rows: jax.Array,
    key: jax.Array,
    masking: Masking,
    settings: ExactSettings,
    start: jax.Array,
    query_length: int,
) -> jax.Array:
    """Logits of a chunk of queries, from ``start`` on, in nats; -inf where hidden."""
    logits = scaled_logits(rows, key, settings.scale, settings.logits_soft_cap)
    return apply_masking(
        logits,
        masking,
        query_start=start,
        query_length=query_length,
        causal=settings.causal,
        window=settings.window,
    )


def exact_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, masking: Masking, settings: ExactSettings
) -> tuple[jax.Array, jax.Array]:
    """Attention [B, S_q, H, D] in the input dtype and its log-sum-exp [B, H, S_q] in nats."""
    query_length, out_dtype = query.shape[1], query.dtype
    chunks = _chunks_for(query, key.shape[1])
    padded_masking = pad_query_rows(masking, chunks.padded)
    seen = _seen_keys(masking, query, key)
    key, value = _without_unseen(key, seen), _without_unseen(value, seen)
    query, key, value = (x.astype(computed_in(out_dtype)) for x in (query, key, value))

    def one_chunk(piece: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start, rows = piece
        logits = _masked_logits(rows, key, padded_masking, settings, start, query_length)
        largest = jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf)
        largest = jnp.where(jnp.isneginf(largest), 0, largest)
        weights = jnp.exp(logits - largest)
        row_sum = jnp.sum(weights, axis=-1, keepdims=True)
        numerator = weighted_values(weights.astype(value.dtype), value)
        divisor = jnp.where(row_sum == 0, 1, row_sum)
        out = numerator / jnp.swapaxes(divisor, 1, 2)
        return out.astype(out_dtype), (largest + jnp.log(row_sum))[..., 0]

    starts = jnp.arange(chunks.number) * chunks.rows
    out, lse = jax.lax.map(one_chunk, (starts, _split(query, chunks, 1)))
    return _join(out, 1, query_length), _join(lse, 2, query_length)


class Gradients(NamedTuple):
    """Gradients of the inputs, and of an additive mask (float32; None without one)."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    attn_mask: jax.Array | None


def exact_backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    masking: Masking,
    settings: ExactSettings,
    lse: jax.Array,
    grad_out: jax.Array,
    grad_lse: jax.Array | None = None,
) -> Gradients:
    """Gradients from the saved log-sum-exp, the probabilities being computed again by chunks.

    Args:
        grad_out: [B, S_q, H, D]; lse, grad_lse: [B, H, S_q], nats.
    """
    query_length, dtype = query.shape[1], query.dtype
    chunks = _chunks_for(query, key.shape[1])
    mask = masking.attn_mask
    bias = None if mask is None or mask.dtype == jnp.bool_ else mask
    padded_masking = pad_query_rows(masking, chunks.padded)
    seen = _seen_keys(masking, query, key)
    key, value = _without_unseen(key, seen), _without_unseen(value, seen)
    query, key, value = (x.astype(computed_in(dtype)) for x in (query, key, value))
    grad_lse = jnp.zeros_like(lse) if grad_lse is None else grad_lse
    saved = jnp.where(jnp.isneginf(lse), jnp.inf, lse)

    def one_chunk(
        sums: tuple[jax.Array, jax.Array], piece: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array | None]]:
        start, rows, rows_grad, rows_lse, rows_grad_lse = piece

        logits, logits_vjp = jax.vjp(
            lambda q, k: _masked_logits(q, k, padded_masking, settings, start, query_length),
            rows,
            key,
        )
        # Their sum is 1 but for rounding: these logits and those behind lse are not the same bits.
        weights = jnp.exp(logits - rows_lse[..., None])
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights / jnp.maximum(total, SMALLEST_NORMAL)
        _, values_vjp = jax.vjp(
            lambda w, v: weighted_values(w.astype(value.dtype), v), weights, value
        )
        grad_weights, grad_value = values_vjp(rows_grad.astype(jnp.float32))
        # The mean of grad_weights, not out * grad_out: the output is rounded, and what is left of
        # the difference on peaked rows would be its rounding.
        mean = jnp.sum(weights * grad_weights, axis=-1, keepdims=True)
        grad_logits = weights * (grad_weights - mean + rows_grad_lse[..., None])
        grad_rows, grad_key = logits_vjp(grad_logits)
        grad_bias = None
        if bias is not None:
            spread = tuple(axis for axis in (0, 1, 3) if bias.shape[axis] == 1)
            grad_bias = jnp.sum(grad_logits, axis=spread, keepdims=True)
        added = (sums[0] + grad_key.astype(jnp.float32), sums[1] + grad_value.astype(jnp.float32))
        return added, (grad_rows, grad_bias)

    pieces = (
        jnp.arange(chunks.number) * chunks.rows,
        _split(query, chunks, 1),
        _split(grad_out, chunks, 1),
        _split(saved, chunks, 2, fill=jnp.inf),
        _split(grad_lse, chunks, 2),
    )
    zeros = (jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32))
    (grad_key, grad_value), (grad_query, grad_bias) = jax.lax.scan(one_chunk, zeros, pieces)
    grad_mask = None
    if bias is not None and grad_bias is not None:
        grad_mask = _join(grad_bias, 2, query_length)
        if bias.shape[2] == 1:
            grad_mask = jnp.sum(grad_mask, axis=2, keepdims=True)
    return Gradients(
        _join(grad_query, 1, query_length).astype(dtype),
        _without_unseen(grad_key, seen).astype(dtype),
        _without_unseen(grad_value, seen).astype(dtype),
        grad_mask,
    )
