"""An accelerator that flushes to zero, emulated; the second of two, written apart from the tests'.

Keys lie along the first axis and rows along the last; one Python step per key, so that every
partial sum is cut (and rounded, where the machine rounds) as it is made. ``exact`` machines work in
float64 and only cut; ``rounded`` ones use the host's float32 and ml_dtypes' bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]

TINY = 2.0**-126
HUGE = 2.0**128
UNIT = 2.0**-24
"""Unit roundoff of float32."""
HALF_UNIT = 2.0**-8
"""Unit roundoff of bfloat16."""

PAIRS = ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0))
"""Which parts of p and v a float32 product at the highest precision multiplies."""


@dataclass(frozen=True)
class FlushMachine:
    """Name of the input dtype ("bfloat16" or "float32") and whether results are rounded."""

    dtype: str
    rounded: bool

    @property
    def name(self) -> str:
        return f"{self.dtype}, {'cut-offs and rounding' if self.rounded else 'cut-offs only'}"


@dataclass(frozen=True)
class Outcome:
    """Row sum [R] and output [C, R] in float64, and whether the look found all finite, bool [R]."""

    row_sum: Float64
    out: Float64
    finite: npt.NDArray[np.bool_]


def flush(numbers: Array) -> Array:
    """0 for what is below 2^-126, infinite from 2^128 on; in place."""
    size = np.abs(numbers)
    numbers *= size >= TINY
    if numbers.dtype == np.float64:
        over = size >= HUGE
        if over.any():
            numbers[over] = np.copysign(np.inf, numbers[over])
    return numbers


def _eight_bits(numbers: Float64) -> Float64:
    """The nearest number of eight significant bits, by Veltkamp's splitting in float64."""
    stretched = numbers * (2.0**45 + 1.0)
    return stretched - (stretched - numbers)


def _to_bfloat16(numbers: Array) -> Array:
    return flush(numbers.astype(ml_dtypes.bfloat16).astype(np.float32))


def _parts(numbers: Array, exact: bool) -> list[Array]:
    """Three bfloat16 parts of each number, flushed."""
    parts, rest = [], numbers
    for _ in range(3):
        part = _eight_bits(rest) if exact else rest.astype(ml_dtypes.bfloat16).astype(np.float32)
        parts.append(flush(part.copy()))
        rest = rest - part
    return parts


def _sum(terms: list[Array], order: str) -> Array:
    """The terms' sum, each partial sum cut: one after the other, or in eight strands."""
    strands = terms
    if order == "strands":
        strands = [_sum(terms[start::8], "sequence") for start in range(min(8, len(terms)))]
    total = strands[0].copy()
    for term in strands[1:]:
        total += term
        flush(total)
    return total


def _read(numbers: Float64, parts: list[Float64]) -> Float64:
    """A number as its flushed parts give it back; bits beyond the parts are rounding, and stay."""
    total = parts[0] + parts[1] + parts[2]
    beyond = numbers - total
    return total + np.where(np.abs(beyond) >= TINY, beyond, 0.0)


def _kept(probability: Float64, value: Float64) -> Float64:
    """p v of one key less all that six passes flush, in exact arithmetic: [C, R]."""
    left, right = _parts(probability, exact=True), _parts(value, exact=True)
    kept = _read(probability, left) * _read(value, right)
    for i, j in PAIRS:
        product = left[i] * right[j]
        kept -= np.where(np.abs(product) < TINY, product, 0.0)
    return kept


def run(
    machine: FlushMachine,
    logits: Array,
    value: Array,
    stabilizer: Array,
    order: str = "sequence",
) -> Outcome:
    """Attention of R rows with a fixed stabilizer.

    Args:
        logits: float32 numbers [n, R], bits.
        value: float32 numbers [n, C, R].
        stabilizer: float32 numbers [R], bits.
        order: "sequence" or "strands" (eight partial sums).
    """
    kind = np.float32 if machine.rounded else np.float64
    with np.errstate(all="ignore"):
        argument = logits.astype(kind) - stabilizer.astype(kind)
        # float32 by way of float64: rounded once, as a good exp2 is.
        probability = flush(np.exp2(argument.astype(np.float64)).astype(kind))
        values = flush(value.astype(kind))
        row_sum = _sum(list(probability), order)
        if machine.dtype == "bfloat16":
            weights = _to_bfloat16(probability) if machine.rounded else probability
            numerator = _sum([flush(p * v) for p, v in zip(weights, values, strict=True)], order)
        elif machine.rounded:
            numerator = _six_passes(probability, values, order)
        else:
            kept = [_kept(p, v) for p, v in zip(probability, values, strict=True)]
            numerator = _sum([flush(product) for product in kept], order)
        reciprocal = flush(np.asarray(1.0 / row_sum, kind))
        out = numerator * reciprocal
        if machine.rounded and machine.dtype == "bfloat16":
            out = _to_bfloat16(out)
        out = flush(np.asarray(out, kind))
    finite = np.all(np.isfinite(numerator) & np.isfinite(out), axis=0)
    return Outcome(row_sum.astype(np.float64), out.astype(np.float64), finite)


def _six_passes(probability: Array, values: Array, order: str) -> Array:
    """Six sums of bfloat16 products, each pass on its own, then added smallest first: [C, R]."""
    left, right = _parts(probability, exact=False), _parts(values, exact=False)
    passes = [
        _sum([flush(p * v) for p, v in zip(left[i], right[j], strict=True)], order)
        for i, j in reversed(PAIRS)
    ]
    return _sum(passes, "sequence")


def softmax(logits: Array) -> Float64:
    """Exact weights of base 2, float64 [n, R]."""
    shifted = np.exp2(logits.astype(np.float64) - np.max(logits, axis=0).astype(np.float64))
    return shifted / np.sum(shifted, axis=0)


def log_sum_exp(logits: Array) -> Float64:
    """log2 sum 2^logit over the keys, float64 [R]."""
    largest = np.max(logits, axis=0).astype(np.float64)
    return largest + np.log2(np.sum(np.exp2(logits.astype(np.float64) - largest), axis=0))


def errors(outcome: Outcome, logits: Array, value: Array, unit: Array | None = None) -> Float64:
    """|o - o_exact| of each row, the worst channel, in units of ``unit`` or of max|v|: [R].

    inf where the output is NaN.
    """
    exact = np.einsum("nr,ncr->cr", softmax(logits), value.astype(np.float64))
    with np.errstate(invalid="ignore"):
        error = np.max(np.abs(outcome.out - exact), axis=0)
    size = np.max(np.abs(value), axis=(0, 1)) if unit is None else unit
    size = size.astype(np.float64)
    return np.where(np.isnan(error), np.inf, error) / np.where(size > 0, size, 1.0)


def rounding_errors(
    machine: FlushMachine, logits: Array, value: Array, unit: Array | None = None
) -> Float64:
    """E_round of each row in units of ``unit`` or of max|v|: what any attention rounds; [R].

    u_p sum_j w_j |v_j| + 2 e_exp2 V + 2 gamma_n V + u_out |o|, V = max|v| over the keys that the
    row sees. 0 for machines that do not round.
    """
    if not machine.rounded:
        return np.zeros(logits.shape[1])
    six = machine.dtype == "float32"
    count = (6 if six else 1) * logits.shape[0] + 8
    gamma = count * UNIT / (1.0 - count * UNIT)
    low = 4.0 * UNIT if six else HALF_UNIT
    weights = softmax(logits)
    double = np.where(np.isneginf(logits)[:, None], 0.0, value.astype(np.float64))
    mean_size = np.max(np.einsum("nr,ncr->cr", weights, np.abs(double)), axis=0)
    out = np.max(np.abs(np.einsum("nr,ncr->cr", weights, double)), axis=0)
    largest = np.max(np.abs(double), axis=(0, 1))
    total = low * mean_size + (2.0 * UNIT + 2.0 * gamma) * largest + low * out
    size = largest if unit is None else unit.astype(np.float64)
    return total / np.where(size > 0, size, 1.0)
