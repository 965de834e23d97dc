"""Named families of queries, keys and values, each a kind of head that exists or can be built.

Every family takes a generator, the number of queries and keys and the head dimension, and gives
float32 arrays query [S_q, D], key [S_k, D] and value [S_k, D] whose logits are query . key bits.
``draw`` stretches the queries by what ``SCALE`` takes back, so that scaled queries have bits beyond
those of bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from certify.formats import Float32, FloatArray, round_to_bfloat16

STRETCH = 1.0 / 0.7
SCALE = 1.0 / (STRETCH * math.log2(math.e))

Head = tuple[Float32, Float32, Float32]
Family = Callable[[np.random.Generator, int, int, int], Head]


def _unit(rng: np.random.Generator, dim: int) -> Float32:
    direction = rng.standard_normal(dim)
    return (direction / np.linalg.norm(direction)).astype(np.float32)


def gaussian(bits: float) -> Family:
    """Independent normal queries and keys whose logits have this standard deviation."""

    def draw(rng: np.random.Generator, rows: int, keys: int, dim: int) -> Head:
        factor = math.sqrt(bits / math.sqrt(dim))
        normal = rng.standard_normal
        query = factor * normal((rows, dim))
        key = factor * normal((keys, dim))
        return _float32(query, key, normal((keys, dim)))

    return draw


def student(bits: float) -> Family:
    """Heavy tails: three degrees of freedom."""

    def draw(rng: np.random.Generator, rows: int, keys: int, dim: int) -> Head:
        factor = math.sqrt(bits / (3.0 * math.sqrt(dim)))
        query = factor * rng.standard_t(3, (rows, dim))
        key = factor * rng.standard_t(3, (keys, dim))
        return _float32(query, key, rng.standard_normal((keys, dim)))

    return draw


def sink(side: str, bits: float = 500.0, count: int = 1) -> Family:
    """``count`` huge keys; queries lie along them (aligned), opposite (anti) or both (mixed)."""

    def draw(rng: np.random.Generator, rows: int, keys: int, dim: int) -> Head:
        query, key, value = gaussian(2.0)(rng, rows, keys, dim)
        direction = _unit(rng, dim)
        sign = {"aligned": 1.0, "anti": -1.0, "mixed": 0.0}[side]
        signs = np.full(rows, sign) if sign else rng.choice([-1.0, 1.0], rows)
        strength = signs * rng.uniform(0.8, 1.2, rows) * math.sqrt(dim) / 4.0
        query += (strength[:, None] * direction).astype(np.float32)
        where = rng.choice(keys, min(count, keys), replace=False)
        key[where] += np.float32(bits * 4.0 / math.sqrt(dim)) * direction
        value[where] *= np.float32(0.01)
        return _float32(query, key, value)

    return draw


def offset(bits: float) -> Family:
    """Every key holds the same large vector."""

    def draw(rng: np.random.Generator, rows: int, keys: int, dim: int) -> Head:
        query, key, value = gaussian(3.0)(rng, rows, keys, dim)
        length = np.mean(np.linalg.norm(query, axis=1))
        return _float32(query, key + bits / length * _unit(rng, dim), value)

    return draw


def outlier_channel(size: float) -> Family:
    """One channel of the keys is larger than the others."""

    def draw(rng: np.random.Generator, rows: int, keys: int, dim: int) -> Head:
        query, key, value = gaussian(2.0)(rng, rows, keys, dim)
        key[:, int(rng.integers(dim))] *= np.float32(size)
        return _float32(query, key, value)

    return draw


def orthogonal_outliers(rng: np.random.Generator, rows: int, keys: int, dim: int) -> Head:
    """Two opposite keys of norm 300 orthogonal to every query, values of 0.02 (field case 14)."""
    query = rng.standard_normal((rows, dim))
    query[:, 0] = 0.0
    query *= 0.7 / np.linalg.norm(query, axis=1, keepdims=True)
    key = rng.standard_normal((keys, dim))
    key *= 0.2 / np.linalg.norm(key, axis=1, keepdims=True)
    where = rng.choice(keys, min(2, keys), replace=False)
    key[where] = 0.0
    key[where, 0] = [300.0, -300.0][: len(where)]
    value = 0.02 * rng.choice([-1.0, 1.0], (keys, dim)) * rng.uniform(0.5, 1.0, (keys, dim))
    return _float32(query, key, value)


def beside_orthogonal_keys(bits: float, reach: float = 210.0) -> Family:
    """Gaussian logits; two opposite keys orthogonal to every query make |q| |k| reach ``reach``."""

    def draw(rng: np.random.Generator, rows: int, keys: int, dim: int) -> Head:
        query, key, value = gaussian(bits)(rng, rows, keys, dim)
        query[:, 0] = 0.0
        where = rng.choice(keys, min(2, keys), replace=False)
        size = reach / float(np.max(np.linalg.norm(query, axis=1)))
        key[where] = 0.0
        key[where, 0] = [size, -size][: len(where)]
        return _float32(query, key, value)

    return draw


def identical(bits: float) -> Family:
    """All keys are one vector: radius 0, so that only slack keeps S and L apart."""

    def draw(rng: np.random.Generator, rows: int, keys: int, dim: int) -> Head:
        query = rng.standard_normal((rows, dim))
        key = np.tile(rng.standard_normal(dim), (keys, 1))
        factor = math.sqrt(bits / math.sqrt(dim))
        return _float32(factor * query, factor * key, rng.standard_normal((keys, dim)))

    return draw


def opposite(bits: float) -> Family:
    """Half of the keys point along the query, half against it: Cauchy-Schwarz is attained."""

    def draw(rng: np.random.Generator, rows: int, keys: int, dim: int) -> Head:
        direction = _unit(rng, dim)
        root = math.sqrt(bits)
        query = root * rng.uniform(0.9, 1.0, rows)[:, None] * direction
        key = root * np.where(np.arange(keys) % 2, 1.0, -1.0)[:, None] * direction
        return _float32(query, key, rng.standard_normal((keys, dim)))

    return draw


def two_runs(rng: np.random.Generator, rows: int, keys: int, dim: int) -> Head:
    """Runs of equal keys at two opposite points: blocks without radius, far from the ball."""
    direction = _unit(rng, dim)
    run = 1024 if keys >= 2048 else 256
    side = np.where(np.arange(keys) // run % 2, 30.0, -30.0)
    query = rng.uniform(5.0, 10.0, rows)[:, None] * direction
    return _float32(query, side[:, None] * direction, rng.standard_normal((keys, dim)))


def identical_beside_a_sink(rng: np.random.Generator, rows: int, keys: int, dim: int) -> Head:
    """A key so large that the mean of the others, once it is out, has lost most of its bits."""
    query = np.zeros((rows, dim))
    query[:, 0] = rng.uniform(20.0, 40.0, rows)
    key = np.tile(rng.uniform(0.2, 0.4, dim) * rng.choice([-1.0, 1.0]), (keys, 1))
    key[int(rng.integers(keys)), 0] = -(10.0 ** rng.uniform(5.5, 7.0))
    return _float32(query, key, rng.standard_normal((keys, dim)))


def constant(bits: float) -> Family:
    """All products of a logit are equal, so that a sequential sum rounds one way every time."""

    def draw(rng: np.random.Generator, rows: int, keys: int, dim: int) -> Head:
        query = np.tile(rng.uniform(0.5, 1.0, (rows, 1)) * math.sqrt(bits / dim), (1, dim))
        key = np.full((keys, dim), math.sqrt(bits / dim))
        return _float32(query, key, rng.standard_normal((keys, dim)))

    return draw


def clusters(rng: np.random.Generator, rows: int, keys: int, dim: int) -> Head:
    """Runs of keys around far-apart centers, so that block means lie far from the mean of all."""
    query, key, value = gaussian(1.0)(rng, rows, keys, dim)
    centers = 6.0 * rng.standard_normal((1 + keys // 50, dim))
    return _float32(query, key + centers[np.arange(keys) // 50], value)


def many_sinks(rng: np.random.Generator, rows: int, keys: int, dim: int) -> Head:
    """A quarter of the keys, up to 128, stand out: taking them out moves every mean."""
    return sink("aligned", bits=5.0, count=min(128, max(1, keys // 4)))(rng, rows, keys, dim)


def zeros(rng: np.random.Generator, rows: int, keys: int, dim: int) -> Head:
    """Logits of 0: the log-sum-exp is log2 n exactly."""
    return _float32(
        rng.standard_normal((rows, dim)), np.zeros((keys, dim)), rng.standard_normal((keys, dim))
    )


def scaled(query_size: float, key_size: float) -> Family:
    """Numbers at the ends of float32's range."""

    def draw(rng: np.random.Generator, rows: int, keys: int, dim: int) -> Head:
        normal = rng.standard_normal
        query, key = query_size * normal((rows, dim)), key_size * normal((keys, dim))
        return _float32(query, key, normal((keys, dim)))

    return draw


FAMILIES: dict[str, Family] = {
    "gaussian 1": gaussian(1.0),
    "gaussian 15": gaussian(15.0),
    "gaussian 60": gaussian(60.0),
    "student 5": student(5.0),
    "sink aligned": sink("aligned"),
    "sink anti": sink("anti"),
    "sink mixed": sink("mixed"),
    "four sinks": sink("mixed", count=4),
    "many sinks": many_sinks,
    "offset 30": offset(30.0),
    "offset 5000": offset(5000.0),
    "outlier channel": outlier_channel(30.0),
    "orthogonal outliers": orthogonal_outliers,
    "identical 3": identical(3.0),
    "identical 3000": identical(3000.0),
    "opposite 1000": opposite(1000.0),
    "two runs": two_runs,
    "identical beside a sink": identical_beside_a_sink,
    "constant 3000": constant(3000.0),
    "clusters": clusters,
    "zeros": zeros,
    "tiny keys": scaled(1.0, 1e-25),
    "subnormal keys": scaled(1e15, 1e-40),
    "underflowing squares": scaled(1e17, 1e-23),
    "huge keys": scaled(1e-15, 1e15),
}


def _float32(*arrays: object) -> Head:
    query, key, value = (np.asarray(array, np.float32) for array in arrays)
    return query, key, value


def draw(family: Family, rng: np.random.Generator, rows: int, keys: int, dim: int) -> Head:
    """A head of the family for calls with ``scale=SCALE``."""
    query, key, value = family(rng, rows, keys, dim)
    return query * np.float32(STRETCH), key, value


def as_dtype(array: Float32, dtype: str) -> FloatArray:
    """The array in a dtype; bfloat16 by dropping bits."""
    if dtype == "bfloat16":
        return FloatArray(round_to_bfloat16(array), dtype)
    if dtype == "float16":
        within = np.clip(array, -6e4, 6e4)
        return FloatArray(within.astype(np.float16).astype(np.float32), dtype)
    return FloatArray(array, dtype)


def call_arrays(heads: list[Head], dtype: str) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Heads -> query, key, value [1, S, H, D]."""
    stacked = (np.stack([head[part] for head in heads], axis=1)[None] for part in range(3))
    query, key, value = (as_dtype(array, dtype) for array in stacked)
    return query, key, value
