"""``certify()``: the certificate of an attention call, from its tensors, before it runs.

It evaluates, in numpy and float32, the formulas that the kernel evaluates: the keys' summary
(``keys``), bounds on every row's log-sum-exp (``bounds``, ``rows``) and the theorem (``theorem``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from certify import arithmetic, theorem
from certify.certificate import ROW_ARRAYS, Certificate
from certify.formats import Float32
from certify.inputs import AttentionInputs, positive_int, read_inputs, validate_bounds
from certify.keys import HeadKeys, head_keys, key_values, scaled_query
from certify.rows import (
    RECORD_FIELDS,
    HeadBounds,
    Queries,
    RowLimits,
    block_record,
    row_limits,
)
from certify.summary import KEYS_PER_BLOCK
from certify.visibility import VisibleRows, valid_keys, visible_rows

DEFAULT_BLOCK_Q = 2048
"""Rows judged together: the largest query block of the kernels. They share the rows evenly among as
few blocks as that allows; pass their block_q to compare block by block."""

ROWS_AT_ONCE = 8192
"""Rows whose bounds are evaluated together, which bounds the memory."""

VISIBLE_AT_ONCE = 2**24
"""Pairs of query and key whose visibility is spelled out together."""


def certify(
    query: Any,
    key: Any,
    value: Any = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_lengths: Any = None,
    segment_ids: Any = None,
    window: int | None = None,
    attn_mask: Any = None,
    logits_soft_cap: float | None = None,
    tolerance: float = arithmetic.DEFAULT_TOLERANCE,
    block_q: int | None = None,
    bounds: str = "auto",
    statistics_block: int = KEYS_PER_BLOCK,
    progress: Callable[[int, int], None] | None = None,
) -> Certificate:
    """Certify an attention call before it runs.

    Args:
        query: [B, S_q, H, D], bfloat16, float16 or float32; anything with ``__array__``.
        key: [B, S_k, H_kv, D], the same dtype; H a multiple of H_kv.
        value: [B, S_k, H_kv, D]. None takes max|v| = 1 for every key: the certificate then holds
            for values with that maximum only.
        scale: logits are scale * query . key (nats); None: D ** -0.5.
        causal: query i sees keys up to i + S_k - S_q (bottom-right).
        key_lengths: int [B]; every row of batch element b sees its first key_lengths[b] keys.
        segment_ids: int [B, S], or a pair ([B, S_q], [B, S_k]): attention within equal numbers.
        window: a query sees keys at most this many positions away from its own (i + S_k - S_q).
        attn_mask: bool (True = attend) or additive (nats), broadcastable to [B, H, S_q, S_k]. A
            bias of -inf or at most half of its dtype's lowest number hides the key.
        logits_soft_cap: logits (nats) become cap * tanh(logits / cap), before any bias.
        tolerance: largest |o - o_exact| / max|v| beyond ordinary rounding.
        block_q: rows judged together; None: ``DEFAULT_BLOCK_Q``.
        bounds: "auto" (what the kernels evaluate: per row the best of those that cost least) or one
            name of ``BOUND_NAMES`` other than "none" and "weights".
        statistics_block: keys whose mean is one row of the keys' summary.
        progress: called with (heads done, heads in all) after every head of keys.

    A row that sees no key is an exact zero, which is certified.

    Raises:
        ValueError: for an argument of the wrong shape, dtype or range.
    """
    inputs = read_inputs(
        query,
        key,
        value,
        scale=scale,
        key_lengths=key_lengths,
        causal=causal,
        segment_ids=segment_ids,
        window=window,
        attn_mask=attn_mask,
        logits_soft_cap=logits_soft_cap,
    )
    settings = _Settings(
        tolerance=arithmetic.validate_tolerance(tolerance),
        bounds=validate_bounds(bounds, inputs.soft_cap),
        statistics_block=positive_int("statistics_block", statistics_block),
    )
    block_q = DEFAULT_BLOCK_Q if block_q is None else positive_int("block_q", block_q)
    batch, query_length, heads, _ = inputs.query.shape
    rows = _Rows((batch, heads, query_length))
    # NaN, inf and underflow are ordinary here: every test is written so that they fail it.
    with np.errstate(all="ignore"):
        for head in heads_of(inputs, settings.statistics_block, progress):
            if inputs.length(head.element):
                _certify_head(head, settings, rows)
            else:
                rows.see_nothing((head.element, head.index), settings.tolerance)
    return rows.by_block(settings.tolerance, block_q)


def record(
    query: Any,
    key: Any,
    value: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_lengths: Any = None,
    segment_ids: Any = None,
    window: int | None = None,
    attn_mask: Any = None,
    logits_soft_cap: float | None = None,
    tolerance: float = arithmetic.DEFAULT_TOLERANCE,
    block_q: int | None = None,
    lse: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> Float32:
    """What a recording keeps of a call: every family's bounds in the worst row of each query block.

    Args, as for ``certify``:
        lse: exact log-sum-exp [B, H, S_q], nats, or None: the row sums are then unknown.

    Returns:
        float32 [B, H, num_q_blocks, len(RECORD_FIELDS)], lanes as in ``rows.RECORD_FIELDS``.

    Raises:
        ValueError: for an argument of the wrong shape, dtype or range.
    """
    inputs = read_inputs(
        query,
        key,
        value,
        scale=scale,
        key_lengths=key_lengths,
        causal=causal,
        segment_ids=segment_ids,
        window=window,
        attn_mask=attn_mask,
        logits_soft_cap=logits_soft_cap,
    )
    tolerance = arithmetic.validate_tolerance(tolerance)
    block_q = DEFAULT_BLOCK_Q if block_q is None else positive_int("block_q", block_q)
    batch, query_length, heads, _ = inputs.query.shape
    exact = _read_lse(lse, (batch, heads, query_length))
    starts = range(0, query_length, block_q)
    records = np.empty((batch, heads, len(starts), len(RECORD_FIELDS)), np.float32)
    with np.errstate(all="ignore"):
        for head in heads_of(inputs, KEYS_PER_BLOCK, progress):
            for block, start in enumerate(starts):
                span = slice(start, min(start + block_q, query_length))
                queries = head.queries(span)
                row = head.limits(queries, tolerance)
                sums = None if exact is None else exact[head.element, head.index, span]
                judged = np.full(span.stop - span.start, inputs.length(head.element) > 0)
                found = block_record(queries, head.bounds, row, sums, judged)
                records[head.element, head.index, block] = found
    return records


def _read_lse(lse: Any, shape: tuple[int, int, int]) -> Float32 | None:
    if lse is None:
        return None
    exact = np.asarray(lse)
    if exact.shape != shape or exact.dtype.kind != "f":
        raise ValueError(
            f"lse: got {exact.dtype.name} of shape {exact.shape}; pass floats of shape {shape}, "
            "the log-sum-exp in nats."
        )
    return exact.astype(np.float32)


@dataclass(frozen=True)
class _Settings:
    tolerance: float
    bounds: str
    statistics_block: int


@dataclass(frozen=True)
class Head:
    """One (batch element, query head) of a call."""

    inputs: AttentionInputs
    element: int
    index: int
    bounds: HeadBounds
    key: Float32
    value_max: Float32
    value_high: np.float32

    def queries(self, span: slice) -> Queries:
        """The queries of a span of positions, and what they see."""
        inputs = self.inputs
        query = inputs.query[self.element, span, self.index]
        scaled = scaled_query(query, inputs.dtype, inputs.scale)
        if not inputs.masks.by_row:
            return Queries(scaled)
        rows = np.arange(span.start, span.stop)
        seen = visible_rows(
            inputs.masks,
            self.element,
            self.index,
            rows,
            query_length=inputs.query.shape[1],
            key_length=inputs.key.shape[1],
            xp=np,
        )
        length = self.key.shape[0]
        bias = None if seen.bias is None else seen.bias[:, :length]
        seen = VisibleRows(
            np.broadcast_to(seen.visible[:, :length], (rows.size, length)), bias, seen.own
        )
        own_key = None
        if seen.own is not None:
            own_key = self.key[np.clip(seen.own, 0, length - 1)]
        return Queries(scaled, seen, own_key)

    def limits(self, queries: Queries, tolerance: float) -> RowLimits:
        """``rows.row_limits`` of these queries."""
        return row_limits(
            queries,
            self.value_max,
            self.value_high,
            num_keys=self.bounds.num_keys,
            tolerance=tolerance,
            kernel=arithmetic.arithmetic_for(self.inputs.dtype),
            xp=np,
        )


def heads_of(
    inputs: AttentionInputs,
    statistics_block: int,
    progress: Callable[[int, int], None] | None,
) -> Iterator[Head]:
    """Every (batch element, query head); heads that share keys and mask share their summary."""
    batch, heads = inputs.query.shape[0], inputs.query.shape[2]
    mask = inputs.masks.attn_mask
    alone = mask is not None and mask.shape[1] > 1
    head: Head | None = None
    for done, (element, index) in enumerate(np.ndindex(batch, heads), start=1):
        if head is None or alone or index % inputs.group == 0:
            head = _head_of(inputs, int(element), int(index), statistics_block)
        head = replace(head, index=int(index))
        yield head
        if progress is not None:
            progress(done, batch * heads)


def _head_of(inputs: AttentionInputs, element: int, query_head: int, statistics_block: int) -> Head:
    """Keys and values of one head. Those beyond the batch element's length are left out."""
    length, key_head = max(inputs.length(element), 1), query_head // inputs.group
    key = inputs.key[element, :length, key_head]
    value_max = np.ones(length, np.float32)
    if inputs.value is not None:
        value_max = key_values(inputs.value[element, :length, key_head], xp=np)
    valid = None
    if inputs.masks.by_row:
        valid = valid_keys(inputs.masks, element, query_head, inputs.key.shape[1], xp=np)
    if valid is not None:
        valid = valid[:length]
        key = np.where(valid[:, None], key, np.float32(0.0))
        value_max = np.where(valid, value_max, np.float32(0.0))

    @functools.cache
    def summarize(sentinels: bool) -> HeadKeys:
        return head_keys(
            key,
            inputs.dtype,
            valid=valid,
            sentinels=sentinels,
            statistics_block=statistics_block,
        )

    bounds = HeadBounds(summarize, inputs.soft_cap, inputs.dtype, length)
    return Head(inputs, element, query_head, bounds, key, value_max, np.max(value_max))


class _Rows:
    """Results per row, each [B, H, S_q], filled in head by head."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self.certified = np.zeros(shape, np.bool_)
        self.code = np.zeros(shape, np.int8)
        self.arrays = {name: np.full(shape, np.inf, np.float32) for name in ROW_ARRAYS}
        self.arrays["stabilizer"][...] = np.nan
        self.arrays["budget"][...] = -np.inf

    def set(self, index: Any, **rows: Any) -> None:
        for name, row in rows.items():
            self.arrays[name][index] = row

    def see_nothing(self, index: Any, tolerance: float) -> None:
        """Rows without a visible key are exact zeros, whatever the stabilizer."""
        one = np.ones(1, np.float32)
        kernel = arithmetic.FLOAT32
        head = theorem.limits(one, num_keys=1, tolerance=tolerance, kernel=kernel, xp=np)
        self.certified[index] = True
        self.code[index] = 0
        zeros = ("stabilizer", "error_bound", "lse_error_bound", "rounding_bound", "gap")
        self.set(index, **dict.fromkeys((*zeros, "value_low", "value_high"), 0.0))
        self.set(index, budget=head.budget, upper=-np.inf, lower=-np.inf)

    def by_block(self, tolerance: float, block_q: int) -> Certificate:
        """Judge the rows of every query block together."""
        query_length = self.certified.shape[2]
        starts = np.arange(0, query_length, block_q)
        certified = np.logical_and.reduceat(self.certified, starts, axis=2)
        used = np.zeros(certified.shape, np.int8)
        gap = self.arrays["gap"]
        for block, start in enumerate(starts):
            span = slice(start, start + block_q)
            worst = np.argmax(gap[..., span], axis=2, keepdims=True)
            used[..., block] = np.take_along_axis(self.code[..., span], worst, axis=2)[..., 0]
        return Certificate(
            certified=certified,
            bound_used=used,
            tolerance=tolerance,
            block_q=block_q,
            **self.arrays,
        )


def _certify_head(head: Head, settings: _Settings, rows: _Rows) -> None:
    """Fill in the rows of one query head."""
    kernel = arithmetic.arithmetic_for(head.inputs.dtype)
    rounding = theorem.rounding_error(head.bounds.num_keys, kernel)
    for span in _spans(head.inputs):
        queries = head.queries(span)
        row = head.bounds.evaluate(queries, settings.bounds)
        limit = head.limits(queries, settings.tolerance)
        limits = limit.limits
        choice = theorem.choose_stabilizer(row.upper, row.lower, row.grid_origin, limits, xp=np)
        row_sum = theorem.lowest_row_sum(choice.stabilizer, row.lower, xp=np)
        error = theorem.error_from_row_sum(row_sum, limits, xp=np)
        lse_error = theorem.lse_error_from_row_sum(row_sum, limits, xp=np)
        gap = row.upper - row.lower
        index = (head.element, head.index, span)
        rows.certified[index] = choice.certified
        rows.code[index] = row.code
        rows.set(
            index,
            stabilizer=np.where(choice.certified, choice.stabilizer, np.nan),
            error_bound=np.where(choice.certified, error, np.inf),
            lse_error_bound=np.where(choice.certified, lse_error, np.inf),
            rounding_bound=rounding,
            gap=np.where(np.isnan(gap), np.inf, gap),
            budget=limits.budget,
            upper=np.where(np.isnan(row.upper), np.inf, row.upper),
            lower=np.where(np.isnan(row.lower), -np.inf, row.lower),
            value_low=limit.value_low,
            value_high=limit.value_high,
        )
        if queries.rows is not None:
            blind = np.flatnonzero(~np.any(queries.rows.visible, axis=1)) + span.start
            rows.see_nothing((head.element, head.index, blind), settings.tolerance)


def _spans(inputs: AttentionInputs) -> Iterator[slice]:
    length, size = inputs.query.shape[1], ROWS_AT_ONCE
    if inputs.masks.by_row:
        size = max(1, min(size, VISIBLE_AT_ONCE // inputs.key.shape[1]))
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))
