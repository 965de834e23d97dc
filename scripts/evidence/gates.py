"""The published gate that a certificate is compared with, by its own formulas.

Centred keys, m = ceil(|q| max|k|) - 88 for every row, and a head is accepted when
max|q| max|k| <= 213 bits. It keeps the largest probability of a row from being flushed and says
nothing of the values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evidence import machine

ACCEPTED_BITS = 213.0
BELOW_THE_BOUND = 88.0


@dataclass(frozen=True)
class GateVerdict:
    """Whether the gate accepts a block of rows, and its stabilizers [R] on the centred logits."""

    accepts: bool
    bound: npt.NDArray[np.float64]
    stabilizer: npt.NDArray[np.float64]
    logits: npt.NDArray[np.float64]


def centred_gate(query: npt.NDArray[np.float32], key: npt.NDArray[np.float32]) -> GateVerdict:
    """The gate on the queries [R, D] of a block and the keys [n, D]; query . key is in bits."""
    double, centred = query.astype(np.float64), key - key.mean(axis=0, dtype=np.float64)
    bound = np.linalg.norm(double, axis=1) * np.max(np.linalg.norm(centred, axis=1))
    return GateVerdict(
        accepts=bool(np.max(bound) <= ACCEPTED_BITS),
        bound=bound,
        stabilizer=np.ceil(bound) - BELOW_THE_BOUND,
        logits=double @ centred.T,
    )


def fixed_stabilizer_errors(
    logits: npt.NDArray[np.float64],
    value: npt.NDArray[np.float32],
    stabilizer: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Error / max|v| of rows of logits [R, n] with values [n, C] where only cut-offs hurt: [R].

    Products below 2^-126 are 0, as are sums of them; no rounding.
    """
    probability = machine.flush(np.exp2(logits - stabilizer[:, None]))
    row_sum = machine.flush(probability.sum(axis=1))
    double = value.astype(np.float64)
    worst = np.zeros(len(logits))
    weights = machine.softmax(logits.T)
    with np.errstate(all="ignore"):
        for channel in range(value.shape[1]):
            products = machine.flush(probability * double[:, channel])
            out = machine.flush(machine.flush(products.sum(axis=1)) / row_sum)
            exact = double[:, channel] @ weights
            worst = np.maximum(worst, np.nan_to_num(np.abs(out - exact), nan=np.inf))
    return worst / np.max(np.abs(double))
