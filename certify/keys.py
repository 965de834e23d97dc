"""What the certificate needs from the keys of one head, in numpy: the kernel's statistics pass.

Means over runs of keys, each key's squared distance to its mean, and from every class of positions
modulo 128 the farthest key, which becomes a sentinel. ``bounds.summarize_keys`` does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from certify.arithmetic import arithmetic_for, query_factor
from certify.bounds import (
    KEYS_PER_BLOCK,
    NUM_SENTINELS,
    KeySummary,
    RowBounds,
    norm_above,
    row_bounds,
    summarize_keys,
)
from certify.formats import Float32, split_for


@dataclass(frozen=True)
class HeadSummary:
    """The rows of one head's ``KeySummary``, the first ``num_sentinels`` of which are sentinels."""

    rows: KeySummary
    num_sentinels: int

    @property
    def num_blocks(self) -> int:
        """Rows between the sentinels and the ball."""
        return int(self.rows.log2_count.shape[0]) - self.num_sentinels - 1


def choose_sentinels(squared_distance: Float32) -> npt.NDArray[np.intp]:
    """Position of the farthest key in each class of positions modulo 128; no key appears twice.

    With fewer than 128 keys every key is one.
    """
    num_keys = squared_distance.shape[0]
    classes = min(num_keys, NUM_SENTINELS)
    rounds = -(-num_keys // classes)
    padded = np.full(rounds * classes, -1.0, np.float32)
    padded[:num_keys] = squared_distance
    farthest = np.argmax(padded.reshape(rounds, classes), axis=0)
    return farthest * classes + np.arange(classes)


def key_summary(
    key: Float32, dtype: str, *, sentinels: bool = True, statistics_block: int = KEYS_PER_BLOCK
) -> HeadSummary:
    """Summary of the keys [S_k, D] of one head.

    Args:
        key: float32 values of the keys that every row sees; at least one.
        dtype: the input's dtype, which decides how the kernel multiplies.
        sentinels: take the farthest keys out one by one.
        statistics_block: keys whose mean is one row of the summary.
    """
    num_keys = key.shape[0]
    statistics_block = min(statistics_block, num_keys)
    starts = np.arange(0, num_keys, statistics_block)
    count = np.minimum(num_keys - starts, statistics_block)
    block_of = np.arange(num_keys) // statistics_block
    block_mean = np.add.reduceat(key, starts, axis=0) / count[:, None].astype(np.float32)
    difference = key - block_mean[block_of]
    squared_distance = np.sum(difference * difference, axis=-1)
    spread_squared = np.maximum.reduceat(squared_distance, starts)
    chosen = choose_sentinels(squared_distance) if sentinels else np.zeros(0, np.intp)
    others = squared_distance.copy()
    others[chosen] = 0.0
    membership = (block_of[chosen] == np.arange(starts.size)[:, None]).astype(np.float32)
    rows = summarize_keys(
        block_mean=block_mean,
        block_count=count.astype(np.float32),
        radius_squared=np.maximum.reduceat(others, starts),
        spread_squared=spread_squared,
        sentinels=key[chosen],
        membership=membership,
        keys_per_block=statistics_block,
        kernel=arithmetic_for(dtype),
        split=lambda values: split_for(dtype, values),
        matmul=np.matmul,
        xp=np,
    )
    return HeadSummary(rows, chosen.size)


def scaled_query(query: Float32, dtype: str, scale: float) -> Float32:
    """q' [S_q, D] as the kernel multiplies it, bits per unit of key: the sum of its two halves."""
    high, low = split_for(dtype, query * np.float32(query_factor(scale)))
    return high + low


def bound_rows(
    query: Float32, summary: HeadSummary, *, dtype: str, scale: float, bounds: str = "auto"
) -> RowBounds:
    """Bounds on the log-sum-exp of the rows of one head, each [S_q], bits.

    Args:
        query: float32 values of the queries [S_q, D].
        summary: of the keys, with sentinels iff ``bounds`` names them or is "auto".
        bounds: "auto" or one of ``BOUND_NAMES`` other than "none".
    """
    queries = scaled_query(query, dtype, scale)
    rows = summary.rows
    result = row_bounds(
        np.matmul(rows.high + rows.low, queries.T),
        norm_above(queries, xp=np)[None, :],
        *(part[:, None] for part in (rows.log2_count, rows.reach_up, rows.reach_down)),
        num_sentinels=summary.num_sentinels,
        num_blocks=summary.num_blocks,
        xp=np,
        family=bounds.removesuffix("+sentinels"),
    )
    return RowBounds(*(part[0] for part in result))
