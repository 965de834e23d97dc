"""Checks of certificates under masks, biases and the soft cap, against the definition."""

from __future__ import annotations

import numpy as np

import certify
from certify import visibility
from certify.arithmetic import BFLOAT16, FLOAT32
from certify.keys import head_keys
from certify.theorem import limits
from tests.certify import emulator, families
from tests.certify.checks_bounds import UNCAPPED
from tests.certify.emulator import ORDERS
from tests.certify.mask_cases import MaskCase, cases
from tests.certify.measures import ALLOWED
from tests.certify.theorem_cases import MACHINES

MASK_FAMILIES = (
    "gaussian 15",
    "sink mixed",
    "many sinks",
    "offset 30",
    "clusters",
    "outlier channel",
    "identical 3",
)


def _cases(seed: int, *, queries: int = 60, keys: int = 150, dim: int = 16) -> list[MaskCase]:
    rng = np.random.default_rng(seed)
    return [
        case
        for name in MASK_FAMILIES
        for case in cases(families.FAMILIES[name], rng, queries, keys, dim)
    ]


def check_masked_enclosure() -> None:
    """L <= log2 sum 2^logit over what a row sees <= S, for every mask, family and bound."""
    for case in _cases(40):
        arrays, arguments = case.call()
        exact = case.log_sum()
        for bound in (*UNCAPPED, *(("soft cap",) if case.cap else ()), "auto"):
            found = certify.certify(*arrays, bounds=bound, statistics_block=32, **arguments)
            upper, lower = (side[0, 0].astype(np.float64) for side in (found.upper, found.lower))
            assert np.all(upper >= exact), f"S is too low: {case.name}, {bound}"
            assert np.all(lower <= exact), f"L is too high: {case.name}, {bound}"


def check_masked_tightness() -> None:
    """Rows that see few keys are bounded by those: a mask may not spoil every certificate."""
    wide = {"causal": 0, "segments": 0, "boolean": 0}
    rng = np.random.default_rng(41)
    for case in cases(families.gaussian(8.0), rng, 300, 300, 32):
        if case.name in wide:
            arrays, arguments = case.call()
            found = certify.certify(*arrays, block_q=50, **arguments)
            wide[case.name] = int(found.certified.sum())
    assert all(count == 6 for count in wide.values()), f"blocks certified: {wide}"
    for case in cases(families.identical(8.0), rng, 100, 100, 16):
        arrays, arguments = case.call()
        found = certify.certify(*arrays, bounds="blocks", **arguments)
        seen = np.any(case.visible, axis=1)
        if case.name in wide:
            assert np.max(found.gap[0, 0][seen]) < 1.0, f"equal keys: {case.name}"


def check_own_key() -> None:
    """Under a causal mask the row's own key bounds its sum from below, however far it lies."""
    rng = np.random.default_rng(42)
    query, key, value = (rng.standard_normal((1, 200, 1, 16)).astype(np.float32) for _ in range(3))
    key = 20.0 * query
    found = certify.certify(query, key, value, causal=True, statistics_block=16)
    own = np.sum(query * key, axis=-1)[0, :, 0] * 16**-0.5 * np.log2(np.e)
    assert np.all(found.lower[0, 0] >= own - 0.1), "the row's own key has no say"
    hidden = ~np.eye(200, dtype=bool)
    found = certify.certify(query, key, value, causal=True, attn_mask=hidden, statistics_block=16)
    logits = np.einsum("qd,kd->qk", query[0, :, 0], key[0, :, 0]) * 16**-0.5 * np.log2(np.e)
    exact = emulator.log_sum_exp(np.where(hidden & np.tri(200, dtype=bool), logits, -1e30))
    assert np.all(found.lower[0, 0] <= exact + 1e-3), "a hidden own key has a say"


def check_row_values() -> None:
    """V_lo is max|v| over visible keys whose bias is live, V_hi over all keys, by definition."""
    for case in _cases(43):
        arrays, arguments = case.call()
        found = certify.certify(*arrays, **arguments)
        size = np.max(np.abs(case.value), axis=1)
        if "lengths" in case.name or case.name == "padding mask":
            size = np.where(np.arange(size.size) < size.size // 2, size, 0.0)
        bias = np.where(case.visible, np.broadcast_to(case.bias, case.visible.shape), -np.inf)
        bits = bias * np.log2(np.e)
        largest = np.max(bits, axis=1, keepdims=True)
        live = case.visible & (bits >= largest - visibility.LIVE_BITS)
        expected = np.max(np.where(live, size, 0.0), axis=1)
        seen = np.any(case.visible, axis=1)
        assert np.array_equal(found.value_low[0, 0][seen], expected[seen]), f"V_lo: {case.name}"
        shown = np.any(case.visible, axis=0)
        assert np.all(found.value_high[0, 0][seen] >= np.max(size[shown])), f"V_hi: {case.name}"
        blind = ~seen
        assert np.all(found.error_bound[0, 0][blind] == 0.0), f"blind rows: {case.name}"
        assert np.all(np.isneginf(found.upper[0, 0][blind])), f"blind rows: {case.name}"


def check_masked_calls() -> None:
    """From the tensors to the output under every mask: certified rows obey their bound."""
    certified = 0
    for index, case in enumerate(_cases(44, queries=24, keys=90)):
        rng = np.random.default_rng(index)
        size = np.float32(2.0 ** rng.uniform(-40.0, 40.0))
        case = MaskCase(
            case.name,
            case.query,
            case.key,
            (case.value[:, :3] * size).astype(np.float32),
            case.arguments,
            case.visible,
            case.bias,
            case.cap,
        )
        arrays, arguments = case.call()
        found = certify.certify(*arrays, **arguments)
        stabilizer = found.stabilizer[0, 0].astype(np.float64)
        rows = np.isfinite(stabilizer) & np.any(case.visible, axis=1)
        if not rows.any():
            continue
        logits, kernel = case.logits()[rows], MACHINES["float32"]
        value = np.broadcast_to(case.value.astype(np.float64), (rows.sum(), *case.value.shape))
        result = emulator.attend(logits, value, stabilizer[rows], kernel[1], ORDERS[index % 4])
        error = np.max(np.abs(result.out - emulator.oracle(logits, value)), axis=1)
        live = found.value_low[0, 0][rows].astype(np.float64)
        bound = found.error_bound[0, 0][rows] * np.where(live > 0, live, 1.0)
        assert np.all(error <= bound * ALLOWED), f"{case.name}: {np.max(error / bound)}"
        certified += int(rows.sum())
    assert certified > 500, f"only {certified} rows were certified"


def check_values_far_below_a_bias() -> None:
    """A live key of 1e-6 beside a key biased by -10,000 with 100 must not pass on the latter's."""
    rng = np.random.default_rng(45)
    query, key = (rng.standard_normal((1, 40, 1, 16)).astype(np.float32) for _ in range(2))
    value = np.full((1, 40, 1, 4), 1e-6, np.float32)
    value[0, ::2] = 100.0
    bias = np.zeros(40, np.float32)
    bias[::2] = -10000.0
    found = certify.certify(query, key, value, attn_mask=bias)
    assert np.all(found.value_low == np.float32(1e-6)), "V_lo is that of a key far below"
    assert not found.certified.any(), "an error relative to 100 was certified as one to 1e-6"
    alone = certify.certify(query, key[:, 1::2], value[:, 1::2])
    assert alone.certified.all()


def check_ratio_costs_room() -> None:
    """The losses count V_row / V_lo times, in the room below and in the argument's error."""
    one = np.ones(1, np.float32)
    for kernel in (BFLOAT16, FLOAT32):
        near, far = (
            limits(
                8 * one,
                num_keys=100,
                tolerance=2.0**-8,
                kernel=kernel,
                xp=np,
                value_low=one,
                value_ratio=ratio * one,
            )
            for ratio in (1.0, 8.0)
        )
        losses = [
            kernel.probability_losses * ratio + kernel.product_flushes for ratio in (1.0, 8.0)
        ]
        assert np.isclose(far.loss / near.loss, losses[1] / losses[0], rtol=1e-5)
        assert far.floor > 7.9 * near.floor and far.lower_room < near.lower_room - 1.0
        whole = limits(8 * one, num_keys=100, tolerance=2.0**-8, kernel=kernel, xp=np)
        assert far.upper_room == near.upper_room == whole.upper_room


def check_statistics_of_valid_keys() -> None:
    """Keys that no row sees stay out of means, radii, counts and sentinels: they may be NaN."""
    rng = np.random.default_rng(46)
    key = rng.standard_normal((300, 8)).astype(np.float32)
    valid = np.arange(300) < 170
    whole = head_keys(np.where(valid[:, None], key, np.nan), "float32", valid=valid)
    alone = head_keys(key[:170], "float32")
    assert whole.rows.log2_count[-1] == alone.rows.log2_count[-1]
    assert np.isclose(whole.rows.reach_up[-1], alone.rows.reach_up[-1], rtol=1e-3)
