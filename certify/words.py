"""Verdicts in words: why a query block is not certified, and what decided it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from certify import arithmetic
from certify.audit import AuditResult
from certify.facts import BlockFacts
from certify.judgement import (
    CONTRADICTION,
    GAP,
    LARGE_LOGITS,
    NO_BOUNDS,
    NOT_FINITE,
    REASONS,
    VALUES,
)
from certify.theorem import CERTIFIED, EXACT, RECOMPUTED, VERDICTS, VERIFIED

UNKNOWN = "not recorded"


def power_of_two(number: float) -> str:
    """2^-31, 0, inf; "not recorded" for NaN."""
    if math.isnan(number):
        return UNKNOWN
    if number == 0 or math.isinf(number):
        return f"{number:g}"
    sign = "-" if number < 0 else ""
    return f"{sign}2^{math.log2(abs(number)):.1f}".removesuffix(".0")


def tolerance_text(tolerance: float) -> str:
    """2^-12 where that is exact, else the number."""
    exact = math.frexp(tolerance)[0] == 0.5
    return power_of_two(tolerance) if exact else f"{tolerance:.6g}"


def bits(number: float) -> str:
    """A number of bits with one decimal, without one from 100 on."""
    if math.isnan(number):
        return UNKNOWN
    return f"{number:.0f}" if abs(number) >= 100 or math.isinf(number) else f"{number:.1f}"


def why(facts: BlockFacts) -> str:
    """One sentence about a block's verdict."""
    if facts.verdict == VERDICTS[CERTIFIED]:
        if facts.visible_rows == 0:
            return "No row sees a key: the output is exactly 0."
        return (
            f"Gap {bits(facts.gap)} bits, within the budget of {bits(facts.budget)}: proved before "
            "the loop."
        )
    if facts.verdict == VERDICTS[EXACT]:
        return (
            f"The true row maximum was used ({facts.settings.num_keys} keys): there is nothing to "
            "prove."
        )
    obstacle = _obstacle(facts)
    return f"{obstacle}; {_after_the_loop(facts)}."


def _obstacle(facts: BlockFacts) -> str:
    """Why there is no proof before the loop."""
    reason = REASONS.index(facts.reason)
    if reason == GAP:
        return (
            f"Gap {bits(facts.gap)} bits is more than the budget of {bits(facts.budget)}: "
            f"{_spread(facts)}"
        )
    if reason == VALUES:
        return f"max|v| outside of the window: {_values(facts)}"
    if reason == NOT_FINITE:
        return f"An input is not finite, or too large for its logits to be ({_values(facts)})"
    if reason == LARGE_LOGITS:
        return (
            f"The logits are too large: the stabilizer {bits(facts.stabilizer)} lies beyond "
            f"+-{power_of_two(arithmetic.LARGEST_STABILIZER)} bits"
        )
    if reason == CONTRADICTION:
        return "The recorded lower bound lies above the upper one"
    assert reason == NO_BOUNDS
    return "No bounds were recorded"


def _spread(facts: BlockFacts) -> str:
    if facts.settings.soft_cap is not None:
        return "keys spread too far from their mean, and the soft cap leaves too much room"
    if facts.settings.causal or facts.settings.masked:
        return "the keys that the row sees spread too far"
    return "keys spread too far from their mean"


def _values(facts: BlockFacts) -> str:
    low, high = facts.value_low, facts.value_high
    if low == high or math.isnan(low):
        return f"max|v| is {high:.3g}"
    return f"max|v| is {low:.3g} among the keys that a row sees, {high:.3g} among all"


def _after_the_loop(facts: BlockFacts) -> str:
    low, high = facts.row_sum_min, facts.row_sum_max
    if facts.verdict == VERDICTS[VERIFIED]:
        return f"smallest row sum {power_of_two(low)} still proves the tolerance"
    assert facts.verdict in (VERDICTS[RECOMPUTED], "not recorded")
    if math.isnan(low) or math.isnan(high):
        return "no row sums are known that would prove the tolerance"
    if not high <= 2.0**arithmetic.OVERFLOW_EXPONENT:
        return f"largest row sum {power_of_two(high)} is past the limit of 2^125"
    if not math.isfinite(facts.row_sum_limit):
        return "no row sum proves the tolerance with such values"
    if low < facts.row_sum_limit:
        return (
            f"smallest row sum {power_of_two(low)} is below the "
            f"{power_of_two(facts.row_sum_limit)} that would prove the tolerance"
        )
    if facts.tolerance != facts.recorded_tolerance:
        return "its row sums would leave the range at the stabilizer of this tolerance"
    return "the numerator or the output was not finite"


def as_run(result: AuditResult) -> str:
    """What the verdicts of the run were."""
    ran = ", ".join(f"{count:,} {name}" for name, count in result.as_run.items())
    return f"As run at tolerance {tolerance_text(result.recorded_tolerance)}: {ran}."


def needed(facts: BlockFacts) -> Iterator[str]:
    """What would have to change for the block to be certified."""
    reason = REASONS.index(facts.reason)
    if reason == GAP:
        excess = facts.gap - facts.budget
        yield f"A gap smaller by {bits(excess)} bits, {bits(100 * excess / facts.gap)}% of it."
        families = {f: upper - lower for f, (upper, lower) in facts.bounds.items() if f != "auto"}
        best = min(families, key=lambda f: families[f], default=None)
        if best is not None and families[best] <= facts.budget:
            yield (
                f"The {best} bound gives {bits(families[best])} bits, which is enough: it was "
                "recorded, but the kernels do not evaluate it."
            )
        yield (
            "The budget grows by one bit for each doubling of the tolerance, and by one for each "
            "halving of the number of keys."
        )
    elif reason == VALUES:
        yield (
            "Values between about "
            f"{power_of_two(2 * arithmetic.SMALLEST_NORMAL / facts.tolerance)} and 2^127 in size."
        )
    elif reason == NOT_FINITE:
        yield "Finite query, key and value, small enough that their products stay finite."
    elif reason == LARGE_LOGITS:
        yield "Logits below 2^18 bits in size: a smaller scale, or smaller queries and keys."
    elif reason == NO_BOUNDS:
        yield "A recording of the bounds."
