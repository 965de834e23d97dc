"""Rows built to hurt: logits at the cut-offs, values that make products flush."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from certify import theorem
from certify.arithmetic import BFLOAT16, FLOAT32, KernelArithmetic
from tests.certify.emulator import (
    CUT_OFFS_ONLY,
    SIX_PASSES,
    Float64,
    Machine,
    as_float32,
    log_sum_exp,
)

TOLERANCES = (2.0**-15, 2.0**-12, 2.0**-8, 2.0**-3, 0.5)

MACHINES: dict[str, tuple[KernelArithmetic, Machine]] = {
    "bfloat16": (BFLOAT16, CUT_OFFS_ONLY),
    "float32": (FLOAT32, SIX_PASSES),
}


@dataclass(frozen=True)
class Rows:
    """R rows with their own values: logits [R, n] bits, value [R, n, C], limits per row."""

    logits: Float64
    value: Float64
    limits: theorem.Limits
    tolerance: float
    kernel: KernelArithmetic

    @property
    def log_sum(self) -> Float64:
        return log_sum_exp(self.logits)


def limits_of(value: Float64, tolerance: float, kernel: KernelArithmetic) -> theorem.Limits:
    """The package's limits of rows whose values are [R, n, C]."""
    value_max = np.max(np.abs(value), axis=(1, 2)).astype(np.float32)
    with np.errstate(all="ignore"):
        return theorem.limits(
            value_max, num_keys=value.shape[1], tolerance=tolerance, kernel=kernel, xp=np
        )


def draw_rows(
    rng: np.random.Generator, rows: int, keys: int, tolerance: float, kernel: KernelArithmetic
) -> Rows:
    """A few keys carry a row; the others sit where p or p * v is about to be flushed.

    Half of the rows carry values that hurt most: the keys that are flushed all have one sign, those
    that carry the row the other.
    """
    channels = 3
    scale = np.exp2(rng.uniform(-70.0, 70.0, rows) * rng.choice([0.0, 0.2, 1.0], rows))
    carrying = (rng.uniform(size=(rows, keys)) < 2.0 / keys) | (np.arange(keys) == 0)
    size = np.exp2(
        -rng.exponential(1.0, (rows, keys, channels)) * rng.choice([0.0, 3.0], rows)[:, None, None]
    )
    sign = rng.choice([-1.0, 1.0], (rows, keys, channels))
    hurting = rng.uniform(size=rows) < 0.5
    sign = np.where(hurting[:, None, None], np.where(carrying, 1.0, -1.0)[..., None], sign)
    value = as_float32(scale[:, None, None] * size * sign)
    limits = limits_of(value, tolerance, kernel)
    # Where the lower side allows it, the carrying logits lie that far below the stabilizer at 0.
    depth = np.asarray(limits.lower_room, np.float64)
    by_product = rng.choice([0.0, 1.0], (rows, keys))
    by_product[::2] = by_product[::2, :1]
    slot = by_product * np.log2(np.max(np.abs(value), axis=2))
    slot = np.where(kernel.product_flushes > 1, slot + rng.choice([0.0, 8.0], (rows, keys)), slot)
    edge = -126.0 - slot + rng.choice([-0.3, -0.02, -1e-3, 1e-3], (rows, 1))
    edge = edge + rng.normal(0.0, 1.0, (rows, keys)) * rng.choice([0.0, 1.0], rows)[:, None]
    logits = np.where(carrying, -depth[:, None], np.minimum(edge, -depth[:, None]))
    shift = np.rint(rng.normal(0.0, 100.0, rows))[:, None]
    return Rows(as_float32(logits + shift), value, limits, tolerance, kernel)
