"""Attention with a fixed stabilizer on a machine whose faults are switched on one by one.

Written apart from the package, from the definition alone. Everything is float64; a ``Machine`` says
what is rounded, and every place that the theorem names is cut off: a number below 2^-126 becomes 0,
one at 2^128 or above becomes infinite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

SMALLEST = 2.0**-126
LARGEST = 2.0**128
ORDERS = ("sequential", "reversed", "eight", "tree")


def as_float32(numbers: Any) -> Float64:
    """The nearest float32 numbers, held in float64."""
    return np.asarray(numbers, np.float32).astype(np.float64)


def cut(numbers: Any) -> Float64:
    """Flush to zero below 2^-126, overflow to infinity from 2^128 on."""
    numbers = np.asarray(numbers, np.float64)
    numbers = np.where(np.abs(numbers) < SMALLEST, 0.0, numbers)
    return np.where(np.abs(numbers) >= LARGEST, np.copysign(np.inf, numbers), numbers)


def round_bits(numbers: Any, bits: int) -> Float64:
    """Round to ``bits`` significant bits, ties to even; no limit on the exponent."""
    fraction, exponent = np.frexp(np.asarray(numbers, np.float64))
    rounded = np.where(np.isfinite(fraction), np.rint(fraction * 2.0**bits) / 2.0**bits, fraction)
    return np.ldexp(rounded, exponent)


def _exactly(numbers: Any) -> Float64:
    return np.asarray(numbers, np.float64)


def to_single(numbers: Any) -> Float64:
    return round_bits(numbers, 24)


def to_half(numbers: Any) -> Float64:
    """To bfloat16's eight significant bits."""
    return round_bits(numbers, 8)


@dataclass(frozen=True)
class Machine:
    """How results are rounded; cut-offs are there in every machine."""

    single: Callable[[Any], Float64]
    probability: Callable[[Any], Float64]
    output: Callable[[Any], Float64]
    passes: int = 1


CUT_OFFS_ONLY = Machine(_exactly, _exactly, _exactly)
SIX_PASSES = Machine(_exactly, _exactly, _exactly, passes=6)
ROUNDED_BFLOAT16 = Machine(to_single, to_half, to_half)
ROUNDED_FLOAT32 = Machine(to_single, to_single, to_single, passes=6)


@dataclass(frozen=True)
class Result:
    """Row sum [R], numerator and output [R, C] as the machine left them."""

    row_sum: Float64
    numerator: Float64
    out: Float64

    @property
    def finite(self) -> npt.NDArray[np.bool_]:
        """bool [R]: the look at every component of numerator and output."""
        return np.all(np.isfinite(self.numerator) & np.isfinite(self.out), axis=1)


def sum_keys(terms: Float64, machine: Machine, order: str) -> Float64:
    """Sum [R, n, ...] over the keys; every partial sum is rounded and cut."""

    def add(first: Float64, second: Float64) -> Float64:
        return cut(machine.single(first + second))

    def chain(parts: Float64) -> Float64:
        total = parts[:, 0]
        for key in range(1, parts.shape[1]):
            total = add(total, parts[:, key])
        return total

    if order == "eight":
        return chain(np.stack([chain(terms[:, i::8]) for i in range(min(8, terms.shape[1]))], 1))
    if order == "tree":
        while terms.shape[1] > 1:
            half = terms.shape[1] // 2
            paired = add(terms[:, :half], terms[:, half : 2 * half])
            terms = np.concatenate([paired, terms[:, 2 * half :]], axis=1)
        return terms[:, 0]
    return chain(terms[:, ::-1] if order == "reversed" else terms)


def _bfloat16_parts(numbers: Float64) -> list[Float64]:
    """Three bfloat16 numbers that add up to a float32 number; each is cut where it is made."""
    parts, rest = [], numbers
    for _ in range(3):
        part = cut(to_half(rest))
        parts.append(part)
        rest = np.where(np.isfinite(part), rest - part, 0.0)
    return parts


def _products(probability: Float64, value: Float64, machine: Machine) -> tuple[Float64, Float64]:
    """Cut products [R, passes * n, C], and what the omitted passes would add [R, C]."""
    if machine.passes == 1:
        product = cut(machine.single(cut(machine.probability(probability))[..., None] * value))
        return product, np.zeros(1)
    left, right = _bfloat16_parts(probability), _bfloat16_parts(value)
    pairs = ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0))
    products = [cut(machine.single(left[i][..., None] * right[j])) for i, j in pairs]
    if machine.single is not _exactly:
        return np.concatenate(products, axis=1), np.zeros(1)
    # Omitted passes are rounding, not range: a machine of cut-offs only gets them for free.
    rest = probability - left[0] - left[1] - left[2]
    omitted = np.where(np.abs(rest) >= SMALLEST, rest, 0.0)[..., None] * value
    for i, j in ((1, 2), (2, 1), (2, 2)):
        omitted = omitted + left[i][..., None] * right[j]
    return np.concatenate(products, axis=1), np.sum(omitted, axis=1)


def attend(
    logits: Float64,
    value: Float64,
    stabilizer: Float64,
    machine: Machine,
    order: str = "sequential",
) -> Result:
    """Fixed-stabilizer attention of rows [R, n] with values [R, n, C]; logits in bits."""
    with np.errstate(all="ignore"):
        argument = machine.single(logits - stabilizer[:, None])
        probability = cut(machine.single(np.exp2(argument)))
        row_sum = sum_keys(probability, machine, order)
        products, omitted = _products(probability, cut(value), machine)
        numerator = sum_keys(products, machine, order) + omitted
        reciprocal = cut(machine.single(1.0 / row_sum))
        out = cut(machine.output(numerator * reciprocal[:, None]))
    return Result(row_sum, numerator, out)


def log_sum_exp(logits: Float64) -> Float64:
    """log2 sum 2^logit over the last axis, float64."""
    largest = np.max(logits, axis=-1)
    return largest + np.log2(np.sum(np.exp2(logits - largest[..., None]), axis=-1))


def weights(logits: Float64) -> Float64:
    """The exact softmax in base 2 over the last axis."""
    shifted = np.exp2(logits - np.max(logits, axis=-1, keepdims=True))
    return shifted / np.sum(shifted, axis=-1, keepdims=True)


def oracle(logits: Float64, value: Float64) -> Float64:
    """Attention in float64, shifted by the row maximum: [R, C]."""
    return np.einsum("rn,rnc->rc", weights(logits), value)


def relative_error(result: Result, logits: Float64, value: Float64) -> Float64:
    """[R]: largest |o - o_exact| over the channels, relative to the row's max|v|."""
    largest = np.max(np.abs(value), axis=(1, 2))
    with np.errstate(invalid="ignore"):
        error = np.max(np.abs(result.out - oracle(logits, value)), axis=1)
    error = np.where(np.isnan(error), np.inf, error)
    return error / np.where(largest > 0, largest, 1.0)


def rounding_bound(logits: Float64, value: Float64, machine: Machine) -> Float64:
    """[R]: E_round of the design, relative to max|v|: what any attention in this precision rounds.

    u_p sum_j w_j |v_j| + 2 e_exp2 V + 2 gamma_n V + u_out |o|, with exp2 rounded once; six passes
    have a sum six times as long and omit products of 2^-24.
    """
    unit, half = 2.0**-24, 2.0**-8
    terms = machine.passes * logits.shape[1] + 8
    gamma = terms * unit / (1.0 - terms * unit)
    largest = np.max(np.abs(value), axis=(1, 2))
    mean_size = np.max(np.einsum("rn,rnc->rc", weights(logits), np.abs(value)), axis=1)
    out_size = np.max(np.abs(oracle(logits, value)), axis=1)
    low = half if machine.passes == 1 else 4.0 * unit
    total = low * mean_size + (2.0 * unit + 2.0 * gamma) * largest + low * out_size
    return total / np.where(largest > 0, largest, 1.0)
