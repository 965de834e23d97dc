"""What the search varies: rows with bounds given to them, rows after the loop, whole calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import certify
from certify import theorem
from certify.arithmetic import ARITHMETICS, KernelArithmetic
from certify.inputs import BOUND_CHOICES
from evidence import machine
from evidence.calls import MASKS, Call, in_dtype, masking
from evidence.climb import Float64, Problem, Scores
from evidence.machine import FlushMachine, Outcome

PATHS = ("edge", "after loop", "call certified", "call verified")
"""edge: S and L exact, the stabilizer at the edge of the interval; after loop: any stabilizer, the
row sum passes; calls: from query, key and value through certify.certify()."""

ORDERS = ("sequence", "strands")

FAULTS = ("product-flushes", "probability-losses")
"""Clauses of the theorem that can be dropped, to see whether the search notices."""


def kernel_of(dtype: str, fault: str | None = None) -> KernelArithmetic:
    """The arithmetic of a dtype, with one clause dropped if a fault is named."""
    kernel = ARITHMETICS[dtype]
    if fault == "product-flushes":
        return replace(kernel, product_flushes=0)
    if fault == "probability-losses":
        return replace(kernel, probability_losses=1)
    return kernel


def _ratio(measured: Float64, bound: Float64, judged: Any) -> Float64:
    return np.where(judged, measured / np.where(judged, bound, 1.0), 0.0)


@dataclass(frozen=True)
class RowProblem:
    """Rows of logits with values of their own, one candidate each.

    Genes: logit below the log-sum-exp in units of 16 bits [n], log2 of |v| in units of 16 bits and
    its sign [n, C] each, log2 of max|v| in units of 32 bits, and where the stabilizer lies.
    """

    machine: FlushMachine
    tolerance: float
    num_keys: int = 12
    channels: int = 1
    after_loop: bool = False
    fault: str | None = None
    rows_each: int = 1

    @property
    def _values(self) -> int:
        return self.num_keys * self.channels

    def draw(self, rng: np.random.Generator, size: int) -> Float64:
        depth = rng.exponential(0.5, (size, self.num_keys)) * rng.choice([0.5, 4.0], (size, 1))
        depth *= rng.uniform(size=depth.shape) > 1.0 / self.num_keys
        log2_size = -rng.exponential(0.2, (size, self._values)) * rng.choice([0.0, 1.0], (size, 1))
        sign = rng.standard_normal((size, self._values))
        scale = rng.normal(0.0, 1.0, (size, 1)) * rng.choice([0.0, 0.2, 1.0], (size, 1))
        place = rng.exponential(0.1, (size, 1)) * rng.choice([-1.0, 1.0], (size, 1))
        return np.concatenate([depth, log2_size, sign, scale, place], axis=1)

    def score(self, genes: Float64, rng: np.random.Generator) -> Scores:
        keys, values = self.num_keys, self._values
        shape = (len(genes), keys, self.channels)
        log2_size = np.minimum(16.0 * genes[:, keys : keys + values].reshape(shape), 0.0)
        sign = np.where(genes[:, keys + values : keys + 2 * values].reshape(shape) < 0, -1.0, 1.0)
        scale = np.clip(32.0 * genes[:, -2], -100.0, 100.0)[:, None, None]
        value = in_dtype(sign * np.exp2(np.maximum(log2_size + scale, -125.0)), self.machine.dtype)
        value = np.moveaxis(value, 0, -1)
        depth = np.minimum(16.0 * np.abs(genes[:, :keys]), 400.0).T
        # The same rounded numbers, whichever stabilizer; multiples of 2^-12 survive the shift.
        logits = (-np.rint(depth * 2.0**12) * 2.0**-12).astype(np.float32)
        exact = machine.log_sum_exp(logits)
        limits = theorem.limits(
            np.max(np.abs(value), axis=(0, 1)),
            num_keys=keys,
            tolerance=self.tolerance,
            kernel=kernel_of(self.machine.dtype, self.fault),
            xp=np,
        )
        stabilizer = self._stabilizer(genes[:, -1], exact, limits)
        order = ORDERS[int(rng.integers(2))]
        outcome = machine.run(self.machine, logits, value, stabilizer, order)
        bound, judged, distance = self._judge(exact, stabilizer, limits, outcome)
        total = bound + machine.rounding_errors(self.machine, logits, value)
        ratio = _ratio(machine.errors(outcome, logits, value), total, judged)
        return Scores(np.where(judged, ratio, -distance), ratio, judged.astype(np.int64))

    def _stabilizer(self, place: Float64, exact: Float64, limits: theorem.Limits) -> Any:
        """float32 [R]: below the lower side's edge by |place| units of 16 bits, or on either side.

        After the loop a stabilizer may lie anywhere; genes beyond 4 stand for the upper edge.
        """
        edge = exact + np.asarray(limits.lower_room, np.float64)
        edge = np.where(np.isfinite(edge), edge, exact)
        if not self.after_loop:
            single = (edge - 16.0 * np.abs(place)).astype(np.float32)
            return np.where(single > edge, np.nextafter(single, np.float32(-np.inf)), single)
        top = exact - np.asarray(limits.upper_room, np.float64)
        distance = 16.0 * np.sign(place) * np.abs(place)
        return np.where(np.abs(place) < 4.0, edge + distance, top + distance).astype(np.float32)

    def _judge(
        self, exact: Float64, stabilizer: Any, limits: theorem.Limits, outcome: Outcome
    ) -> tuple[Float64, Any, Float64]:
        """The bound, whether the row is certified or passes, and how far it is from that."""
        with np.errstate(all="ignore"):
            if self.after_loop:
                row_sum = outcome.row_sum.astype(np.float32)
                bound = theorem.error_from_row_sum(row_sum, limits, xp=np)
                judged = theorem.row_sum_passes(row_sum, limits) & outcome.finite
                low = np.log2(np.maximum(limits.row_sum_min, 1e-300) / np.maximum(row_sum, 1e-45))
                distance = np.maximum(low.astype(np.float64), 1.0)
            else:
                lower = exact.astype(np.float32)
                lower = np.where(lower > exact, np.nextafter(lower, np.float32(-np.inf)), lower)
                upper = np.nextafter(lower, np.float32(np.inf))
                bound = theorem.error_in_advance(stabilizer, lower, limits, xp=np)
                inside = upper - stabilizer <= limits.upper_room
                judged = inside & (bound <= self.tolerance) & np.isfinite(limits.budget)
                distance = np.maximum(upper - stabilizer - limits.upper_room, 1.0)
        return bound.astype(np.float64), judged, np.where(np.isfinite(distance), distance, 1e6)


@dataclass(frozen=True)
class CallProblem:
    """Whole calls: two queries that share keys and values, judged row by row.

    Genes: query [rows, D], key [n, D], value [n, C], which mask of its kind, log2 of scale and of
    max|v|. Some candidates start as two opposite keys orthogonal to the queries, which a bound
    cannot tell from large logits.
    """

    machine: FlushMachine
    tolerance: float
    bounds: str = "auto"
    mask: str = "none"
    verified: bool = False
    num_keys: int = 24
    head_dim: int = 4
    channels: int = 1
    rows_each: int = 2

    def _sizes(self) -> tuple[int, int, int]:
        rows, keys = self.rows_each * self.head_dim, self.num_keys * self.head_dim
        return rows, keys, self.num_keys * self.channels

    def draw(self, rng: np.random.Generator, size: int) -> Float64:
        genes = rng.standard_normal((size, sum(self._sizes()) + 3))
        genes[:, -2:] *= rng.choice([0.1, 1.0], (size, 2))
        rows, keys, _ = self._sizes()
        outliers = rng.uniform(size=size) < 0.25
        strength = np.where(outliers, np.exp2(rng.uniform(0.0, 6.0, size)), 1.0)
        genes[:, rows : rows + keys] /= strength[:, None]
        genes[outliers, 0 : rows : self.head_dim] = 0.0
        genes[outliers, rows] = strength[outliers]
        genes[outliers, rows + self.head_dim] = -strength[outliers]
        return genes

    def call(self, genes: Float64) -> Call:
        """The attention call of candidates [P, genes], one batch element each."""
        size = len(genes)
        query, key, value = np.split(genes[:, :-3], np.cumsum(self._sizes())[:2], axis=1)
        scale = np.exp2(np.clip(8.0 * genes[:, -2], -20.0, 20.0))[:, None]
        value_scale = np.exp2(np.clip(32.0 * genes[:, -1], -100.0, 100.0))[:, None]
        dtype = self.machine.dtype
        return Call(
            query=in_dtype(scale * query, dtype).reshape(size, self.rows_each, 1, self.head_dim),
            key=in_dtype(4.0 * key, dtype).reshape(size, self.num_keys, 1, self.head_dim),
            value=in_dtype(value_scale * value, dtype).reshape(
                size, self.num_keys, 1, self.channels
            ),
            dtype=dtype,
            scale=0.7,
            **self._masking(np.abs(genes[:, -3])),
        )

    def _masking(self, numbers: Float64) -> dict[str, Any]:
        """A mask for each candidate, by its number; one for all where a call can have only one."""
        seeds = np.minimum(16.0 * numbers, 2.0**31).astype(np.int64)
        each = [
            masking(self.mask, np.random.default_rng(seed), 1, self.rows_each, self.num_keys)
            for seed in seeds
        ]
        together = dict(each[0])
        for name in ("key_lengths", "attn_mask"):
            if name in together:
                together[name] = np.concatenate([one[name] for one in each])
        if "segment_ids" in together:
            pairs = [one["segment_ids"] for one in each]
            together["segment_ids"] = tuple(
                np.concatenate(side) for side in zip(*pairs, strict=True)
            )
        return together

    def score(self, genes: Float64, rng: np.random.Generator) -> Scores:
        # Numbers that overflow or are not finite are ordinary here; they must not be certified.
        with np.errstate(all="ignore"):
            return self._score(self.call(genes), rng)

    def _score(self, call: Call, rng: np.random.Generator) -> Scores:
        certificate = certify.certify(
            *call.arrays,
            **call.arguments,
            tolerance=self.tolerance,
            bounds=self.bounds,
            block_q=1,
        )
        rows = _rows_of(call)
        order = ORDERS[int(rng.integers(2))]
        bound, judged, outcome = self._judge(call, certificate, rows, order)
        unit = certificate.value_low.ravel()
        measured = machine.errors(outcome, rows.logits, rows.value, unit)
        total = bound + machine.rounding_errors(self.machine, rows.logits, rows.value, unit)
        ratio = _ratio(measured, total, judged).reshape(call.shape[0], -1)
        missing = np.clip(np.nan_to_num(certificate.gap - certificate.budget, nan=1e6), 0.0, 1e6)
        judged = judged.reshape(ratio.shape)
        # Where nothing is flushed yet, climb towards it: to row sums that lie deep.
        depth = -np.log2(outcome.row_sum).reshape(ratio.shape) / 126.0
        promising = ratio + 1e-6 * np.clip(depth, -1.0, 1.0)
        fitness = np.where(judged, promising, -1e-3 * missing.reshape(ratio.shape))
        return Scores(fitness.max(axis=1), ratio.max(axis=1), judged.sum(axis=1))

    def _judge(
        self, call: Call, certificate: certify.Certificate, rows: _Rows, order: str
    ) -> tuple[Float64, Any, Outcome]:
        """Bound, whether the row is certified (or passes after the loop), and what comes out."""
        if not self.verified:
            stabilizer = certificate.stabilizer.ravel()
            sure = np.isfinite(stabilizer) & rows.sees
            stabilizer = np.where(sure, stabilizer, np.float32(0.0))
            outcome = machine.run(self.machine, rows.logits, rows.value, stabilizer, order)
            return certificate.error_bound.ravel().astype(np.float64), sure, outcome
        low = certificate.value_low.ravel()
        ratio = np.where(low > 0, rows.largest / low, 1.0).astype(np.float32)
        limits = theorem.limits(
            certificate.value_high.ravel(),
            value_low=low,
            # Values that V_lo does not speak of, where a bias puts their keys far below others.
            value_ratio=np.nextafter(np.maximum(ratio, np.float32(1.0)), np.float32(np.inf)),
            num_keys=call.shape[3],
            tolerance=self.tolerance,
            kernel=kernel_of(self.machine.dtype),
            xp=np,
        )
        # No upper bound: every row is left to the check after the loop.
        lower = certificate.lower.ravel()
        nothing = np.full_like(lower, np.inf)
        choice = theorem.choose_stabilizer(nothing, lower, lower, limits, xp=np)
        outcome = machine.run(self.machine, rows.logits, rows.value, choice.stabilizer, order)
        row_sum = outcome.row_sum.astype(np.float32)
        passes = theorem.row_sum_passes(row_sum, limits) & outcome.finite & rows.sees
        bound = theorem.error_from_row_sum(row_sum, limits, xp=np)
        return bound.astype(np.float64), passes, outcome


@dataclass(frozen=True)
class _Rows:
    """All rows of a call side by side: logits [n, R], value [n, C, R], is a key seen [R].

    ``largest`` is max|v| over the keys that a row sees [R].
    """

    logits: Any
    value: Any
    sees: Any
    largest: Any


def _rows_of(call: Call) -> _Rows:
    logits = call.logits()
    seen = np.isfinite(logits)
    sees = np.any(seen, axis=-1)
    # Rows that see nothing are not judged; any logits will do.
    logits = np.where(sees[..., None], logits, 0.0)
    batch, heads, rows, keys = call.shape
    value = np.broadcast_to(
        call.row_values()[:, :, None], (batch, heads, rows, keys, call.value.shape[3])
    )
    size = np.where(seen, np.max(np.abs(value), axis=-1), 0.0)
    return _Rows(
        logits.reshape(-1, keys).T.astype(np.float32),
        np.moveaxis(value.reshape(-1, keys, value.shape[-1]), 0, -1),
        sees.ravel(),
        np.max(size, axis=-1).ravel(),
    )


@dataclass(frozen=True)
class Study:
    """One line of the report: a problem with a name for its machine and its path."""

    machine: FlushMachine
    path: str
    detail: str
    problem: Problem


def studies(tolerances: tuple[float, float] = (2.0**-3, 2.0**-12)) -> list[Study]:
    """Every machine on every path; calls with every family of bounds and every mask."""
    machines = [FlushMachine(d, r) for d in ("bfloat16", "float32") for r in (False, True)]
    settings = [(name, "none") for name in BOUND_CHOICES if name != "soft cap"]
    settings += [("auto", name) for name in MASKS[1:]]
    settings.append(("soft cap", "soft cap"))
    found: list[Study] = []
    for each in machines:
        found += row_studies(each, tolerances)
        for turn, (bounds, mask) in enumerate(settings):
            for verified in (False, True):
                call = CallProblem(each, tolerances[turn % 2], bounds, mask, verified)
                detail = f"mask: {mask}" if bounds == "auto" else f"bounds: {bounds}"
                found.append(Study(each, PATHS[2 + verified], detail, call))
        for verified in (False, True):
            # More keys than sentinels, so that blocks and ball have a say beside them.
            call = CallProblem(each, tolerances[0], verified=verified, num_keys=160)
            found.append(Study(each, PATHS[2 + verified], "160 keys", call))
    return found


def row_studies(
    each: FlushMachine, tolerances: tuple[float, float], fault: str | None = None
) -> list[Study]:
    """Rows with bounds given, and rows after the loop, of one machine."""
    return [
        Study(
            each,
            path,
            f"tolerance 2^{np.log2(tolerance):g}",
            RowProblem(each, tolerance, after_loop=path == "after loop", fault=fault),
        )
        for tolerance in tolerances
        for path in PATHS[:2]
    ]
