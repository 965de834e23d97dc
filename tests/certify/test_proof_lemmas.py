"""Lemmas of certify/PROOF.md that no other test covers, each against float64 or fractions."""

from __future__ import annotations

import inspect
import math
from fractions import Fraction

import numpy as np
import pytest

import certify
from certify import arithmetic, bounds, keys, theorem
from certify.arithmetic import BFLOAT16, FLOAT32, KernelArithmetic
from certify.formats import round_to_bfloat16
from certify.summary import KEYS_PER_BLOCK
from jax_kernels import config
from tests.certify import emulator
from tests.certify.emulator import (
    CUT_OFFS_ONLY,
    ORDERS,
    ROUNDED_BFLOAT16,
    ROUNDED_FLOAT32,
    Float64,
    as_float32,
)
from tests.certify.theorem_cases import limits_of

UNIT = Fraction(1, 2**24)
LOG2_E = math.log2(math.e)


def gamma(terms: int) -> Fraction:
    """Relative error of a float32 sum of so many terms, in any order."""
    return terms * UNIT / (1 - terms * UNIT)


def _lowered(argument: np.ndarray, how: str) -> Float64:
    """log2 of what exact exp2 or exp gives for the argument that a compiler makes of ours."""
    ln2, log2_e = np.float32(math.log(2.0)), np.float32(LOG2_E)
    if how == "exp2":
        return argument.astype(np.float64)
    nats = argument * ln2
    if how == "exp(ln2 x)":
        return nats.astype(np.float64) * LOG2_E
    return (nats * log2_e).astype(np.float64)


@pytest.mark.parametrize("how", ["exp2", "exp(ln2 x)", "exp2(log2e (ln2 x))"])
def test_argument_displacement(how: str) -> None:
    """Catches: a lowering of exp2 that is off by more than ARGUMENT_ERROR (in nats)."""
    rng = np.random.default_rng(71)
    stabilizer = rng.normal(0.0, 1.0, 400_000).astype(np.float32)
    logit = (stabilizer + rng.uniform(-127.9, 125.0, stabilizer.size)).astype(np.float32)
    exact = logit.astype(np.float64) - stabilizer
    off = np.max(np.abs(_lowered(logit - stabilizer, how) - exact))
    assert off * math.log(2.0) <= arithmetic.ARGUMENT_ERROR
    if how == "exp2":
        assert off <= 2.0**-18
    if how == "exp2(log2e (ln2 x))":
        assert off >= 3 * 2.0**-18, "the count of roundings is too high"


def test_displaced_exponents_move_the_output_by_less() -> None:
    """|o' - o| <= delta V for exponents off by delta nats. Catches: 1 for the factor where the
    worst case, half of the weight at V and half at -V, needs it."""
    rng = np.random.default_rng(72)
    delta, nearest = 1e-3, 0.0
    for turn in range(200):
        keys_ = int(rng.integers(2, 12))
        logits = rng.normal(0.0, (0.0, 1.0, 5.0)[turn % 3], (50, keys_))
        value = rng.choice([-1.0, 1.0], (50, keys_, 1))
        sign = (
            np.where(value[..., 0] > 0, 1.0, -1.0)
            if turn % 2
            else rng.choice([-1.0, 1.0], (50, keys_))
        )
        moved = emulator.oracle(logits + delta * LOG2_E * sign, value)
        worst = float(np.max(np.abs(moved - emulator.oracle(logits, value))))
        nearest = max(nearest, worst / delta)
    assert 0.999 < nearest <= 1.0 + 1e-9


def _flushes(terms: list[Fraction], rng: np.random.Generator) -> tuple[int, int]:
    """Sum terms in a random tree, values below 1 becoming 0: flushes, and leaves."""
    flushed, leaves = 0, len(terms)

    def cut(number: Fraction) -> Fraction:
        nonlocal flushed
        if number != 0 and abs(number) < 1:
            flushed += 1
            return Fraction(0)
        return number

    live = [cut(term) for term in terms]
    while len(live) > 1:
        first, second = sorted(rng.choice(len(live), 2, replace=False))
        total = cut(live[first] + live[second])
        live = [term for index, term in enumerate(live) if index not in (first, second)]
        live.append(total)
    return flushed, leaves


def test_flushes_are_at_most_leaves() -> None:
    """Products and partial sums together flush at most once a product. Catches: a bound of 2n - 1
    where the count is n, and a count below n where every product flushes."""
    rng = np.random.default_rng(73)
    most = 0
    for _ in range(3000):
        size = int(rng.integers(1, 9))
        # Neighbours that cancel leave what is flushed in the sum and not in the products.
        terms = [Fraction(int(rng.integers(-8, 9)), 4) for _ in range(size)]
        flushed, leaves = _flushes(terms, rng)
        assert flushed <= leaves
        most = max(most, flushed)
    assert _flushes([Fraction(1, 2)] * 5, rng) == (5, 5)
    assert most > 3


def test_split_parts_lose_one_flush() -> None:
    """Three bfloat16 parts of a float32 number lose at most 2^-126, and nothing where none is
    flushed; a bfloat16 cast is never flushed. Catches: parts that lose more than they are
    counted for."""
    rng = np.random.default_rng(74)
    number = np.exp2(rng.uniform(-126.0, 10.0, 200_000)).astype(np.float32)
    number = np.maximum(number, np.float32(2.0**-126)) * rng.choice([-1, 1], number.size)
    rest, total = number.astype(np.float64), np.zeros(number.size)
    for _ in range(3):
        part = emulator.cut(emulator.to_half(rest))
        total += part
        rest = emulator.cut(rest - part)
    lost = np.abs(number.astype(np.float64) - total)
    assert np.max(lost) <= 2.0**-126
    assert np.max(lost[np.abs(number) >= 2.0**-126 * 2**24]) == 0.0
    assert np.min(np.abs(round_to_bfloat16(number.astype(np.float32)))) >= 2.0**-126


@pytest.mark.parametrize("kernel", [BFLOAT16, FLOAT32], ids=lambda kernel: kernel.name)
def test_kappa_covers_the_passes(kernel: KernelArithmetic) -> None:
    """(1 + gamma_N) / (1 - gamma_N) and three percent more, N with the passes of one product.

    Catches: a kappa that does not grow, and passes that are left out of N.
    """
    for num_keys in [2**i + step for i in range(23) for step in (-1, 0, 1) if 2**i + step > 0]:
        if num_keys >= 2**22:
            continue
        terms = num_keys + (5 * 512 if kernel is FLOAT32 else 0)
        assert kernel.summation_length(num_keys) >= terms
        needed = (1 + gamma(terms)) / (1 - gamma(terms)) * Fraction(103, 100)
        flush = Fraction(theorem.flush_scale(num_keys, kernel))
        assert flush >= needed * num_keys * Fraction(1, 2**126)


def test_chunks_of_the_kernel() -> None:
    """Catches: kernels whose matrix products take more or fewer keys than the sums are counted
    for, by any block size that is allowed."""
    assert config.CHUNK_KEYS == arithmetic.CHUNK_KEYS
    for block_kv in range(128, 16385, 128):
        chunk = config.BlockSizes(128, block_kv).chunk_kv
        assert arithmetic.SMALLEST_CHUNK_KEYS <= chunk <= arithmetic.CHUNK_KEYS
        assert block_kv % chunk == 0
    for length in (1, 100, 1024, 1025, 2049, 75600):
        for head_dim in (64, 128, 256, 512):
            chunk = config.choose_block_sizes(128, length, head_dim).chunk_kv
            assert arithmetic.SMALLEST_CHUNK_KEYS <= chunk <= arithmetic.CHUNK_KEYS


@pytest.mark.parametrize("kernel", [BFLOAT16, FLOAT32], ids=lambda kernel: kernel.name)
def test_reciprocals_stay_normal(kernel: KernelArithmetic) -> None:
    """1 / l is normal and finite from l_min to 2^125. Catches: an upper limit of 2^127."""
    assert 1.0 / theorem.ROW_SUM_MAX >= 2.0**-126
    for tolerance in (1.7e-5, 2.0**-12, 0.5, 0.999):
        for num_keys in (1, 7, 2**20):
            for value in np.exp2(np.arange(-126.0, 128.0)):
                limits = theorem.limits(
                    np.full(1, value, np.float32),
                    num_keys=num_keys,
                    tolerance=tolerance,
                    kernel=kernel,
                    xp=np,
                )
                least = float(limits.row_sum_min[0])
                assert 1.0 / least <= 2.0**127, (tolerance, num_keys, value)


@pytest.mark.parametrize("rows", [2, 202, 8192 + 128])
def test_evaluation_of_log_sums(rows: int) -> None:
    """Catches: EVALUATION_SLACK below the error of a sum of all rows that a summary may have, and
    COEFFICIENT_SLACK below the rounding of exponents of 2^18 bits and more."""
    rng = np.random.default_rng(75)
    for size in (0.0, 100.0, 2.0**18, 1e6):
        for kind in range(4):
            offset = (-0.3, -1.65, -rng.exponential(3.0, (rows, 16)), -24.5)[kind]
            exponents = as_float32(size + offset + np.zeros((rows, 16))).astype(np.float32)
            exponents[0] = size
            exact = emulator.log_sum_exp(exponents.T.astype(np.float64))
            found = bounds.log_sum_exp2(exponents, xp=np)[0].astype(np.float64)
            error = np.max(np.abs(found - exact))
            assert error <= 0.75 * arithmetic.EVALUATION_SLACK + size * 2.0**-24
    assert 4 * size * 2.0**-24 <= size * arithmetic.COEFFICIENT_SLACK
    worst_sum = gamma((2**23 // KEYS_PER_BLOCK) + 128) * Fraction(14427, 10000)
    assert worst_sum <= Fraction(3, 4) * Fraction(arithmetic.EVALUATION_SLACK)


def test_far_sentinels_do_not_move_the_grid() -> None:
    """128 keys at -10^10 bits in a block of their own are all sentinels. Catches: a stabilizer
    rounded to the spacing of numbers as large as their logits."""
    rng = np.random.default_rng(76)
    for far in (1e6, 1e10, 1e15):
        key = np.zeros((1152, 8), np.float32)
        key[:1024, 1] = rng.uniform(-1.0, 1.0, 1024)
        key[1024:, 0] = -far * (1.0 + 1e-3 * rng.uniform(size=128))
        query = np.zeros((64, 8), np.float32)
        query[:, 0], query[:, 1] = rng.uniform(0.5, 2.0, 64), 140.0
        value = rng.standard_normal((1152, 2)).astype(np.float32)
        certificate = certify.certify(
            query[None, :, None],
            key[None, :, None],
            value[None, :, None],
            scale=1.0 / LOG2_E,
            block_q=1,
        )
        assert certificate.certified.all()
        logits = query.astype(np.float64) @ key.T.astype(np.float64)
        values = np.broadcast_to(value.astype(np.float64), (64, *value.shape))
        result = emulator.attend(
            logits, values, certificate.stabilizer[0, 0].astype(np.float64), CUT_OFFS_ONLY
        )
        error = emulator.relative_error(result, logits, values)
        assert np.all(error <= certificate.error_bound[0, 0]), f"sentinels at {-far}"


def test_online_shift_keeps_sums_in_range() -> None:
    """n weights of 2^-shift and their products stay in range, and small values lose nothing.

    Catches: a row maximum that is not lowered for large values or not raised for small ones.
    """
    for num_keys in (1, 2, 1000, 2**17, 2**23 - 1):
        value = np.exp2(np.arange(-126.0, 127.5, 0.25)).astype(np.float32)
        shift = theorem.online_shift(value, num_keys=num_keys, xp=np).astype(np.float64)
        assert np.array_equal(shift, np.rint(shift))
        weight = num_keys * np.exp2(-shift)
        assert np.all(weight <= 2.0**125)
        most = math.ceil(math.log2(num_keys))
        assert np.all((weight * value <= 2.0**125) | (shift == most))
        lost = num_keys * 2.0**-126 * (2.0 + 1.0 / value.astype(np.float64)) * np.exp2(shift)
        provable = value > 2.0**-114
        assert np.all(lost[provable] <= 2.0**-60)


def test_soft_cap_alone_needs_finite_products() -> None:
    """Catches: a cap that certifies a row whose logits are NaN, from a NaN or from inf - inf."""
    rng = np.random.default_rng(77)
    query, key = (rng.standard_normal((1, 40, 1, 8)).astype(np.float32) for _ in range(2))
    query[0, 3, 0, 2] = np.nan
    for name in ("soft cap", "auto"):
        found = certify.certify(query, key, key, logits_soft_cap=30.0, bounds=name, block_q=1)
        assert found.certified[0, 0].tolist() == [row != 3 for row in range(40)], name
    query[...] = key[...] = 1e25
    key[..., ::2] *= -1.0
    for name in ("soft cap", "auto"):
        found = certify.certify(query, key, key, logits_soft_cap=30.0, bounds=name, block_q=1)
        assert not found.certified.any(), name


def _six_passes(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """A float32 product as a device may form it: small products last, added one by one."""
    parts = []
    for array in (left, right):
        rest, split = array.astype(np.float32), []
        for _ in range(3):
            split.append(round_to_bfloat16(rest))
            rest = rest - split[-1]
        parts.append(split)
    total = np.zeros((left.shape[0], right.shape[1]), np.float32)
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0)):
        for channel in range(left.shape[1]):
            total = total + parts[0][i][:, channel : channel + 1] * parts[1][j][channel]
    return total


def test_box_in_six_passes() -> None:
    """Catches: a slack for the products of one pass where six are added up."""
    # Parts 1, 179 2^-16 and 63 2^-23: three of the six products lie below half a unit in the last
    # place of a sum of 128.
    half_width = np.full((1, 128), 1.0 + 179 * 2.0**-16 + 63 * 2.0**-23, np.float32)
    query = half_width.copy()
    names = inspect.signature(bounds.box_reach).parameters
    slack = {"slack": np.zeros((), np.float32)} if "slack" in names else {}
    reach = bounds.box_reach(half_width, query, **slack, matmul=_six_passes, xp=np)
    exact = half_width.astype(np.float64) @ query.T.astype(np.float64)
    lost = np.max(1.0 - _six_passes(half_width, query.T) / exact)
    assert lost > 1e-5, "the passes lose nothing here"
    assert np.all(reach >= exact)


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_rounding_error_covers_the_rounded_machine(name: str) -> None:
    """|o - o_exact| <= (E + E_round) V with every rounding switched on. Catches: a rounding that
    ``rounding_error`` leaves out, and one that is so generous that it would hide cut-offs."""
    rng = np.random.default_rng(79)
    kernel, machine = {
        "bfloat16": (BFLOAT16, ROUNDED_BFLOAT16),
        "float32": (FLOAT32, ROUNDED_FLOAT32),
    }[name]
    worst = 0.0
    for turn in range(40):
        keys_ = (2, 9, 64, 257)[turn % 4]
        logits = as_float32(rng.normal(0.0, rng.uniform(0.0, 20.0), (200, keys_)))
        value = as_float32(rng.choice([-1.0, 1.0, 1.0], (200, keys_, 1)) * (1.0 + 2.0**-9))
        limits = limits_of(value, 2.0**-12, kernel)
        stabilizer = np.rint(emulator.log_sum_exp(logits)) + rng.uniform(-60.0, 60.0)
        stabilizer = as_float32(stabilizer)
        result = emulator.attend(logits, value, stabilizer, machine, ORDERS[turn % 4])
        bound = theorem.error_from_row_sum(result.row_sum.astype(np.float32), limits, xp=np)
        bound = bound.astype(np.float64) + theorem.rounding_error(keys_, kernel)
        error = emulator.relative_error(result, logits, value)
        worst = max(worst, float(np.max(error / bound)))
    assert (0.4 if name == "bfloat16" else 1e-3) < worst <= 1.0


def test_lse_of_the_rounded_machine() -> None:
    """|lse - lse_exact| <= its range error + lse_rounding. Catches: a rounding left out."""
    rng = np.random.default_rng(80)
    for turn in range(60):
        keys_ = (1, 9, 257)[turn % 3]
        size = (0.0, 10.0, 1e3, 1e5)[turn % 4]
        logits = as_float32(rng.normal(0.0, 10.0, (200, keys_)) + rng.normal(0.0, size, (200, 1)))
        value = np.ones((200, keys_, 1))
        limits = limits_of(value, 2.0**-12, BFLOAT16)
        exact = emulator.log_sum_exp(logits)
        stabilizer = as_float32(exact + rng.uniform(-100.0, 100.0, 200))
        result = emulator.attend(logits, value, stabilizer, ROUNDED_BFLOAT16, ORDERS[turn % 4])
        row_sum = result.row_sum.astype(np.float32)
        bits = stabilizer.astype(np.float32) + np.log2(row_sum)
        lse = (bits * np.float32(math.log(2.0))).astype(np.float64)
        bound = theorem.lse_error_from_row_sum(row_sum, limits, xp=np).astype(np.float64)
        bound = bound + theorem.lse_rounding(lse, keys_)
        assert np.all(np.abs(lse - exact * math.log(2.0)) <= bound)


def test_the_look_knows_no_bounds() -> None:
    """Catches: an S, an L or a stabilizer that finds its way into the check after the loop."""
    assert set(inspect.signature(theorem.row_sum_passes).parameters) == {"row_sum", "head"}
    assert set(inspect.signature(theorem.error_from_row_sum).parameters) == {
        "row_sum",
        "head",
        "xp",
    }
    known = set(inspect.signature(theorem.limits).parameters)
    assert known.isdisjoint({"upper", "lower", "stabilizer", "query", "key"})


def test_flushed_inputs_are_enclosed() -> None:
    """Queries and keys that a machine reads as 0. Catches: bounds that hold only on a machine that
    reads subnormal numbers as they are."""
    rng = np.random.default_rng(81)
    smallest = 2.0**-126
    for query_size, key_size in ((2.0**-127, 2.0**124), (2.0**124, 2.0**-127), (2.0**-127, 1.0)):
        query = (query_size * rng.uniform(0.5, 1.9, (30, 8))).astype(np.float32)
        key = (key_size * rng.uniform(0.5, 1.9, (200, 8))).astype(np.float32)
        scaled = keys.scaled_query(query, "float32", 1.0 / LOG2_E)
        found = certify.certify(
            query[None, :, None], key[None, :, None], scale=1.0 / LOG2_E, block_q=1
        )
        for reads in (np.asarray, lambda x: np.where(np.abs(x) < smallest, 0.0, x)):
            logits = reads(scaled).astype(np.float64) @ reads(key).T.astype(np.float64)
            exact = emulator.log_sum_exp(logits)
            assert np.all(found.upper[0, 0] >= exact) and np.all(found.lower[0, 0] <= exact)


def test_constants_are_what_the_proof_says() -> None:
    """Catches: a constant changed without its derivation."""
    assert arithmetic.SMALLEST_NORMAL == 2.0**arithmetic.SMALLEST_NORMAL_EXPONENT == 2.0**-126
    assert np.finfo(np.float32).tiny == arithmetic.SMALLEST_NORMAL
    assert np.finfo(np.float32).max == arithmetic.FLOAT32_LARGEST
    # Two bits below the largest power of two: sum, its reciprocal and a bfloat16 cast stay normal.
    assert 2.0 ** -(arithmetic.OVERFLOW_EXPONENT + 1) == arithmetic.SMALLEST_NORMAL
    assert 6 * math.log(2.0) * 2.0**-18 == arithmetic.ARGUMENT_ERROR
    # Rounding of stabilizers up to LARGEST_STABILIZER, see the lemma of the grid.
    rounded = 2.0**-5 + 2.0**-6 + 2.0**-6 + 2.0**-7
    assert np.spacing(np.float32(arithmetic.LARGEST_STABILIZER)) == 2.0**-5
    assert rounded < arithmetic.GRID_MARGIN < 0.5 * arithmetic.GRID_SPACING
    # log2 e in nats: log2 1p of 16 roundings of a logit's size.
    assert arithmetic.COEFFICIENT_SLACK == 16 * arithmetic.FLOAT32_ROUNDOFF
    assert arithmetic.LARGEST_NUM_KEYS * 2 * arithmetic.FLOAT32_ROUNDOFF == 1.0
