"""Bounds on some queries of one head by every family, and what a recording keeps of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from certify import arithmetic, theorem
from certify.arithmetic import KernelArithmetic
from certify.bounds import (
    RECORDED_BOUNDS,
    SENTINELS_SUFFIX,
    Exponents,
    RowBounds,
    Seen,
    ball_reach,
    box_reach,
    code_of,
    exponents,
    masked_exponents,
    row_bounds,
    scaled_reach,
    smaller_reach,
)
from certify.keys import NUMPY, Backend, HeadKeys
from certify.summary import EMPTY, Array, norm_above
from certify.visibility import VisibleRows, live_keys, row_values, seen_by

RECORD_FIELDS = (
    *(f"{side}:{name}" for name in RECORDED_BOUNDS for side in ("upper", "lower")),
    "num_keys",
    "value_low",
    "value_high",
    "value_ratio",
    "row_sum_log2_min",
    "row_sum_log2_max",
    "visible_rows",
)
"""Lanes of a query block's record: of each family S and L (bits) in the row with the largest gap,
NaN where the family has no say; the number of keys processed; the smallest V_lo, the largest V_hi
and ratio; log2 of the smallest and largest row sum that the kernel's stabilizers give, from the
exact log-sum-exp (NaN where that is not known); rows that see a key."""


class Queries(NamedTuple):
    """Some queries of one head: q' [queries, D] in bits per unit of key, and what they see.

    Attributes:
        rows: None where every query sees every key.
        own_key: [queries, D], the key at each query's own position, or None.
    """

    scaled: Array
    rows: VisibleRows | None = None
    own_key: Array | None = None


class _HeadExponents(NamedTuple):
    """Exponents of a head's summary rows, its logits, and where channels were scaled."""

    sides: Exponents
    logits: Array
    scaled: Array


@dataclass(frozen=True)
class HeadBounds:
    """Everything to bound rows with.

    Attributes:
        summarize: the keys of the head, with (True) or without (False) sentinels.
        soft_cap: bits.
        dtype: of the inputs.
        num_keys: keys that are processed, hidden ones included.
    """

    summarize: Callable[[bool], HeadKeys]
    soft_cap: float | None
    dtype: str
    num_keys: int
    backend: Backend = NUMPY

    def evaluate(self, queries: Queries, name: str) -> RowBounds:
        """S and L, each [queries], by one family or "auto" (what the kernels evaluate).

        "auto" takes, per row, the better of blocks and ball beside the sentinels, for each the
        smaller of the plain and the channel-scaled reach; under a mask also the row's own key, and
        under a soft cap the cap itself.
        """
        xp = self.backend.xp
        family = name.removesuffix(SENTINELS_SUFFIX)
        with_sentinels = name == "auto" or name.endswith(SENTINELS_SUFFIX)
        if name == "soft cap":
            return self._by_cap(queries)
        keys = self.summarize(with_sentinels)
        seen = None if queries.rows is None else seen_by(queries.rows, keys, xp=xp)
        found = self._exponents(queries, keys, family, seen)
        bounds = row_bounds(
            found.sides,
            self._grid_origin(found.logits, keys, seen),
            found.scaled,
            num_sentinels=keys.num_sentinels,
            num_blocks=keys.num_blocks,
            xp=xp,
            family=family,
        )
        flat = RowBounds(*(part[0] for part in bounds))
        if name == "auto":
            if queries.own_key is not None:
                flat = flat._replace(lower=xp.maximum(flat.lower, self._own_key(queries)))
            if self.soft_cap is not None:
                flat = self._better(flat, self._by_cap(queries))
        return flat

    def _better(self, one: RowBounds, other: RowBounds) -> RowBounds:
        xp = self.backend.xp
        return one._replace(
            upper=xp.minimum(one.upper, other.upper),
            lower=xp.maximum(one.lower, other.lower),
            code=xp.where(one.upper <= other.upper, one.code, other.code),
        )

    def _exponents(
        self, queries: Queries, keys: HeadKeys, family: str, seen: Seen | None
    ) -> _HeadExponents:
        xp, matmul, rows = self.backend.xp, self.backend.matmul, keys.rows
        scaled = queries.scaled
        logits = matmul(rows.high + rows.low, xp.swapaxes(scaled, 0, 1))
        norm = norm_above(scaled, xp=xp)[None, :]
        # reach_down holds the rounding slack of reach_up, and the mean's own error beside it.
        down = rows.reach_down[:, None] * norm
        reach = ball_reach(rows.reach_up[:, None], rows.saved[:, None], norm, xp=xp)
        first, last = keys.num_sentinels, keys.num_sentinels + keys.num_blocks
        if family in ("scaled", "auto"):
            scaled_norm = norm_above(scaled * rows.channel_scale, xp=xp)[None, :]
            finer = scaled_reach(
                rows.scaled_radius[:, None], rows.scaled_saved[:, None], scaled_norm, down, xp=xp
            )
            reach = smaller_reach(reach, finer, xp=xp) if family == "auto" else finer
        elif family == "box":
            boxes = box_reach(keys.half_width, scaled, down[first:last], matmul=matmul, xp=xp)
            up = xp.concatenate([reach.up[:first], boxes, reach.up[last:]], axis=0)
            reach = reach._replace(up=up, saving=xp.zeros_like(up))
        if seen is None and self.soft_cap is None:
            sides = exponents(logits, rows.log2_count[:, None], reach, down)
            return _HeadExponents(sides, logits, reach.scaled)
        if seen is None:
            count = xp.broadcast_to(rows.log2_count[:, None], logits.shape)
            seen = Seen(count, count, xp.ones_like(logits, bool))
        sides = masked_exponents(logits, reach, down, seen, soft_cap=self.soft_cap, xp=xp)
        return _HeadExponents(sides, logits, reach.scaled)

    def _grid_origin(self, logits: Array, keys: HeadKeys, seen: Seen | None) -> Array | None:
        """The largest sentinel's logit; 0 where the row sees none or where a cap bends it."""
        xp = self.backend.xp
        if not keys.num_sentinels or self.soft_cap is not None:
            return None
        counts = keys.rows.log2_count[:, None] if seen is None else seen.log2_lower
        counts = counts[: keys.num_sentinels]
        there = counts > 0.5 * EMPTY
        bias = xp.where(there, counts, 0.0)
        singles = xp.where(there, logits[: keys.num_sentinels] + bias, EMPTY)
        origin = xp.max(singles, axis=0, keepdims=True)
        return xp.where(origin > 0.5 * EMPTY, origin, 0.0)

    def _own_key(self, queries: Queries) -> Array:
        """A lower bound on the logit of the key at each query's own position, if it sees it."""
        xp = self.backend.xp
        scaled, own_key, rows = queries.scaled, queries.own_key, queries.rows
        assert own_key is not None and rows is not None and rows.own is not None
        kernel = arithmetic.arithmetic_for(self.dtype)
        unit = 2.0 * arithmetic.dot_slack(kernel.contraction_length(scaled.shape[-1]))
        unit = unit + arithmetic.COEFFICIENT_SLACK
        slack = unit * norm_above(scaled, xp=xp) * norm_above(own_key, xp=xp)
        logit = xp.sum(scaled * own_key, axis=-1) - slack
        if self.soft_cap is not None:
            logit = self.soft_cap * xp.tanh(logit / self.soft_cap)
            logit = logit - self.soft_cap * arithmetic.TANH_ERROR
        position = xp.clip(rows.own, 0, rows.visible.shape[1] - 1)[:, None]
        inside = rows.own == position[:, 0]
        live = xp.take_along_axis(live_keys(rows, xp=xp), position, axis=1)[:, 0] & inside
        if rows.bias is not None:
            bias = xp.take_along_axis(rows.bias, position, axis=1)[:, 0]
            logit = logit + bias - xp.abs(bias) * arithmetic.COEFFICIENT_SLACK
        return xp.where(live, logit - arithmetic.EVALUATION_SLACK, EMPTY)

    def _by_cap(self, queries: Queries) -> RowBounds:
        """Logits lie in [-cap, cap], whatever the inputs; as long as no product q.k overflows."""
        assert self.soft_cap is not None
        xp, rows = self.backend.xp, self.summarize(False).rows
        largest_key = norm_above(rows.high[-1] + rows.low[-1], xp=xp) + rows.reach_up[-1]
        finite = norm_above(queries.scaled, xp=xp) * largest_key <= 2.0**127
        zero = xp.zeros_like(queries.scaled[:, 0])
        most = zero + math.log2(self.num_keys)
        least = most
        if queries.rows is not None:
            seen = seen_by(queries.rows, self.summarize(False), xp=xp)
            most, least = seen.log2_upper[-1], seen.log2_lower[-1]
        reach = self.soft_cap * (1.0 + arithmetic.TANH_ERROR) + arithmetic.EVALUATION_SLACK
        reach = xp.where(finite, reach, xp.inf)
        return RowBounds(most + reach, least - reach, zero + code_of("soft cap"), zero)


class RowLimits(NamedTuple):
    """The theorem's limits of some queries, and the values behind them, each [queries]."""

    limits: theorem.Limits
    value_low: Array
    value_high: Array
    value_ratio: Array


def row_limits(
    queries: Queries,
    value_max: Array,
    value_high: Array,
    *,
    num_keys: int,
    tolerance: float,
    kernel: KernelArithmetic,
    xp: Any,
) -> RowLimits:
    """Limits of some queries.

    Args:
        value_max: float32 [S_k], max|v| of each key.
        value_high: scalar, its maximum over the keys that are multiplied.
    """
    high = xp.zeros_like(queries.scaled[:, 0]) + value_high
    low, ratio = high, xp.ones_like(high)
    if queries.rows is not None:
        low, ratio = row_values(queries.rows, value_max, xp=xp)
    limits = theorem.limits(
        high,
        num_keys=num_keys,
        tolerance=tolerance,
        kernel=kernel,
        xp=xp,
        value_low=low,
        value_ratio=ratio,
    )
    return RowLimits(limits, low, high, ratio)


def block_record(
    queries: Queries,
    head: HeadBounds,
    row: RowLimits,
    lse: Array | None,
    judged: Array,
) -> Array:
    """One query block in ``RECORD_FIELDS``, float32 [fields].

    Args:
        lse: exact log-sum-exp of the rows, nats [queries], or None.
        judged: bool [queries], rows before the end of the sequence.
    """
    xp = head.backend.xp
    sees = judged if queries.rows is None else judged & xp.any(queries.rows.visible, axis=1)
    lanes = []
    choice = None
    for name in RECORDED_BOUNDS:
        if name == "soft cap" and head.soft_cap is None:
            lanes += [xp.float32(math.nan)] * 2
            continue
        bounds = head.evaluate(queries, name)
        if name == "auto":
            choice = theorem.choose_stabilizer(
                bounds.upper, bounds.lower, bounds.grid_origin, row.limits, xp=xp
            )
            # Such a row is not certified, however small its gap: it counts as the worst.
            far = xp.abs(choice.stabilizer) > arithmetic.LARGEST_STABILIZER
            bounds = bounds._replace(upper=xp.where(far, xp.inf, bounds.upper))
        gap = bounds.upper - bounds.lower
        gap = xp.where(xp.abs(gap) <= arithmetic.FLOAT32_LARGEST, gap, xp.inf)
        worst = xp.argmax(xp.where(sees, gap, -xp.inf))
        some = xp.any(sees)
        lanes += [xp.where(some, side[worst], math.nan) for side in (bounds.upper, bounds.lower)]
    assert choice is not None

    def extreme(array: Array, largest: bool) -> Array:
        fill = -xp.inf if largest else xp.inf
        found = (xp.max if largest else xp.min)(xp.where(sees, array, fill))
        return xp.where(xp.any(sees), found, math.nan)

    lanes += [
        xp.float32(head.num_keys),
        extreme(row.value_low, False),
        extreme(row.value_high, True),
        extreme(row.value_ratio, True),
    ]
    if lse is None:
        lanes += [xp.float32(math.nan)] * 2
    else:
        row_sum = lse * math.log2(math.e) - choice.stabilizer
        row_sum = xp.where(row_sum == row_sum, row_sum, -xp.inf)
        lanes += [extreme(row_sum, False), extreme(row_sum, True)]
    lanes.append(xp.sum(sees).astype(xp.float32))
    return xp.stack([xp.asarray(lane, dtype=xp.float32) for lane in lanes])
