"""When a bound on every logit, known before the model runs, is worth more than statistics."""

from __future__ import annotations

from typing import Any

import numpy as np

from certify import theorem
from certify.arithmetic import KernelArithmetic
from certify.bounds import promised_bounds


def promise_certifies(
    logit_bound: Any, *, num_keys: int, tolerance: float, kernel: KernelArithmetic
) -> bool:
    """Whether bounds [H] (bits) certify every head at the values that allow most, max|v| = 1.

    A promise that does not would leave every block to the check after the loop, with a worse
    stabilizer than statistics of the keys give.
    """
    bound = np.asarray(logit_bound, np.float32)
    rows = promised_bounds(bound, num_keys=num_keys, xp=np)
    limits = theorem.limits(
        np.ones_like(bound), num_keys=num_keys, tolerance=tolerance, kernel=kernel, xp=np
    )
    with np.errstate(invalid="ignore"):
        return bool(np.all(rows.upper - rows.lower <= limits.budget))
