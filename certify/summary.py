"""A head's keys in a few rows: what bounds on the log-sum-exp of any query are made of.

The summary of one (batch, head) is a short list of rows, each a vector c with a count of keys:

* sentinels: keys taken out one by one; their logits are known up to rounding;
* blocks: means of runs of the remaining keys, with the radius around each;
* the ball: mean and radius of all remaining keys together.

Everything is evaluated with the array namespace ``xp`` (numpy or jax.numpy) in float32, with slack
that always points outward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from certify import arithmetic
from certify.arithmetic import KernelArithmetic

Array = Any
Split = Callable[[Array], tuple[Array, Array]]
MatMul = Callable[[Array, Array], Array]

NUM_SENTINELS = 128
"""One tile of the matrix unit; one key from each class of positions modulo 128."""

KEYS_PER_BLOCK = 1024
"""Keys whose mean is one row of the summary."""

SAVING_BITS = 192.0
"""Reach in bits at which it is evaluated what a row saves because few of its keys lie at the edge:
near the gap from which on nothing is certified. Any number is sound."""

EMPTY = -1e30
"""log2 of the count of an empty row: finite, so that no inf - inf can arise."""


class KeySummary(NamedTuple):
    """Rows [sentinels | blocks | ball] of each (batch, head); leading dimensions are free.

    Attributes:
        high, low: [..., rows, head_dim]; the row's vector is high + low (each exact in the kernel's
            input dtype).
        log2_count: [..., rows], bits.
        reach_up, reach_down: [..., rows]; times |q| (bits) they bound how far above and below
            q . (high + low) + log2_count the row's share of the log-sum-exp may lie.
        channel_scale: [..., head_dim], powers of two s.
        scaled_radius: [..., rows]; times |q s|, and with reach_down |q|, it bounds the same from
            above.
        saved, scaled_saved: [..., rows], bits by which the row's share is smaller than reach_up and
            scaled_radius say, at a reach of ``SAVING_BITS`` and beyond; in proportion below.
    """

    high: Array
    low: Array
    log2_count: Array
    reach_up: Array
    reach_down: Array
    channel_scale: Array
    scaled_radius: Array
    saved: Array
    scaled_saved: Array


def norm_above(vector: Array, *, xp: Any) -> Array:
    """An upper bound on the Euclidean norm over the last axis, rounding and underflow included."""
    squares = xp.sum(vector * vector, axis=-1)
    return root_above(squares, vector.shape[-1], xp=xp)


def root_above(squares: Array, length: int, *, xp: Any, scale: Array | float = 0.0) -> Array:
    """An upper bound on a norm, from its square as float32 summed it over ``length`` numbers.

    Args:
        squares: sum of squares, each possibly flushed, split in two bfloat16 halves, and multiplied
            by the square of a power of two.
        scale: the largest of those powers, which what was flushed before is multiplied by; 0 where
            there are none.
    """
    slack = 1.0 + arithmetic.dot_slack(length + 4) + arithmetic.SPLIT_ERROR
    return (xp.sqrt(squares) + arithmetic.norm_underflow(length) * (1.0 + scale)) * slack


def bits_saved(distance: Array, count: Array, reach: Array, log2_count: Array, *, xp: Any) -> Array:
    """Bits by which sum_j 2^(q0 (r_j - R)) is below the number of keys, q0 = SAVING_BITS / reach.

    Args:
        distance: [..., rows, groups], the largest r_j of each group of the row's keys; R is the
            largest of all.
        count: [..., rows, groups], keys of each group.
        reach: [..., rows], at least R.
        log2_count: [..., rows], bits, ``EMPTY`` where the row has no key.
    """
    present = count > 0
    largest = xp.max(xp.where(present, distance, 0.0), axis=-1, keepdims=True)
    nearer = present & (distance < largest)
    reach = xp.maximum(reach, arithmetic.SMALLEST_NORMAL)[..., None]
    bits = SAVING_BITS * (xp.where(nearer, distance - largest, 0.0) / reach)
    effective = xp.sum(count * xp.exp2(bits), axis=-1)
    effective = effective * (1.0 + arithmetic.dot_slack(count.shape[-1]))
    saved = log2_count - xp.log2(xp.maximum(effective, 1.0)) - arithmetic.EVALUATION_SLACK
    return xp.maximum(saved, 0.0)


def summarize_keys(
    *,
    block_mean: Array,
    block_count: Array,
    group_count: Array,
    distance_squared: Array,
    spread_squared: Array,
    scaled_squared: Array,
    channel_scale: Array,
    sentinels: Array,
    membership: Array,
    keys_per_block: int,
    kernel: KernelArithmetic,
    split: Split,
    matmul: MatMul,
    xp: Any,
) -> KeySummary:
    """Take the sentinels out of the block statistics and bound what is left.

    Args:
        block_mean: float32 [..., blocks, head_dim], mean of all keys of the block.
        block_count: float32 [blocks], number of keys of the block.
        group_count: float32 [..., blocks, groups], the block's keys that are not sentinels, in any
            groups: how many are in each.
        distance_squared: float32 [..., blocks, groups], largest squared distance to ``block_mean``
            in the group (0 if it is empty); each channel's square may be rounded to bfloat16, here
            and below.
        spread_squared: float32 [..., blocks], the same among all keys of the block.
        scaled_squared: float32 [..., blocks, groups], largest |(key - block_mean) /
            channel_scale|^2 in the group.
        channel_scale: float32 [..., head_dim], powers of two.
        sentinels: float32 [..., sentinels, head_dim], distinct keys.
        membership: float32 [..., blocks, sentinels], 1 where the sentinel lies in the block.
        keys_per_block: largest number of keys of a block.
        split: rounds to the pair (high, low) of the kernel's input dtype.
        matmul: float32 matrix product at full precision.
    """
    head_dim = block_mean.shape[-1]
    num_sentinels = sentinels.shape[-2]

    def norm(vector: Array) -> Array:
        return norm_above(vector, xp=xp)

    def distance(squared: Array, scale: Array | float = 0.0) -> Array:
        measured = root_above(squared, head_dim, xp=xp, scale=scale)
        return measured * (1.0 + arithmetic.SQUARES_ERROR)

    count = xp.broadcast_to(block_count, spread_squared.shape)
    rest = count - xp.sum(membership, axis=-1)
    occupied = rest > 0
    divisor = xp.maximum(rest, 1.0)
    total = count[..., None] * block_mean - matmul(membership, sentinels)
    mean = xp.where(occupied[..., None], total / divisor[..., None], 0.0)
    high, low = split(mean)
    center = high + low
    largest_key = norm(block_mean) + distance(spread_squared)
    summation = arithmetic.dot_slack(keys_per_block + num_sentinels + 8)
    mean_error = summation * 2.0 * count * largest_key / divisor + norm(mean - center)
    distances = distance(distance_squared)
    radius = xp.max(distances, axis=-1) + norm(block_mean - center)
    mean_error = xp.where(occupied, mean_error, 0.0)
    radius = xp.where(occupied, radius, 0.0)

    everything = xp.maximum(xp.sum(rest, axis=-1, keepdims=True), 1.0)
    ball_mean = matmul((rest / everything)[..., None, :], center)
    ball_high, ball_low = split(ball_mean)
    ball_center = ball_high + ball_low
    center_norm = norm(center)
    weighing = arithmetic.dot_slack(arithmetic.MATMUL_PASSES * (rest.shape[-1] + 8))
    ball_error = (
        xp.max(mean_error, axis=-1, keepdims=True)
        + weighing * xp.max(center_norm, axis=-1, keepdims=True)
        + norm(ball_mean - ball_center)
    )
    offset = xp.where(occupied, radius + norm(center - ball_center), 0.0)
    ball_radius = xp.max(offset, axis=-1, keepdims=True)

    inverse = 1.0 / channel_scale[..., None, :]
    largest_inverse = xp.max(inverse, axis=-1)
    scaled_distances = distance(scaled_squared, largest_inverse[..., None])
    scaled = xp.max(scaled_distances, axis=-1) + norm((block_mean - center) * inverse)
    scaled = xp.where(occupied, scaled, 0.0)
    apart = xp.where(occupied, scaled + norm((center - ball_center) * inverse), 0.0)
    ball_scaled = xp.max(apart, axis=-1, keepdims=True)

    unit = arithmetic.dot_slack(kernel.contraction_length(head_dim)) + arithmetic.COEFFICIENT_SLACK

    def rounding(vector_norm: Array, distance: Array) -> Array:
        return unit * (2.0 * vector_norm + distance)

    sentinel_reach = rounding(norm(sentinels), 0.0)
    block_slack = rounding(center_norm, radius)
    ball_slack = rounding(norm(ball_center), ball_radius)
    log2_rest = xp.where(occupied, xp.log2(divisor), EMPTY)
    log2_everything = xp.where(xp.sum(rest, axis=-1, keepdims=True) > 0, xp.log2(everything), EMPTY)
    block_reach, ball_reach = radius + block_slack, ball_radius + ball_slack

    def saved(distances: Array, offset: Array, reach: Array, ball_reach: Array) -> Array:
        """Of sentinels (one key: nothing), blocks and the ball, where blocks lie ``offset`` out."""
        largest = xp.max(distances, axis=-1, keepdims=True)
        inward = xp.where(distances < largest, distances - largest, 0.0)
        in_ball = (offset[..., None] + inward).reshape(*offset.shape[:-1], 1, -1)
        ball_count = group_count.reshape(in_ball.shape)
        blocks = bits_saved(distances, group_count, reach, log2_rest, xp=xp)
        ball = bits_saved(in_ball, ball_count, ball_reach, log2_everything, xp=xp)
        return xp.concatenate([xp.zeros_like(sentinel_reach), blocks, ball], axis=-1)

    return KeySummary(
        high=xp.concatenate([sentinels, high, ball_high], axis=-2),
        low=xp.concatenate([xp.zeros_like(sentinels), low, ball_low], axis=-2),
        log2_count=xp.concatenate(
            [xp.zeros_like(sentinel_reach), log2_rest, log2_everything], axis=-1
        ),
        reach_up=xp.concatenate([sentinel_reach, block_reach, ball_reach], axis=-1),
        reach_down=xp.concatenate(
            [sentinel_reach, mean_error + block_slack, ball_error + ball_slack], axis=-1
        ),
        channel_scale=channel_scale,
        scaled_radius=xp.concatenate([xp.zeros_like(sentinel_reach), scaled, ball_scaled], axis=-1),
        saved=saved(distances, offset, block_reach, ball_reach),
        scaled_saved=saved(scaled_distances, apart, scaled, ball_scaled),
    )


def channel_scale_bits(mean_square: Array) -> Array:
    """Bits of powers of two near the fourth root of ``mean_square``, from its bits (int32).

    For the mean square deviation of each channel this is the root of its root mean square: of all
    channel scales s the one for which |q s| |d / s| is smallest where channels are independent. Any
    positive scale is sound; powers of two round nothing, and whole numbers agree on every machine.
    """
    exponent = ((mean_square >> 23) & 0xFF) - 127
    return (((exponent + 2) >> 2) + 127) << 23


def box_half_width(
    difference_max: Array, block_mean: Array, center: Array, occupied: Array, *, xp: Any
) -> Array:
    """[..., blocks, head_dim]: largest |k - center| of each channel.

    Args:
        difference_max: float32, largest |k - block_mean| per channel among the keys that are not
            sentinels.
        center: the summary's block rows.
        occupied: bool [..., blocks], some key is left.
    """
    half_width = difference_max + xp.abs(block_mean - center)
    half_width = half_width * (1.0 + arithmetic.COEFFICIENT_SLACK)
    return xp.where(occupied[..., None], half_width, 0.0)
