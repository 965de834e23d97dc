"""A search for the largest score: random sampling, then climbing with restarts.

A candidate is a vector of real genes. After a random phase, a population of the best climbs by
moves, each kept where it does not lower the score: a few genes changed by steps of any size, genes
copied from one place to others or from other candidates, differences of other candidates, the last
successful step again (longer or shorter), and a step along a two-sided finite-difference gradient
in a random direction. Candidates that stand still start again at random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

RANDOM_SHARE = 0.2
"""Share of the evaluations spent on random sampling, which is also what climbing is compared to."""

PATIENCE = 200
"""Moves without a better score after which a candidate starts again."""


@dataclass(frozen=True)
class Scores:
    """Of each candidate: what to climb, measured error / bound (0: nothing to judge), how many."""

    fitness: Float64
    ratio: Float64
    judged: npt.NDArray[np.int64]


class Problem(Protocol):
    """What is searched: genes drawn at random, and their score."""

    @property
    def rows_each(self) -> int:
        """Evaluations that one candidate costs."""

    def draw(self, rng: np.random.Generator, size: int) -> Float64:
        """Random genes [size, genes]."""

    def score(self, genes: Float64, rng: np.random.Generator) -> Scores:
        """Scores of candidates [size, genes]."""


@dataclass
class Climb:
    """What a search found."""

    evaluations: int = 0
    judged: int = 0
    restarts: int = 0
    violations: int = 0
    best_random: float = 0.0
    best: float = 0.0
    best_genes: Float64 = field(default_factory=lambda: np.zeros(0))


def climb(
    problem: Problem,
    evaluations: int,
    rng: np.random.Generator,
    *,
    allowed: float,
    population: int = 16,
    random_share: float = RANDOM_SHARE,
    progress: Callable[[int], None] | None = None,
) -> Climb:
    """Spend at least ``evaluations`` evaluations in search of a ratio above ``allowed``."""
    found = Climb()

    def evaluate(genes: Float64) -> Float64:
        scores = problem.score(genes, rng)
        spent = len(genes) * problem.rows_each
        found.evaluations += spent
        found.judged += int(np.sum(scores.judged))
        found.violations += int(np.sum(scores.ratio > allowed))
        best = int(np.argmax(scores.ratio))
        if scores.ratio[best] > found.best:
            found.best, found.best_genes = float(scores.ratio[best]), genes[best].copy()
        if progress is not None:
            progress(spent)
        return np.nan_to_num(scores.fitness, nan=-np.inf, posinf=1e300, neginf=-1e300)

    genes = problem.draw(rng, population)
    fitness = evaluate(genes)
    while found.evaluations < random_share * evaluations:
        fresh = problem.draw(rng, population)
        genes, fitness = _best(genes, fitness, fresh, evaluate(fresh))
    found.best_random = found.best
    last_step = np.zeros_like(genes)
    idle = np.zeros(population, np.int64)
    turn = 0
    while found.evaluations < evaluations:
        if turn % 8 == 7:
            trial = genes + _gradient_step(genes, evaluate, rng)
        else:
            trial = _move(genes, last_step, rng, kind=turn % 8)
        turn += 1
        score = evaluate(trial)
        kept, better = score >= fitness, score > fitness
        last_step = np.where(better[:, None], trial - genes, last_step)
        genes = np.where(kept[:, None], trial, genes)
        fitness = np.where(kept, score, fitness)
        idle = np.where(better, 0, idle + 1)
        tired = (idle > PATIENCE) & (fitness < np.partition(fitness, -8)[-8])
        if tired.any():
            fresh = problem.draw(rng, int(tired.sum()))
            genes[tired], fitness[tired], idle[tired] = fresh, evaluate(fresh), 0
            last_step[tired] = 0.0
            found.restarts += int(tired.sum())
    return found


def _best(
    genes: Float64, fitness: Float64, others: Float64, other_fitness: Float64
) -> tuple[Float64, Float64]:
    """The better half of two populations."""
    both, scores = np.concatenate([genes, others]), np.concatenate([fitness, other_fitness])
    order = np.argsort(-scores, kind="stable")[: len(genes)]
    return both[order], scores[order]


def _move(genes: Float64, last_step: Float64, rng: np.random.Generator, kind: int) -> Float64:
    """Genes [P, G] moved."""
    size, count = genes.shape
    if kind == 1:
        first, second = genes[rng.permutation(size)], genes[rng.permutation(size)]
        chosen = rng.uniform(size=genes.shape) < rng.choice([0.1, 0.9], (size, 1))
        return genes + chosen * rng.uniform(0.2, 1.0, (size, 1)) * (first - second)
    if kind == 3:
        return genes + rng.uniform(-0.5, 2.0, (size, 1)) * last_step
    if kind == 5:
        chosen = rng.uniform(size=genes.shape) < 0.3
        return np.where(chosen, genes[rng.permutation(size)], genes)
    if kind in (2, 6):
        source = genes[np.arange(size), rng.integers(count, size=size)]
        chosen = rng.uniform(size=genes.shape) < rng.choice([1.0, 3.0, 10.0], (size, 1)) / count
        return np.where(chosen, source[:, None], genes)
    chosen = rng.uniform(size=genes.shape) < rng.choice([1.0, 3.0], (size, 1)) / count
    steps = rng.standard_normal(genes.shape) * np.exp2(rng.uniform(-16.0, 2.0, (size, 1)))
    flip = rng.uniform(size=genes.shape) < 0.1
    return genes + chosen * np.where(flip, -2.0 * genes, steps)


def _gradient_step(
    genes: Float64, evaluate: Callable[[Float64], Float64], rng: np.random.Generator
) -> Float64:
    """A step uphill, from two evaluations either side along a random direction."""
    direction = rng.choice([-1.0, 1.0], genes.shape)
    width = np.exp2(rng.uniform(-12.0, -2.0, (len(genes), 1)))
    ahead, behind = evaluate(genes + width * direction), evaluate(genes - width * direction)
    slope = np.sign(ahead - behind)
    return slope[:, None] * width * rng.uniform(0.5, 4.0, (len(genes), 1)) * direction
