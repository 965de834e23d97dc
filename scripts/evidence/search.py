"""The whole search: every study its share of the evaluations, and a summary by machine and path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from evidence.climb import Climb, climb
from evidence.machine import FlushMachine
from evidence.problems import Study, row_studies, studies

ALLOWED = 1.0 + 1e-9
"""Ratio of measured error to bound: 1, and what float64 rounds in measuring."""

TOLERANCES = (2.0**-3, 2.0**-12)

ROW_SHARE = 0.5
"""Share of the evaluations for rows with bounds given and after the loop; calls take the rest."""

POPULATION = 16
"""Few candidates and many generations find the most."""


@dataclass(frozen=True)
class PathResult:
    """What all studies of one machine on one path found; ``detail`` names the best's study."""

    dtype: str
    rounded: bool
    path: str
    evaluations: int
    judged: int
    restarts: int
    violations: int
    best_random: float
    best: float
    detail: str


def run_search(
    evaluations: int,
    seed: int,
    *,
    fault: str | None = None,
    progress: Callable[[int, str], None] | None = None,
) -> list[PathResult]:
    """Search all studies (with a fault: those of rows), in all at least ``evaluations``.

    Args:
        progress: called with the evaluations spent and the study's name.
    """
    plan = studies(TOLERANCES)
    if fault is not None:
        machines = {study.machine: None for study in plan}
        plan = [study for each in machines for study in row_studies(each, TOLERANCES, fault)]
    of_rows = [study for study in plan if study.problem.rows_each == 1]
    row_share = 1.0 if len(of_rows) == len(plan) else ROW_SHARE
    found: dict[tuple[FlushMachine, str], list[tuple[Study, Climb]]] = {}
    for number, study in enumerate(plan):
        is_row = study.problem.rows_each == 1
        share = row_share / len(of_rows)
        if not is_row:
            share = (1.0 - row_share) / (len(plan) - len(of_rows))
        result = climb(
            study.problem,
            int(np.ceil(share * evaluations)),
            np.random.default_rng([seed, number]),
            allowed=ALLOWED,
            population=POPULATION,
            progress=_named(progress, f"{study.machine.name}; {study.path}"),
        )
        found.setdefault((study.machine, study.path), []).append((study, result))
    return [_summary(each, path, results) for (each, path), results in found.items()]


def _named(progress: Callable[[int, str], None] | None, name: str) -> Callable[[int], None] | None:
    return None if progress is None else lambda spent: progress(spent, name)


def _summary(each: FlushMachine, path: str, results: Sequence[tuple[Study, Climb]]) -> PathResult:
    study, best = max(results, key=lambda pair: pair[1].best)
    climbs = [result for _, result in results]
    return PathResult(
        dtype=each.dtype,
        rounded=each.rounded,
        path=path,
        evaluations=sum(result.evaluations for result in climbs),
        judged=sum(result.judged for result in climbs),
        restarts=sum(result.restarts for result in climbs),
        violations=sum(result.violations for result in climbs),
        best_random=max(result.best_random for result in climbs),
        best=best.best,
        detail=study.detail,
    )
