"""Inequalities of the certificate, checked in interval arithmetic: no rounding on our side."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import certify
from certify import arithmetic, theorem
from certify.arithmetic import BFLOAT16, FLOAT32, KernelArithmetic
from certify.inputs import BOUND_CHOICES
from evidence import families, machine
from evidence.calls import MASKS, Call, in_dtype, masking
from evidence.machine import FlushMachine
from tests.certify import arb_oracle
from tests.certify.arb_oracle import exact, precisely

UNCAPPED_BOUNDS = tuple(name for name in BOUND_CHOICES if name != "soft cap")
DTYPES = ("bfloat16", "float32")


def random_call(
    seed: int, family: str, keys: int, dim: int, dtype: str, mask: str, log2_value: float = 0.0
) -> Call:
    """A call of one batch element and head with four queries."""
    rng = np.random.default_rng(seed)
    query, key, value = families.draw(families.FAMILIES[family], rng, 4, keys, dim)
    value = value[:, :2] * np.float32(2.0**log2_value)
    arrays = [in_dtype(array, dtype)[None, :, None] for array in (query, key, value)]
    return Call(
        arrays[0], arrays[1], arrays[2], dtype, families.SCALE, **masking(mask, rng, 1, 4, keys)
    )


def exact_logits(call: Call, row: int) -> list[Any]:
    """Logits of a row's visible keys in bits: the definition on the query that is multiplied."""
    query = call.kernel_query()[0, row, 0]
    found = []
    for position in np.flatnonzero(call.visible()[0, 0, row]):
        logit = arb_oracle.dot(query, call.key[0, position, 0])
        if call.logits_soft_cap is not None:
            logit = arb_oracle.soft_cap(logit, call.logits_soft_cap)
        if call.attn_mask is not None and call.attn_mask.dtype != np.bool_:
            logit += arb_oracle.nats(
                np.broadcast_to(call.attn_mask, call.shape)[0, 0, row, position]
            )
        found.append(logit)
    return found


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    family=st.sampled_from(sorted(families.FAMILIES)),
    keys=st.integers(1, 40),
    dim=st.sampled_from([4, 16]),
    dtype=st.sampled_from(DTYPES),
    mask=st.sampled_from(MASKS),
    bound=st.sampled_from(UNCAPPED_BOUNDS),
)
def test_bounds_enclose_the_exact_log_sum_exp(
    seed: int, family: str, keys: int, dim: int, dtype: str, mask: str, bound: str
) -> None:
    """L <= log2 sum 2^logit <= S over visible keys, of exact logits and of the kernel's float32.

    Catches a bound or slack on the wrong side, and a hidden key that has a say.
    """
    call = random_call(seed, family, keys, dim, dtype, mask)
    with np.errstate(all="ignore"):
        found = certify.certify(*call.arrays, **call.arguments, bounds=bound, statistics_block=16)
    kernel = call.logits("reversed")[0, 0]
    with precisely():
        for row in range(4):
            lower, upper = (side[0, 0, row] for side in (found.lower, found.upper))
            logits = exact_logits(call, row)
            if not logits:
                assert np.isneginf(upper) and found.error_bound[0, 0, row] == 0.0
                continue
            computed = [exact(x) for x in kernel[row] if not np.isneginf(x)]
            for numbers in (logits, computed):
                true = arb_oracle.log2_sum_exp2(numbers)
                assert np.isnan(lower) or not np.isfinite(lower) or exact(lower) <= true
                assert np.isnan(upper) or not np.isfinite(upper) or true <= exact(upper)


def test_the_enclosure_is_sharp() -> None:
    """Equal keys: S and L moved by 1/100 bit towards each other no longer enclose.

    Catches an oracle so wide that every bound would pass.
    """
    call = random_call(3, "identical 3", 20, 16, "float32", "none")
    found = certify.certify(*call.arrays, **call.arguments, bounds="ball")
    with precisely():
        for row in range(4):
            true = arb_oracle.log2_sum_exp2(exact_logits(call, row))
            lower, upper = exact(found.lower[0, 0, row]), exact(found.upper[0, 0, row])
            assert lower <= true and true <= upper
            assert not lower + exact(0.01) <= true and not true <= upper - exact(0.01)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    family=st.sampled_from(sorted(families.FAMILIES)),
    keys=st.integers(1, 24),
    dtype=st.sampled_from(DTYPES),
    mask=st.sampled_from(MASKS),
    log2_value=st.floats(-60.0, 60.0),
    log2_tolerance=st.floats(-14.0, -1.0),
    order=st.sampled_from(["sequence", "strands"]),
)
def test_certified_errors_are_exactly_within_the_bound(
    seed: int,
    family: str,
    keys: int,
    dtype: str,
    mask: str,
    log2_value: float,
    log2_tolerance: float,
    order: str,
) -> None:
    """|o - o_exact| <= E V of the flushing machine, o_exact an enclosure of the real number.

    And its log-sum-exp is within lse_error_bound. Catches an oracle that rounds in the machine's
    favour, and a value hidden from V.
    """
    call = random_call(seed, family, keys, 8, dtype, mask, log2_value)
    with np.errstate(all="ignore"):
        found = certify.certify(*call.arrays, **call.arguments, tolerance=2.0**log2_tolerance)
    logits = call.logits()[0, 0]
    sure = np.isfinite(found.stabilizer[0, 0]) & np.any(np.isfinite(logits), axis=1)
    rows = np.flatnonzero(sure)
    if not rows.size:
        return
    value = np.repeat(call.value[0, :, 0, :, None], rows.size, axis=2)
    outcome = machine.run(
        FlushMachine(dtype, rounded=False),
        logits[rows].T,
        value,
        found.stabilizer[0, 0][rows],
        order,
    )
    with precisely():
        for place, row in enumerate(rows):
            visible = np.flatnonzero(np.isfinite(logits[row]))
            out = arb_oracle.attention(
                [exact(x) for x in logits[row][visible]], call.value[0, visible, 0]
            )
            low = float(found.value_low[0, 0, row])
            allowed = exact(found.error_bound[0, 0, row]) * exact(low if low > 0 else 1.0)
            assert found.error_bound[0, 0, row] <= found.tolerance
            true = arb_oracle.log2_sum_exp2([exact(x) for x in logits[row][visible]])
            bits = exact(found.stabilizer[0, 0, row]) - true
            bits += arb_oracle.log2(exact(outcome.row_sum[place]))
            lse_error = abs(bits * arb_oracle.arb.const_log2())
            assert lse_error <= exact(found.lse_error_bound[0, 0, row]) + exact(2.0**-44)
            for channel in range(2):
                got = exact(outcome.out[channel, place])
                # The machine's own float64 arithmetic: 2^-44 of max|v|.
                slack = exact(float(np.max(np.abs(call.value)))) * exact(2.0**-44)
                assert abs(got - out[channel]) <= allowed + slack


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    family=st.sampled_from(sorted(families.FAMILIES)),
    keys=st.integers(1, 60),
    dtype=st.sampled_from(DTYPES),
    mask=st.sampled_from(MASKS),
    log2_tolerance=st.floats(-14.0, -1.0),
)
def test_rounded_errors_are_within_both_bounds(
    seed: int, family: str, keys: int, dtype: str, mask: str, log2_tolerance: float
) -> None:
    """With rounding: |o - o_exact| <= E V_lo + rounding_bound V, as the certificate reports both.

    Catches a rounding_bound below what ordinary arithmetic rounds.
    """
    call = random_call(seed, family, keys, 8, dtype, mask)
    with np.errstate(all="ignore"):
        found = certify.certify(*call.arrays, **call.arguments, tolerance=2.0**log2_tolerance)
    logits = call.logits()[0, 0]
    rows = np.flatnonzero(np.isfinite(found.stabilizer[0, 0]) & np.any(np.isfinite(logits), axis=1))
    if not rows.size:
        return
    value = np.repeat(call.value[0, :, 0, :, None], rows.size, axis=2)
    outcome = machine.run(
        FlushMachine(dtype, rounded=True), logits[rows].T, value, found.stabilizer[0, 0][rows]
    )
    error = machine.errors(outcome, logits[rows].T, value, np.ones(rows.size))
    seen = np.isfinite(logits[rows])
    largest = np.max(np.where(seen, np.max(np.abs(call.value[0, :, 0]), axis=1), 0.0), axis=1)
    allowed = found.error_bound[0, 0][rows] * found.value_low[0, 0][rows]
    allowed = allowed + found.rounding_bound[0, 0][rows] * largest
    assert np.all(error <= allowed * (1.0 + 1e-6))


@settings(max_examples=200, deadline=None)
@given(
    log2_value=st.floats(-100.0, 126.0),
    below=st.floats(0.0, 20.0),
    keys=st.integers(1, 2**22),
    log2_tolerance=st.floats(-15.5, -0.05),
    kernel=st.sampled_from([BFLOAT16, FLOAT32]),
    place=st.floats(0.0, 200.0),
)
def test_limits_lie_inside_the_exact_interval(
    log2_value: float,
    below: float,
    keys: int,
    log2_tolerance: float,
    kernel: KernelArithmetic,
    place: float,
) -> None:
    """Every limit is on the safe side of the design's formula, evaluated exactly.

    h_max, g_max, the budget, l_min and E: catches a constant or a float32 rounding that gives more
    room than there is.
    """
    high = np.full(1, 2.0**log2_value, np.float32)
    low = (high * np.float32(2.0**-below)).astype(np.float32)
    tolerance = 2.0**log2_tolerance
    row = theorem.limits(
        high, value_low=low, num_keys=keys, tolerance=tolerance, kernel=kernel, xp=np
    )
    with np.errstate(over="ignore"):
        row_sum = (row.row_sum_min * np.exp2(np.float32(place))).astype(np.float32)
    reported = theorem.error_from_row_sum(row_sum, row, xp=np)
    with precisely():
        value, n = exact(low[0]), exact(keys)
        growth = n * exact(2.0**-24) / (1 - n * exact(2.0**-24))
        kappa = (1 + growth) / (1 - growth)
        least = exact(1.0 + 2.0**-4)
        kappa = kappa if least <= kappa else least
        losses = exact(kernel.probability_losses) + exact(kernel.product_flushes) / value
        floor = exact(2.0 * arithmetic.ARGUMENT_ROUNDINGS * 2.0**-18) * arb_oracle.arb.const_log2()
        floor += exact(kernel.value_flushes * 2.0**-126) / value
        room = exact(tolerance) - floor
        if not np.isfinite(row.budget[0]):
            assert not room > exact(2.0**-18) * exact(tolerance), (
                "nothing proved with room to spare"
            )
            return
        assert room > 0
        h_max = exact(125.0) - arb_oracle.log2(exact(max(1.0, float(high[0]))))
        g_max = exact(126.0) - arb_oracle.log2(n) + arb_oracle.log2(room)
        g_max -= arb_oracle.log2(kappa * (losses + room))
        assert exact(row.upper_room[0]) <= h_max
        assert exact(row.lower_room[0]) <= g_max
        assert exact(row.budget[0]) <= h_max + g_max - exact(1.5)
        unit = n * exact(2.0**-126) * kappa
        assert unit * (losses + room) / room <= exact(row.row_sum_min[0])
        if np.isfinite(row_sum[0]):
            flushed = unit / exact(row_sum[0])
            assert flushed < 1
            error = flushed * losses / (1 - flushed) + floor
            assert error <= exact(reported[0])
            assert exact(reported[0]) <= exact(tolerance)


@settings(max_examples=60, deadline=None)
@given(
    log2_row_sum=st.floats(-120.0, 100.0),
    keys=st.integers(1, 2**20),
)
def test_lse_error_covers_what_is_flushed(log2_row_sum: float, keys: int) -> None:
    """-ln(1 - kappa d) + k ln2 2^-18, exactly. Catches log1p of the wrong sign, or half a term."""
    row_sum = np.full(1, 2.0**log2_row_sum, np.float32)
    row = theorem.limits(
        np.ones(1, np.float32), num_keys=keys, tolerance=2.0**-12, kernel=BFLOAT16, xp=np
    )
    reported = theorem.lse_error_from_row_sum(row_sum, row, xp=np)[0]
    with precisely():
        flushed = exact(keys) * exact(2.0**-126) * exact(1.0 + 2.0**-4) / exact(row_sum[0])
        if not flushed < 1:
            assert math.isinf(reported)
            return
        argument = exact(arithmetic.ARGUMENT_ROUNDINGS * 2.0**-18) * arb_oracle.arb.const_log2()
        needed = argument - (1 - flushed).log()
        assert math.isinf(reported) or needed <= exact(reported)
