"""The theorem evaluated again on recorded numbers, for any tolerance, many query blocks at a time.

Every formula is ``certify.theorem``'s. A block is *certified* where the recorded S and L of its
worst row satisfy the theorem before the loop; else *verified* where its row sums prove the
tolerance; else *recomputed*. *exact* stands where the true row maximum was used and no row sum is
known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from certify import arithmetic, theorem
from certify.bounds import BOUND_NAMES
from certify.formats import Float32
from certify.recorded_layers import CERTIFICATE_FIELDS, LayerPasses
from certify.theorem import CERTIFIED, EXACT, RECOMPUTED, VERDICTS, VERIFIED

NOT_RECORDED = -1
"""Verdict of a block of which nothing is known."""

REASONS = (
    "certified",
    "bounds not recorded",
    "an input is not finite",
    "the bounds contradict each other",
    "max|v| outside of the window",
    "gap above the budget",
    "logits too large",
)
"""Why a block is not certified, by code."""

(
    NO_REASON,
    NO_BOUNDS,
    NOT_FINITE,
    CONTRADICTION,
    VALUES,
    GAP,
    LARGE_LOGITS,
) = range(len(REASONS))

AGREEMENT = 2.0**-4
"""Bits by which a number from the device and the same formula in numpy may differ, at logits of up
to some thousand bits: the sums run in another order, and each side's slack covers its own. Measured
on the families of the tests, kernel beside record: 2^-11."""

PROMISED = float(BOUND_NAMES.index("weights")) if "weights" in BOUND_NAMES else math.nan


class Judged(NamedTuple):
    """Arrays of one shape, one entry per block. Bits, unless said otherwise.

    Attributes:
        verdict: int8, code of ``theorem.VERDICTS``, or ``NOT_RECORDED``.
        as_run: float32, the verdict of the run; NaN where the kernels did not run it.
        reason: int8, why it is not certified, code of ``REASONS``.
        upper, lower: S and L of the worst row.
        gap: S - L; inf where one is not finite.
        limits: what the theorem allows at the tolerance asked for.
        margin: budget - gap; -inf where nothing can be proved.
        stabilizer: of the worst row, to within one bit.
        row_sum_min, row_sum_max: of the run, or from the exact log-sum-exp; NaN where not known.
        measured: how far the row sums lay inside the edges of the check, at the run's tolerance.
        error: proven |o - o_exact| / max|v| beyond rounding; inf where nothing is proved.
        overclaimed: bool, the run claimed what its recorded numbers do not prove.
        refuted: bool, the row sums lie where the bounds do not let them lie.
        disputed: bool, the run recomputed what its recorded numbers certify.
    """

    verdict: npt.NDArray[np.int8]
    as_run: Float32
    reason: npt.NDArray[np.int8]
    upper: Float32
    lower: Float32
    gap: Float32
    limits: theorem.Limits
    margin: Float32
    stabilizer: Float32
    row_sum_min: Float32
    row_sum_max: Float32
    measured: Float32
    error: Float32
    overclaimed: npt.NDArray[np.bool_]
    refuted: npt.NDArray[np.bool_]
    disputed: npt.NDArray[np.bool_]


def lanes_of(layer: LayerPasses, fields: Sequence[str]) -> dict[str, Float32]:
    """Every lane of a layer's record and certificate by its name, each [P, B, H, Q].

    A ratio below 1, which no values have, and a verdict that does not exist become NaN, which
    proves nothing.

    Raises:
        ValueError: where a number of keys is not one.
    """
    bounds = np.ascontiguousarray(np.moveaxis(layer.bounds, -1, 0))
    certificate = np.ascontiguousarray(np.moveaxis(layer.certificate, -1, 0))
    lanes = dict(zip(fields, bounds, strict=True))
    lanes |= {f"run:{n}": a for n, a in zip(CERTIFICATE_FIELDS, certificate, strict=True)}
    ratio = lanes["value_ratio"]
    lanes["value_ratio"] = np.where(ratio >= 1.0, ratio, np.float32(np.nan))
    verdict = lanes["run:verdict"]
    exists = np.isin(verdict, np.arange(len(VERDICTS), dtype=np.float32))
    lanes["run:verdict"] = np.where(exists, verdict, np.float32(np.nan))
    num_keys = lanes["num_keys"]
    whole = (num_keys == np.floor(num_keys)) & (num_keys >= 0)
    if not np.all(np.isnan(num_keys) | (whole & (num_keys <= layer.settings.num_keys))):
        raise ValueError(
            f"layer {layer.name!r}: its record of num_keys is no number from 0 to "
            f"{layer.settings.num_keys}. The file is damaged; record it again."
        )
    return lanes


def judge(
    lanes: Mapping[str, Float32],
    *,
    dtype: str,
    family: str,
    recorded_tolerance: float,
    tolerance: float,
) -> Judged:
    """Judge blocks by the recorded S and L of one family and by their row sums.

    Args:
        lanes: as ``lanes_of`` gives them, any one shape.
        dtype: of query, key and value.
        family: of bounds, "auto" for the best per row.
    """
    with np.errstate(all="ignore"):
        return _judge(
            lanes, arithmetic.arithmetic_for(dtype), family, recorded_tolerance, tolerance
        )


def _judge(
    lanes: Mapping[str, Float32],
    kernel: arithmetic.KernelArithmetic,
    family: str,
    recorded_tolerance: float,
    tolerance: float,
) -> Judged:
    upper, lower = lanes[f"upper:{family}"], lanes[f"lower:{family}"]
    head = limits_of(lanes, kernel, tolerance)
    run_limits = head
    if tolerance != recorded_tolerance:
        run_limits = limits_of(lanes, kernel, recorded_tolerance)
    as_run = lanes["run:verdict"]
    promised = (lanes["run:bound_used"] == PROMISED) & (family == "auto")
    known = _finite(upper) & _finite(lower)
    gap = np.where(known, upper - lower, np.inf)
    sensible = gap >= 0
    gap = np.where(promised, np.fmin(gap, lanes["run:gap"]), gap).astype(np.float32)
    choice = theorem.choose_stabilizer(upper, lower, lower, head, xp=np)
    sees_nothing = lanes["visible_rows"] == 0
    proved = choice.certified & sensible
    proved = proved | (promised & (gap <= head.budget)) | sees_nothing
    reason = _reasons(lanes, proved, known & sensible, gap, head, upper, lower)
    low, high = _row_sums(lanes)
    passes = _row_sums_pass(
        low, high, as_run, head, run_limits, tolerance=tolerance, recorded=recorded_tolerance
    )
    verdict = np.where(proved, CERTIFIED, np.where(passes, VERIFIED, RECOMPUTED))
    unknown = np.isnan(low) & np.isnan(high)
    verdict = np.where((as_run == EXACT) & unknown & ~proved, EXACT, verdict)
    nothing = np.isnan(lanes["num_keys"]) & np.isnan(as_run)
    verdict = np.where(nothing, NOT_RECORDED, verdict).astype(np.int8)
    margin = np.where(np.isfinite(gap), head.budget - np.where(np.isfinite(gap), gap, 0), -np.inf)
    margin = np.where(sees_nothing, np.inf, margin)
    measured = np.fmin(
        np.log2(low) - np.log2(run_limits.row_sum_min),
        arithmetic.OVERFLOW_EXPONENT - np.log2(high),
    )
    error = _error(verdict, choice.stabilizer, lower, low, head, tolerance, recorded_tolerance)
    # Elsewhere the limits of a row can be wider than those of its block.
    comparable = (lanes["value_low"] == lanes["value_high"]) & (tolerance == recorded_tolerance)
    fails = ~passes & ~theorem.row_sum_passes(low * np.float32(1.0 + AGREEMENT), run_limits)
    overclaimed = (as_run == CERTIFIED) & ~proved & ~(gap <= head.budget + AGREEMENT)
    overclaimed = overclaimed | ((as_run == VERIFIED) & ~proved & fails)
    return Judged(
        verdict=verdict,
        as_run=as_run,
        reason=reason,
        upper=upper,
        lower=lower,
        gap=gap,
        limits=head,
        margin=margin.astype(np.float32),
        stabilizer=choice.stabilizer,
        row_sum_min=low,
        row_sum_max=high,
        measured=np.where(np.isnan(low), np.nan, measured).astype(np.float32),
        error=np.where(sees_nothing, 0.0, error).astype(np.float32),
        overclaimed=overclaimed & comparable,
        refuted=_refuted(verdict, as_run, margin, measured) & comparable & ~promised,
        disputed=(as_run == RECOMPUTED) & proved & (margin > AGREEMENT) & comparable,
    )


def _refuted(
    verdict: npt.NDArray[np.int8], as_run: Float32, margin: Float32, measured: Float32
) -> npt.NDArray[np.bool_]:
    """Certified rows have the middle of their interval, half of the margin from either edge."""
    from_middle = (verdict == CERTIFIED) & ((as_run == CERTIFIED) | ~(as_run <= RECOMPUTED))
    return from_middle & (measured < 0.5 * margin - AGREEMENT)


def limits_of(
    lanes: Mapping[str, Float32], kernel: arithmetic.KernelArithmetic, tolerance: float
) -> theorem.Limits:
    """The theorem's limits of every block; blocks of the same number of keys together.

    NaN, which passes no test, where the number of keys is not known.
    """
    num_keys = lanes["num_keys"]
    parts = []
    for count in np.unique(num_keys[num_keys >= 1]):
        where = num_keys == count
        parts.append(
            (
                where,
                theorem.limits(
                    lanes["value_high"][where],
                    num_keys=int(count),
                    tolerance=tolerance,
                    kernel=kernel,
                    xp=np,
                    value_low=lanes["value_low"][where],
                    value_ratio=lanes["value_ratio"][where],
                ),
            )
        )
    merged: dict[str, Any] = {}
    for name in theorem.Limits._fields:
        array = np.full(num_keys.shape, np.nan, np.float32)
        for where, part in parts:
            array[where] = getattr(part, name)
        merged[name] = array
    return theorem.Limits(**merged)


def _finite(array: Float32) -> npt.NDArray[np.bool_]:
    return np.abs(array) <= arithmetic.FLOAT32_LARGEST


def _reasons(
    lanes: Mapping[str, Float32],
    proved: npt.NDArray[np.bool_],
    sensible: npt.NDArray[np.bool_],
    gap: Float32,
    head: theorem.Limits,
    upper: Float32,
    lower: Float32,
) -> npt.NDArray[np.int8]:
    """The first thing that stands in the way of each block."""
    known = _finite(upper) & _finite(lower) & _finite(lanes["value_high"])
    conditions = (
        (NO_REASON, proved),
        (NO_BOUNDS, np.isnan(lanes["num_keys"])),
        (NOT_FINITE, ~known),
        (CONTRADICTION, ~sensible),
        (VALUES, ~_finite(head.budget)),
        (GAP, ~(gap <= head.budget)),
    )
    codes, tests = zip(*conditions, strict=True)
    return np.select(tests, codes, default=LARGE_LOGITS).astype(np.int8)


def _row_sums(lanes: Mapping[str, Float32]) -> tuple[Float32, Float32]:
    """Smallest and largest row sum: the run's own; else from the exact log-sum-exp."""
    ran = lanes["run:verdict"] <= RECOMPUTED
    sides = []
    for side in ("min", "max"):
        expected = np.exp2(lanes[f"row_sum_log2_{side}"])
        sides.append(np.where(ran, lanes[f"run:row_sum_{side}"], expected).astype(np.float32))
    return sides[0], sides[1]


def _row_sums_pass(
    low: Float32,
    high: Float32,
    as_run: Float32,
    head: theorem.Limits,
    run_limits: theorem.Limits,
    *,
    tolerance: float,
    recorded: float,
) -> npt.NDArray[np.bool_]:
    """Whether the check after the loop holds at ``tolerance``.

    At the recorded tolerance the row sums speak for themselves, and the numerator is finite where
    the run says so or where l V is in range. At another one the stabilizers of uncertified rows
    move with ``lower_room``. They stay VERIFY_MARGIN below L + lower_room, so that the lower side
    holds again where the run has not refuted L. From below they stay within VERIFY_MARGIN and a
    grid step of it, and before the move no stabilizer lay above L + lower_room: at most that much
    is added to what the move gives the largest sum. A run that proved a smaller tolerance proves a
    larger one.
    """
    in_range = theorem.row_sum_passes(low, run_limits) & theorem.row_sum_passes(high, run_limits)
    claimed = (as_run == CERTIFIED) | (as_run == VERIFIED)
    not_failed = as_run != RECOMPUTED
    passed = in_range & not_failed & (claimed | (np.log2(high) <= head.upper_room))
    if tolerance == recorded:
        return passed
    move = run_limits.lower_room - head.lower_room
    step = arithmetic.VERIFY_MARGIN + arithmetic.GRID_SPACING
    highest = np.log2(high + head.flush) + move + step
    moved = theorem.row_sum_passes(low, run_limits) & (highest <= head.upper_room)
    moved = moved & _finite(head.row_sum_min)
    if tolerance > recorded:
        return moved | passed
    return moved & not_failed


def _error(
    verdict: npt.NDArray[np.int8],
    stabilizer: Float32,
    lower: Float32,
    row_sum_min: Float32,
    head: theorem.Limits,
    tolerance: float,
    recorded: float,
) -> Float32:
    """What is proved, never above the tolerance; the run's row sums sharpen it at its tolerance."""
    latest = stabilizer + np.float32(arithmetic.GRID_SPACING)
    advance = theorem.error_in_advance(latest, lower, head, xp=np)
    bound = np.where(verdict == CERTIFIED, np.fmin(advance, tolerance), tolerance)
    if tolerance == recorded:
        measured = theorem.error_from_row_sum(row_sum_min, head, xp=np)
        bound = np.fmin(bound, measured)
    proved = (verdict == CERTIFIED) | (verdict == VERIFIED)
    return np.where(proved, bound, np.inf)
