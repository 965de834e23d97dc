"""The search for violations: it finds none, and it would find one."""

from __future__ import annotations

import numpy as np
import pytest

from evidence import machine
from evidence.climb import climb
from evidence.machine import FlushMachine
from evidence.problems import CallProblem, RowProblem
from evidence.search import ALLOWED, run_search


def test_search_finds_no_violation() -> None:
    """100,000 evaluations on every machine and path. Catches a bound that only random rows obey."""
    results = run_search(100_000, seed=7)
    assert sum(result.evaluations for result in results) >= 100_000
    assert sum(result.judged for result in results) > 80_000
    for result in results:
        assert result.violations == 0 and result.best <= ALLOWED, result
    assert len({(result.dtype, result.rounded, result.path) for result in results}) == 16
    assert max(result.best for result in results) > 0.75


@pytest.mark.slow
def test_a_million_evaluations_find_no_violation() -> None:
    """The stated number of evaluations."""
    results = run_search(1_000_000, seed=0)
    assert sum(result.evaluations for result in results) >= 1_000_000
    assert sum(result.violations for result in results) == 0
    assert 0.9 < max(result.best for result in results) <= ALLOWED


@pytest.mark.parametrize("after_loop", [False, True])
def test_search_beats_random_sampling(after_loop: bool) -> None:
    """Climbing finds a ratio twice that of as many random rows. Catches a search that does not."""
    problem = RowProblem(FlushMachine("bfloat16", False), 2.0**-3, after_loop=after_loop)
    climbed = climb(problem, 20_000, np.random.default_rng(1), allowed=ALLOWED)
    sampled = climb(problem, 20_000, np.random.default_rng(1), allowed=ALLOWED, random_share=1.0)
    assert sampled.best_random == sampled.best
    assert climbed.best > 2.0 * sampled.best > 0.2


@pytest.mark.parametrize("after_loop", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("fault", "evaluations"), [("product-flushes", 2_000), ("probability-losses", 40_000)]
)
def test_search_finds_a_dropped_clause(
    fault: str, evaluations: int, dtype: str, after_loop: bool
) -> None:
    """The search is worth something only if it notices: each clause of the loss, dropped."""
    problem = RowProblem(FlushMachine(dtype, False), 2.0**-3, after_loop=after_loop, fault=fault)
    found = climb(problem, evaluations, np.random.default_rng(3), allowed=ALLOWED)
    assert found.violations > 0, f"best ratio {found.best}"
    again = problem.score(found.best_genes[None], np.random.default_rng(0))
    assert again.ratio[0] > 1.0


@pytest.mark.parametrize("mask", ["none", "causal", "bias"])
def test_search_of_calls_judges_rows(mask: str) -> None:
    """Calls are certified or pass in numbers. Catches a search of which nothing is judged."""
    for verified in (False, True):
        problem = CallProblem(FlushMachine("bfloat16", True), 2.0**-3, mask=mask, verified=verified)
        found = climb(problem, 1000, np.random.default_rng(5), allowed=ALLOWED)
        assert found.judged > 700 and found.violations == 0
        assert 0.1 < found.best <= ALLOWED


def test_measured_errors_are_absolute() -> None:
    """A NaN output is an infinite error, and hidden keys (-inf) weigh nothing."""
    logits = np.array([[0.0], [-np.inf]], np.float32)
    value = np.array([[[2.0]], [[50.0]]], np.float32)
    good = machine.run(FlushMachine("bfloat16", False), logits, value, np.zeros(1, np.float32))
    assert good.out[0, 0] == 2.0
    assert machine.errors(good, logits, value, np.full(1, 2.0))[0] == 0.0
    bad = machine.Outcome(good.row_sum, np.full((1, 1), np.nan), np.zeros(1, bool))
    assert np.isposinf(machine.errors(bad, logits, value)[0])
