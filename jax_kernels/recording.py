"""What a recording keeps of a call, evaluated on the device by the certifier's own functions."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from certify.arithmetic import DEFAULT_TOLERANCE, arithmetic_for, validate_tolerance
from certify.keys import Backend, HeadKeys, head_keys, key_values, scaled_query
from certify.rows import HeadBounds, Queries, block_record, row_limits
from certify.visibility import Masks, valid_keys, visible_rows
from jax_kernels.config import choose_block_sizes, round_up
from jax_kernels.masks import Masking, visible_by
from jax_kernels.statistics import full_precision_matmul, on_bits, split_for
from jax_kernels.validation import masking_from, validate_call

JAX_BACKEND = Backend(jnp, split_for, full_precision_matmul, on_bits)
"""The certifier's functions on a device."""


@dataclass(frozen=True)
class _Settings:
    scale: float
    causal: bool
    window: int | None
    soft_cap: float | None
    tolerance: float
    block_q: int


def record_bounds(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    segment_ids: Any = None,
    key_lengths: jax.Array | None = None,
    window: int | None = None,
    attn_mask: jax.Array | None = None,
    logits_soft_cap: float | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
    block_q: int | None = None,
    lse: jax.Array | None = None,
) -> jax.Array:
    """Every family's bounds in the worst row of each query block, on the device.

    For recordings, not for every call: it is plain XLA, one head at a time.

    Args, as for ``attention``:
        block_q: rows of a query block; None: the kernels' own.
        lse: exact log-sum-exp float32 [B, H, S_q], nats, or None: the row sums are then unknown.

    Returns:
        float32 [B, H, num_q_blocks, len(certify.RECORD_FIELDS)].

    Raises:
        ValueError: for shapes, dtypes, masks or settings that do not fit, naming the argument.
    """
    validate_call(
        query,
        key,
        value,
        path="auto",
        scale=scale,
        window=window,
        logits_soft_cap=logits_soft_cap,
    )
    masking = masking_from(query, key, segment_ids, key_lengths, attn_mask)
    head_dim = query.shape[3]
    if block_q is None:
        block_q = choose_block_sizes(query.shape[1], key.shape[1], head_dim).block_q
    settings = _Settings(
        scale=head_dim**-0.5 if scale is None else float(scale),
        causal=bool(causal),
        window=window,
        soft_cap=None if logits_soft_cap is None else logits_soft_cap * math.log2(math.e),
        tolerance=validate_tolerance(tolerance),
        block_q=block_q,
    )
    return _record(settings, query, key, value, masking, lse)


@functools.partial(jax.jit, static_argnums=0)
def _record(
    settings: _Settings,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    masking: Masking,
    lse: jax.Array | None,
) -> jax.Array:
    batch, _, heads, _ = query.shape
    masks = _masks(settings, masking)

    def one_head(place: jax.Array) -> jax.Array:
        element, head = place // heads, place % heads
        return _record_head(settings, query, key, value, masks, lse, element, head)

    records = jax.lax.map(one_head, jnp.arange(batch * heads))
    return records.reshape(batch, heads, *records.shape[1:])


def _masks(settings: _Settings, masking: Masking) -> Masks:
    """The certifier's masks: an additive one in bits, -inf where hidden."""
    mask = masking.attn_mask
    if mask is not None and mask.dtype != jnp.bool_:
        bits = mask.astype(jnp.float32) * jnp.float32(math.log2(math.e))
        mask = jnp.where(visible_by(mask), bits, -jnp.inf)
    return Masks(
        attn_mask=mask,
        key_lengths=masking.key_lengths,
        query_segments=masking.query_segments,
        key_segments=masking.key_segments,
        causal=settings.causal,
        window=settings.window,
    )


def _record_head(
    settings: _Settings,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    masks: Masks,
    lse: jax.Array | None,
    element: jax.Array,
    head: jax.Array,
) -> jax.Array:
    """float32 [num_q_blocks, fields] of one (batch element, query head)."""
    query_length, heads = query.shape[1:3]
    key_length = key.shape[1]
    dtype = jnp.dtype(query.dtype).name
    key_head = head // (heads // key.shape[2])
    keys = key[element, :, key_head].astype(jnp.float32)
    value_max = key_values(value[element, :, key_head].astype(jnp.float32), xp=jnp)
    valid = valid_keys(masks, element, head, key_length, xp=jnp)
    if valid is not None:
        keys = jnp.where(valid[:, None], keys, 0.0)
        value_max = jnp.where(valid, value_max, 0.0)

    @functools.cache
    def summarize(sentinels: bool) -> HeadKeys:
        return head_keys(keys, dtype, valid=valid, sentinels=sentinels, backend=JAX_BACKEND)

    bounds = HeadBounds(summarize, settings.soft_cap, dtype, key_length, JAX_BACKEND)
    for sentinels in (True, False):
        summarize(sentinels)
    block_q = settings.block_q
    padded = round_up(query_length, block_q)
    rows_of_head = jnp.pad(query[element, :, head], ((0, padded - query_length), (0, 0)))
    sums = None
    if lse is not None:
        sums = jnp.pad(lse[element, head], (0, padded - query_length))
    masked = masks.by_row or masks.key_lengths is not None

    def one_block(block: jax.Array) -> jax.Array:
        rows = block * block_q + jnp.arange(block_q)
        part = jax.lax.dynamic_slice_in_dim(rows_of_head, block * block_q, block_q)
        scaled = scaled_query(part.astype(jnp.float32), dtype, settings.scale, backend=JAX_BACKEND)
        queries = Queries(scaled)
        if masked:
            seen = visible_rows(
                masks,
                element,
                head,
                jnp.minimum(rows, query_length - 1),
                query_length=query_length,
                key_length=key_length,
                xp=jnp,
            )
            own_key = None
            if seen.own is not None:
                own_key = keys[jnp.clip(seen.own, 0, key_length - 1)]
            queries = Queries(scaled, seen, own_key)
        limits = row_limits(
            queries,
            value_max,
            jnp.max(value_max),
            num_keys=key_length,
            tolerance=settings.tolerance,
            kernel=arithmetic_for(dtype),
            xp=jnp,
        )
        exact = None
        if sums is not None:
            exact = jax.lax.dynamic_slice_in_dim(sums, block * block_q, block_q)
        return block_record(queries, bounds, limits, exact, rows < query_length)

    return jax.lax.map(one_block, jnp.arange(padded // block_q))
