"""Two emulators of a machine that flushes to zero, written apart, must agree."""

from __future__ import annotations

import numpy as np
import pytest

from evidence import machine
from evidence.machine import FlushMachine
from tests.certify import emulator
from tests.certify.emulator import Machine
from tests.certify.theorem_cases import MACHINES, draw_rows

ORDERS = {"sequence": "sequential", "strands": "eight"}

PAIRS: dict[str, tuple[FlushMachine, Machine, float]] = {
    "bfloat16 cut-offs": (FlushMachine("bfloat16", False), emulator.CUT_OFFS_ONLY, 1e-13),
    "float32 cut-offs": (FlushMachine("float32", False), emulator.SIX_PASSES, 1e-13),
    # Rounded alike but in another order of roundings: bfloat16's output may differ by a step.
    "bfloat16 rounded": (FlushMachine("bfloat16", True), emulator.ROUNDED_BFLOAT16, 2.0**-7),
    "float32 rounded": (FlushMachine("float32", True), emulator.ROUNDED_FLOAT32, 2.0**-17),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", PAIRS)
def test_machines_agree(name: str, order: str) -> None:
    """On rows at the cut-offs. Catches a flush, a pass or an overflow that one of them forgets.

    Six passes may be summed in several orders: up to 1% of what their flushes may take in all.
    """
    second, first, tolerance = PAIRS[name]
    kernel, _ = MACHINES[second.dtype]
    rng = np.random.default_rng(61)
    flushes = 0
    for keys in (1, 2, 9, 32, 65):
        case = draw_rows(rng, 300, keys, 2.0**-3, kernel)
        limit = np.asarray(case.limits.lower_room, np.float64)
        stabilizer = emulator.as_float32(case.log_sum + np.where(np.isfinite(limit), limit, 0.0))
        left = emulator.attend(case.logits, case.value, stabilizer, first, ORDERS[order])
        right = machine.run(
            second,
            case.logits.T.astype(np.float32),
            np.moveaxis(case.value, 0, -1).astype(np.float32),
            stabilizer.astype(np.float32),
            order,
        )
        assert np.array_equal(left.finite, right.finite)
        rows = left.finite & (left.row_sum > 0)
        assert np.allclose(left.row_sum[rows], right.row_sum[rows], rtol=max(tolerance, 2.0**-20))
        size = np.max(np.abs(case.value), axis=(1, 2))[rows, None]
        allowed = tolerance * size
        if second.dtype == "float32":
            lost = keys * 2.0**-126 / left.row_sum[rows, None]
            allowed = allowed + 0.01 * lost * (kernel.product_flushes + 4.0 * size)
        assert np.all(np.abs(left.out[rows] - right.out.T[rows]) <= allowed)
        exact = emulator.oracle(case.logits, case.value)
        flushes += int(np.sum(np.abs(exact[rows] - right.out.T[rows]) > 1e-6 * size))
    assert flushes > 100, "hardly anything was flushed"


def test_second_machine_cuts() -> None:
    """The second machine itself: 2^-126 stays, anything smaller goes, 2^128 is infinite."""
    numbers = np.array([2.0**-126, 0.99 * 2.0**-126, -(2.0**-127), 2.0**128, 2.0**127])
    assert machine.flush(numbers.copy()).tolist() == [2.0**-126, 0.0, 0.0, np.inf, 2.0**127]
    half = np.float32(2.0**-126) * np.array([1.0, 0.75, 0.5], np.float32)
    assert machine.flush(half).tolist() == [2.0**-126, 0.0, 0.0]
    for dtype in ("bfloat16", "float32"):
        for rounded in (False, True):
            # The second key's p is flushed; the third's product with 2^-30 is.
            result = machine.run(
                FlushMachine(dtype, rounded),
                np.array([[0.0], [-127.0], [-100.0]], np.float32),
                np.array([[[1.0]], [[1.0]], [[2.0**-30]]], np.float32),
                np.zeros(1, np.float32),
            )
            assert result.row_sum[0] == 1.0 + (0.0 if rounded else 2.0**-100)
            assert result.out[0, 0] == 1.0 / result.row_sum[0]


def test_rounding_bounds_agree() -> None:
    """E_round of both: catches a factor forgotten in one."""
    rng = np.random.default_rng(62)
    for second, first, _ in PAIRS.values():
        if second.rounded:
            case = draw_rows(rng, 50, 20, 2.0**-3, MACHINES[second.dtype][0])
            left = emulator.rounding_bound(case.logits, case.value, first)
            right = machine.rounding_errors(second, case.logits.T, np.moveaxis(case.value, 0, -1))
            assert np.allclose(left, right, rtol=1e-12)
