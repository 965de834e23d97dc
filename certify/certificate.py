"""The certificate of an attention call, from its tensors, before anything is multiplied.

It evaluates, in numpy and float32, the formulas that the kernel evaluates: the keys' summary
(``keys``), bounds on every row's log-sum-exp (``bounds``) and the theorem (``theorem``).
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from certify import arithmetic, theorem
from certify.bounds import KEYS_PER_BLOCK
from certify.formats import Float32
from certify.inputs import (
    AttentionInputs,
    positive_int,
    read_inputs,
    refuse_masks,
    validate_bounds,
)
from certify.keys import bound_rows, key_summary

DEFAULT_BLOCK_Q = 2048
"""Rows judged together: the largest query block of the kernels. They share the rows evenly among as
few blocks as that allows; pass their block_q to compare block by block."""

SCHEMA = "certify.certificate"
SCHEMA_VERSION = 1

ROWS_AT_ONCE = 8192
"""Rows whose bounds are evaluated together, which bounds the memory."""

_BLOCK_ARRAYS = {"certified": np.dtype(np.bool_), "bound_used": np.dtype(np.int8)}
_ROW_ARRAYS = {
    name: np.dtype(np.float32) for name in ("stabilizer", "error_bound", "gap", "budget")
}
_ARRAYS = _BLOCK_ARRAYS | _ROW_ARRAYS


@dataclass(frozen=True, eq=False)
class Certificate:
    """What is proved of every row of an attention call before its KV loop.

    A row is certified iff gap <= budget and its stabilizer stays within
    ``arithmetic.LARGEST_STABILIZER``; a query block is certified iff all its rows are.

    Attributes:
        certified: bool [B, H, num_q_blocks].
        stabilizer: float32 [B, H, S_q], bits (base 2); NaN where the row is not certified.
        error_bound: float32 [B, H, S_q]; proven |o - o_exact| / max|v| beyond what any attention in
            this precision rounds; inf where the row is not certified.
        gap: float32 [B, H, S_q], bits: S - L, upper minus lower bound on the row's log-sum-exp; inf
            where an input is not finite.
        budget: float32 [B, H, S_q], bits that the theorem allows; -inf where nothing can be proved.
        bound_used: int8 [B, H, num_q_blocks], code into ``BOUND_NAMES``: the bound behind the row
            with the largest gap, certified or not; 0 ("none") where no key is visible.
        tolerance: the error_bound that was asked for.
        block_q: rows of a query block.

    Raises:
        ValueError: where an array has another dtype or shape.
    """

    certified: npt.NDArray[np.bool_]
    stabilizer: Float32
    error_bound: Float32
    gap: Float32
    budget: Float32
    bound_used: npt.NDArray[np.int8]
    tolerance: float
    block_q: int

    def __post_init__(self) -> None:
        arithmetic.validate_tolerance(self.tolerance)
        positive_int("block_q", self.block_q)
        rows = np.shape(self.stabilizer)
        if len(rows) != 3:
            raise ValueError(f"stabilizer: got shape {rows}; expected [B, H, S_q].")
        blocks = (*rows[:2], -(-rows[2] // self.block_q))
        for name, dtype in _ARRAYS.items():
            array = getattr(self, name)
            expected = blocks if name in _BLOCK_ARRAYS else rows
            if array.dtype != dtype or array.shape != expected:
                given = f"{array.dtype} of shape {array.shape}"
                raise ValueError(f"{name}: got {given}; expected {dtype} of shape {expected}.")

    @property
    def margin(self) -> Float32:
        """float32 [B, H, S_q], bits: budget - gap; -inf where nothing can be proved."""
        known = np.isfinite(self.gap) & np.isfinite(self.budget)
        room = self.budget - np.where(known, self.gap, 0.0)
        return np.where(known, room, -np.inf).astype(np.float32)

    def to_json(self) -> str:
        """One JSON object; arrays as base64 of little-endian bytes, so that nothing is lost."""
        arrays = {}
        for name, dtype in _ARRAYS.items():
            array = np.ascontiguousarray(getattr(self, name), dtype.newbyteorder("<"))
            data = base64.b64encode(array.tobytes()).decode("ascii")
            arrays[name] = {"dtype": dtype.name, "shape": array.shape, "base64": data}
        document = {
            "schema": SCHEMA,
            "version": SCHEMA_VERSION,
            "tolerance": self.tolerance,
            "block_q": self.block_q,
            "arrays": arrays,
        }
        return json.dumps(document)

    @classmethod
    def from_json(cls, text: str) -> Certificate:
        """The certificate that ``to_json`` wrote.

        Raises:
            ValueError: when the text is not one, or of another version of the schema.
        """
        try:
            document = json.loads(text)
            schema, version = document["schema"], document["version"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"text: not the JSON of a certificate ({error!r}).") from error
        if schema != SCHEMA or version != SCHEMA_VERSION:
            raise ValueError(
                f"text: got schema {schema!r} version {version!r}; this release reads {SCHEMA!r} "
                f"version {SCHEMA_VERSION}."
            )
        try:
            arrays = {name: _decode(name, document["arrays"][name]) for name in _ARRAYS}
            return cls(**arrays, tolerance=document["tolerance"], block_q=document["block_q"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"text: a part of the certificate is wrong ({error!r}).") from error


def _decode(name: str, entry: dict[str, Any]) -> npt.NDArray[Any]:
    dtype = _ARRAYS[name]
    data = base64.b64decode(entry["base64"], validate=True)
    shape = tuple(int(size) for size in entry["shape"])
    if entry["dtype"] != dtype.name or len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"text: {name} does not hold a {dtype.name} array of shape {shape}.")
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype).reshape(shape)


def certify(
    query: Any,
    key: Any,
    value: Any = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_lengths: Any = None,
    segment_ids: Any = None,
    window: Any = None,
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
        value: [B, S_k, H_kv, D]. None takes max|v| = 1 for every head: the certificate then holds
            for values with that maximum only.
        scale: logits are scale * query . key (nats); None: D ** -0.5.
        causal, segment_ids, window, attn_mask, logits_soft_cap: not certified in this version.
        key_lengths: int [B]; every row of batch element b sees its first key_lengths[b] keys. A
            length of 0 gives rows of exact zeros, which are certified.
        tolerance: largest |o - o_exact| / max|v| beyond ordinary rounding.
        block_q: rows judged together; None: ``DEFAULT_BLOCK_Q``.
        bounds: "auto" (the best per row) or one name of ``BOUND_NAMES`` other than "none".
        statistics_block: keys whose mean is one row of the keys' summary.
        progress: called with (heads done, heads in all) after every head of keys.

    Raises:
        ValueError: for an argument of the wrong shape, dtype or range.
        NotImplementedError: for a mask or a soft cap. The kernels compute such calls by an exact
            path, which needs no certificate.
    """
    refuse_masks(
        causal=causal,
        segment_ids=segment_ids,
        window=window,
        attn_mask=attn_mask,
        logits_soft_cap=logits_soft_cap,
    )
    inputs = read_inputs(query, key, value, scale=scale, key_lengths=key_lengths)
    settings = _Settings(
        tolerance=arithmetic.validate_tolerance(tolerance),
        bounds=validate_bounds(bounds),
        statistics_block=positive_int("statistics_block", statistics_block),
    )
    block_q = DEFAULT_BLOCK_Q if block_q is None else positive_int("block_q", block_q)
    batch, query_length, heads, _ = inputs.query.shape
    rows = _Rows((batch, heads, query_length))
    key_heads = inputs.key.shape[2]
    # NaN, inf and underflow are ordinary here: every test is written so that they fail it.
    with np.errstate(all="ignore"):
        for done, (element, key_head) in enumerate(np.ndindex(batch, key_heads), start=1):
            if inputs.key_lengths[element] == 0:
                rows.see_nothing(element, settings.tolerance)
            else:
                _certify_key_head(inputs, settings, element, key_head, rows)
            if progress is not None:
                progress(done, batch * key_heads)
    return rows.by_block(settings.tolerance, block_q)


@dataclass(frozen=True)
class _Settings:
    tolerance: float
    bounds: str
    statistics_block: int


class _Rows:
    """Results per row, each [B, H, S_q], filled in head by head."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self.certified = np.zeros(shape, np.bool_)
        self.stabilizer = np.full(shape, np.nan, np.float32)
        self.error_bound = np.full(shape, np.inf, np.float32)
        self.gap = np.full(shape, np.inf, np.float32)
        self.budget = np.full(shape, -np.inf, np.float32)
        self.code = np.zeros(shape, np.int8)

    def see_nothing(self, element: int, tolerance: float) -> None:
        """Rows without a visible key are exact zeros, whatever the stabilizer."""
        one = np.ones(1, np.float32)
        kernel = arithmetic.FLOAT32
        head = theorem.limits(one, num_keys=1, tolerance=tolerance, kernel=kernel, xp=np)
        self.certified[element] = True
        self.stabilizer[element] = self.error_bound[element] = self.gap[element] = 0.0
        self.budget[element] = head.budget

    def by_block(self, tolerance: float, block_q: int) -> Certificate:
        """Judge the rows of every query block together."""
        query_length = self.certified.shape[2]
        starts = np.arange(0, query_length, block_q)
        certified = np.logical_and.reduceat(self.certified, starts, axis=2)
        used = np.zeros(certified.shape, np.int8)
        for block, start in enumerate(starts):
            span = slice(start, start + block_q)
            worst = np.argmax(self.gap[..., span], axis=2, keepdims=True)
            used[..., block] = np.take_along_axis(self.code[..., span], worst, axis=2)[..., 0]
        return Certificate(
            certified=certified,
            stabilizer=self.stabilizer,
            error_bound=self.error_bound,
            gap=self.gap,
            budget=self.budget,
            bound_used=used,
            tolerance=tolerance,
            block_q=block_q,
        )


def _certify_key_head(
    inputs: AttentionInputs, settings: _Settings, element: int, key_head: int, rows: _Rows
) -> None:
    """Fill in the rows of all query heads that share one head of keys."""
    length = int(inputs.key_lengths[element])
    summary = key_summary(
        inputs.key[element, :length, key_head],
        inputs.dtype,
        sentinels=settings.bounds == "auto" or settings.bounds.endswith("+sentinels"),
        statistics_block=settings.statistics_block,
    )
    value_max = np.ones(1, np.float32)
    if inputs.value is not None:
        value_max = np.max(np.abs(inputs.value[element, :length, key_head])).reshape(1)
    head = theorem.limits(
        value_max,
        num_keys=length,
        tolerance=settings.tolerance,
        kernel=arithmetic.arithmetic_for(inputs.dtype),
        xp=np,
    )
    for query_head in range(key_head * inputs.group, (key_head + 1) * inputs.group):
        for span in _spans(inputs.query.shape[1]):
            query = inputs.query[element, span, query_head]
            row = bound_rows(
                query, summary, dtype=inputs.dtype, scale=inputs.scale, bounds=settings.bounds
            )
            choice = theorem.choose_stabilizer(row.upper, row.lower, row.grid_origin, head, xp=np)
            error = theorem.error_in_advance(choice.stabilizer, row.lower, head, xp=np)
            gap = row.upper - row.lower
            index = (element, query_head, span)
            rows.certified[index] = choice.certified
            rows.stabilizer[index] = np.where(choice.certified, choice.stabilizer, np.nan)
            rows.error_bound[index] = np.where(choice.certified, error, np.inf)
            rows.gap[index] = np.where(np.isnan(gap), np.inf, gap)
            rows.budget[index] = head.budget
            rows.code[index] = row.code


def _spans(length: int) -> Iterator[slice]:
    for start in range(0, length, ROWS_AT_ONCE):
        yield slice(start, min(start + ROWS_AT_ONCE, length))
