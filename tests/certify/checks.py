"""Named checks: each asserts one property of the package and raises AssertionError where it fails.

The suite runs every check on the package as it is, and again on mutants of it (``test_mutants``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

import certify
from certify import arithmetic, bounds, keys, theorem
from certify.arithmetic import BFLOAT16, FLOAT32
from certify.formats import Float32, split_bfloat16
from tests.certify import emulator, families
from tests.certify.emulator import CUT_OFFS_ONLY, ORDERS, Float64, Machine, Result, as_float32
from tests.certify.families import FAMILIES, SCALE, as_dtype, call_arrays
from tests.certify.theorem_cases import MACHINES, TOLERANCES, Rows, draw_rows, limits_of

ALLOWED = 1.0 + 1e-9
"""Ratio of measured error to bound: 1, and what float64 rounds in measuring."""


def log_sum_edges(rows: Rows) -> tuple[Float32, Float32]:
    """L and S in float32 around the exact log-sum-exp."""
    exact = rows.log_sum
    lower = upper = exact.astype(np.float32)
    lower = np.where(lower > exact, np.nextafter(lower, np.float32(-np.inf)), lower)
    upper = np.where(upper < exact, np.nextafter(upper, np.float32(np.inf)), upper)
    return lower, upper


def grid_below(stabilizer: Float64) -> Float32:
    """float32 stabilizers, never above what was asked for."""
    rounded = stabilizer.astype(np.float32)
    return np.where(rounded > stabilizer, np.nextafter(rounded, np.float32(-np.inf)), rounded)


def worst_ratio(
    rows: Rows, stabilizer: Float32, error: Float64, machine: Machine, order: str
) -> tuple[float, Result]:
    """Largest measured error / bound over the rows whose bound is finite."""
    result = emulator.attend(rows.logits, rows.value, stabilizer.astype(np.float64), machine, order)
    measured = emulator.relative_error(result, rows.logits, rows.value)
    judged = np.isfinite(error)
    ratio = np.where(judged, measured / np.where(judged, error, 1.0), 0.0)
    return float(np.max(ratio, initial=0.0)), result


def lower_edge_ratio(rng: np.random.Generator, rounds: int, rows: int) -> tuple[float, int]:
    """Worst error / E with stabilizers at the lower side's edge, and the number of evaluations."""
    worst, evaluations = 0.0, 0
    for index in range(rounds):
        kernel, machine = MACHINES["float32" if index % 4 == 3 else "bfloat16"]
        num_keys = (1, 2, 9, 32, 100, 257)[index % 6]
        tolerance = TOLERANCES[index % len(TOLERANCES)]
        case = draw_rows(rng, rows, num_keys, tolerance, kernel)
        lower, upper = log_sum_edges(case)
        below = rng.choice([0.0, 1e-3, 1.0, 60.0], rows)
        top = np.minimum(lower + np.asarray(case.limits.lower_room, np.float64), lower + 300.0)
        stabilizer = grid_below(top - below)
        error = theorem.error_in_advance(stabilizer, lower, case.limits, xp=np)
        inside = upper - stabilizer <= case.limits.upper_room
        assert np.all(~inside | ~np.isfinite(case.limits.budget) | (error <= tolerance)), (
            "E exceeds the tolerance inside the interval"
        )
        error = np.where(inside & np.isfinite(case.limits.budget), error, np.inf)
        ratio, _ = worst_ratio(case, stabilizer, error, machine, ORDERS[index % 4])
        worst, evaluations = max(worst, ratio), evaluations + rows
    return worst, evaluations


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


def accepted(result: Result, limits: theorem.Limits) -> np.ndarray:
    """The whole check after the loop: the row sum, and a look at every component."""
    with np.errstate(invalid="ignore", over="ignore"):
        passes = theorem.row_sum_passes(result.row_sum.astype(np.float32), limits)
    return passes & all_finite(result)


def all_finite(result: Result) -> np.ndarray:
    """The look; a function of its own so that a mutant can close its eyes."""
    return result.finite


def after_loop_ratio(rng: np.random.Generator, rounds: int, rows: int) -> tuple[float, int]:
    """Worst error / E among rows that pass the check, with stabilizers around both edges."""
    worst, passed = 0.0, 0
    for index in range(rounds):
        kernel, machine = MACHINES["float32" if index % 4 == 3 else "bfloat16"]
        tolerance = TOLERANCES[index % len(TOLERANCES)]
        case = draw_rows(rng, rows, (1, 2, 9, 32, 100)[index % 5], tolerance, kernel)
        exact = case.log_sum
        low = exact + np.asarray(case.limits.lower_room, np.float64)
        high = (
            exact
            - 125.0
            - rng.choice([0.0, 1.0], rows)
            * np.log2(np.maximum(1.0, np.max(np.abs(case.value), axis=(1, 2))))
        )
        edge = np.where(rng.uniform(size=rows) < 0.6, low, high)
        noise = np.where(
            rng.uniform(size=rows) < 0.5,
            rng.choice([-0.01, -0.2, -0.7], rows),
            rng.normal(0.0, 2.0, rows),
        )
        edge = np.where(np.isfinite(edge), edge, exact) + noise
        stabilizer = as_float32(edge)
        result = emulator.attend(case.logits, case.value, stabilizer, machine, ORDERS[index % 4])
        passes = accepted(result, case.limits)
        row_sum = result.row_sum.astype(np.float32)
        error = theorem.error_from_row_sum(row_sum, case.limits, xp=np)
        assert np.all(error[passes] <= tolerance), "a row passes with E above the tolerance"
        measured = emulator.relative_error(result, case.logits, case.value)
        ratio = measured[passes] / error[passes].astype(np.float64)
        worst, passed = max(worst, float(np.max(ratio, initial=0.0))), passed + int(passes.sum())
    return worst, passed


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


def check_norms_are_upper_bounds() -> None:
    """norm_above >= |x| whatever underflows: 1e-25 has square 0 in float32."""
    rng = np.random.default_rng(17)
    for size in (1e-40, 1e-30, 1e-25, 1e-22, 1e-19, 1e-3, 1.0, 1e18):
        for dim in (1, 8, 64, 128, 256):
            vector = (size * rng.standard_normal((200, dim))).astype(np.float32)
            exact = np.linalg.norm(vector.astype(np.float64), axis=1)
            flushed = np.where(np.abs(vector) < 2.0**-126, 0.0, vector).astype(np.float32)
            squares = flushed * flushed
            squares = np.where(squares < 2.0**-126, np.float32(0.0), squares)
            total = np.sum(squares, axis=1, dtype=np.float32)
            above = bounds.root_above(total, dim, xp=np)
            assert np.all(above >= exact), f"norm of size {size}, dim {dim}"
            assert np.all(bounds.norm_above(vector, xp=np) >= exact), (
                f"norm of size {size}, dim {dim}"
            )


def kernel_query(query: Float32, dtype: str) -> Float32:
    """log2(e) * scale * query as the kernel holds it: float32, or two bfloat16 halves."""
    scaled = query * np.float32(math.log2(math.e) * SCALE)
    if dtype != "bfloat16":
        return scaled
    high = (scaled.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    low = ((scaled - high).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return high + low


def kernel_logits(query: Float32, key: Float32, how: str) -> Float64:
    """The logits [S_q, S_k] of a kernel that sums float32 products in one order or another."""
    if how == "exact":
        return query.astype(np.float64) @ key.astype(np.float64).T
    if how == "matmul":
        return (query @ key.T).astype(np.float64)
    total = np.zeros((query.shape[0], key.shape[0]), np.float32)
    for channel in range(query.shape[1] - 1, -1, -1):
        total = total + query[:, channel : channel + 1] * key[:, channel]
    return total.astype(np.float64)


def enclosure(
    family: families.Family,
    rng: np.random.Generator,
    *,
    keys_: int,
    dim: int,
    dtype: str,
    bound: str,
) -> tuple[Float64, Float64]:
    """How far S lies above and L below the log-sum-exp of any order of the dot products."""
    with np.errstate(all="ignore"):
        query, key, _ = families.draw(family, rng, 24, keys_, dim)
        query, key = as_dtype(query, dtype).values, as_dtype(key, dtype).values
        summary = keys.key_summary(
            key, dtype, sentinels=bound == "auto" or "sentinels" in bound, statistics_block=256
        )
        row = keys.bound_rows(query, summary, dtype=dtype, scale=SCALE, bounds=bound)
        scaled = kernel_query(query, dtype)
        sums = [
            emulator.log_sum_exp(kernel_logits(scaled, key, how))
            for how in ("exact", "matmul", "reversed")
        ]
    above = row.upper.astype(np.float64) - np.max(sums, axis=0)
    below = np.min(sums, axis=0) - row.lower.astype(np.float64)
    return above, below


def check_enclosure(bound: str = "all", seed: int = 18) -> None:
    """L <= log2 sum 2^logit <= S for every family, length, head dimension, dtype and bound."""
    rng = np.random.default_rng(seed)
    names = certify.BOUND_NAMES[1:] if bound == "all" else (bound,)
    for index, (name, family) in enumerate(FAMILIES.items()):
        for turn, (num_keys, dim) in enumerate(((1000, 64), (3, 8), (300, 64), (130, 256))):
            dtype = ("bfloat16", "float32")[(index + turn + turn // 2) % 2]
            for each in names:
                above, below = enclosure(
                    family, rng, keys_=num_keys, dim=dim, dtype=dtype, bound=each
                )
                place = f"{name}, {num_keys} keys, dim {dim}, {dtype}, {each}"
                assert np.all(above >= 0), f"S is {-np.min(above)} too low: {place}"
                assert np.all(below >= 0), f"L is {-np.min(below)} too high: {place}"


def check_rounding_slack() -> None:
    """Identical large keys, S = L but for slack: the kernel's rounding must fit between."""
    rng = np.random.default_rng(19)
    for bits in (3e3, 3e4, 3e5):
        for num_keys, bound in ((200, "ball"), (200, "blocks"), (3, "ball+sentinels")):
            for dtype in ("float32", "bfloat16"):
                for family in (families.identical(bits), families.constant(bits)):
                    above, below = enclosure(
                        family, rng, keys_=num_keys, dim=256, dtype=dtype, bound=bound
                    )
                    assert np.all(above >= 0) and np.all(below >= 0), f"{bits} bits, {bound}"


def check_moved_center() -> None:
    """Taking sentinels out moves a block's center, and its radius must follow.

    128 keys (0.9, 2) are the sentinels and pull the mean of 512 towards themselves; the rest lie at
    0 but for one at (1, 0), nearer to the old mean than to the new one. Queries point to that one.
    """
    key = np.zeros((512, 8), np.float32)
    key[:128, 0], key[:128, 1] = 0.9, 2.0
    key[300, 0] = 1.0
    query = np.zeros((4, 8), np.float32)
    query[:, 0] = 1000.0
    summary = keys.key_summary(key, "float32", statistics_block=512)
    assert np.array_equal(summary.rows.high[:128], key[:128]), "the sentinels are others"
    for bound in ("ball+sentinels", "blocks+sentinels"):
        row = keys.bound_rows(query, summary, dtype="float32", scale=SCALE, bounds=bound)
        exact = emulator.log_sum_exp(kernel_logits(kernel_query(query, "float32"), key, "exact"))
        assert np.all(row.upper >= exact), f"S is too low by {np.max(exact - row.upper)}: {bound}"


def check_error_of_the_mean() -> None:
    """The mean may be as wrong as float32 sums in the worst order are, and L must allow for it.

    Once all keys are equal, once they are opposite, so that their size does not show in the mean.
    """
    num_keys, dim = 1000, 4
    wrong = np.float32(0.4 * num_keys * 2.0**-24)
    for mean, spread in ((1.0, dim * wrong**2), (0.0, dim * 1.0)):
        summary = bounds.summarize_keys(
            block_mean=np.full((1, dim), mean, np.float32) + wrong,
            block_count=np.full(1, num_keys, np.float32),
            radius_squared=np.full(1, spread, np.float32),
            spread_squared=np.full(1, spread, np.float32),
            sentinels=np.full((3, dim), mean, np.float32),
            membership=np.ones((1, 3), np.float32),
            keys_per_block=num_keys,
            kernel=BFLOAT16,
            split=split_bfloat16,
            matmul=np.matmul,
            xp=np,
        )
        center = (summary.high + summary.low)[3:].astype(np.float64)
        error = np.linalg.norm(center - mean, axis=1)
        assert np.all(error > 1e-6), "the mean is not wrong"
        assert np.all(summary.reach_down[3:] >= error), "L does not allow for the error of the mean"


def check_center_is_rounded() -> None:
    """A mean of bfloat16 keys needs more bits than its two halves have; L allows for the rest."""
    rng = np.random.default_rng(25)
    for block in (1, 3):
        for _ in range(200):
            key = as_dtype(rng.uniform(1.0, 2.0, (3, 1)).astype(np.float32), "bfloat16").values
            rows = keys.key_summary(key, "bfloat16", sentinels=False, statistics_block=block).rows
            exact = np.mean(key.astype(np.float64)) if block == 3 else key.astype(np.float64)[:, 0]
            center = (rows.high + rows.low)[:, 0].astype(np.float64)
            error = (
                np.abs(center[:-1] - exact),
                np.abs(center[-1:] - np.mean(key, dtype=np.float64)),
            )
            assert np.all(rows.reach_down >= np.concatenate(error)), "the center is rounded"


def check_evaluation_slack() -> None:
    """All logits 0: log2 n in float32 is rounded one way or the other, and both must be covered."""
    for num_keys in range(1, 200):
        for bound in ("ball", "blocks", "auto"):
            rng = np.random.default_rng(num_keys)
            above, below = enclosure(
                families.zeros, rng, keys_=num_keys, dim=8, dtype="float32", bound=bound
            )
            assert np.all(above >= 0) and np.all(below >= 0), f"n = {num_keys}, {bound}"


def head_errors(
    heads: list[families.Head], dtype: str, order: str, **arguments: object
) -> tuple[Float64, certify.Certificate]:
    """Measured error / max|v| [H, S_q] at the certified stabilizers, and the certificate."""
    query, key, value = call_arrays(heads, dtype)
    certificate = certify.certify(query, key, value, scale=SCALE, **arguments)  # type: ignore[arg-type]
    machine = MACHINES["bfloat16" if dtype == "bfloat16" else "float32"][1]
    errors = []
    for head in range(len(heads)):
        scaled = kernel_query(query.values[0, :, head], dtype)
        logits = kernel_logits(scaled, key.values[0, :, head], "matmul")
        stabilizer = certificate.stabilizer[0, head].astype(np.float64)
        v = np.broadcast_to(
            value.values[0, :, head].astype(np.float64), (len(logits), *value.values.shape[1::2])
        )
        result = emulator.attend(
            logits, v, np.where(np.isnan(stabilizer), 0.0, stabilizer), machine, order
        )
        errors.append(emulator.relative_error(result, logits, v))
    return np.stack(errors), certificate


def check_certified_calls() -> None:
    """From the tensors to the output: certified rows obey E <= tolerance on the machine."""
    rng = np.random.default_rng(20)
    certified = 0
    for index, (name, family) in enumerate(FAMILIES.items()):
        dtype = ("bfloat16", "float32")[index % 2]
        head = families.draw(family, rng, 8, 150, 16)
        size = np.float32(2.0 ** rng.uniform(-30.0, 30.0))
        head = (head[0], head[1], head[2][:, :3] * size)
        errors, certificate = head_errors([head], dtype, ORDERS[index % 4])
        sure = np.isfinite(certificate.error_bound[0])
        certified += int(sure.sum())
        assert np.all(certificate.error_bound[0][sure] <= certificate.tolerance)
        assert np.all(errors[sure] <= certificate.error_bound[0][sure] * ALLOWED), name
    assert certified > 80, f"only {certified} rows were certified"


def check_hidden_keys() -> None:
    """key_lengths: keys that a row does not see have no say, not even a hidden NaN."""
    rng = np.random.default_rng(21)
    query, key, value = (
        a[None, :, None] for a in families.draw(families.gaussian(3.0), rng, 16, 300, 16)
    )
    key = np.concatenate([key, key])
    value = np.concatenate([value * np.float32(1e-6), value * np.float32(1e-6)])
    value[0, 200:] = 100.0
    key[0, 250:] = np.nan
    query = np.concatenate([query, query])
    whole = certify.certify(query, key, value, scale=SCALE, key_lengths=np.array([200, 300]))
    alone = certify.certify(query[:1], key[:1, :200], value[:1, :200], scale=SCALE)
    for name in ("certified", "stabilizer", "error_bound", "gap", "budget", "bound_used"):
        assert np.array_equal(getattr(whole, name)[0], getattr(alone, name)[0], equal_nan=True), (
            name
        )
    other = certify.certify(query[1:], key[1:], value[1:], scale=SCALE)
    assert np.array_equal(whole.gap[1], other.gap[0]), "a batch element has a say in another"
    nothing = certify.certify(query, key, value, scale=SCALE, key_lengths=np.array([0, 300]))
    assert np.all(nothing.certified[0]) and np.all(nothing.error_bound[0] == 0)


def check_grouped_heads() -> None:
    """Fewer key heads: every query head is judged against its own group's keys and values."""
    rng = np.random.default_rng(22)
    kinds = (families.gaussian(1.0), families.gaussian(60.0), families.gaussian(10.0))
    heads = [families.draw(kind, rng, 20, 200, 16) for kind in kinds]
    query, key, value = call_arrays(heads, "float32")
    value.values[:, :, 2] *= np.float32(1e-9)
    more = np.concatenate([query.values, query.values[::-1, ::-1]], axis=2)[
        :, :, [0, 3, 1, 4, 2, 5]
    ]
    grouped = certify.certify(more, key.values, value.values, scale=SCALE)
    assert 0 < np.mean(grouped.certified) < 1, "the heads do not differ"
    for head in range(6):
        one = slice(head // 2, head // 2 + 1)
        alone = certify.certify(
            more[:, :, head : head + 1], key.values[:, :, one], value.values[:, :, one], scale=SCALE
        )
        for name in ("certified", "stabilizer", "error_bound", "gap", "budget", "bound_used"):
            left, right = getattr(grouped, name)[0, head], getattr(alone, name)[0, 0]
            assert np.array_equal(left, right, equal_nan=True), f"{name} of head {head}"


def check_blocks_need_every_row() -> None:
    """One row that cannot be proved takes its query block with it, and no other block."""
    rng = np.random.default_rng(23)
    head = families.draw(families.gaussian(3.0), rng, 40, 300, 16)
    head[0][13] *= np.float32(1e4)
    query, key, value = call_arrays([head], "bfloat16")
    certificate = certify.certify(query, key, value, scale=SCALE, block_q=16)
    assert certificate.certified.tolist() == [[[False, True, True]]]
    assert np.isnan(certificate.stabilizer[0, 0]).nonzero()[0].tolist() == [13]


CHECKS: dict[str, Callable[[], None]] = {
    name.removeprefix("check_"): function
    for name, function in list(globals().items())
    if name.startswith("check_")
}
