"""The theorem against two machines, hypothesis properties, and a search for violations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from certify import arithmetic, theorem
from certify.arithmetic import BFLOAT16, FLOAT32
from tests.certify import emulator
from tests.certify.emulator import ORDERS, ROUNDED_BFLOAT16, ROUNDED_FLOAT32, Float64, as_float32
from tests.certify.families import FAMILIES, draw
from tests.certify.measures import (
    ALLOWED,
    accepted,
    after_loop_ratio,
    enclosure,
    grid_below,
    head_errors,
    log_sum_edges,
    lower_edge_ratio,
    worst_ratio,
)
from tests.certify.theorem_cases import MACHINES, TOLERANCES, Rows, draw_rows, limits_of

ROUNDED = {"bfloat16": (BFLOAT16, ROUNDED_BFLOAT16), "float32": (FLOAT32, ROUNDED_FLOAT32)}


def test_cut_offs_never_exceed_the_bound() -> None:
    """100,000 rows at the lower edge, where E is nearly met. Catches a loss that is not counted."""
    worst, evaluations = lower_edge_ratio(np.random.default_rng(31), rounds=250, rows=400)
    assert evaluations == 100_000
    assert 0.9 < worst <= ALLOWED


def test_passing_rows_never_exceed_the_bound() -> None:
    """Rows that pass the check after the loop. Catches a check too lenient at either edge."""
    worst, passed = after_loop_ratio(np.random.default_rng(32), rounds=250, rows=400)
    assert passed > 30_000
    assert 0.8 < worst <= ALLOWED


@pytest.mark.parametrize("name", ROUNDED)
def test_rounding_stays_within_its_own_bound(name: str) -> None:
    """With bfloat16 and float32 rounding as well: error <= E + E_round.

    Catches cut-offs hidden in E_round, and roundings that neither bound counts.
    """
    kernel, machine = ROUNDED[name]
    rng = np.random.default_rng(33)
    worst = 0.0
    for index in range(40):
        keys = (1, 2, 9, 32, 100, 257)[index % 6]
        case = draw_rows(rng, 200, keys, TOLERANCES[index % len(TOLERANCES)], kernel)
        if index % 2:
            ordinary = as_float32(rng.normal(0.0, rng.uniform(0.0, 30.0), case.logits.shape))
            case = Rows(ordinary, case.value, case.limits, case.tolerance, kernel)
        lower, upper = log_sum_edges(case)
        top = np.minimum(lower + np.asarray(case.limits.lower_room, np.float64), lower + 300.0)
        stabilizer = grid_below(np.rint(top - 0.5) if index % 4 == 1 else top)
        error = theorem.error_in_advance(stabilizer, lower, case.limits, xp=np).astype(np.float64)
        inside = (upper - stabilizer <= case.limits.upper_room) & np.isfinite(case.limits.budget)
        total = error + emulator.rounding_bound(case.logits, case.value, machine)
        ratio, _ = worst_ratio(
            case, stabilizer, np.where(inside, total, np.inf), machine, ORDERS[index % 4]
        )
        worst = max(worst, ratio)
    assert (0.8 if name == "bfloat16" else 0.2) < worst <= ALLOWED


def _moves(rng: np.random.Generator, case: Rows, stabilizer: Float64) -> tuple[Float64, Float64]:
    """Change one key of every row: to an edge of the flushes, by a little, or its value."""
    rows, keys = case.logits.shape
    pick = np.arange(keys) == rng.integers(keys, size=(rows, 1))
    size = np.log2(np.max(np.abs(case.value), axis=2))
    edge = stabilizer[:, None] - 126.0 - rng.choice([0.0, 1.0], (rows, 1)) * size
    edge = edge + rng.choice([0.0, 8.0, 9.0], (rows, 1)) - np.exp2(rng.uniform(-12, 0, (rows, 1)))
    kind = rng.integers(4, size=(rows, 1))
    near = case.logits + rng.normal(0.0, 0.3, (rows, 1))
    logits = np.where(pick & (kind == 0), edge, np.where(pick & (kind == 1), near, case.logits))
    sign = np.where(pick & (kind == 2), -1.0, 1.0)[..., None]
    largest = np.max(np.abs(case.value), axis=(1, 2), keepdims=True)
    value = np.where((pick & (kind == 3))[..., None], largest * np.sign(case.value), case.value)
    return as_float32(logits), value * sign


def _climb(rng: np.random.Generator, name: str, rounds: int) -> tuple[float, int]:
    """Hill climbing on measured error / E over logits and values; worst ratio and evaluations."""
    kernel, machine = MACHINES[name]
    rows, keys, tolerance = 128, 32, 2.0**-3
    case = draw_rows(rng, rows, keys, tolerance, kernel)
    best, stabilizer, evaluations = np.zeros(rows), np.zeros(rows), 0
    for step in range(rounds):
        logits, value = _moves(rng, case, stabilizer) if step else (case.logits, case.value)
        trial = Rows(logits, value, limits_of(value, tolerance, kernel), tolerance, kernel)
        lower, _ = log_sum_edges(trial)
        m = grid_below(lower.astype(np.float64) + trial.limits.lower_room)
        error = theorem.error_in_advance(m, lower, trial.limits, xp=np).astype(np.float64)
        result = emulator.attend(logits, value, m.astype(np.float64), machine, ORDERS[step % 4])
        measured = emulator.relative_error(result, logits, value)
        ratio = np.where(np.isfinite(trial.limits.budget), measured / error, 0.0)
        better = ratio >= best
        stabilizer = np.where(better, m, stabilizer)
        logits = np.where(better[:, None], logits, case.logits)
        value = np.where(better[:, None, None], value, case.value)
        case = Rows(logits, value, trial.limits, tolerance, kernel)
        best, evaluations = np.maximum(best, ratio), evaluations + rows
    return float(best.max()), evaluations


@pytest.mark.parametrize("name", MACHINES)
def test_search_finds_no_violation(name: str) -> None:
    """A search that maximises error / bound. Catches a bound that only random rows obey."""
    worst, evaluations = _climb(np.random.default_rng(34), name, rounds=1000)
    assert evaluations == 128_000
    assert worst <= ALLOWED
    assert worst > (0.75 if name == "bfloat16" else 0.3)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    keys=st.integers(1, 70),
    log2_tolerance=st.floats(-15.9, -0.1),
    name=st.sampled_from(sorted(MACHINES)),
    order=st.sampled_from(ORDERS),
    above=st.floats(0.0, 250.0),
)
def test_certified_rows_obey_the_bound(
    seed: int, keys: int, log2_tolerance: float, name: str, order: str, above: float
) -> None:
    """Any S above and any L below the truth: a certified row is right, and passes the check.

    Catches a choice of stabilizer that leaves the interval, and a check that disagrees with it.
    """
    kernel, machine = MACHINES[name]
    rng = np.random.default_rng(seed)
    case = draw_rows(rng, 20, keys, 2.0**log2_tolerance, kernel)
    lower, upper = log_sum_edges(case)
    share = rng.uniform(size=20).astype(np.float32)
    lower, upper = lower - np.float32(above) * share, upper + np.float32(above) * (1 - share)
    origin = np.max(case.logits, axis=1).astype(np.float32)
    choice = theorem.choose_stabilizer(upper, lower, origin, case.limits, xp=np)
    error = theorem.error_in_advance(choice.stabilizer, lower, case.limits, xp=np)
    assert np.all(error[choice.certified] <= case.tolerance)
    judged = np.where(choice.certified, error.astype(np.float64), np.inf)
    ratio, result = worst_ratio(case, choice.stabilizer, judged, machine, order)
    assert ratio <= ALLOWED
    assert np.all(accepted(result, case.limits)[choice.certified])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    keys=st.integers(1, 70),
    stabilizer=st.floats(-400.0, 400.0),
    log2_tolerance=st.floats(-15.9, -0.1),
)
def test_passing_rows_obey_the_bound(
    seed: int, keys: int, stabilizer: float, log2_tolerance: float
) -> None:
    """Any stabilizer whatever, S and L unknown: what passes the check is right."""
    rng = np.random.default_rng(seed)
    case = draw_rows(rng, 20, keys, 2.0**log2_tolerance, BFLOAT16)
    m = as_float32(case.log_sum + stabilizer)
    result = emulator.attend(case.logits, case.value, m, emulator.CUT_OFFS_ONLY, ORDERS[seed % 4])
    passes = accepted(result, case.limits)
    error = emulator.relative_error(result, case.logits, case.value)
    assert np.all(error[passes] <= case.tolerance * ALLOWED)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    family=st.sampled_from(sorted(FAMILIES)),
    keys=st.integers(1, 400),
    dim=st.sampled_from([8, 16, 40, 64, 128, 256]),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    bound=st.sampled_from(["auto", "ball", "blocks", "ball+sentinels", "blocks+sentinels"]),
)
def test_bounds_enclose_the_log_sum_exp(
    seed: int, family: str, keys: int, dim: int, dtype: str, bound: str
) -> None:
    """L <= log2 sum 2^logit <= S. Catches a bound or a slack on the wrong side."""
    above, below = enclosure(
        FAMILIES[family],
        np.random.default_rng(seed),
        keys_=keys,
        dim=dim,
        dtype=dtype,
        bound=bound,
    )
    assert np.all(above >= 0) and np.all(below >= 0)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    family=st.sampled_from(sorted(FAMILIES)),
    keys=st.integers(1, 150),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    log2_value=st.floats(-100.0, 100.0),
    log2_tolerance=st.floats(-15.9, -0.1),
)
def test_certified_calls_obey_the_bound(
    seed: int, family: str, keys: int, dtype: str, log2_value: float, log2_tolerance: float
) -> None:
    """From tensors to output on the machine. Catches any fault between the formulas."""
    rng = np.random.default_rng(seed)
    query, key, value = draw(FAMILIES[family], rng, 6, keys, 8)
    value = value[:, :3] * np.float32(2.0**log2_value)
    tolerance = 2.0**log2_tolerance
    errors, certificate = head_errors(
        [(query, key, value)], dtype, ORDERS[seed % 4], tolerance=tolerance
    )
    sure = np.isfinite(certificate.error_bound[0])
    assert np.all(certificate.error_bound[0][sure] <= tolerance)
    assert np.all(errors[sure] <= certificate.error_bound[0][sure] * ALLOWED)


@settings(max_examples=100, deadline=None)
@given(
    first=st.floats(-15.9, -0.01),
    second=st.floats(-15.9, -0.01),
    log2_value=st.floats(-112.0, 127.0),
    keys=st.integers(1, 2**20),
)
def test_a_looser_tolerance_never_proves_less(
    first: float, second: float, log2_value: float, keys: int
) -> None:
    """Catches a term of the wrong sign: budget and row_sum_min are monotone in the tolerance."""
    value = np.full(1, 2.0**log2_value, np.float32)
    tight, loose = (
        theorem.limits(value, num_keys=keys, tolerance=2.0**t, kernel=BFLOAT16, xp=np)
        for t in sorted((first, second))
    )
    assert tight.budget[0] <= loose.budget[0] + 1e-4
    assert tight.row_sum_min[0] >= loose.row_sum_min[0] * (1 - 1e-6)


def test_budget_is_what_the_design_says() -> None:
    """n = 2^17, V = 2, tolerance 2^-12: 218 bits. Catches a bound sound only by giving up."""
    two = np.full(1, 2.0, np.float32)
    head = theorem.limits(two, num_keys=2**17, tolerance=2.0**-12, kernel=BFLOAT16, xp=np)
    expected = 124.0 + 126.0 - 17.0 - 12.0 - math.log2(2.5 * 17 / 16) - 1.5
    assert abs(head.budget[0] - expected) < 0.3


@pytest.mark.parametrize("tolerance", [0.0, 1e-6, 1.0, -1.0, math.nan, math.inf, "a", None])
def test_impossible_tolerances_are_refused(tolerance: object) -> None:
    """Catches a tolerance below the rounding of exp2's argument, which nothing can meet."""
    with pytest.raises(ValueError, match="tolerance"):
        arithmetic.validate_tolerance(tolerance)  # type: ignore[arg-type]


def test_the_machine_flushes() -> None:
    """The emulator itself: catches a machine that is kinder than the one of the theorem."""
    numbers = np.array([2.0**-126, 0.99 * 2.0**-126, -(2.0**-127), 2.0**128, 2.0**127])
    assert emulator.cut(numbers).tolist() == [2.0**-126, 0.0, 0.0, math.inf, 2.0**127]
    assert emulator.to_half([1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8]).tolist() == [1.0, 1.0 + 2.0**-6]
    one = np.ones((1, 3, 1))
    result = emulator.attend(
        np.array([[0.0, -200.0, -10.0]]), one, np.zeros(1), emulator.CUT_OFFS_ONLY
    )
    assert result.row_sum.tolist() == [1.0 + 2.0**-10]
    assert result.out[0, 0] == 1.0
