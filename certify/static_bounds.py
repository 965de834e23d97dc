"""Bounds on every logit that a model with QK norm can produce, from its weights alone.

Let n be a vector as its norm leaves it before weight and bias, so that sum_c n_c^2 <= N: the D
channels of a head (N = D), or all H heads normalised together, which may put everything into one
head (N = H D). The norm's eps only shrinks n. Then x_c = w_c n_c + b_c, and the rotary embedding
turns each of its planes P (a pair of channels) by some angle; without one every channel is its own
plane. With W_P = max_{c in P} |w_c| and beta_P = |b|_P,

    |x_P| <= W_P |n_P| + beta_P,      |x_P| is the same after the rotation,

and for a query x and a key y, by Cauchy-Schwarz in every plane and then over the planes,

    |sum_P x_P . y_P| <= sum_P (W_P |n_P| + beta_P) (W'_P |n'_P| + beta'_P)
        <= sqrt(N N') max_P W_P W'_P + sqrt(N) |W beta'| + sqrt(N') |W' beta| + beta . beta'.

Any angles will do, so multi-axis and unrotated tokens are covered; with equal N and no bias the
first term is reached (all of n in the plane of the maximum). If it is not known which channels make
a plane, the whole head is taken as one, which holds for every orthogonal map.

Rounding, with u the unit roundoff of the model's dtype: each rounding on the way (``ROUNDINGS``)
enlarges |x_P| by at most 1 + u. The rotation by float32 or rounded tables has norm at most
(1 + u) (the same two numbers, cos and sin, stand in both of its rows); rounding its two products
adds at most u (|cos| + |sin|) <= sqrt(2) u (1 + u) to that, rounding their sum 1 + u: four
roundings pay for it, and the difference between sqrt(2) and 2 for the error of the tables. A
YaRN or LongRoPE factor multiplies both tables. Values below the smallest normal number may be
flushed at each step; that is additive (``underflow``), below 1e-30 except in float16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from certify import arithmetic
from certify.formats import Float32

Float64 = npt.NDArray[np.float64]
Planes = npt.NDArray[np.intp]

ROUNDINGS = {"norm output": 1, "cast of the weight": 1, "product with the weight": 1}
BIAS_ROUNDINGS = {"sum with the bias": 1}
ROTATION_ROUNDINGS = {"tables": 1, "two products": 2, "their sum": 1}

VARIANCE_ERROR = 2.0**-7
"""A LayerNorm's variance is assumed not to come out low by more than this share: what a machine
makes of E[x^2] - E[x]^2 has no bound. An RMSNorm needs no assumption, as a sum of squares has no
cancellation; its statistics are taken in float32 in every listed class."""

QUERY_SPLIT = 2.0**-16
"""Relative: q' = log2(e) * scale * q in float32 (2^-24), then held as two halves (2^-17)."""


@dataclass(frozen=True)
class ModelFormat:
    """The format in which a model holds its activations.

    Attributes:
        roundoff: unit roundoff.
        smallest_normal: below it a value may be read or written as 0.
        largest: beyond it a value is infinite.
    """

    roundoff: float
    smallest_normal: float
    largest: float


FORMATS = {
    "bfloat16": ModelFormat(2.0**-8, 2.0**-126, (2.0 - 2.0**-7) * 2.0**127),
    "float16": ModelFormat(2.0**-11, 2.0**-14, 65504.0),
    "float32": ModelFormat(2.0**-24, 2.0**-126, arithmetic.FLOAT32_LARGEST),
}


@dataclass(frozen=True)
class NormedHeads:
    """What one norm makes of the heads of queries or keys.

    Attributes:
        weight: float64 [heads, D], |w| with (1 + w) already added up.
        bias: float64 [heads, D], |b|; zeros without one.
        channels: N, the number of channels normalised together.
        centered: the mean is taken off first (LayerNorm).
        biased: a bias is added, which rounds once more.
    """

    weight: Float64
    bias: Float64
    channels: int
    centered: bool = False
    biased: bool = False

    def repeated(self, groups: int) -> NormedHeads:
        """Every head ``groups`` times in a row, as grouped queries share keys."""
        weight, bias = (np.repeat(part, groups, axis=0) for part in (self.weight, self.bias))
        return NormedHeads(weight, bias, self.channels, self.centered, self.biased)


@dataclass(frozen=True)
class _Reach:
    """|x_P| <= root * weight_P * t_P + bias_P with sum_P t_P^2 <= 1, roundings included."""

    root: float
    weight: Float64
    bias: Float64


def channel_planes(head_dim: int) -> Planes:
    """Without a rotation: every channel is its own plane."""
    return np.arange(head_dim)


def interleaved_planes(head_dim: int) -> Planes:
    """Pairs (2i, 2i + 1), of one axis or of several."""
    return np.arange(head_dim) // 2


def half_planes(head_dim: int, rotary_dim: int | None = None) -> Planes:
    """Pairs (i, i + r/2) among the first r channels; the others are not rotated."""
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    planes = np.arange(head_dim)
    planes[rotary_dim // 2 : rotary_dim] = np.arange(rotary_dim // 2)
    return planes


def unknown_planes(head_dim: int) -> Planes:
    """A rotation whose pairs are not known: the head is one plane, max|w_q| max|w_k|."""
    return np.zeros(head_dim, np.intp)


def logit_bound(
    queries: Sequence[NormedHeads],
    keys: Sequence[NormedHeads],
    planes: Planes,
    *,
    scale: float,
    dtype: str,
    rotated: bool,
    rotary_factor: float = 1.0,
) -> Float32:
    """float32 [H], bits: no logit that the kernel computes is larger in size, whatever the input.

    Args:
        queries, keys: the norms whose outputs meet in this attention, each [H, D] (text streams
            have norms of their own); the bound holds for every pair.
        planes: intp [D], the plane that each channel lies in.
        scale: logits are scale * query . key (nats).
        dtype: of the model and of the kernel's input.
        rotated: a rotary embedding follows the norm.
        rotary_factor: what multiplies its cos and sin tables.
    """
    kernel = arithmetic.arithmetic_for(dtype)
    head_dim = planes.size
    unit = arithmetic.query_factor(abs(scale)) * (1.0 + QUERY_SPLIT)
    rounding = 1.0 + arithmetic.dot_slack(kernel.contraction_length(head_dim)) * (1.0 + 2.0**-6)
    factor = rotary_factor if rotated else 1.0
    sides = [
        [_reach(norm, planes, FORMATS[dtype], rotated, factor) for norm in norms]
        for norms in (queries, keys)
    ]
    largest = np.max([_product(x, y) for x in sides[0] for y in sides[1]], axis=0)
    bits = largest * (unit * rounding) + arithmetic.EVALUATION_SLACK
    return round_up(np.where(np.isnan(bits), np.inf, bits))


def soft_cap_bound(cap: float) -> float:
    """Bits: a logit after cap * tanh(logit / cap), natural units, where query . key is finite."""
    bits = abs(cap) * math.log2(math.e) * (1.0 + arithmetic.TANH_ERROR)
    bits = bits * (1.0 + arithmetic.COEFFICIENT_SLACK)
    return float(round_up(np.asarray(bits + arithmetic.EVALUATION_SLACK)))


def round_up(numbers: Float64) -> Float32:
    """The nearest float32 that is not smaller."""
    with np.errstate(over="ignore"):
        nearest = numbers.astype(np.float32)
    return np.where(nearest < numbers, np.nextafter(nearest, np.float32(np.inf)), nearest)


def _product(x: _Reach, y: _Reach) -> Float64:
    with np.errstate(over="ignore", invalid="ignore"):
        cross = x.root * np.linalg.norm(x.weight * y.bias, axis=-1)
        cross = cross + y.root * np.linalg.norm(y.weight * x.bias, axis=-1)
        both = np.max(x.weight * y.weight, axis=-1) * (x.root * y.root)
        return np.asarray(both + cross + np.sum(x.bias * y.bias, axis=-1))


def _reach(
    norm: NormedHeads, planes: Planes, model: ModelFormat, rotated: bool, factor: float
) -> _Reach:
    growth = (1.0 + model.roundoff) ** _count_roundings(norm, rotated)
    growth *= (1.0 + arithmetic.COEFFICIENT_SLACK) ** 2
    growth *= 1.0 + arithmetic.dot_slack(norm.channels + 8)
    growth /= math.sqrt(1.0 - VARIANCE_ERROR) if norm.centered else 1.0
    members = np.arange(planes.max() + 1)[:, None] == planes
    with np.errstate(over="ignore", invalid="ignore"):
        # Half the spacing of subnormal numbers: a stored weight may be rounded up to one.
        stored = norm.weight + model.smallest_normal * model.roundoff
        weight = np.max(np.where(members, stored[:, None, :], 0.0), axis=-1) * factor
        bias = np.linalg.norm(np.where(members, norm.bias[:, None, :], 0.0), axis=-1) * factor
        widest = np.sqrt(np.max(np.sum(members, axis=-1)))
        bias = bias + widest * underflow(weight, model, factor)
        root = math.sqrt(norm.channels)
        overflows = (root * weight + bias) * growth > model.largest
        weight, bias = weight * growth, bias * growth
    weight = np.where(np.any(overflows | np.isnan(weight), axis=-1, keepdims=True), np.inf, weight)
    return _Reach(root, weight, bias)


def underflow(weight: Float64, model: ModelFormat, factor: float) -> Float64:
    """What flushing can add to a channel, in a plane whose largest weight is ``weight``.

    eta (w + 3) for norm output, product, stored bias and sum, times |cos| + |sin| <= 3/2, and eta
    for each of the rotation's products and their sum.
    """
    return model.smallest_normal * (2.0 * weight + 5.0 * factor + 4.0)


def _count_roundings(norm: NormedHeads, rotated: bool) -> int:
    steps = dict(ROUNDINGS)
    steps |= BIAS_ROUNDINGS if norm.biased else {}
    steps |= ROTATION_ROUNDINGS if rotated else {}
    return sum(steps.values())
