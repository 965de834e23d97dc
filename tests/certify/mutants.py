"""The mutants: one clause of the package changed in each, and the check that must notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from certify import arithmetic, bounds, call, keys, theorem
from certify import rows as row_bounds
from certify import summary as summary_of
from tests.certify import measures


@dataclass(frozen=True)
class Mutant:
    """Replace ``old`` (found exactly once) by ``new`` in a function; ``check`` must then fail."""

    fault: str
    function: Callable[..., Any]
    old: str
    new: str
    check: str


def limits(fault: str, old: str, new: str, check: str) -> Mutant:
    return Mutant(fault, theorem.limits, old, new, check)


def choice(fault: str, old: str, new: str, check: str) -> Mutant:
    return Mutant(fault, theorem.choose_stabilizer, old, new, check)


def summary(fault: str, old: str, new: str, check: str = "enclosure") -> Mutant:
    return Mutant(fault, summary_of.summarize_keys, old, new, check)


def rows(fault: str, old: str, new: str, check: str = "enclosure") -> Mutant:
    return Mutant(fault, bounds.row_bounds, old, new, check)


def head(fault: str, old: str, new: str, check: str) -> Mutant:
    return Mutant(fault, call._head_of, old, new, check)


MUTANTS = [
    # The theorem's lower side.
    limits("no V term", "kernel.product_flushes / value", "0.0 * value", "loss_is_counted_in_full"),
    limits("no losses of p", "kernel.probability_losses * ratio", "0.0", "loss_is_counted_in_full"),
    limits(
        "one loss of p",
        "kernel.probability_losses * ratio",
        "1.0 * ratio",
        "loss_is_counted_in_full",
    ),
    limits("no log2 n", "- math.log2(num_keys)", "", "formulas_of_the_design"),
    limits("no log2 of the room", "+ xp.log2(room)", "", "lower_edge"),
    limits(
        "losses left out of the room", "kappa * (losses + room))", "kappa * room)", "lower_edge"
    ),
    limits("no cut-offs of v and o", "kernel.value_flushes * ", "0.0 * ", "small_values"),
    limits(
        "argument error left out",
        "arithmetic.ARGUMENT_ERROR * value_ratio + floor",
        "floor",
        "formulas_of_the_design",
    ),
    limits(
        "floor not taken off",
        "tolerance * below - floor",
        "tolerance * below",
        "row_sum_min_is_consistent",
    ),
    limits(
        "tolerance rounded up",
        "tolerance * below",
        "tolerance * above",
        "row_sum_min_is_consistent",
    ),
    Mutant(
        "n left out of the flushes",
        theorem.flush_scale,
        "* num_keys",
        "",
        "loss_is_counted_in_full",
    ),
    Mutant(
        "kappa is 1",
        arithmetic.summation_factor,
        "max(2.0**-4, 2.0 * dot_slack(num_keys))",
        "0.0",
        "kappa",
    ),
    Mutant(
        "kappa does not grow",
        arithmetic.summation_factor,
        "2.0 * dot_slack(num_keys)",
        "0.0",
        "kappa",
    ),
    Mutant(
        "error without losses",
        theorem.error_from_row_sum,
        "head.loss / safe",
        "head.flush / safe",
        "lower_edge",
    ),
    Mutant(
        "error without its floor",
        theorem.error_from_row_sum,
        "+ head.floor",
        "",
        "formulas_of_the_design",
    ),
    Mutant(
        "unproved is 0 and not inf",
        theorem.error_from_row_sum,
        "error, xp.inf)",
        "error, 0.0)",
        "not_finite_proves_nothing",
    ),
    Mutant(
        "S for L in the error",
        theorem.lowest_row_sum,
        "lower - stabilizer",
        "lower - stabilizer + 40.0",
        "lower_edge",
    ),
    # The upper side.
    limits(
        "V left out above", "- xp.log2(xp.maximum(1.0, largest))", "- 0.0 * largest", "upper_edge"
    ),
    limits(
        "small V makes room", "xp.log2(xp.maximum(1.0, largest))", "xp.log2(largest)", "upper_edge"
    ),
    limits(
        "V halves the room",
        "- xp.log2(xp.maximum(1.0, largest))",
        "- 0.5 * xp.log2(xp.maximum(1.0, largest))",
        "upper_edge",
    ),
    # The check after the loop.
    Mutant(
        "row_sum_min dropped",
        theorem.row_sum_passes,
        "(row_sum >= head.row_sum_min) &",
        "",
        "after_loop",
    ),
    Mutant(
        "largest row sum dropped",
        theorem.row_sum_passes,
        "& (row_sum <= ROW_SUM_MAX)",
        "",
        "row_sum_overflow",
    ),
    Mutant(
        "NaN passes",
        theorem.row_sum_passes,
        "(row_sum >= head.row_sum_min) & (row_sum <= ROW_SUM_MAX)",
        "~((row_sum < head.row_sum_min) | (row_sum > ROW_SUM_MAX))",
        "not_finite_proves_nothing",
    ),
    Mutant(
        "no look at the numerator",
        measures.all_finite,
        "result.finite",
        "np.ones_like(result.finite)",
        "look_sees_overflow",
    ),
    limits(
        "row_sum_min without losses", "flush * (losses + room) / room", "flush / room", "after_loop"
    ),
    limits(
        "row_sum_min without the room",
        "flush * (losses + room) / room",
        "flush * losses / room",
        "formulas_of_the_design",
    ),
    limits(
        "row_sum_min at the edge",
        "(1.0 + 4.0 * arithmetic.COEFFICIENT_SLACK)",
        "1.0",
        "row_sum_min_is_consistent",
    ),
    limits(
        "unprovable rows pass",
        "xp.where(provable, row_sum_min, xp.inf)",
        "row_sum_min",
        "not_finite_proves_nothing",
    ),
    limits("infinite V is provable", "& (value_max <= 2.0**127)", "", "not_finite_proves_nothing"),
    limits(
        "NaN V is provable",
        "& (low >= 0) & (value_max >= low) & (value_max <= 2.0**127)",
        "& ~(low < 0) & ~(value_max < low) & ~(value_max > 2.0**127)",
        "not_finite_proves_nothing",
    ),
    limits("V too small is provable", "(room > 0) &", "", "not_finite_proves_nothing"),
    # The choice of the stabilizer.
    choice(
        "S and L swapped in the gap",
        "upper - lower <= head.budget",
        "lower - upper <= head.budget",
        "stabilizer_stays_inside",
    ),
    choice(
        "S and L swapped in the middle",
        "(upper - head.upper_room) + (lower + head.lower_room)",
        "(lower - head.upper_room) + (upper + head.lower_room - 2 * (upper - lower))",
        "stabilizer_stays_inside",
    ),
    choice(
        "m rounded upward only",
        "xp.floor(middle - grid_origin + 0.5)",
        "xp.ceil(middle - grid_origin)",
        "stabilizer_stays_inside",
    ),
    choice(
        "m off the grid",
        "xp.floor(middle - grid_origin + 0.5)",
        "(middle - grid_origin)",
        "stabilizer_stays_inside",
    ),
    choice(
        "huge stabilizers certify",
        "certified & (xp.abs(stabilizer) <= arithmetic.LARGEST_STABILIZER)",
        "certified",
        "stabilizer_stays_inside",
    ),
    choice(
        "m not finite",
        "xp.where(finite, stabilizer, 0.0)",
        "stabilizer",
        "not_finite_proves_nothing",
    ),
    choice(
        "verified rows above the edge",
        "- arithmetic.VERIFY_MARGIN",
        "+ 1.5",
        "left_to_the_check_passes",
    ),
    choice(
        "verified rows rounded upward",
        "xp.floor(top - grid_origin)",
        "xp.ceil(top - grid_origin)",
        "left_to_the_check_passes",
    ),
    limits("no margin for the grid", "- interval,", ",", "stabilizer_stays_inside"),
    # The bounds.
    summary("no radius of a block", "radius + block_slack", "block_slack"),
    summary("no radius of the ball", "ball_radius + ball_slack", "ball_slack"),
    summary("centers may lie apart", "radius + norm(center - ball_center)", "radius"),
    summary("the center moved, the radius not", "+ norm(block_mean - center)", "", "moved_center"),
    summary("sentinels left in the mean", " - matmul(membership, sentinels)", ""),
    summary(
        "sentinels left in the mean and divided out", "total / divisor[..., None]", "block_mean"
    ),
    summary("sentinels counted twice", "count - xp.sum(membership, axis=-1)", "count"),
    summary(
        "no error of the mean",
        "xp.where(occupied, mean_error, 0.0)",
        "0.0 * mean_error",
        "error_of_the_mean",
    ),
    summary(
        "size of keys taken from their mean",
        " + distance(spread_squared)",
        "",
        "error_of_the_mean",
    ),
    summary(
        "no error of the ball's mean",
        "xp.max(mean_error, axis=-1, keepdims=True)",
        "0.0",
        "error_of_the_mean",
    ),
    summary("centers are exact", " + norm(mean - center)", "", "center_is_rounded"),
    summary(
        "the ball's center is exact", "+ norm(ball_mean - ball_center)", "", "center_is_rounded"
    ),
    summary("a count of keys is left out", "xp.log2(divisor)", "0.0 * divisor"),
    summary("a count of all keys is left out", "xp.log2(everything)", "0.0 * everything"),
    summary(
        "no rounding of logits",
        "unit * (2.0 * vector_norm + distance)",
        "0.0 * (vector_norm + distance)",
        "rounding_slack",
    ),
    summary(
        "no rounding of sentinel logits",
        "sentinel_reach = rounding(norm(sentinels), 0.0)",
        "sentinel_reach = 0.0 * norm(sentinels)",
        "rounding_slack",
    ),
    summary(
        "no rounding of block logits",
        "block_slack = rounding(center_norm, radius)",
        "block_slack = 0.0 * center_norm",
        "rounding_slack",
    ),
    summary(
        "no rounding of ball logits",
        "ball_slack = rounding(norm(ball_center), ball_radius)",
        "ball_slack = 0.0 * ball_radius",
        "rounding_slack",
    ),
    summary(
        "unit of bfloat16 for every contraction",
        "kernel.contraction_length(head_dim)",
        "1",
        "rounding_slack",
    ),
    summary(
        "empty blocks count", "xp.where(occupied, xp.log2(divisor), EMPTY)", "xp.log2(divisor)"
    ),
    Mutant(
        "L reaches up",
        bounds.exponents,
        "log2_count - distance_down",
        "log2_count + distance_down",
        "enclosure",
    ),
    Mutant(
        "S by the mean alone",
        bounds.exponents,
        "logits + (log2_count + up)",
        "logits + (log2_count + distance_down)",
        "enclosure",
    ),
    rows(
        "S and L of the ball swapped",
        "for side in rows)\n    ball",
        "for side in rows[::-1])\n    ball",
    ),
    rows(
        "sentinels left out of S and L",
        "log_add_exp2(rest, single, xp=xp)",
        "rest",
    ),
    rows(
        "S takes the larger count for L",
        "zip((upper, lower), singles, strict=True)",
        "zip((upper, upper), singles, strict=True)",
    ),
    rows("no slack above", "upper + arithmetic.EVALUATION_SLACK", "upper", "evaluation_slack"),
    rows("no slack below", "lower - arithmetic.EVALUATION_SLACK", "lower", "evaluation_slack"),
    Mutant(
        "largest term instead of the sum",
        bounds.log_sum_exp2,
        "largest + xp.log2(",
        "largest + 0.0 * xp.log2(",
        "enclosure",
    ),
    Mutant(
        "underflow of norms ignored",
        summary_of.root_above,
        "+ arithmetic.norm_underflow(length)",
        "",
        "norms_are_upper_bounds",
    ),
    Mutant(
        "rounding of norms ignored",
        summary_of.root_above,
        "arithmetic.dot_slack(length + 4) + ",
        "",
        "split_squares",
    ),
    Mutant(
        "a sentinel is repeated",
        keys.choose_sentinels,
        "rank * NUM_SENTINELS + xp.arange(NUM_SENTINELS)",
        "rank * NUM_SENTINELS + 0 * xp.arange(NUM_SENTINELS)",
        "enclosure",
    ),
    Mutant(
        "sentinels keep no place in the radius, others do not either",
        keys.head_keys,
        "distance_squared=groups.squared",
        "distance_squared=0.0 * groups.squared",
        "enclosure",
    ),
    Mutant(
        "half of the query's channels in its norm",
        row_bounds.HeadBounds._exponents,
        "norm_above(scaled, xp=xp)[None, :]",
        "norm_above(scaled[:, ::2], xp=xp)[None, :]",
        "enclosure",
    ),
    Mutant(
        "scale in nats",
        keys.scaled_query,
        "np.float32(query_factor(scale))",
        "np.float32(scale)",
        "enclosure",
    ),
    # The call.
    head(
        "max|v| over hidden keys",
        "inputs.value[element, :length, key_head]",
        "inputs.value[element, :, key_head]",
        "hidden_keys",
    ),
    head(
        "statistics over hidden keys",
        "inputs.key[element, :length, key_head]",
        "inputs.key[element, :, key_head]",
        "hidden_keys",
    ),
    head(
        "hidden keys are counted",
        "inputs.dtype, length)",
        "inputs.dtype, inputs.key.shape[1])",
        "hidden_keys",
    ),
    head(
        "batch elements pooled",
        "inputs.key[element, :length, key_head]",
        "inputs.key[0, :length, key_head]",
        "hidden_keys",
    ),
    head(
        "heads share the first head's keys",
        "inputs.key[element, :length, key_head]",
        "inputs.key[element, :length, 0]",
        "grouped_heads",
    ),
    head(
        "max|v| of another head",
        "inputs.value[element, :length, key_head]",
        "inputs.value[element, :length, 0]",
        "grouped_heads",
    ),
    Mutant(
        "error reported where nothing is certified",
        call._certify_head,
        "np.where(choice.certified, choice.stabilizer, np.nan)",
        "choice.stabilizer",
        "blocks_need_every_row",
    ),
    Mutant(
        "one row certifies its block",
        call._Rows.by_block,
        "np.logical_and.reduceat",
        "np.logical_or.reduceat",
        "blocks_need_every_row",
    ),
]
