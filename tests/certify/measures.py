"""What the checks measure: errors against the machine, distances to the log-sum-exp."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

import certify
from certify import bounds, keys, theorem
from certify.formats import Float32
from certify.rows import HeadBounds, Queries
from tests.certify import emulator, families
from tests.certify.emulator import ORDERS, Float64, Machine, Result, as_float32
from tests.certify.families import SCALE, as_dtype, call_arrays
from tests.certify.theorem_cases import MACHINES, TOLERANCES, Rows, draw_rows

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


def kernel_query(query: Float32, dtype: str) -> Float32:
    """log2(e) * scale * query as the kernel holds it: float32, or two bfloat16 halves."""
    scaled = query * np.float32(math.log2(math.e) * SCALE)
    if dtype != "bfloat16":
        return scaled
    high = scaled.astype(ml_dtypes.bfloat16).astype(np.float32)
    low = (scaled - high).astype(ml_dtypes.bfloat16).astype(np.float32)
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


def bound_rows(
    query: Float32, key: Float32, dtype: str, bound: str, *, statistics_block: int
) -> bounds.RowBounds:
    """S and L of queries [S_q, D] over keys [S_k, D] by one family."""

    def summarize(sentinels: bool) -> keys.HeadKeys:
        return keys.head_keys(key, dtype, sentinels=sentinels, statistics_block=statistics_block)

    head = HeadBounds(summarize, None, dtype, key.shape[0])
    return head.evaluate(Queries(keys.scaled_query(query, dtype, SCALE)), bound)


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
        row = bound_rows(query, key, dtype, bound, statistics_block=256)
        scaled = kernel_query(query, dtype)
        sums = [
            emulator.log_sum_exp(kernel_logits(scaled, key, how))
            for how in ("exact", "matmul", "reversed")
        ]
    above = row.upper.astype(np.float64) - np.max(sums, axis=0)
    below = np.min(sums, axis=0) - row.lower.astype(np.float64)
    return above, below


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
