"""One query block's numbers, step by step, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from certify import arithmetic
from certify.facts import BlockFacts
from certify.judgement import REASONS, VALUES
from certify.theorem import CERTIFIED, VERDICTS, VERIFIED
from certify.words import bits, needed, power_of_two, tolerance_text, why


class Step(NamedTuple):
    """A heading with its lines; the table of bounds follows where ``shows_bounds``."""

    title: str
    lines: tuple[str, ...]
    shows_bounds: bool = False


def explanation(facts: BlockFacts) -> Iterator[Step]:
    """The steps from the call to the verdict, and what a certificate would need."""
    yield Step(
        f"Layer {facts.layer}, head {facts.head}: {facts.verdict}",
        (why(facts), *_place(facts)),
    )
    yield Step("What the theorem allows", tuple(_budget(facts)))
    yield Step("Bounds on the log-sum-exp, bits", tuple(_bounds(facts)), bool(facts.bounds))
    if not math.isnan(facts.stabilizer) and math.isfinite(facts.gap):
        yield Step("Stabilizer", tuple(_stabilizer(facts)))
    yield Step("Measured", tuple(_measured(facts)))
    if facts.verdict not in (VERDICTS[CERTIFIED], "exact"):
        yield Step("To certify it, one would need", tuple(needed(facts)))


def _place(facts: BlockFacts) -> Iterator[str]:
    settings = facts.settings
    first = facts.block * settings.block_q
    last = min(first + settings.block_q, settings.num_queries) - 1
    yield (
        f"The worst query block of those asked for: pass {facts.pass_index}, batch element "
        f"{facts.batch}, block {facts.block} of {settings.num_blocks}, rows {first} to {last}."
    )
    mask = ", causal" if settings.causal else ", masked" if settings.masked else ""
    cap = f", soft cap {settings.soft_cap:g}" if settings.soft_cap is not None else ""
    yield (
        f"{settings.num_queries} queries x {settings.num_keys} keys, head_dim "
        f"{settings.head_dim}, {settings.dtype}, scale {settings.scale:.6g}{cap}{mask}."
    )
    if facts.as_run != "not run":
        yield f"As run, at tolerance {tolerance_text(facts.recorded_tolerance)}: {facts.as_run}."


def _budget(facts: BlockFacts) -> Iterator[str]:
    if math.isnan(facts.num_keys):
        yield "Nothing was recorded of this block."
        return
    yield (
        f"n = {facts.num_keys:.0f} keys; values: V_lo = {facts.value_low:.6g}, V_hi = "
        f"{facts.value_high:.6g}; tolerance {facts.tolerance:.6g} "
        f"({power_of_two(facts.tolerance)})."
    )
    if facts.value_ratio > 1.0:
        yield f"Values far below the row's largest bias are up to {facts.value_ratio:.3g} V_lo."
    if not math.isfinite(facts.budget):
        yield "No stabilizer can be proved with such values: the budget is -inf."
        return
    top, bottom = arithmetic.OVERFLOW_EXPONENT, -arithmetic.SMALLEST_NORMAL_EXPONENT
    count = math.log2(facts.num_keys)
    ends = 2 * arithmetic.GRID_MARGIN + arithmetic.GRID_SPACING
    yield (
        f"S may lie {facts.upper_room:.2f} bits above the stabilizer: {top} up to the largest sum, "
        f"{_signed(facts.upper_room - top)} for values above 1 and for rounding."
    )
    yield (
        f"The stabilizer may lie {facts.lower_room:.2f} bits above L: {bottom} down to the "
        f"smallest number, {_signed(-count)} for n keys that may each lose one, "
        f"{_signed(facts.lower_room - bottom + count)} for the tolerance and the values."
    )
    yield (
        f"Budget = {facts.upper_room:.2f} + {facts.lower_room:.2f} - {ends:g} for the grid of "
        f"stabilizers and its margins = {facts.budget:.2f} bits."
    )


def _signed(number: float) -> str:
    return f"{'+' if number >= 0 else '-'} {abs(number):.2f}"


def _bounds(facts: BlockFacts) -> Iterator[str]:
    if not facts.bounds:
        yield "None were recorded."
        return
    yield "Of each family's worst row: L below, S above; certified where S - L <= budget."
    if math.isfinite(facts.gap):
        sign = "within" if facts.margin >= 0 else "past"
        judged = "the best per row" if facts.family == "auto" else facts.family
        yield (
            f"Judged by {judged}: gap {facts.gap:.2f}, {abs(facts.margin):.2f} bits {sign} the "
            f"budget. Tightest family: {facts.winner}."
        )
    else:
        yield "A bound is not finite, which proves nothing."


def _stabilizer(facts: BlockFacts) -> Iterator[str]:
    where = "the middle of the interval that is safe"
    if facts.verdict != VERDICTS[CERTIFIED]:
        where = "as high above L as the lower side allows"
    yield f"m = {facts.stabilizer:.2f} bits for the worst row, to within one bit: {where}."
    yield (
        f"Beyond +-{power_of_two(arithmetic.LARGEST_STABILIZER)} bits float32 has no grid of "
        "stabilizers that is fine enough."
    )


def _measured(facts: BlockFacts) -> Iterator[str]:
    low, high = facts.row_sum_min, facts.row_sum_max
    if math.isnan(low):
        yield "Row sums are not recorded."
    else:
        origin = "of the run" if facts.as_run not in ("not run", "exact") else "from exact logits"
        yield (
            f"Row sums ({origin}) from {power_of_two(low)} to {power_of_two(high)}; the check "
            f"takes {power_of_two(facts.row_sum_limit)} to 2^{arithmetic.OVERFLOW_EXPONENT}."
        )
        yield f"Measured margin: {bits(facts.measured)} bits to the nearest edge."
    if facts.verdict in (VERDICTS[CERTIFIED], VERDICTS[VERIFIED]):
        yield (
            f"Proved error: |o - o_exact| / max|v| <= {facts.error:.3g} beyond ordinary rounding, "
            f"with a tolerance of {facts.tolerance:.3g}."
        )
    elif facts.reason == REASONS[VALUES]:
        yield "Nothing is proved of the error with such values."
    else:
        yield "No error is proved for a fixed stabilizer: online softmax takes over."
