"""The rows that a recording kept, bounded again from their queries and keys."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from certify import arithmetic
from certify.bounds import RECORDED_BOUNDS, RowBounds
from certify.formats import Float32
from certify.judgement import AGREEMENT
from certify.keys import HeadKeys, head_keys, scaled_query
from certify.recorded_layers import KeptRows, LayerPasses, LayerSettings
from certify.rows import HeadBounds, Queries
from certify.visibility import Masks, visible_rows

RELATIVE_AGREEMENT = 2.0**-10
"""What a gap from the device and the same in numpy may differ by beside ``AGREEMENT``: the slack
for rounding is part of a gap, and grows with it."""


@dataclass(frozen=True)
class KeptCheck:
    """What became of one head's kept rows.

    Attributes:
        checked: False where they cannot be bounded again; ``faults`` is then empty.
        faults: one line for each disagreement.
        note: why they could not be checked, or "".
    """

    layer: str
    pass_index: int
    batch: int
    head: int
    num_rows: int
    checked: bool
    faults: tuple[str, ...]
    note: str = ""


def check_kept(layer: LayerPasses, fields: Sequence[str]) -> Iterator[KeptCheck]:
    """Bound every kept row again and compare with what its block recorded.

    The gap of a row may not exceed the worst gap of its block beyond ``AGREEMENT`` bits and a share
    of ``RELATIVE_AGREEMENT``; its values must lie within the recorded ones; and the bounds must
    enclose the exact log-sum-exp, in float64.
    """
    for kept in layer.kept:
        place = (layer.name, kept.pass_index, kept.batch, kept.head, int(kept.rows.size))
        if layer.settings.masked:
            note = "its mask is not in the file, so that its rows cannot be bounded again"
            yield KeptCheck(*place, checked=False, faults=(), note=note)
            continue
        with np.errstate(all="ignore"):
            faults = tuple(_faults(layer, kept, fields))
        yield KeptCheck(*place, checked=True, faults=faults)


def _faults(layer: LayerPasses, kept: KeptRows, fields: Sequence[str]) -> Iterator[str]:
    call = int(np.flatnonzero(layer.passes == kept.pass_index)[0])
    blocks = kept.rows // layer.settings.block_q
    record = layer.bounds[call, kept.batch, kept.head, blocks]
    lanes = {name: record[:, index] for index, name in enumerate(fields)}
    head, queries = _head_bounds(kept, layer.settings), _queries(kept, layer.settings)
    exact = _exact_log_sum_exp(kept, layer.settings, queries)
    for family in RECORDED_BOUNDS:
        if f"upper:{family}" not in lanes or (family == "soft cap" and head.soft_cap is None):
            continue
        bounds = head.evaluate(queries, family)
        yield from _wrong_gaps(family, bounds, lanes, kept)
        if not _enclosed(bounds, exact):
            yield f"{family}: the bounds do not enclose the exact log-sum-exp"
    yield from _wrong_values(queries, kept, lanes)


def _wrong_gaps(
    family: str, bounds: RowBounds, lanes: dict[str, Float32], kept: KeptRows
) -> Iterator[str]:
    recorded = lanes[f"upper:{family}"] - lanes[f"lower:{family}"]
    recorded = np.where(np.isfinite(recorded), recorded, np.inf)
    gap = bounds.upper - bounds.lower
    gap = np.where(np.isfinite(gap), gap, np.inf)
    allowed = recorded + AGREEMENT + RELATIVE_AGREEMENT * np.where(np.isfinite(gap), gap, 0.0)
    wrong = np.flatnonzero(~(gap <= allowed))
    if wrong.size:
        row = int(wrong[np.argmax((gap - recorded)[wrong])])
        yield (
            f"{family}: row {kept.rows[row]} has a gap of {gap[row]:.2f} bits, its block recorded "
            f"{recorded[row]:.2f} as the worst"
        )


def _wrong_values(queries: Queries, kept: KeptRows, lanes: dict[str, Float32]) -> Iterator[str]:
    value_max = kept.value_max
    low = np.full(kept.rows.size, value_max.max(), np.float32)
    if queries.rows is not None:
        low = np.max(np.where(queries.rows.visible, value_max[None, :], 0.0), axis=1)
    if np.any(lanes["value_low"] > low):
        recorded = lanes["value_low"].max()
        yield f"V_lo: recorded as {recorded:.4g}, a row sees {low.min():.4g} at most"
    if np.any(lanes["value_high"] < value_max.max()):
        yield f"V_hi: recorded as {lanes['value_high'].min():.4g}, a key has {value_max.max():.4g}"
    if np.any(lanes["num_keys"] != value_max.size):
        yield f"n: recorded as {lanes['num_keys'].min():.0f}, there are {value_max.size} keys"


def _head_bounds(kept: KeptRows, settings: LayerSettings) -> HeadBounds:
    @functools.cache
    def summarize(sentinels: bool) -> HeadKeys:
        return head_keys(kept.key.values, settings.dtype, sentinels=sentinels)

    cap = None if settings.soft_cap is None else settings.soft_cap * math.log2(math.e)
    return HeadBounds(summarize, cap, settings.dtype, settings.num_keys)


def _queries(kept: KeptRows, settings: LayerSettings) -> Queries:
    scaled = scaled_query(kept.query.values, settings.dtype, settings.scale)
    if not settings.causal:
        return Queries(scaled)
    seen = visible_rows(
        Masks(causal=True),
        0,
        0,
        kept.rows,
        query_length=settings.num_queries,
        key_length=settings.num_keys,
        xp=np,
    )
    assert seen.own is not None
    return Queries(scaled, seen, kept.key.values[np.clip(seen.own, 0, settings.num_keys - 1)])


def _exact_log_sum_exp(
    kept: KeptRows, settings: LayerSettings, queries: Queries
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Bits, of the values that the kernel multiplies; in float64 by the definition."""
    logits = queries.scaled.astype(np.float64) @ kept.key.values.astype(np.float64).T
    if settings.soft_cap is not None:
        cap = settings.soft_cap * math.log2(math.e)
        logits = cap * np.tanh(logits / cap)
    if queries.rows is not None:
        logits = np.where(queries.rows.visible, logits, -np.inf)
    largest = np.max(logits, axis=1, keepdims=True)
    total = np.sum(np.exp2(logits - largest), axis=1)
    result: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = largest[:, 0] + np.log2(total)
    return result


def _enclosed(bounds: RowBounds, exact: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> bool:
    """Written so that rows whose logits are not finite, of which nothing is claimed, pass."""
    known = np.abs(exact) <= arithmetic.FLOAT32_LARGEST
    outside = (exact > bounds.upper) | (exact < bounds.lower)
    return not np.any(known & outside)
