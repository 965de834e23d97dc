"""QK norm, rotary embedding and dot product, step by step, in float64 or rounded after every step.

Written apart from the package: it walks over pairs of channels and knows nothing of planes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Round = Callable[[Array], Array]

SMALLEST_NORMAL = {"bfloat16": 2.0**-126, "float16": 2.0**-14, "float32": 2.0**-126}


def exact(values: Array) -> Array:
    return values


def rounded(dtype: str, flush: bool = False) -> Round:
    """To the nearest number of the format; ``flush`` turns subnormal ones into 0."""
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def apply(values: Array) -> Array:
        nearest = values.astype(np.float32).astype(kind).astype(np.float64)
        if flush:
            nearest = np.where(np.abs(nearest) < SMALLEST_NORMAL[dtype], 0.0, nearest)
        return nearest

    return apply


def pairs_of(pairing: str, head_dim: int, rotary_dim: int) -> list[tuple[int, int]]:
    """The pairs of channels that are rotated together."""
    if pairing == "interleaved":
        return [(2 * i, 2 * i + 1) for i in range(rotary_dim // 2)]
    if pairing == "half":
        return [(i, i + rotary_dim // 2) for i in range(rotary_dim // 2)]
    return []


@dataclass(frozen=True)
class Side:
    """One norm: weights [H, D] as stored, biases [H, D] or None."""

    weight: Array
    bias: Array | None = None
    offset: float = 0.0
    centered: bool = False
    joint: bool = False
    epsilon: float = 1e-6

    def normed(self, x: Array, to: Round) -> Array:
        """[T, H, D] -> [T, H, D]."""
        axes = (-2, -1) if self.joint else -1
        if self.centered:
            x = x - np.mean(x, axis=axes, keepdims=True)
        mean_square = np.mean(x * x, axis=axes, keepdims=True)
        n = to(x / np.sqrt(mean_square + self.epsilon))
        y = to((self.offset + to(self.weight)) * n)
        return y if self.bias is None else to(y + to(self.bias))


@dataclass(frozen=True)
class Case:
    """Attention of one layer: ``queries`` and ``keys`` list the norms of its streams."""

    queries: tuple[Side, ...]
    keys: tuple[Side, ...]
    pairing: str = "half"
    rotary_dim: int = 0
    scale: float = 0.25
    rotary_factor: float = 1.0

    @property
    def shape(self) -> tuple[int, int]:
        heads, head_dim = self.queries[0].weight.shape
        return heads, head_dim

    def rotate(self, y: Array, angles: Array, to: Round) -> Array:
        """angles [T, pairs]."""
        out = y.copy()
        rotary_dim = self.rotary_dim or self.shape[1]
        for index, (a, b) in enumerate(pairs_of(self.pairing, self.shape[1], rotary_dim)):
            cos = to(self.rotary_factor * np.cos(angles[:, index, None]))
            sin = to(self.rotary_factor * np.sin(angles[:, index, None]))
            out[..., a] = to(to(y[..., a] * cos) - to(y[..., b] * sin))
            out[..., b] = to(to(y[..., b] * cos) + to(y[..., a] * sin))
        return out

    def logits(self, x: Array, y: Array, angles: Array, stream: int, to: Round) -> Array:
        """[T, H], bits: the logit of input x[t] as query and y[t] as key, head by head.

        Args:
            x, y: [T, H, D] and [T, H_kv, D].
            angles: [2, T, D // 2].
            stream: which pair of norms, counted over queries and keys.
        """
        query_side = self.queries[stream % len(self.queries)]
        key_side = self.keys[stream // len(self.queries) % len(self.keys)]
        query = self.rotate(query_side.normed(x, to), angles[0], to)
        key = self.rotate(key_side.normed(y, to), angles[1], to)
        group = query.shape[1] // key.shape[1]
        head_of = np.arange(query.shape[1]) // group
        products = np.sum(query * key[:, head_of], axis=-1)
        return np.asarray(np.log2(np.e) * self.scale * products)

    @property
    def streams(self) -> int:
        return len(self.queries) * len(self.keys)


def largest_logits(case: Case, rng: np.random.Generator, to: Round, steps: int = 300) -> Array:
    """[H], bits: the largest |logit| that a search over inputs and angles finds.

    Starts with random vectors, vectors in one channel and vectors in two, the same channels for
    query and key; then keeps whatever change of a vector or of an angle makes a logit larger.
    """
    best = np.zeros(case.shape[0])
    for stream in range(case.streams):
        for head in range(case.shape[0]):
            found = _climb(case, rng, to, stream, head, steps)
            best[head] = max(best[head], found)
    return best


def _climb(
    case: Case, rng: np.random.Generator, to: Round, stream: int, head: int, steps: int
) -> float:
    heads, head_dim = case.shape
    key_heads = case.keys[0].weight.shape[0]
    trials = 8 * head_dim
    hot = np.arange(trials) % head_dim
    second = rng.integers(0, head_dim, trials)
    parts = []
    for count, own in ((heads, head), (key_heads, head * key_heads // heads)):
        part = 1e-3 * rng.standard_normal((trials, count, head_dim))
        part[np.arange(trials), own, hot] = rng.choice([-1.0, 1.0], trials)
        part[np.arange(trials), own, second] += rng.standard_normal(trials) * (hot % 3 > 0)
        part[: head_dim // 2] = rng.standard_normal((head_dim // 2, count, head_dim))
        parts.append(part * 100.0)
    x, y = parts
    angles = rng.uniform(0.0, 2.0 * np.pi, (2, trials, head_dim // 2))
    # Half of the trials start aligned: the same rotation for both.
    angles[1, ::2] = angles[0, ::2]

    def value(x: Array, y: Array, angles: Array) -> Array:
        return np.abs(case.logits(x, y, angles, stream, to)[:, head])

    now = value(x, y, angles)
    for step in range(steps):
        size = 10.0 ** rng.uniform(-3.0, 0.5)
        new_x = x * (1.0 + size * rng.standard_normal(x.shape)) if step % 3 == 0 else x
        new_y = y * (1.0 + size * rng.standard_normal(y.shape)) if step % 3 == 1 else y
        turn = size * rng.standard_normal(angles.shape) * (step % 3 == 2)
        new = value(new_x, new_y, angles + turn)
        better = new > now
        x = np.where(better[:, None, None], new_x, x)
        y = np.where(better[:, None, None], new_y, y)
        angles = np.where(better[None, :, None], angles + turn, angles)
        now = np.maximum(now, new)
    return float(np.max(now))


def with_sides(case: Case, **changes: object) -> Case:
    """The case with the same change in all of its norms."""
    sides = [
        tuple(replace(side, **changes) for side in part)  # type: ignore[arg-type]
        for part in (case.queries, case.keys)
    ]
    return replace(case, queries=sides[0], keys=sides[1])
