"""What the certificate needs from K and V: one pass over both, then a few summary rows a head.

The pass gives, per block of keys, the mean and every key's squared distance to it, and max|v| of
the head. From each class of positions modulo 128 the farthest key becomes a sentinel; the sentinels
are fetched and taken out of the block statistics; ``certify.summary.summarize_keys`` does the
rest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from certify.arithmetic import FLOAT32_LARGEST
from certify.summary import EMPTY, KEYS_PER_BLOCK, NUM_SENTINELS, KeySummary, summarize_keys
from jax_kernels.config import Problem, div, rem, round_up

HEADS_PER_GATHER = 512
"""Positions of sentinels that one call holds in scalar memory: 256 kB."""

ROW_TILE = 16
"""Rows of a register tile of bfloat16; row groups of the summary are multiples of it."""

SUMMARY_COLUMNS = 8
LOG2_COUNT, REACH_UP, REACH_DOWN = 0, 1, 2


class Statistics(NamedTuple):
    """The operands of certification, per (batch, key head group, head of the group).

    Attributes:
        centers: [groups, heads, rows, head_dim] in the kernel's dtype: sentinels, then the high
            parts of [blocks | ball], then (bfloat16 only) their low parts.
        columns: float32 [groups, heads, 8, columns]: log2 count and reaches of the summary's rows
            along lanes.
        value_max: float32 [groups, heads], max|v|; inf where a value is not finite.
    """

    centers: jax.Array
    columns: jax.Array
    value_max: jax.Array


def num_statistics_blocks(problem: Problem) -> int:
    return -(-problem.key_length // KEYS_PER_BLOCK)


def num_block_rows(problem: Problem) -> int:
    """Rows of the blocks' group in the summary, padding included."""
    return round_up(num_statistics_blocks(problem), ROW_TILE)


def finite_or_inf(array: jax.Array) -> jax.Array:
    """NaN becomes inf, so that a maximum cannot lose it."""
    return jnp.where(array <= FLOAT32_LARGEST, array, jnp.inf)


def split_bfloat16(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32 -> (high, low), both bfloat16 numbers held in float32; the rest is within 2^-17.

    By bits, since a compiler may drop a round trip through bfloat16.
    """

    def nearest(number: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(number, jnp.uint32)
        odd = jax.lax.shift_right_logical(bits, jnp.uint32(16)) & jnp.uint32(1)
        rounded = (bits + jnp.uint32(0x7FFF) + odd) & jnp.uint32(0xFFFF0000)
        return jax.lax.bitcast_convert_type(rounded, jnp.float32)

    high = nearest(array)
    return high, nearest(array - high)


def split_for(dtype: Any, array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The pair (high, low) that the kernel multiplies; float32 needs no second part."""
    if jnp.dtype(dtype) == jnp.bfloat16:
        return split_bfloat16(array)
    return array, jnp.zeros_like(array)


def full_precision_matmul(left: jax.Array, right: jax.Array) -> jax.Array:
    """float32 matrix product without bfloat16 passes."""
    return jnp.matmul(left, right, precision=jax.lax.Precision.HIGHEST)


def row_sums_along_lanes(array: jax.Array) -> jax.Array:
    """Sum over the last axis of float32 [rows, channels], laid out as [1, rows]."""
    ones = jnp.ones((8, array.shape[1]), jnp.float32)
    sums = jax.lax.dot_general(
        ones,
        array,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return sums[:1]


def _pass_kernel(
    key_ref: Any,
    value_ref: Any,
    mean_ref: Any,
    distance_ref: Any,
    value_ref_max: Any,
    *,
    problem: Problem,
) -> None:
    """One block of keys: mean and running max|v| [1, width], squared distances [heads, keys]."""
    block = pl.program_id(1)
    position = jax.lax.broadcasted_iota(jnp.int32, (KEYS_PER_BLOCK, 1), 0)
    left = problem.key_length - block * KEYS_PER_BLOCK
    inside = position < left
    keys = jnp.where(inside, key_ref[0].astype(jnp.float32), 0.0)
    count = jnp.minimum(left, KEYS_PER_BLOCK).astype(jnp.float32)
    mean = jnp.sum(keys, axis=0, keepdims=True) / count
    mean_ref[0, pl.ds(block, 1), :] = mean
    difference = jnp.where(inside, keys - mean, 0.0)
    inside_lanes = jax.lax.broadcasted_iota(jnp.int32, (1, KEYS_PER_BLOCK), 1) < left
    for head in range(problem.heads_per_group):
        channels = slice(head * problem.head_dim, (head + 1) * problem.head_dim)
        part = difference[:, channels]
        squared = finite_or_inf(row_sums_along_lanes(part * part))
        distance_ref[0, head : head + 1, :] = jnp.where(inside_lanes, squared, -1.0)
    magnitude = finite_or_inf(jnp.abs(value_ref[0].astype(jnp.float32)))
    largest = jnp.max(jnp.where(inside, magnitude, 0.0), axis=0, keepdims=True)

    @pl.when(block == 0)
    def _first() -> None:
        value_ref_max[0] = largest

    @pl.when(block > 0)
    def _later() -> None:
        value_ref_max[0] = jnp.maximum(value_ref_max[0], largest)


def _scan_keys(
    key: jax.Array, value: jax.Array, problem: Problem
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Block means [groups, blocks, heads, head_dim], distances [groups, heads, keys], max|v|."""
    groups = problem.batch * problem.key_groups
    blocks, rows = num_statistics_blocks(problem), num_block_rows(problem)
    width, heads = problem.group_width, problem.heads_per_group

    def key_block(group: Any, block: Any) -> tuple[Any, Any, Any]:
        return div(group, problem.key_groups), block, rem(group, problem.key_groups)

    mean, distance, value_max = pl.pallas_call(
        lambda *refs: _pass_kernel(*refs, problem=problem),
        grid=(groups, blocks),
        in_specs=[pl.BlockSpec((1, KEYS_PER_BLOCK, width), key_block)] * 2,
        out_specs=[
            pl.BlockSpec((1, rows, width), lambda group, block: (group, 0, 0)),
            pl.BlockSpec((1, heads, KEYS_PER_BLOCK), lambda group, block: (group, 0, block)),
            pl.BlockSpec((1, 1, width), lambda group, block: (group, 0, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((groups, rows, width), jnp.float32),
            jax.ShapeDtypeStruct((groups, heads, blocks * KEYS_PER_BLOCK), jnp.float32),
            jax.ShapeDtypeStruct((groups, 1, width), jnp.float32),
        ],
        interpret=problem.interpret,
        name="clis_statistics",
    )(key, value)
    mean = mean[:, :blocks].reshape(groups, blocks, heads, problem.head_dim)
    value_max = jnp.max(value_max.reshape(groups, heads, problem.head_dim), axis=-1)
    return mean, distance, value_max


def largest_values(value: jax.Array, problem: Problem) -> jax.Array:
    """max|v| of every head, float32 [groups, heads]; inf where a value is not finite."""
    width = problem.key_groups * problem.group_width
    magnitude = finite_or_inf(jnp.abs(value.astype(jnp.float32)))
    by_channel = jnp.max(magnitude, axis=1)
    by_channel = jnp.pad(by_channel, ((0, 0), (0, width - by_channel.shape[1])))
    heads = (problem.batch * problem.key_groups, problem.heads_per_group, problem.head_dim)
    return jnp.max(by_channel.reshape(heads), axis=-1)


def _gather_kernel(index_ref: Any, key_ref: Any, out_ref: Any, *, problem: Problem) -> None:
    """Copy one key, found in its tile of 16 rows, into the row of its class."""
    head, sentinel = pl.program_id(0), pl.program_id(1)
    row = rem(index_ref[head, sentinel], ROW_TILE)
    position = jax.lax.broadcasted_iota(jnp.int32, (ROW_TILE, 1), 0)
    tile = key_ref[0].astype(jnp.float32)
    if problem.heads_per_group == 2:
        second = rem(head, 2) == 1
        tile = jnp.where(second, tile[:, problem.head_dim :], tile[:, : problem.head_dim])
    chosen = jnp.sum(jnp.where(position == row, tile, 0.0), axis=0, keepdims=True)
    out_ref[0, pl.ds(sentinel, 1), :] = chosen


def _gather_keys(key: jax.Array, index: jax.Array, problem: Problem) -> jax.Array:
    """Keys float32 [groups * heads, sentinels, head_dim] at positions ``index``."""
    starts = range(0, index.shape[0], HEADS_PER_GATHER)
    parts = [
        _gather_for_heads(key, index[first : first + HEADS_PER_GATHER], first, problem)
        for first in starts
    ]
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def _gather_for_heads(key: jax.Array, index: jax.Array, first: int, problem: Problem) -> jax.Array:
    """The keys of the heads from ``first`` on, one row of ``index`` each."""
    heads = problem.heads_per_group

    def tile_of(head: Any, sentinel: Any, index_ref: Any) -> tuple[Any, Any, Any]:
        group = div(first + head, heads)
        return (
            div(group, problem.key_groups),
            div(index_ref[head, sentinel], ROW_TILE),
            rem(group, problem.key_groups),
        )

    return pl.pallas_call(
        lambda *refs: _gather_kernel(*refs, problem=problem),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=index.shape,
            in_specs=[pl.BlockSpec((1, ROW_TILE, problem.group_width), tile_of)],
            out_specs=pl.BlockSpec(
                (1, NUM_SENTINELS, problem.head_dim), lambda head, sentinel, index_ref: (head, 0, 0)
            ),
        ),
        out_shape=jax.ShapeDtypeStruct((*index.shape, problem.head_dim), jnp.float32),
        interpret=problem.interpret,
        name="clis_sentinels",
    )(index, key)


def key_statistics(key: jax.Array, value: jax.Array, problem: Problem) -> Statistics:
    """Certification operands of K and V, both [B, S_k, heads * head_dim]."""
    groups, heads = problem.batch * problem.key_groups, problem.heads_per_group
    blocks = num_statistics_blocks(problem)
    mean, distance, value_max = _scan_keys(key, value, problem)

    classes = distance.reshape(groups, heads, -1, NUM_SENTINELS)
    winner = jnp.argmax(classes, axis=2)
    present = jnp.max(classes, axis=2) >= 0
    rank = jax.lax.broadcasted_iota(jnp.int32, classes.shape, 2)
    is_sentinel = rank == winner[:, :, None, :]
    others = jnp.where(is_sentinel, 0.0, jnp.maximum(classes, 0.0))
    by_block = (groups, heads, blocks, KEYS_PER_BLOCK)
    radius_squared = jnp.max(others.reshape(by_block), axis=-1)
    spread_squared = jnp.max(distance.reshape(by_block), axis=-1)

    position = winner * NUM_SENTINELS + jnp.arange(NUM_SENTINELS)
    position = jnp.where(present, position, 0).astype(jnp.int32)
    sentinels = _gather_keys(key, position.reshape(groups * heads, NUM_SENTINELS), problem)
    sentinels = sentinels.reshape(groups, heads, NUM_SENTINELS, problem.head_dim)
    sentinels = jnp.where(present[..., None], sentinels, 0.0)
    in_block = position[:, :, None, :] // KEYS_PER_BLOCK == jnp.arange(blocks)[:, None]
    starts = jnp.arange(blocks) * KEYS_PER_BLOCK
    summary = summarize_keys(
        block_mean=jnp.swapaxes(mean, 1, 2),
        block_count=jnp.minimum(problem.key_length - starts, KEYS_PER_BLOCK).astype(jnp.float32),
        radius_squared=radius_squared,
        spread_squared=spread_squared,
        sentinels=sentinels,
        membership=(in_block & present[:, :, None, :]).astype(jnp.float32),
        keys_per_block=KEYS_PER_BLOCK,
        kernel=problem.kernel,
        split=lambda array: split_for(problem.dtype, array),
        matmul=full_precision_matmul,
        xp=jnp,
    )
    absent = jnp.where(present, 0.0, EMPTY)
    log2_count = summary.log2_count.at[..., :NUM_SENTINELS].add(absent)
    return _pack(summary._replace(log2_count=log2_count), value_max, problem)


def _pack(summary: KeySummary, value_max: jax.Array, problem: Problem) -> Statistics:
    """Lay the summary out in aligned row groups: sentinels, blocks, ball."""
    blocks, padded = num_statistics_blocks(problem), num_block_rows(problem)

    def aligned(array: jax.Array, axis: int, fill: float) -> jax.Array:
        sentinels, rest, ball = jnp.split(array, (NUM_SENTINELS, NUM_SENTINELS + blocks), axis=axis)
        width = [(0, 0)] * array.ndim
        width[axis] = (0, padded - blocks)
        rest = jnp.pad(rest, width, constant_values=fill)
        width[axis] = (0, ROW_TILE - 1)
        ball = jnp.pad(ball, width, constant_values=fill)
        return jnp.concatenate([sentinels, rest, ball], axis=axis)

    high, low = (aligned(part, -2, 0.0) for part in (summary.high, summary.low))
    parts = [high]
    if problem.query_in_halves:
        parts.append(low[..., NUM_SENTINELS:, :])
    centers = jnp.concatenate(parts, axis=-2).astype(problem.dtype)
    log2_count = aligned(summary.log2_count, -1, EMPTY)
    columns = jnp.stack(
        [log2_count, aligned(summary.reach_up, -1, 0.0), aligned(summary.reach_down, -1, 0.0)],
        axis=-2,
    )
    rows = columns.shape[-1]
    columns = jnp.pad(
        columns,
        ((0, 0), (0, 0), (0, SUMMARY_COLUMNS - columns.shape[-2]), (0, round_up(rows, 128) - rows)),
    )
    return Statistics(centers, columns, value_max)
