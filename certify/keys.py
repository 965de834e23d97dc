"""What the certificate needs from the keys and values of one head: the kernel's statistics pass.

Means over runs of keys, each key's squared distance to its mean, and from every class of positions
modulo 128 the farthest key, which becomes a sentinel. ``summary.summarize_keys`` does the rest. On
the host in numpy, on a device in jax.numpy: the same functions, with a ``Backend``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from certify.arithmetic import arithmetic_for, query_factor
from certify.formats import split_for
from certify.summary import (
    EMPTY,
    KEYS_PER_BLOCK,
    NUM_SENTINELS,
    Array,
    KeySummary,
    MatMul,
    box_half_width,
    channel_scale_bits,
    summarize_keys,
)

MOST_BLOCKS = 2**13
"""Rows of a summary, at most: what ``arithmetic.EVALUATION_SLACK`` pays for."""


@dataclass(frozen=True)
class Backend:
    """An array library: its namespace, and what it needs of its own.

    Attributes:
        xp: numpy or jax.numpy.
        split: dtype name and float32 values -> the pair that the kernel multiplies.
        matmul: float32 matrix product at full precision.
        on_bits: float32 values -> those whose bits (int32) a function makes of theirs.
    """

    xp: Any
    split: Callable[[str, Array], tuple[Array, Array]]
    matmul: MatMul
    on_bits: Callable[[Array, Callable[[Array], Array]], Array]


def _on_bits(values: Array, function: Callable[[Array], Array]) -> Array:
    return function(np.ascontiguousarray(values).view(np.int32)).view(np.float32)


NUMPY = Backend(np, split_for, np.matmul, _on_bits)


@dataclass(frozen=True)
class HeadKeys:
    """The keys of one head, summed up; the first ``num_sentinels`` rows are sentinels.

    Attributes:
        rows: the summary, [sentinels | blocks | ball].
        half_width: float32 [blocks, D], the blocks' boxes.
        position: int [sentinels], where the sentinels lie; 0 where there is none.
        membership: float32 [blocks, sentinels], 1 where the sentinel lies in the block.
        rest: float32 [blocks], keys of the block that are not sentinels.
        statistics_block: keys of a block, the last one's padding included.
    """

    rows: KeySummary
    half_width: Array
    position: Array
    membership: Array
    rest: Array
    statistics_block: int

    @property
    def num_sentinels(self) -> int:
        return int(self.position.shape[0])

    @property
    def num_blocks(self) -> int:
        """Rows between the sentinels and the ball."""
        return int(self.rest.shape[0])


def choose_sentinels(squared_distance: Array, *, xp: Any) -> tuple[Array, Array]:
    """The farthest key of each class of positions modulo 128; no key appears twice.

    Args:
        squared_distance: float32 [keys], a multiple of 128 of them; negative: no key.

    Returns:
        position int [128], and whether the class has a key.
    """
    classes = squared_distance.reshape(-1, NUM_SENTINELS)
    rank = xp.argmax(classes, axis=0)
    position = rank * NUM_SENTINELS + xp.arange(NUM_SENTINELS)
    present = xp.max(classes, axis=0) >= 0
    return xp.where(present, position, 0), present


class KeyGroups(NamedTuple):
    """A block's keys that are not sentinels, by class of positions in the block modulo 128: the
    farthest key of each class, then the others of each class.

    Attributes:
        count: float32 [..., blocks, 256], keys of the group.
        squared: the same shape, largest squared distance to the block's mean.
        scaled: the same shape, at least the largest squared distance with channels scaled.
    """

    count: Array
    squared: Array
    scaled: Array


def key_groups(squared: Array, scaled: Array, others: Array, *, xp: Any) -> KeyGroups:
    """Groups as the kernel's statistics have them.

    Args:
        squared, scaled: float32 [blocks, keys].
        others: bool [blocks, keys], keys that are there and no sentinels.
    """
    added = -squared.shape[1] % NUM_SENTINELS

    def by_class(array: Array) -> Array:
        padded = xp.pad(array, ((0, 0), (0, added)))
        return padded.reshape(padded.shape[0], -1, NUM_SENTINELS)

    squared, scaled, others = by_class(squared), by_class(scaled), by_class(others)
    # Sentinels take part in the choice: where the farthest is one, its group is empty.
    rank = xp.argmax(squared, axis=1)[:, None, :]
    farthest = xp.arange(squared.shape[1])[None, :, None] == rank
    groups = (others & farthest, others & ~farthest)

    def largest(array: Array, members: tuple[Array, ...]) -> Array:
        parts = [xp.max(xp.where(member, array, 0.0), axis=1) for member in members]
        return xp.concatenate(parts, axis=-1)

    return KeyGroups(
        count=xp.concatenate([xp.sum(part.astype(xp.float32), axis=1) for part in groups], axis=-1),
        squared=largest(squared, groups),
        scaled=largest(scaled, (others, groups[1])),
    )


def head_keys(
    key: Array,
    dtype: str,
    *,
    valid: Array | None = None,
    sentinels: bool = True,
    statistics_block: int = KEYS_PER_BLOCK,
    backend: Backend = NUMPY,
) -> HeadKeys:
    """Sum up the keys [S_k, D] of one head.

    Args:
        key: float32 values.
        dtype: the input's dtype, which decides how the kernel multiplies.
        valid: bool [S_k], keys that some query sees; None: all. What lies at the others may be NaN.
        sentinels: take the farthest keys out one by one.
        statistics_block: keys whose mean is one row of the summary.
    """
    xp = backend.xp
    num_keys = key.shape[0]
    statistics_block = max(min(statistics_block, num_keys), -(-num_keys // MOST_BLOCKS))
    blocks = -(-num_keys // statistics_block)
    padded = -(-blocks * statistics_block // NUM_SENTINELS) * NUM_SENTINELS
    length = blocks * statistics_block
    inside = xp.arange(padded) < num_keys
    if valid is not None:
        inside = inside & xp.pad(valid, (0, padded - num_keys))
    key = xp.where(inside[:, None], xp.pad(key, ((0, padded - num_keys), (0, 0))), 0.0)

    def by_block(array: Array) -> Array:
        return array[:length].reshape(blocks, statistics_block, *array.shape[1:])

    count = xp.sum(by_block(inside).astype(xp.float32), axis=1)
    mean = xp.sum(by_block(key), axis=1) / xp.maximum(count, 1.0)[:, None]
    difference = xp.where(by_block(inside)[..., None], by_block(key) - mean[:, None, :], 0.0)
    # Squares as the device has them, rounded to bfloat16.
    squares = backend.split("bfloat16", difference * difference)[0]
    squared = _not_a_number_is_far(xp.sum(squares, axis=-1), xp)
    distance = xp.where(by_block(inside), squared, -1.0).reshape(-1)
    distance = xp.pad(distance, (0, padded - length), constant_values=-1.0)

    position, present = choose_sentinels(distance, xp=xp)
    if not sentinels:
        position, present = position[:0], present[:0]
    chosen = xp.any(
        (xp.arange(length)[:, None] == position[None, :]) & present[None, :], axis=1
    ).reshape(blocks, statistics_block)
    others = by_block(inside) & ~chosen
    in_block = position[None, :] // statistics_block == xp.arange(blocks)[:, None]
    membership = (in_block & present[None, :]).astype(xp.float32)
    mean_square = _mean_square(difference[0], count[0], xp)
    channel_scale = backend.on_bits(mean_square, channel_scale_bits)
    inverse = 1.0 / channel_scale
    scaled_squared = _not_a_number_is_far(xp.sum(squares * (inverse * inverse), axis=-1), xp)

    groups = key_groups(squared, scaled_squared, others, xp=xp)
    rows = summarize_keys(
        block_mean=mean,
        block_count=count,
        group_count=groups.count,
        distance_squared=groups.squared,
        spread_squared=xp.max(xp.where(by_block(inside), squared, 0.0), axis=1),
        scaled_squared=groups.scaled,
        channel_scale=channel_scale,
        sentinels=xp.where(present[:, None], key[position], 0.0),
        membership=membership,
        keys_per_block=statistics_block,
        kernel=arithmetic_for(dtype),
        split=lambda values: backend.split(dtype, values),
        matmul=backend.matmul,
        xp=xp,
    )
    if sentinels:
        log2_count = xp.concatenate(
            [xp.where(present, 0.0, EMPTY), rows.log2_count[NUM_SENTINELS:]], axis=0
        )
        rows = rows._replace(log2_count=log2_count.astype(xp.float32))
    first = int(position.shape[0])
    rest = count - xp.sum(membership, axis=1)
    half_width = box_half_width(
        xp.max(xp.where(others[..., None], xp.abs(difference), 0.0), axis=1),
        mean,
        (rows.high + rows.low)[first : first + blocks],
        rest > 0,
        xp=xp,
    )
    return HeadKeys(rows, half_width, position, membership, rest, statistics_block)


def _not_a_number_is_far(squared: Array, xp: Any) -> Array:
    return xp.where(squared >= 0, squared, xp.inf)


def _mean_square(difference: Array, count: Array, xp: Any) -> Array:
    """[D], over the first block of keys: any scale is sound, and this one is known early."""
    return xp.sum(difference * difference, axis=0) / xp.maximum(count, 1.0)


def scaled_query(query: Array, dtype: str, scale: float, *, backend: Backend = NUMPY) -> Array:
    """q' [S_q, D] as the kernel multiplies it, bits per unit of key: the sum of its two halves."""
    high, low = backend.split(dtype, query * np.float32(query_factor(scale)))
    return high + low


def key_values(value: Array, *, xp: Any) -> Array:
    """float32 [S_k]: max|v| over the channels of each key; inf where one is not finite."""
    largest = xp.max(xp.abs(value), axis=-1)
    return xp.where(largest <= np.finfo(np.float32).max, largest, xp.inf)
