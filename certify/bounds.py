"""Upper and lower bounds on the log-sum-exp of every query row, from a summary of its keys.

Each family is one function that says how far a logit q.k can lie from q.c, c being the center of
the row of the summary that stands for k:

* ``ball_reach``: |q| |k - c| (Cauchy-Schwarz), for blocks of keys and for all keys as one ball;
* ``scaled_reach``: |q s| |(k - c) / s| for fixed positive channel scales s;
* ``saving``: less, for a row of the summary of which few keys lie at the edge of its reach;
* ``box_reach``: sum_d |q_d| |k_d - c_d|, from the largest deviation of each channel;
* ``soft_capped``: a capped logit is monotone in the logit, and never beyond the cap.

From below, Jensen's inequality: n keys with mean c sum to at least n 2^(q.c), where the row sees
all of them and nothing is capped. Everything is evaluated with the array namespace ``xp`` (numpy or
jax.numpy) in float32, with slack that points outward. Logits are in bits.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from certify import arithmetic
from certify.summary import EMPTY, SAVING_BITS, Array

BOUND_NAMES = (
    "none",
    "ball",
    "blocks",
    "ball+sentinels",
    "blocks+sentinels",
    "box",
    "scaled",
    "box+sentinels",
    "scaled+sentinels",
    "soft cap",
    "weights",
)
"""Names of the bound codes, from 0 on. "weights": promised in advance, see ``static``."""

SENTINELS_SUFFIX = "+sentinels"

RECORDED_BOUNDS = (
    "auto",
    "ball",
    "blocks",
    "ball+sentinels",
    "blocks+sentinels",
    "box+sentinels",
    "scaled+sentinels",
    "soft cap",
)
"""What a recording holds of every query block."""


class Exponents(NamedTuple):
    """log2 of the most and the least that the keys behind each row of a summary can sum to.

    Both [..., rows, queries], bits.
    """

    upper: Array
    lower: Array


class Seen(NamedTuple):
    """What each query sees of the keys behind each row of a summary, [..., rows, queries].

    Attributes:
        log2_upper: log2 of the number of visible keys plus their largest bias, bits.
        log2_lower: log2 of the number of visible keys whose bias is not far below the row's
            largest, plus the smallest bias among them, bits.
        whole: bool, those are all keys of the row of the summary.
    """

    log2_upper: Array
    log2_lower: Array
    whole: Array


class RowBounds(NamedTuple):
    """Per query row: S (``upper``) and L (``lower``) in bits, the bound code and a grid origin."""

    upper: Array
    lower: Array
    code: Array
    grid_origin: Array


def code_of(name: str) -> float:
    """The code of a bound, as the float that arrays of codes hold."""
    return float(BOUND_NAMES.index(name))


class Reach(NamedTuple):
    """How far the logits behind each row of a summary lie from its center's, [..., rows, queries].

    Attributes:
        up: bits above or below, for every key.
        saving: bits by which log2 of the sum over all keys is less than ``up`` says.
        scaled: whether channels are scaled, one bool or each.
    """

    up: Array
    saving: Array
    scaled: Array


def saving(reach: Array, saved: Array, *, xp: Any) -> Array:
    """Bits by which a sum of keys is below their number times 2^reach, for any reach.

    log2 of sum_j 2^(x r_j / R - x) is convex in the reach x and never rises; at x = 0 it is that of
    the number of keys, at ``SAVING_BITS`` less by ``saved``.
    """
    return xp.minimum(reach * (1.0 / SAVING_BITS), 1.0) * saved


def ball_reach(reach: Array, saved: Array, query_norm: Array, *, xp: Any) -> Reach:
    """|q| R. Rounding of the logits is part of ``reach``."""
    up = reach * query_norm
    return Reach(up, saving(up, saved, xp=xp), scaled=False)


def scaled_reach(
    scaled_radius: Array, scaled_saved: Array, scaled_query_norm: Array, slack: Array, *, xp: Any
) -> Reach:
    """The same with channels scaled: |q s| max |(k - c) / s|, for any positive s.

    Args:
        slack: for the rounding of the logits, bits.
    """
    measured = scaled_radius * scaled_query_norm * (1.0 + arithmetic.COEFFICIENT_SLACK)
    less = saving(measured, scaled_saved, xp=xp)
    return Reach(measured + slack, less, scaled=True)


def smaller_reach(plain: Reach, scaled: Reach, *, xp: Any) -> Reach:
    """Row by row whichever bounds the sum of all keys from above more tightly."""
    take = scaled.up - scaled.saving < plain.up - plain.saving
    return Reach(
        up=xp.where(take, scaled.up, plain.up),
        saving=xp.where(take, scaled.saving, plain.saving),
        scaled=take,
    )


def box_reach(half_width: Array, query: Array, slack: Array, *, matmul: Any, xp: Any) -> Array:
    """The same in a box: sum_d |q_d| h_d, [..., rows, queries].

    Args:
        half_width: [..., rows, head_dim].
        query: [..., queries, head_dim].
        slack: for the rounding of the logits, bits.
    """
    factor = 1.0 + arithmetic.dot_slack(arithmetic.MATMUL_PASSES * (query.shape[-1] + 4))
    flushed = query.shape[-1] * arithmetic.SMALLEST_NORMAL
    return matmul(half_width, xp.swapaxes(xp.abs(query), -1, -2)) * factor + (flushed + slack)


def soft_capped(logits: Array, cap: float, *, xp: Any) -> Array:
    """cap tanh(logits / cap), bits; monotone, within [-cap, cap]."""
    return cap * xp.tanh(logits / cap)


def exponents(logits: Array, log2_count: Array, reach: Reach, distance_down: Array) -> Exponents:
    """Exponents where every query sees every key and nothing is capped."""
    up = reach.up - reach.saving
    return Exponents(logits + (log2_count + up), logits + (log2_count - distance_down))


def masked_exponents(
    logits: Array,
    reach: Reach,
    distance_down: Array,
    seen: Seen,
    *,
    soft_cap: float | None,
    xp: Any,
) -> Exponents:
    """Exponents of the keys that each query sees, with the soft cap between logit and bias.

    Jensen's inequality holds for the mean of the keys behind a row of the summary: where a query
    sees only some of them, or where the cap bends the logits, each key is taken at the lower edge
    of its reach, and nothing is saved.
    """
    high, edge, mean = logits + reach.up, logits - reach.up, logits - distance_down
    if soft_cap is None:
        high = high - xp.where(seen.whole, reach.saving, 0.0)
    else:
        slack = soft_cap * arithmetic.TANH_ERROR
        high = soft_capped(high, soft_cap, xp=xp) + slack
        edge = mean = soft_capped(edge, soft_cap, xp=xp) - slack
    low = xp.where(seen.whole, mean, edge)
    return Exponents(high + seen.log2_upper, low + seen.log2_lower)


def log_sum_exp2(exponents: Array, *, xp: Any) -> Array:
    """log2 of the sum of 2^exponents over axis -2, kept as a row."""
    largest = xp.max(exponents, axis=-2, keepdims=True)
    return largest + xp.log2(xp.sum(xp.exp2(exponents - largest), axis=-2, keepdims=True))


def log_add_exp2(first: Array, second: Array, *, xp: Any) -> Array:
    """log2(2^first + 2^second), elementwise."""
    larger = xp.maximum(first, second)
    return larger + xp.log2(1.0 + xp.exp2(xp.minimum(first, second) - larger))


def row_bounds(
    rows: Exponents,
    grid_origin: Array | None,
    scaled: Array,
    *,
    num_sentinels: int,
    num_blocks: int,
    xp: Any,
    family: str = "auto",
) -> RowBounds:
    """Bounds S and L of every query row: sentinels with the blocks, the ball, or the better.

    Args:
        rows: of the summary's rows: sentinels first, then blocks, then the ball.
        grid_origin: [..., 1, queries], a logit of the row; None: L.
        scaled: bool [..., rows, queries], where the scaled reach was the smaller; the last row
            decides what the bound is called.
        family: "auto" takes the better of blocks and ball per row; "ball" the ball alone; another
            name takes the blocks alone and says by which reach their exponents came about.
    """
    first_block, ball = num_sentinels, num_sentinels + num_blocks

    def blocks_of(side: Array) -> Array:
        return log_sum_exp2(side[..., first_block:ball, :], xp=xp)

    suffix = SENTINELS_SUFFIX if num_sentinels else ""
    upper_ball, lower_ball = (side[..., ball : ball + 1, :] for side in rows)
    ball_code = code_of("ball" + suffix)
    if family == "ball":
        upper, lower, code = upper_ball, lower_ball, xp.zeros_like(upper_ball) + ball_code
    else:
        upper, lower = blocks_of(rows.upper), blocks_of(rows.lower)
        named = "blocks" if family == "auto" else family
        code = xp.zeros_like(upper) + code_of(named + suffix)
    if family == "auto":
        code = xp.where(upper <= upper_ball, code, xp.zeros_like(upper) + ball_code)
        upper, lower = xp.minimum(upper, upper_ball), xp.maximum(lower, lower_ball)
        scaled_code = xp.zeros_like(upper) + code_of("scaled" + suffix)
        code = xp.where(scaled[..., ball : ball + 1, :], scaled_code, code)
    origin = lower if grid_origin is None else grid_origin
    if num_sentinels:
        singles = (log_sum_exp2(side[..., :first_block, :], xp=xp) for side in rows)
        upper, lower = (
            log_add_exp2(rest, single, xp=xp)
            for rest, single in zip((upper, lower), singles, strict=True)
        )
    return RowBounds(
        upper=upper + arithmetic.EVALUATION_SLACK,
        lower=lower - arithmetic.EVALUATION_SLACK,
        code=code,
        grid_origin=origin,
    )


def promised_bounds(logit_bound: Array, *, num_keys: int, xp: Any) -> RowBounds:
    """S and L where every logit of the head lies in [-bound, bound] bits, whatever the inputs.

    Args:
        logit_bound: bits, rounding of the kernel's logits included; inf or NaN bounds nothing.
    """
    count = math.log2(num_keys)
    slack = arithmetic.EVALUATION_SLACK
    zero = xp.zeros_like(logit_bound)
    return RowBounds(
        upper=logit_bound + (count + slack),
        lower=(count - slack) - logit_bound,
        code=zero + code_of("weights"),
        grid_origin=zero,
    )


def log2_of_count(count: Array, *, xp: Any) -> Array:
    """log2, ``EMPTY`` for a count of 0."""
    return xp.where(count > 0, xp.log2(xp.maximum(count, 1.0)), EMPTY)
