"""What the certificate needs from K and V: one pass over both, then a few summary rows a head.

The pass gives, per block of keys, the mean and every key's squared distance to it, and max|v| of
the head. From each class of positions modulo 128 the farthest key becomes a sentinel; the sentinels
are fetched and taken out of the block statistics; ``certify.summary.summarize_keys`` does the
rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from certify.arithmetic import FLOAT32_LARGEST
from certify.summary import (
    EMPTY,
    KEYS_PER_BLOCK,
    NUM_SENTINELS,
    KeySummary,
    channel_scale_bits,
    summarize_keys,
)
from jax_kernels.config import Problem, div, rem, round_up

HEADS_PER_GATHER = 512
"""Positions of sentinels that one call holds in scalar memory: 256 kB."""

BLOCKS_PER_STEP = 2
SENTINELS_PER_STEP = 8

ROW_TILE = 16
"""Rows of a register tile of bfloat16; row groups of the summary are multiples of it."""

SUMMARY_COLUMNS = 8
LOG2_COUNT, REACH_UP, REACH_DOWN, SCALED_RADIUS, SAVED, SCALED_SAVED = range(6)

CLASS_ROWS = 8
LARGEST, OTHER, SCALED_LARGEST, SCALED_OTHER, RANK = range(5)
"""Rows of a block's squared distances by class."""

PLAIN, SCALED = 0, 1
"""Rows of the weights of a weighted sum of squares: 1, and a power of two for each channel."""


class Statistics(NamedTuple):
    """The operands of certification, per (batch, key head group, head of the group).

    Attributes:
        centers: [groups, heads, rows, head_dim] in the kernel's dtype: sentinels, then the high
            parts of [blocks | ball], then (bfloat16 only) their low parts.
        columns: float32 [groups, heads, 8, columns]: log2 count, reaches, scaled radii and savings
            of the summary's rows along lanes.
        weights: float32 [groups, heads, 8, head_dim]: 1 and s^2, the weights of a query's squares.
        value_max: float32 [groups, heads], max|v|; inf where a value is not finite.
    """

    centers: jax.Array
    columns: jax.Array
    weights: jax.Array
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


def on_bits(values: jax.Array, function: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """float32 values -> those whose bits (int32) ``function`` makes of theirs."""
    bits = function(jax.lax.bitcast_convert_type(values, jnp.int32))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def weighted_sums(terms: list[jax.Array], weights: jax.Array) -> jax.Array:
    """Weighted sums over the last axis of float32 terms [rows, channels], added up: [8, rows].

    Terms are bfloat16 numbers side by side in one pass of the matrix unit.

    Args:
        weights: float32 [8, channels], powers of two.
    """
    wide = jnp.concatenate(terms, axis=1).astype(jnp.bfloat16)
    repeated = jnp.concatenate([weights] * len(terms), axis=1).astype(jnp.bfloat16)
    return jax.lax.dot_general(
        repeated, wide, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


def weighted_squares(array: jax.Array, weights: jax.Array) -> jax.Array:
    """Weighted sums of squares over the last axis: [8, rows]; loses ``arithmetic.SPLIT_ERROR``."""
    squares = array * array
    high = on_bits(squares, lambda bits: bits & jnp.int32(-65536))
    return weighted_sums([high, squares - high], weights)


def square_weights(scale: jax.Array) -> jax.Array:
    """[8, channels] weights of ``weighted_squares`` from scales [1, channels]: 1, scale^2, 0."""
    row = jax.lax.broadcasted_iota(jnp.int32, (8, scale.shape[1]), 0)
    return jnp.where(row == PLAIN, 1.0, jnp.where(row == SCALED, scale * scale, 0.0))


def _classes(plain: jax.Array, scaled: jax.Array) -> jax.Array:
    """What is kept of a block's squared distances [1, keys], by class: [8, 128], rows as named.

    The largest plain distance of each class of positions modulo 128 and the rank of its key in the
    block; the largest of the others; the largest scaled distance, with and without that key.
    """
    rows = KEYS_PER_BLOCK // NUM_SENTINELS

    def by_rank(row: jax.Array) -> jax.Array:
        pieces = [row[:, i * NUM_SENTINELS : (i + 1) * NUM_SENTINELS] for i in range(rows)]
        return jnp.concatenate(pieces, axis=0)

    plain, scaled = by_rank(plain), by_rank(scaled)
    rank = jax.lax.broadcasted_iota(jnp.int32, plain.shape, 0).astype(jnp.float32)
    largest = jnp.max(plain, axis=0, keepdims=True)
    first = jnp.min(jnp.where(plain == largest, rank, float(rows)), axis=0, keepdims=True)
    others = rank != first

    def most(distances: jax.Array) -> jax.Array:
        return jnp.max(distances, axis=0, keepdims=True)

    kept = {
        LARGEST: largest,
        OTHER: most(jnp.where(others, plain, 0.0)),
        SCALED_LARGEST: most(scaled),
        SCALED_OTHER: most(jnp.where(others, scaled, 0.0)),
        RANK: first,
    }
    unused = [jnp.zeros_like(largest)] * (CLASS_ROWS - len(kept))
    return jnp.concatenate([kept[row] for row in sorted(kept)] + unused, axis=0)


def _pass_kernel(
    key_ref: Any,
    value_ref: Any,
    mean_ref: Any,
    scale_ref: Any,
    class_ref: Any,
    value_ref_max: Any,
    *,
    problem: Problem,
) -> None:
    """Blocks of keys: means and running max|v| [1, width], distances by class [heads, 8, 128]."""
    step = pl.program_id(1)

    def scan(turn: int, masked: bool) -> None:
        block = step * BLOCKS_PER_STEP + turn
        left = problem.key_length - block * KEYS_PER_BLOCK
        inside = None
        if masked:
            inside = jax.lax.broadcasted_iota(jnp.int32, (KEYS_PER_BLOCK, 1), 0) < left
        place = slice(turn * KEYS_PER_BLOCK, (turn + 1) * KEYS_PER_BLOCK)

        def valid(array: jax.Array) -> jax.Array:
            return array if inside is None else jnp.where(inside, array, 0.0)

        keys = valid(key_ref[0, place].astype(jnp.float32))
        count = jnp.clip(left, 1, KEYS_PER_BLOCK).astype(jnp.float32)
        mean = jnp.sum(keys, axis=0, keepdims=True) / count
        mean_ref[0, pl.ds(block, 1), :] = mean
        difference = valid(keys - mean)
        squares = difference * difference

        @pl.when(block == 0)
        def _scale() -> None:
            mean_square = jnp.sum(squares, axis=0, keepdims=True) / count
            scale_ref[0] = on_bits(mean_square, channel_scale_bits)

        weights = square_weights(1.0 / scale_ref[0])
        lanes = jax.lax.broadcasted_iota(jnp.int32, (CLASS_ROWS, KEYS_PER_BLOCK), 1)
        for head in range(problem.heads_per_group):
            channels = slice(head * problem.head_dim, (head + 1) * problem.head_dim)
            sums = weighted_sums([squares[:, channels]], weights[:, channels])
            sums = finite_or_inf(sums)
            if inside is not None:
                sums = jnp.where(lanes < left, sums, -1.0)
            rows = (sums[row : row + 1] for row in (PLAIN, SCALED))
            class_ref[0, head, turn] = _classes(*rows)
        magnitude = valid(jnp.abs(value_ref[0, place].astype(jnp.float32)))
        # Of non-negative numbers the bits are in order, with inf and then NaN at the top.
        bits = jnp.max(jax.lax.bitcast_convert_type(magnitude, jnp.int32), axis=0, keepdims=True)
        largest = finite_or_inf(jax.lax.bitcast_convert_type(bits, jnp.float32))
        value_ref_max[0] = jnp.where(block == 0, largest, jnp.maximum(value_ref_max[0], largest))

    def scan_all(masked: bool) -> None:
        for turn in range(BLOCKS_PER_STEP):
            scan(turn, masked)

    keys_per_step = BLOCKS_PER_STEP * KEYS_PER_BLOCK
    if problem.key_length % keys_per_step == 0:
        scan_all(False)
        return
    whole = (step + 1) * keys_per_step <= problem.key_length
    pl.when(whole)(lambda: scan_all(False))
    pl.when(jnp.logical_not(whole))(lambda: scan_all(True))


class _Scan(NamedTuple):
    """What one pass over K and V gives.

    Attributes:
        mean: float32 [groups, blocks, heads, head_dim].
        scale: float32 [groups, heads, head_dim], powers of two.
        classes: float32 [groups, heads, blocks, 8, 128], squared distances by class, see
            ``_classes``; -1 where a class has no key.
        value_max: float32 [groups, heads].
    """

    mean: jax.Array
    scale: jax.Array
    classes: jax.Array
    value_max: jax.Array


def _scan_keys(key: jax.Array, value: jax.Array, problem: Problem) -> _Scan:
    groups = problem.batch * problem.key_groups
    blocks, rows = num_statistics_blocks(problem), num_block_rows(problem)
    width, heads = problem.group_width, problem.heads_per_group

    def key_block(group: Any, step: Any) -> tuple[Any, Any, Any]:
        return div(group, problem.key_groups), step, rem(group, problem.key_groups)

    whole = pl.BlockSpec((1, 1, width), lambda group, block: (group, 0, 0))
    by_channel = jax.ShapeDtypeStruct((groups, 1, width), jnp.float32)
    tile, steps = (CLASS_ROWS, NUM_SENTINELS), -(-blocks // BLOCKS_PER_STEP)
    mean, scale, classes, value_max = pl.pallas_call(
        lambda *refs: _pass_kernel(*refs, problem=problem),
        grid=(groups, steps),
        in_specs=[pl.BlockSpec((1, BLOCKS_PER_STEP * KEYS_PER_BLOCK, width), key_block)] * 2,
        out_specs=[
            pl.BlockSpec((1, rows, width), lambda group, block: (group, 0, 0)),
            whole,
            pl.BlockSpec(
                (1, heads, BLOCKS_PER_STEP, *tile), lambda group, step: (group, 0, step, 0, 0)
            ),
            whole,
        ],
        out_shape=[
            jax.ShapeDtypeStruct((groups, rows, width), jnp.float32),
            by_channel,
            jax.ShapeDtypeStruct((groups, heads, steps * BLOCKS_PER_STEP, *tile), jnp.float32),
            by_channel,
        ],
        interpret=problem.interpret,
        name="clis_statistics",
    )(key, value)
    by_head = (groups, heads, problem.head_dim)
    return _Scan(
        mean=mean[:, :blocks].reshape(groups, blocks, heads, problem.head_dim),
        scale=scale.reshape(by_head),
        classes=classes[:, :, :blocks],
        value_max=jnp.max(value_max.reshape(by_head), axis=-1),
    )


def largest_values(value: jax.Array, problem: Problem) -> jax.Array:
    """max|v| of every head, float32 [groups, heads]; inf where a value is not finite."""
    width = problem.key_groups * problem.group_width
    magnitude = finite_or_inf(jnp.abs(value.astype(jnp.float32)))
    by_channel = jnp.max(magnitude, axis=1)
    by_channel = jnp.pad(by_channel, ((0, 0), (0, width - by_channel.shape[1])))
    heads = (problem.batch * problem.key_groups, problem.heads_per_group, problem.head_dim)
    return jnp.max(by_channel.reshape(heads), axis=-1)


def _gather_kernel(index_ref: Any, *refs: Any, problem: Problem) -> None:
    """Copy keys, each found in its tile of 16 rows, into the rows of their classes."""
    *key_refs, out_ref = refs
    head, step = pl.program_id(0), pl.program_id(1)
    position = jax.lax.broadcasted_iota(jnp.int32, (ROW_TILE, 1), 0)
    for turn, key_ref in enumerate(key_refs):
        sentinel = step * SENTINELS_PER_STEP + turn
        row = rem(index_ref[head, sentinel], ROW_TILE)
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

    def tile_of(turn: int, head: Any, step: Any, index_ref: Any) -> tuple[Any, Any, Any]:
        group, sentinel = div(first + head, heads), step * SENTINELS_PER_STEP + turn
        return (
            div(group, problem.key_groups),
            div(index_ref[head, sentinel], ROW_TILE),
            rem(group, problem.key_groups),
        )

    return pl.pallas_call(
        lambda *refs: _gather_kernel(*refs, problem=problem),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(index.shape[0], NUM_SENTINELS // SENTINELS_PER_STEP),
            in_specs=[
                pl.BlockSpec((1, ROW_TILE, problem.group_width), functools.partial(tile_of, turn))
                for turn in range(SENTINELS_PER_STEP)
            ],
            out_specs=pl.BlockSpec(
                (1, NUM_SENTINELS, problem.head_dim), lambda head, step, index_ref: (head, 0, 0)
            ),
        ),
        out_shape=jax.ShapeDtypeStruct((*index.shape, problem.head_dim), jnp.float32),
        interpret=problem.interpret,
        name="clis_sentinels",
    )(index, *[key] * SENTINELS_PER_STEP)


def key_statistics(key: jax.Array, value: jax.Array, problem: Problem) -> Statistics:
    """Certification operands of K and V, both [B, S_k, heads * head_dim]."""
    groups, heads = problem.batch * problem.key_groups, problem.heads_per_group
    blocks = num_statistics_blocks(problem)
    scan = _scan_keys(key, value, problem)

    largest, other, scaled_largest, scaled_other, rank = (
        scan.classes[:, :, :, row] for row in (LARGEST, OTHER, SCALED_LARGEST, SCALED_OTHER, RANK)
    )
    winner = jnp.argmax(largest, axis=2)
    present = jnp.max(largest, axis=2) >= 0
    # A sentinel is the farthest key of its class, in its block too: the others are known there.
    in_block = winner[:, :, None, :] == jnp.arange(blocks)[:, None]
    rank = jnp.sum(jnp.where(in_block, rank, 0.0), axis=2).astype(jnp.int32)

    # Groups as in ``certify.keys.KeyGroups``. What no key decides is counted in numpy: a constant
    # of the program, not one more operation on the device.
    there = present[:, :, None, :] & (largest >= 0)
    starts = np.arange(blocks) * KEYS_PER_BLOCK
    block_count = np.minimum(problem.key_length - starts, KEYS_PER_BLOCK)
    of_class = -(-(block_count[:, None] - np.arange(NUM_SENTINELS)) // NUM_SENTINELS)
    group_count = jnp.concatenate(
        [there & ~in_block, jnp.broadcast_to(np.maximum(of_class - 1, 0), there.shape)], axis=-1
    ).astype(jnp.float32)

    def by_group(every: jax.Array, others: jax.Array) -> jax.Array:
        farthest = jnp.where(in_block, 0.0, jnp.maximum(every, 0.0))
        return jnp.concatenate([farthest, others], axis=-1)

    position = winner * KEYS_PER_BLOCK + rank * NUM_SENTINELS + jnp.arange(NUM_SENTINELS)
    position = jnp.where(present, position, 0).astype(jnp.int32)
    sentinels = _gather_keys(key, position.reshape(groups * heads, NUM_SENTINELS), problem)
    sentinels = sentinels.reshape(groups, heads, NUM_SENTINELS, problem.head_dim)
    sentinels = jnp.where(present[..., None], sentinels, 0.0)
    summary = summarize_keys(
        block_mean=jnp.swapaxes(scan.mean, 1, 2),
        block_count=block_count.astype(np.float32),
        group_count=group_count,
        distance_squared=by_group(largest, other),
        spread_squared=jnp.max(jnp.maximum(largest, 0.0), axis=-1),
        scaled_squared=by_group(scaled_largest, scaled_other),
        channel_scale=scan.scale,
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
    return _pack(summary._replace(log2_count=log2_count), scan.value_max, problem)


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
        [
            log2_count,
            *(
                aligned(part, -1, 0.0)
                for part in (
                    summary.reach_up,
                    summary.reach_down,
                    summary.scaled_radius,
                    summary.saved,
                    summary.scaled_saved,
                )
            ),
        ],
        axis=-2,
    )
    rows = columns.shape[-1]
    columns = jnp.pad(
        columns,
        ((0, 0), (0, 0), (0, SUMMARY_COLUMNS - columns.shape[-2]), (0, round_up(rows, 128) - rows)),
    )
    scale = summary.channel_scale[..., None, :]
    zeros = jnp.zeros((*scale.shape[:-2], SUMMARY_COLUMNS - 2, scale.shape[-1]), jnp.float32)
    weights = jnp.concatenate([jnp.ones_like(scale), scale * scale, zeros], axis=-2)
    return Statistics(centers, columns, weights, value_max)
