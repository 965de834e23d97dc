"""Checks of the look after the loop: of the theorem's functions, and of the kernel that takes it.

Nothing here knows S or L: stabilizers are arbitrary, and the kernel is given a promise that is
wrong, so that only the check after the loop stands between a bad stabilizer and the caller.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from certify import arithmetic, bounds, theorem
from certify.arithmetic import BFLOAT16, arithmetic_for
from certify.formats import Float32
from jax_kernels import forward
from jax_kernels.config import BlockSizes, Problem
from tests.certify import emulator
from tests.certify.emulator import CUT_OFFS_ONLY, ORDERS, Float64, as_float32
from tests.certify.measures import ALLOWED, accepted

ROWS, KEYS, BLOCK, DIM = 200, 256, 128, 128
CERTIFIED, RECOMPUTED = float(theorem.CERTIFIED), float(theorem.RECOMPUTED)


class Scenario(NamedTuple):
    """One head of a kernel call.

    Attributes:
        logits: [2, KEYS], bits above the stabilizer: of ordinary rows, and of the odd one.
        odd: position of the odd row.
        value: [KEYS].
        verdicts: expected of the two query blocks.
    """

    logits: Float64
    odd: int
    value: Float64
    verdicts: tuple[float, float]


def _both(logits: Float64, value: Float64, verdict: float) -> Scenario:
    return Scenario(np.stack([logits, logits]), 7, value, (verdict, verdict))


def _row_sum_min(value_max: float, dtype: str) -> float:
    """l_min from the formula of the proof, in float64."""
    kernel, tolerance = arithmetic_for(dtype), arithmetic.DEFAULT_TOLERANCE
    room = tolerance - arithmetic.ARGUMENT_ERROR - kernel.value_flushes * 2.0**-126 / value_max
    losses = kernel.probability_losses + kernel.product_flushes / value_max
    return KEYS * 2.0**-126 * (1.0 + 2.0**-4) * (losses + room) / room


def scenarios(dtype: str) -> dict[str, Scenario]:
    """What can be wrong with a stabilizer, and what must come of it."""
    rng = np.random.default_rng(61)
    one = rng.choice([-1.0, 1.0], KEYS)
    zero = np.zeros(KEYS)
    edge = math.log2(_row_sum_min(1.0, dtype) / KEYS)
    lone = np.full(KEYS, -126.5)
    lone[0] = edge + math.log2(KEYS) - 0.5
    alone = np.full(KEYS, -1.0)
    alone[0] = 1.0
    late = zero.copy()
    late[BLOCK:] = 200.0
    small = 2.0**-100
    products = np.full(KEYS, -27.0)
    products[0] = -20.0
    not_a_number = zero.copy()
    not_a_number[:] = np.nan
    return {
        "in order": _both(rng.uniform(-3.0, 3.0, KEYS), one, CERTIFIED),
        "one row just above l_min": Scenario(
            np.stack([zero, zero + edge + 0.1]), 7, one, (CERTIFIED, CERTIFIED)
        ),
        "below l_min, flushed": _both(lone, alone, RECOMPUTED),
        "l above 2^125": _both(zero + 126.5 - math.log2(KEYS), one * 2.0**-20, RECOMPUTED),
        "l infinite": _both(zero + 127.0, one * 2.0**-20, RECOMPUTED),
        "numerator overflows": _both(zero + 40.0, one * 2.0**100, RECOMPUTED),
        "numerator overflows downwards": _both(zero + 40.0, zero - 2.0**100, RECOMPUTED),
        "last keys overflow": _both(late, one * 2.0**-20, RECOMPUTED),
        "small values": _both(products, alone * small, RECOMPUTED),
        "one row": Scenario(np.stack([zero, zero - 200.0]), 7, one, (RECOMPUTED, CERTIFIED)),
        "NaN row": Scenario(np.stack([zero, not_a_number]), 9, one, (RECOMPUTED, CERTIFIED)),
    }


class _KernelRun(NamedTuple):
    """Output [ROWS, heads], certificate [heads, blocks, fields] of the fixed-stabilizer kernel."""

    out: Float64
    certificate: Float64


def _stabilizer(value_max: float, dtype: str) -> float:
    """What the kernel chooses where it is promised that every logit is 0."""
    head = theorem.limits(
        np.full(1, value_max, np.float32),
        num_keys=KEYS,
        tolerance=arithmetic.DEFAULT_TOLERANCE,
        kernel=arithmetic_for(dtype),
        xp=np,
    )
    row = bounds.promised_bounds(np.zeros(1, np.float32), num_keys=KEYS, xp=np)
    choice = theorem.choose_stabilizer(row.upper, row.lower, row.grid_origin, head, xp=np)
    return float(choice.stabilizer[0])


def _run_kernel(cases: list[Scenario], dtype: str) -> _KernelRun:
    """All scenarios as heads of one call; path "clis": nothing is recomputed."""
    heads = len(cases)
    problem = Problem(
        batch=1,
        query_length=ROWS,
        key_length=KEYS,
        query_heads=heads,
        key_heads=heads,
        head_dim=DIM,
        dtype=jnp.dtype(dtype),
        scale=math.log(2.0),
        tolerance=arithmetic.DEFAULT_TOLERANCE,
        blocks=BlockSizes(BLOCK, BLOCK),
        interpret=True,
    )
    query = np.zeros((1, ROWS, heads, DIM), np.float32)
    key = np.zeros((1, KEYS, heads, DIM), np.float32)
    value = np.zeros((1, KEYS, heads, DIM), np.float32)
    for head, case in enumerate(cases):
        ordinary = np.arange(ROWS) != case.odd
        query[0, :, head, 0], query[0, :, head, 1] = ordinary, ~ordinary
        shift = _stabilizer(float(np.max(np.abs(case.value))), dtype)
        key[0, :, head, :2] = (case.logits + shift).T
        value[0, :, head, 0] = case.value  # the other channels are 0, and so always finite
        if np.isnan(case.logits[1]).any():
            key[0, :, head, 1] = 0.0
            query[0, case.odd, head, 1] = np.nan

    def columns(array: Float32) -> Any:
        return jnp.asarray(array.reshape(1, array.shape[1], -1), dtype)

    result = forward.attention_forward(
        columns(query), columns(key), columns(value), problem, "clis", jnp.zeros(heads)
    )
    out = np.asarray(result.out.astype(jnp.float32), np.float64)
    return _KernelRun(
        out.reshape(ROWS, heads, DIM)[..., 0], np.asarray(result.certificate[0], np.float64)
    )


def check_kernel_after_loop(dtype: str = "float32") -> None:
    """Promised logits of 0 and given others, the kernel recomputes what is wrong, and only that."""
    cases = scenarios(dtype)
    found = _run_kernel(list(cases.values()), dtype)
    fields = forward.CERTIFICATE_FIELDS
    verdict, error_bound, row_sum_min = (
        found.certificate[..., fields.index(name)]
        for name in ("verdict", "error_bound", "row_sum_min")
    )
    rounding = theorem.rounding_error(KEYS, arithmetic_for(dtype))
    for head, (name, case) in enumerate(cases.items()):
        assert tuple(verdict[head]) == case.verdicts, f"{name}: verdicts {verdict[head]}"
        largest = np.max(np.abs(case.value))
        limits = theorem.limits(
            np.full(1, largest, np.float32),
            num_keys=KEYS,
            tolerance=arithmetic.DEFAULT_TOLERANCE,
            kernel=arithmetic_for(dtype),
            xp=np,
        )
        for block, passed in enumerate(verdict[head] != RECOMPUTED):
            if not passed:
                continue
            worst = np.full(1, row_sum_min[head, block], np.float32)
            claim = float(theorem.error_from_row_sum(worst, limits, xp=np)[0])
            assert math.isclose(error_bound[head, block], claim, rel_tol=1e-5), name
            rows = slice(block * BLOCK, min((block + 1) * BLOCK, ROWS))
            exact = emulator.oracle(case.logits, np.stack([case.value] * 2)[..., None])[:, 0]
            expected = np.where(np.arange(ROWS) == case.odd, exact[1], exact[0])
            error = np.max(np.abs(found.out[rows, head] - expected[rows])) / largest
            assert error <= error_bound[head, block] + rounding, f"{name}: error {error}"


class _Few(NamedTuple):
    """One key carries a row; all others lose p (values far above 2^-126) or p * v."""

    logits: Float64
    value: Float64


def _carried_by_one(carrying: float, keys: int, log2_value: float) -> _Few:
    """The stabilizer is 0. The others lie just below the cut-off of p, or of p * v."""
    edge = -126.0 - min(log2_value, 0.0) * (1.0 - 2.0**-10) - 2.0**-10
    logits = np.full((1, keys), edge)
    logits[0, 0] = carrying
    value = np.full((1, keys, 1), -(2.0**log2_value))
    value[0, 0] *= -1.0
    return _Few(as_float32(logits), as_float32(value))


def check_values_of_hidden_size() -> None:
    """V_lo below max|v| of the row: the error relative to V_lo stays within E, nearly reached."""
    tolerance, ratio = 2.0**-3, 8.0
    nearest = []
    for keys in (9, 257):
        for log2_value in (20.0, -20.0):
            largest = np.full(1, 2.0**log2_value, np.float32)
            head = theorem.limits(
                largest,
                num_keys=keys,
                tolerance=tolerance,
                kernel=BFLOAT16,
                xp=np,
                value_low=largest / np.float32(ratio),
                value_ratio=np.full(1, ratio, np.float32),
            )
            carrying = math.log2(float(head.row_sum_min[0])) + 1e-3
            case = _carried_by_one(carrying, keys, log2_value)
            result = emulator.attend(
                case.logits, case.value, np.zeros(1), CUT_OFFS_ONLY, ORDERS[keys % 4]
            )
            assert accepted(result, head)[0], "the case does not pass"
            error = emulator.relative_error(result, case.logits, case.value)[0] * ratio
            claim = float(
                theorem.error_from_row_sum(result.row_sum.astype(np.float32), head, xp=np)[0]
            )
            assert error <= claim * ALLOWED, f"error {error} where {claim} is proved"
            assert claim <= tolerance
            nearest.append(error / claim)
    assert max(nearest) > 0.85, f"the cases reach only {max(nearest)} of the bound"


def check_lse_after_loop() -> None:
    """|lse - lse_exact| stays within its bound, from the row sum alone, and nearly reaches it."""
    head = theorem.limits(
        np.full(1, 1.0, np.float32), num_keys=257, tolerance=0.5, kernel=BFLOAT16, xp=np
    )
    nearest = []
    for times in (1.5, 3.0, 30.0, 1e4):
        case = _carried_by_one(math.log2(257 * 2.0**-126 * times), 257, 0.0)
        result = emulator.attend(case.logits, case.value, np.zeros(1), CUT_OFFS_ONLY)
        bound = theorem.lse_error_from_row_sum(result.row_sum.astype(np.float32), head, xp=np)
        measured = np.log2(result.row_sum) - emulator.log_sum_exp(case.logits)
        nearest.append(abs(float(measured[0])) * math.log(2.0) / float(bound[0]))
    assert max(nearest) <= ALLOWED, f"lse error is {max(nearest)} times its bound"
    assert max(nearest) > 0.8, f"the cases reach only {max(nearest)} of the bound"
    far = theorem.lse_error_from_row_sum(np.full(1, 2.0, np.float32), head, xp=np)[0]
    least = 3 * math.log(2.0) * 2.0**-18
    assert least <= far <= 3 * least, "exp2's argument is not counted"


def judged_at_the_end(row_sum: Float64, numerator: Float64) -> tuple[Float64, Float64]:
    """What is looked at: the sums over all keys; a function so that a mutant can look early."""
    return row_sum[:, -1], numerator[:, -1]


def check_every_key_is_seen() -> None:
    """An overflow among the last keys: whatever is looked at must know of it."""
    logits = np.zeros((1, 40))
    logits[0, 20:] = 100.0
    head = theorem.limits(
        np.full(1, 2.0**-20, np.float32), num_keys=40, tolerance=2.0**-12, kernel=BFLOAT16, xp=np
    )
    sums = np.stack(
        [
            emulator.sum_keys(
                emulator.cut(np.exp2(logits[:, :count] + 30.0)), CUT_OFFS_ONLY, "eight"
            )
            for count in range(1, 41)
        ],
        axis=1,
    )
    row_sum, numerator = judged_at_the_end(sums, sums * 2.0**-20)
    with np.errstate(over="ignore"):
        passes = theorem.row_sum_passes(row_sum.astype(np.float32), head) & np.isfinite(numerator)
    assert not np.any(passes), "a row whose last keys overflow passes"


CHECKS = {
    name.removeprefix("check_"): function
    for name, function in list(globals().items())
    if name.startswith("check_")
}
