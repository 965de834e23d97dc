"""Which keys a query sees, with what bias, and how many of every run of keys.

``Masks`` holds everything that hides keys or adds to logits; ``visible_rows`` spells it out for
some queries of one head; ``seen_by`` counts it by the rows of the keys' summary, which is all that
the bounds need.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from certify import arithmetic
from certify.bounds import Seen, log2_of_count
from certify.keys import HeadKeys
from certify.summary import EMPTY, Array

LIVE_BITS = 30.0
"""A key whose bias lies further below the row's largest does not speak for the row's values."""


class Masks(NamedTuple):
    """Everything that decides what a query sees. None where not given.

    Attributes:
        attn_mask: bool (True = attend) or additive float32 in bits, -inf where hidden; 4-D, each
            dimension that of [B, H, S_q, S_k] or 1.
        key_lengths: int [B]; keys at or beyond are hidden.
        query_segments, key_segments: int [B, S_q], [B, S_k]; a query sees keys of its segment.
        causal: query i sees keys up to i + S_k - S_q.
        window: a query sees keys at most this many positions away from its own.
    """

    attn_mask: Array | None = None
    key_lengths: Array | None = None
    query_segments: Array | None = None
    key_segments: Array | None = None
    causal: bool = False
    window: int | None = None

    @property
    def by_row(self) -> bool:
        """Whether queries of one batch element and head can see different keys."""
        return (
            self.causal
            or self.window is not None
            or self.query_segments is not None
            or self.attn_mask is not None
        )


class VisibleRows(NamedTuple):
    """What some queries of a head see.

    Attributes:
        visible: bool [queries, S_k].
        bias: float32 [queries, S_k], bits, or None; finite where visible.
        own: int [queries], the position of each query among the keys, or None where a query has
            none. The query may or may not see it.
    """

    visible: Array
    bias: Array | None
    own: Array | None


def visible_rows(
    masks: Masks,
    element: Any,
    head: Any,
    rows: Array,
    *,
    query_length: int,
    key_length: int,
    xp: Any,
) -> VisibleRows:
    """What the queries at positions ``rows`` (int [queries]) of one (batch element, head) see."""
    keys = xp.arange(key_length)[None, :]
    own = rows + (key_length - query_length)
    visible = xp.ones((rows.shape[0], key_length), bool)
    if masks.causal:
        visible = visible & (keys <= own[:, None])
    if masks.window is not None:
        visible = visible & (xp.abs(keys - own[:, None]) <= masks.window)
    if masks.key_lengths is not None:
        visible = visible & (keys < masks.key_lengths[element])
    if masks.query_segments is not None and masks.key_segments is not None:
        segments = masks.query_segments[element][rows]
        visible = visible & (segments[:, None] == masks.key_segments[element][None, :])
    bias = None
    if masks.attn_mask is not None:
        mask = _rows_of_mask(masks.attn_mask, element, head, rows)
        if mask.dtype == np.bool_:
            visible = visible & mask
        else:
            visible = visible & ~(mask == -xp.inf)
            bias = xp.where(visible, mask, 0.0)
    return VisibleRows(visible, bias, own if masks.causal or masks.window is not None else None)


def _rows_of_mask(mask: Array, element: Any, head: Any, rows: Array) -> Array:
    """[queries or 1, S_k or 1] of a 4-D mask whose dimensions may be 1."""
    part = mask[element if mask.shape[0] > 1 else 0]
    part = part[head if mask.shape[1] > 1 else 0]
    return part[rows] if mask.shape[2] > 1 else part


def valid_keys(masks: Masks, element: Any, head: Any, key_length: int, *, xp: Any) -> Array | None:
    """bool [S_k]: keys that key lengths, segments and attn_mask let some query see; None: all.

    What lies at the others may be anything, NaN included.
    """
    parts = []
    if masks.key_lengths is not None:
        parts.append(xp.arange(key_length) < masks.key_lengths[element])
    if masks.query_segments is not None and masks.key_segments is not None:
        same = masks.query_segments[element][:, None] == masks.key_segments[element][None, :]
        parts.append(xp.any(same, axis=0))
    if masks.attn_mask is not None:
        mask = masks.attn_mask[element if masks.attn_mask.shape[0] > 1 else 0]
        mask = mask[head if mask.shape[0] > 1 else 0]
        shown = mask if mask.dtype == np.bool_ else ~(mask == -xp.inf)
        parts.append(xp.broadcast_to(xp.any(shown, axis=0), (key_length,)))
    valid = None
    for part in parts:
        valid = part if valid is None else valid & part
    return valid


class RowValues(NamedTuple):
    """[queries]: V_lo, and max|v| over all visible keys in units of it (1 without a bias)."""

    low: Array
    ratio: Array


def live_keys(rows: VisibleRows, *, xp: Any) -> Array:
    """bool [queries, S_k]: visible keys whose bias is within ``LIVE_BITS`` of the row's largest."""
    if rows.bias is None:
        return rows.visible
    largest = xp.max(xp.where(rows.visible, rows.bias, -xp.inf), axis=1, keepdims=True)
    return rows.visible & (rows.bias >= largest - LIVE_BITS)


def row_values(rows: VisibleRows, value_max: Array, *, xp: Any) -> RowValues:
    """What the visible values are like, from max|v| of each key [S_k]."""

    def largest(where: Array) -> Array:
        return xp.max(xp.where(where, value_max[None, :], 0.0), axis=1)

    low = largest(live_keys(rows, xp=xp))
    if rows.bias is None:
        return RowValues(low, xp.ones_like(low))
    whole = largest(rows.visible)
    ratio = xp.where(whole > low, whole / xp.where(low > 0, low, 0.0), 1.0)
    return RowValues(low, ratio * (1.0 + arithmetic.COEFFICIENT_SLACK))


def seen_by(rows: VisibleRows, keys: HeadKeys, *, xp: Any) -> Seen:
    """Counts and biases by the rows of the keys' summary, each [summary rows, queries]."""
    live = live_keys(rows, xp=xp)
    size, blocks = keys.statistics_block, keys.num_blocks

    def by_block(array: Array, fill: Any) -> Array:
        added = blocks * size - array.shape[1]
        padded = xp.pad(array, ((0, 0), (0, added)), constant_values=fill)
        return padded.reshape(array.shape[0], blocks, size)

    present = xp.sum(keys.membership, axis=0) > 0

    def count(where: Array) -> tuple[Array, Array]:
        """Blocks without their sentinels, and the sentinels themselves, 0 or 1 each."""
        singles = (where[:, keys.position] & present[None, :]).astype(xp.float32)
        total = xp.sum(by_block(where, False), axis=2).astype(xp.float32)
        # Sums of small whole numbers: exact in any precision that holds them.
        return total - singles @ xp.swapaxes(keys.membership, 0, 1), singles

    blocks_upper, singles_upper = count(rows.visible)
    blocks_lower, singles_lower = count(live)
    ball_upper = xp.sum(blocks_upper, axis=1, keepdims=True)
    ball_lower = xp.sum(blocks_lower, axis=1, keepdims=True)
    rest = xp.concatenate([keys.rest, xp.sum(keys.rest, keepdims=True)], axis=0)
    upper = log2_of_count(xp.concatenate([singles_upper, blocks_upper, ball_upper], axis=1), xp=xp)
    lower = log2_of_count(xp.concatenate([singles_lower, blocks_lower, ball_lower], axis=1), xp=xp)
    whole = xp.concatenate([blocks_lower, ball_lower], axis=1) == rest[None, :]
    whole = xp.concatenate([singles_lower > 0, whole], axis=1)
    if rows.bias is not None:
        slack = arithmetic.COEFFICIENT_SLACK
        most = _largest_bias(
            rows.bias + xp.abs(rows.bias) * slack, rows.visible, by_block, keys, xp
        )
        least = -_largest_bias(xp.abs(rows.bias) * slack - rows.bias, live, by_block, keys, xp)
        upper, lower = upper + most, lower + least
    return Seen(*(xp.swapaxes(part, 0, 1) for part in (upper, lower, whole)))


def _largest_bias(bias: Array, where: Array, by_block: Any, keys: HeadKeys, xp: Any) -> Array:
    """[queries, summary rows]; 0 where nothing is seen."""
    known = xp.where(where, bias, EMPTY)
    blocks = xp.max(by_block(known, EMPTY), axis=2)
    ball = xp.max(blocks, axis=1, keepdims=True)
    found = xp.concatenate([known[:, keys.position], blocks, ball], axis=1)
    return xp.where(found > EMPTY, found, 0.0)
