"""The theorem in formulas: the interval of safe stabilizers, the choice, the check, the error.

All functions are pure and take the array namespace ``xp`` (numpy or jax.numpy), so that the kernels
evaluate exactly what the certifier evaluates. With base-2 logits of one row over n keys, bounds
L <= log2 sum 2^logit <= S, V = max|v| and a stabilizer m,

* nothing overflows when S - m <= ``upper_room``;
* the range error stays within the tolerance when m - L <= ``lower_room``;
* after the loop, the same holds when ``row_sum_min`` <= l <= 2^125 and everything is finite.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from certify import arithmetic
from certify.arithmetic import KernelArithmetic

Array = Any

VERDICTS = ("certified", "verified", "recomputed", "exact")
"""Names of the verdict codes 0, 1, 2, 3 of a (batch, head, query block)."""

CERTIFICATE_FIELDS = (
    "verdict",
    "gap",
    "budget",
    "error_bound",
    "bound_used",
    "row_sum_min",
    "row_sum_max",
)
"""What a kernel says of a (batch, head, query block), in this order."""

CERTIFIED, VERIFIED, RECOMPUTED, EXACT = range(4)

ROW_SUM_MAX = 2.0**arithmetic.OVERFLOW_EXPONENT


class Limits(NamedTuple):
    """What one head allows, each an array of the shape of ``value_max``.

    Attributes:
        upper_room: bits that S may lie above the stabilizer.
        lower_room: bits that the stabilizer may lie above L.
        budget: bits; a row is certified iff S - L <= budget. -inf where nothing can be proved.
        row_sum_min: smallest row sum that proves the tolerance after the loop, +inf where none
            does.
        loss: numerator of the error bound, d * kappa * (losses + flushes / V) times the row sum.
        flush: kappa * n * 2^-126, the same without the factor of V.
        floor: error that no stabilizer removes: argument rounding and flushed values.
    """

    upper_room: Array
    lower_room: Array
    budget: Array
    row_sum_min: Array
    loss: Array
    flush: float
    floor: Array


class Choice(NamedTuple):
    """A stabilizer per row (bits, always finite) and whether the row is certified with it."""

    stabilizer: Array
    certified: Array


def limits(
    value_max: Array,
    *,
    num_keys: int,
    tolerance: float,
    kernel: KernelArithmetic,
    xp: Any,
    value_low: Array | None = None,
    value_ratio: Array | float = 1.0,
) -> Limits:
    """Limits of rows whose keys have values up to ``value_max`` in size.

    V = 0 is treated as V = 1: the output is exactly 0 wherever the row sum is neither 0 nor
    infinite. Values that are NaN, infinite or too small for the tolerance (as subnormal ones are)
    prove nothing. What is proved is proved of the values as the machine reads them: hardware that
    reads a subnormal number as 0 sees V = 0 there.

    Args:
        value_max: V_hi, max|v| over every key that is multiplied, hidden ones included.
        num_keys: keys that are summed, hidden ones included.
        value_low: V_lo, a lower bound on max|v| over the keys that the row sees; None where every
            row sees every key: ``value_max``.
        value_ratio: max|v| over all keys that the row sees, divided by V_lo, where V_lo speaks of
            some of them only (an additive bias puts the others far below). The error is then
            relative to V_lo.
    """
    kappa = arithmetic.summation_factor(kernel.summation_length(num_keys))
    above, below = 1.0 + arithmetic.COEFFICIENT_SLACK, 1.0 - arithmetic.COEFFICIENT_SLACK
    low = value_max if value_low is None else value_low
    value = xp.where(low > 0, low, 1.0)
    smallest = arithmetic.SMALLEST_NORMAL
    floor = kernel.value_flushes * (smallest / xp.maximum(value, smallest))
    floor = (arithmetic.ARGUMENT_ERROR * value_ratio + floor) * above
    room = tolerance * below - floor
    provable = (room > 0) & (low >= 0) & (value_max >= low) & (value_max <= 2.0**127)
    value = xp.where(provable, value, 1.0)
    room = xp.where(provable, room, tolerance)
    ratio = xp.where(provable, value_ratio, 1.0)
    losses = (kernel.probability_losses * ratio + kernel.product_flushes / value) * above
    largest = xp.where(provable, value_max, 1.0)
    upper_room = arithmetic.OVERFLOW_EXPONENT - xp.log2(xp.maximum(1.0, largest))
    upper_room = upper_room - math.log2(kappa) - arithmetic.EVALUATION_SLACK
    lower_room = -arithmetic.SMALLEST_NORMAL_EXPONENT - math.log2(num_keys) + xp.log2(room)
    lower_room = lower_room - xp.log2(kappa * (losses + room)) - arithmetic.EVALUATION_SLACK
    interval = 2 * arithmetic.GRID_MARGIN + arithmetic.GRID_SPACING
    flush = flush_scale(num_keys, kernel)
    # Four times the slack of ``error_from_row_sum``: its rounded E then stays within the tolerance.
    row_sum_min = flush * (losses + room) / room * (1.0 + 4.0 * arithmetic.COEFFICIENT_SLACK)
    return Limits(
        upper_room=upper_room,
        lower_room=lower_room,
        budget=xp.where(provable, upper_room + lower_room - interval, -xp.inf),
        row_sum_min=xp.where(provable, row_sum_min, xp.inf),
        loss=xp.where(provable, flush * losses, xp.inf),
        flush=flush,
        floor=floor,
    )


def flush_scale(num_keys: int, kernel: KernelArithmetic) -> float:
    """kappa * n * 2^-126: what ``num_keys`` flushes can take from a row sum."""
    kappa = arithmetic.summation_factor(kernel.summation_length(num_keys))
    return kappa * num_keys * arithmetic.SMALLEST_NORMAL


def online_shift(value_max: Array, *, num_keys: int, xp: Any) -> Array:
    """Bits that online softmax adds to the row maximum, so that no numerator leaves the range.

    n keys of weight at most 1 sum to n V; the shift is whole, 0 wherever V >= 1 and n V stays in
    range, and at most ceil(log2 n). Below V = 1 it is log2 V, as far as n weights of 2^-shift
    stay in range: products of small values are then not flushed before their probabilities are.
    """
    most = float(math.ceil(math.log2(num_keys)))
    log2_value = xp.log2(xp.maximum(value_max, arithmetic.SMALLEST_NORMAL))
    least = xp.clip(xp.ceil(log2_value), most - arithmetic.OVERFLOW_EXPONENT, 0.0)
    excess = xp.ceil(most + log2_value - arithmetic.OVERFLOW_EXPONENT)
    shift = xp.minimum(xp.maximum(excess, least), most)
    return xp.where(value_max <= arithmetic.FLOAT32_LARGEST, shift, most)


def choose_stabilizer(
    upper: Array, lower: Array, grid_origin: Array, head: Limits, *, xp: Any
) -> Choice:
    """The stabilizer of each row from its bounds S (``upper``) and L (``lower``), in bits.

    Certified rows take the grid point nearest the middle of the interval; the others the largest
    grid point that still leaves the lower side its room, to be verified after the loop.

    Args:
        grid_origin: a logit of the row; stabilizers differ from it by an integer.
    """
    certified = upper - lower <= head.budget
    middle = 0.5 * ((upper - head.upper_room) + (lower + head.lower_room))
    # Only its fraction counts; a far origin would round its distance to whole grid steps.
    grid_origin = grid_origin - xp.floor(grid_origin)
    nearest = grid_origin + xp.floor(middle - grid_origin + 0.5)
    top = lower + head.lower_room - arithmetic.VERIFY_MARGIN
    highest = grid_origin + xp.floor(top - grid_origin)
    stabilizer = xp.where(certified, nearest, highest)
    certified = certified & (xp.abs(stabilizer) <= arithmetic.LARGEST_STABILIZER)
    finite = xp.abs(stabilizer) <= arithmetic.FLOAT32_LARGEST
    return Choice(xp.where(finite, stabilizer, 0.0), certified)


def row_sum_passes(row_sum: Array, head: Limits) -> Array:
    """The check after the loop on l; written so that NaN fails.

    It is complete only together with a look at every component of the numerator and of the output
    after its cast, which must be finite.
    """
    return (row_sum >= head.row_sum_min) & (row_sum <= ROW_SUM_MAX)


def error_from_row_sum(row_sum: Array, head: Limits, *, xp: Any) -> Array:
    """Proven |o - o_exact| / max|v| beyond ordinary rounding, given the computed row sum.

    E = kappa d (losses + flushes / V) / (1 - kappa d) + floor with d = n 2^-126 / l; inf unless
    kappa d < 1.
    """
    remaining = row_sum - head.flush
    safe = xp.where(remaining > 0, remaining, 1.0)
    error = (head.loss / safe) * (1.0 + arithmetic.COEFFICIENT_SLACK) + head.floor
    return xp.where(remaining > 0, error, xp.inf)


def lowest_row_sum(stabilizer: Array, lower: Array, *, xp: Any) -> Array:
    """2^(L - m): what the row sum is at least, before anything is flushed."""
    return xp.exp2(xp.minimum(lower - stabilizer, float(arithmetic.OVERFLOW_EXPONENT)))


def error_in_advance(stabilizer: Array, lower: Array, head: Limits, *, xp: Any) -> Array:
    """``error_from_row_sum`` before the loop: the row sum is at least 2^(L - m)."""
    return error_from_row_sum(lowest_row_sum(stabilizer, lower, xp=xp), head, xp=xp)


def lse_error_from_row_sum(row_sum: Array, head: Limits, *, xp: Any) -> Array:
    """Proven |lse - lse_exact| in nats beyond float32 rounding, given the row sum.

    -ln(1 - kappa d) for what is flushed, and ``ARGUMENT_ERROR`` for exp2's argument; inf unless
    kappa d < 1. Rounding adds what ``lse_rounding`` says.
    """
    lost = head.flush / xp.where(row_sum > head.flush, row_sum, xp.inf)
    error = arithmetic.ARGUMENT_ERROR - xp.log1p(-lost)
    return xp.where(row_sum > head.flush, error * (1.0 + arithmetic.COEFFICIENT_SLACK), xp.inf)


def lse_rounding(lse: Array, num_keys: int) -> Array:
    """Float32 rounding of lse = (m + log2 l) ln 2, nats: what any attention in float32 rounds.

    The sum over the keys, exp2 and log2, and three roundings of numbers of the size of lse and
    log2 l; |log2 l| stays below 128.
    """
    depth = arithmetic.BFLOAT16.summation_depth(num_keys)
    summed = arithmetic.dot_slack(depth) + 2.0 * arithmetic.EXP2_ERROR
    return summed + 4.0 * arithmetic.FLOAT32_ROUNDOFF * (abs(lse) + 256.0)


def rounding_error(num_keys: int, kernel: KernelArithmetic) -> float:
    """E_round / max|v|: what any attention in this precision may round, whatever its stabilizer.

    u_p for the probabilities, 2 e for exp2 in numerator and row sum, 2 gamma for their sums, u_out
    for the output; each against max|v|, the largest that sum w|v| and |o| can be. Kept apart from
    the range error E, which it usually exceeds.
    """
    summed = arithmetic.dot_slack(kernel.summation_depth(num_keys))
    summed = 2.0 * arithmetic.EXP2_ERROR + 2.0 * summed
    return kernel.probability_roundoff + summed + kernel.output_roundoff
