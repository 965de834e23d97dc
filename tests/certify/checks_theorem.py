"""Checks of the theorem: limits, the choice of a stabilizer, the check after the loop."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from certify import arithmetic, theorem
from certify.arithmetic import BFLOAT16, FLOAT32
from tests.certify import emulator
from tests.certify.emulator import CUT_OFFS_ONLY, as_float32
from tests.certify.measures import (
    ALLOWED,
    accepted,
    after_loop_ratio,
    log_sum_edges,
    lower_edge_ratio,
    worst_ratio,
)
from tests.certify.theorem_cases import MACHINES, TOLERANCES, Rows, limits_of


def check_lower_edge() -> None:
    """Only cut-offs: error <= E for every stabilizer up to L + lower_room, in any order of sums."""
    rng = np.random.default_rng(11)
    worst, _ = lower_edge_ratio(rng, rounds=48, rows=200)
    assert worst <= ALLOWED, f"error is {worst} times the bound"


def flushed_rows(kernel: arithmetic.KernelArithmetic, value_size: float, value_only: bool) -> Rows:
    """One key carries the row; the others lose all of p, or (value_only) all of p * v."""
    num_keys, tolerance = 257, 2.0**-3
    value = np.full((1, num_keys, 1), -value_size)
    value[:, 0] = value_size
    limits = limits_of(value, tolerance, kernel)
    edge = -126.0 - (math.log2(value_size) if value_only else 0.0) - 2.0**-10
    logits = np.full((1, num_keys), edge)
    logits[:, 0] = -float(limits.lower_room[0])
    return Rows(logits, value, limits, tolerance, kernel)


def check_loss_is_counted_in_full() -> None:
    """All keys but one flushed: the error is nearly E, so no term of E may be left out."""
    for name, (kernel, machine) in MACHINES.items():
        for value_size, value_only in ((1e6, False), (2.0**-20, True)):
            rows = flushed_rows(kernel, value_size, value_only)
            lower, _ = log_sum_edges(rows)
            stabilizer = np.zeros(1, np.float32)
            error = theorem.error_in_advance(stabilizer, lower, rows.limits, xp=np)
            ratio, _ = worst_ratio(rows, stabilizer, error, machine, "eight")
            assert ratio <= ALLOWED, f"{name}: error is {ratio} times the bound"
            if name == "bfloat16":
                assert ratio >= 0.87, f"the case reaches only {ratio} of the bound"


def check_six_passes_are_counted() -> None:
    """float32: products of the parts of p and v flush one by one; each is counted."""
    kernel, machine = MACHINES["float32"]
    num_keys, tolerance, size = 257, 2.0**-3, 2.0**-20
    # p and v are 1 + 2^-9 times a power of two: p1 v2 and p2 v1 can both lie just below 2^-126.
    fraction = 1.0 + 0.98 * 2.0**-9
    value = np.full((1, num_keys, 1), float(np.float32(-size * fraction)))
    value[:, 0] *= -1.0
    limits = limits_of(value, tolerance, kernel)
    ratios = []
    for depth in range(20):
        logits = np.full((1, num_keys), -126.0 - math.log2(size) + depth + math.log2(fraction))
        logits[:, 0] = -float(limits.lower_room[0])
        rows = Rows(logits, value, limits, tolerance, kernel)
        lower, _ = log_sum_edges(rows)
        error = theorem.error_in_advance(np.zeros(1, np.float32), lower, limits, xp=np)
        ratios.append(worst_ratio(rows, np.zeros(1, np.float32), error, machine, "tree")[0])
    assert max(ratios) <= ALLOWED, f"error is {max(ratios)} times the bound"


def check_upper_edge() -> None:
    """Nothing overflows at S - m = upper_room, for values from tiny to the largest."""
    rng = np.random.default_rng(12)
    for log2_value in (-100.0, -40.0, 0.0, 40.0, 100.0, 126.9):
        for num_keys in (1, 7, 200):
            value = np.exp2(log2_value) * rng.choice([-1.0, 1.0], (50, num_keys, 2))
            value = np.abs(value) if num_keys == 7 else value
            limits = limits_of(value, 2.0**-12, BFLOAT16)
            logits = as_float32(rng.normal(0.0, 0.01, (50, num_keys)))
            rows = Rows(logits, value, limits, 2.0**-12, BFLOAT16)
            stabilizer = as_float32(rows.log_sum - np.asarray(limits.upper_room, np.float64))
            result = emulator.attend(logits, value, stabilizer, CUT_OFFS_ONLY, "sequential")
            assert np.all(result.finite), f"overflow at max|v| = 2^{log2_value}"
            assert np.all(np.asarray(result.row_sum) <= 2.0**125.01), "the row sum exceeds 2^125"


def check_after_loop() -> None:
    """Whatever passes the row sum and the look obeys E <= tolerance; S and L are not used."""
    worst, passed = after_loop_ratio(np.random.default_rng(13), rounds=40, rows=200)
    assert passed > 1000, f"only {passed} rows passed"
    assert worst <= ALLOWED, f"error is {worst} times the bound"


def check_look_sees_overflow() -> None:
    """Large values overflow the numerator while the row sum is in range: the row must not pass."""
    value = np.full((1, 4, 1), 2.0**100)
    value[0, 1:] *= -1.0
    logits = np.zeros((1, 4))
    limits = limits_of(value, 2.0**-12, BFLOAT16)
    result = emulator.attend(logits, value, np.full(1, -60.0), CUT_OFFS_ONLY)
    error = emulator.relative_error(result, logits, value)
    assert not np.any(accepted(result, limits) & (error > 2.0**-12)), "an overflow passes"


def check_row_sum_overflow() -> None:
    """Tiny values keep the numerator finite while the row sum overflows: the row must not pass."""
    value = np.full((1, 4, 1), 2.0**-20)
    logits = np.zeros((1, 4))
    limits = limits_of(value, 2.0**-12, BFLOAT16)
    result = emulator.attend(logits, value, np.full(1, -126.5), CUT_OFFS_ONLY)
    error = emulator.relative_error(result, logits, value)
    assert np.isinf(result.row_sum[0]), "the case does not overflow"
    assert not np.any(accepted(result, limits) & (error > 2.0**-12)), "an overflow passes"


def check_small_values() -> None:
    """Values near 2^-126: reading them as 0 and flushing the output count against the tolerance."""
    for log2_value in np.arange(-125.0, -105.0):
        value = np.zeros((1, 2, 1))
        value[0, 0], value[0, 1] = 0.99 * 2.0**-126, 2.0**log2_value
        logits = np.array([[0.0, -300.0]])
        limits = limits_of(value, 2.0**-12, BFLOAT16)
        result = emulator.attend(logits, value, np.full(1, -60.0), CUT_OFFS_ONLY)
        error = emulator.relative_error(result, logits, value)
        bound = theorem.error_from_row_sum(result.row_sum.astype(np.float32), limits, xp=np)
        assert not np.any(accepted(result, limits) & (error > bound)), f"2^{log2_value} passes"


def _document_limits(
    value: float, num_keys: int, tolerance: float, kernel: arithmetic.KernelArithmetic
) -> tuple[float, float, float]:
    """h_max, g_max (bits) and l_min of the design, in float64, from its formulas alone."""
    growth = num_keys * 2.0**-24
    kappa = max(1.0 + 2.0**-4, (1.0 + growth) / (1.0 - growth))
    factor = kernel.probability_losses + kernel.product_flushes / value
    argument = 2.0 * 3 * math.log(2.0) * 2.0**-18
    room = tolerance - argument - kernel.value_flushes * 2.0**-126 / value
    if room <= 0:
        return math.inf, -math.inf, math.inf
    h_max = 125.0 - max(0.0, math.log2(value))
    g_max = 126.0 - math.log2(num_keys) + math.log2(room) - math.log2(kappa * (factor + room))
    return h_max, g_max, num_keys * 2.0**-126 * kappa * (factor + room) / room


def check_formulas_of_the_design() -> None:
    """Every limit equals the design's, and lies on the safe side of it."""
    for kernel in (BFLOAT16, FLOAT32):
        for num_keys in (1, 100, 2**17, 2**19, 2**21):
            for tolerance in TOLERANCES:
                for log2_value in (-60.0, -8.0, 0.0, 5.0, 90.0, 127.0):
                    value = np.full(1, 2.0**log2_value, np.float32)
                    head = theorem.limits(
                        value, num_keys=num_keys, tolerance=tolerance, kernel=kernel, xp=np
                    )
                    h_max, g_max, row_sum_min = _document_limits(
                        float(value[0]), num_keys, tolerance, kernel
                    )
                    loose = 0.2 if num_keys < 2**19 else 2.0
                    assert h_max - loose <= head.upper_room[0] <= h_max
                    assert g_max - loose <= head.lower_room[0] <= g_max
                    assert row_sum_min <= head.row_sum_min[0] <= row_sum_min * 2.0**loose
                    assert head.budget[0] <= h_max + g_max - 1.5
                    edge = np.asarray(head.row_sum_min, np.float32)
                    error = theorem.error_from_row_sum(edge, head, xp=np)[0]
                    assert 0.5 * tolerance <= error <= tolerance, (error, tolerance)


def check_row_sum_min_is_consistent() -> None:
    """Passing row_sum_min implies E <= tolerance in float32, for any value size and tolerance."""
    rng = np.random.default_rng(14)
    value = np.exp2(rng.uniform(-112.0, 127.0, 20000)).astype(np.float32)
    for tolerance in (*np.exp2(rng.uniform(-15.9, -0.01, 20)), 1.6e-5, 2.0**-12):
        head = theorem.limits(
            value, num_keys=5000, tolerance=float(tolerance), kernel=BFLOAT16, xp=np
        )
        with np.errstate(over="ignore", invalid="ignore"):
            error = theorem.error_from_row_sum(head.row_sum_min, head, xp=np)
        provable = np.isfinite(head.row_sum_min)
        assert np.all(error[provable].astype(np.float64) <= tolerance), "E exceeds the tolerance"


def check_kappa() -> None:
    """kappa covers (1 + g) / (1 - g), g = gamma_n of float32 sums, and never falls with n."""
    previous = 0.0
    for num_keys in [2**i + step for i in range(1, 23) for step in (-1, 0, 1)]:
        unit = Fraction(1, 2**24)
        growth = num_keys * unit / (1 - num_keys * unit)
        needed = max((1 + growth) / (1 - growth), 1 + Fraction(1, 16))
        kappa = arithmetic.summation_factor(num_keys)
        assert Fraction(kappa) >= needed, f"kappa = {kappa} for n = {num_keys}"
        assert kappa >= previous
        previous = kappa


def check_stabilizer_stays_inside() -> None:
    """Certified rows: m is finite, on the grid, and 1/5 bit inside both ends of the interval."""
    rng = np.random.default_rng(15)
    size = 20000
    value = np.exp2(rng.uniform(-20.0, 60.0, size)).astype(np.float32)
    head = theorem.limits(value, num_keys=3000, tolerance=2.0**-12, kernel=BFLOAT16, xp=np)
    lower = rng.normal(0.0, 1.0, size) * rng.choice([1.0, 100.0, 1e4, 1e5, 1e7, 3e8], size)
    lower = lower.astype(np.float32)
    share = rng.choice([0.0, 0.5, 1.0, 1.1], size)
    gap = head.budget * share
    upper = (lower + gap).astype(np.float32)
    origin = (lower + rng.uniform(-40.0, 40.0, size)).astype(np.float32)
    choice = theorem.choose_stabilizer(upper, lower, origin, head, xp=np)
    sure = choice.certified
    assert np.mean(sure[(share < 1) & (np.abs(lower) < 1e5)]) > 0.99, "hardly anything is certified"
    assert not np.any(sure & (share > 1.05) & (np.abs(lower) < 1e4)), (
        "an excessive gap is certified"
    )
    m, high, low = (part.astype(np.float64)[sure] for part in (choice.stabilizer, upper, lower))
    assert np.all(high - m <= head.upper_room[sure] - 0.2), "too close to overflow"
    assert np.all(m - low <= head.lower_room[sure] - 0.2), "too close to the flushes"
    near = np.abs(m) < 2.0**12
    steps = m[near] - origin.astype(np.float64)[sure][near]
    assert np.max(np.abs(steps - np.rint(steps))) < 2.0**-9, "off the grid"
    assert np.all(np.isfinite(choice.stabilizer))


def check_left_to_the_check_passes() -> None:
    """Rows that are not certified, with S far off and L exact, pass the check after the loop."""
    rng = np.random.default_rng(16)
    value = np.exp2(rng.uniform(-20.0, 20.0, 5000)).astype(np.float32)
    head = theorem.limits(value, num_keys=3000, tolerance=2.0**-12, kernel=BFLOAT16, xp=np)
    lower = rng.normal(0.0, 300.0, 5000).astype(np.float32)
    origin = (lower + rng.uniform(-1.0, 0.0, 5000)).astype(np.float32)
    choice = theorem.choose_stabilizer(lower + np.float32(1000.0), lower, origin, head, xp=np)
    assert not np.any(choice.certified)
    row_sum = np.exp2(lower.astype(np.float64) - choice.stabilizer).astype(np.float32)
    assert np.all(theorem.row_sum_passes(row_sum, head)), "a row whose sum is 2^L fails"


def check_not_finite_proves_nothing() -> None:
    """NaN and inf in S, L or max|v| neither certify nor verify; m stays finite."""
    bad = np.array([np.nan, np.inf, -np.inf, 1e30], np.float32)
    head = theorem.limits(
        np.ones(4, np.float32), num_keys=9, tolerance=2**-12, kernel=BFLOAT16, xp=np
    )
    zero = np.zeros(4, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for upper, lower, origin in ((bad, zero, zero), (zero, bad, zero), (bad, bad, bad)):
            if lower is bad:
                lower = np.array([np.nan, -np.inf, np.nan, -1e30], np.float32)
            choice = theorem.choose_stabilizer(upper, lower, origin, head, xp=np)
            assert not np.any(choice.certified), "something not finite is certified"
            assert np.all(np.isfinite(choice.stabilizer)), "the stabilizer is not finite"
        for value in (np.nan, np.inf, 2.0**-126, 1e-40):
            row = theorem.limits(
                np.full(1, value, np.float32), num_keys=9, tolerance=2**-12, kernel=BFLOAT16, xp=np
            )
            assert not row.budget[0] > 0, f"max|v| = {value} has a budget"
            assert not theorem.row_sum_passes(np.ones(1, np.float32), row)[0], f"{value} passes"
        sums = np.array([np.nan, np.inf, 0.0, -1.0], np.float32)
        assert not np.any(theorem.row_sum_passes(sums, head)), "a row sum that is no number passes"
        error = theorem.error_from_row_sum(sums, head, xp=np)
        assert np.all(np.isposinf(error[[0, 2, 3]])), "an error bound without a row sum"
