"""The kernel itself, in interpret mode on XLA's CPU, held to the bound that it reports.

XLA on the CPU reads and writes subnormal numbers as 0 (a test says so), in the kernel as anywhere.
Not emulated: products in bfloat16 passes inside one dot product, partial sums in the order of the
matrix unit, and an exp2 of another accuracy; the two machines of ``evidence`` and ``emulator`` do.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import certify
from certify import theorem
from evidence import completeness, families, machine
from evidence.calls import Call, in_dtype
from evidence.machine import FlushMachine
from jax_kernels import BlockSizes, attention

SMALL = BlockSizes(128, 128)
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}

HARD = {f"gaussian {bits}": families.gaussian(bits) for bits in (30, 100, 1000)}
KERNEL_FAMILIES: dict[str, families.Family] = {**families.FAMILIES, **HARD}
HALVES = {2.0**-12: list(families.FAMILIES)[::2], 0.5: list(families.FAMILIES)[1::2]}
"""Families by tolerance: each at one of them, the hard ones at both."""


def call_of(name: str, dtype: str, *, log2_value: float = 0.0, seed: int = 71) -> Call:
    """A call of one head: 130 queries, 300 keys, three blocks of keys."""
    rng = np.random.default_rng(seed)
    query, key, value = families.draw(KERNEL_FAMILIES[name], rng, 130, 300, 64)
    arrays = [
        in_dtype(array, dtype)[None, :, None]
        for array in (query, key, value * np.float32(2.0**log2_value))
    ]
    return Call(arrays[0], arrays[1], arrays[2], dtype, families.SCALE)


def run(call: Call, **arguments: Any) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Output float64 [S_q, C], lse [S_q] and certificate [blocks] of the kernel."""
    kind = DTYPES[call.dtype]
    query, key, value = (jnp.asarray(x.astype(kind)) for x in (call.query, call.key, call.value))
    out, lse, fields = attention(
        query,
        key,
        value,
        **call.arguments,
        block_sizes=SMALL,
        return_lse=True,
        return_certificate=True,
        **arguments,
    )
    named = {name: np.asarray(field)[0, 0] for name, field in fields.items()}
    return np.asarray(out)[0, :, 0].astype(np.float64), np.asarray(lse)[0, 0], named


def test_xla_on_the_cpu_flushes() -> None:
    """What the tests below rest on. Catches a release of XLA that keeps subnormal numbers."""
    tiny, small = (jnp.full((64, 64), 2.0**x, jnp.float32) for x in (-100, -40))
    assert float(jax.jit(lambda a, b: a @ b)(tiny, small)[0, 0]) == 0.0
    assert float(jax.jit(lambda a, b: a * b)(tiny, small)[0, 0]) == 0.0
    assert float(jax.jit(lambda a: jnp.exp2(a - 140.0))(small * 0.0)[0, 0]) == 0.0
    subnormal = jnp.full((8,), 1e-40, jnp.float32)
    assert float(jax.jit(lambda a: a * 2.0**20)(subnormal)[0]) == 0.0


def exact_output(call: Call, how: str = "exact") -> np.ndarray:
    """Float64 softmax of logits that were summed in one order or another: [S_q, C]."""
    weights = machine.softmax(call.logits(how)[0, 0].T).T
    return weights @ call.value[0, :, 0].astype(np.float64)


def allowed_errors(call: Call, bound: np.ndarray) -> np.ndarray:
    """E + E_round, times max|v|, and three times what the order of float32 sums moves: [S_q]."""
    logits = call.logits("exact")[0, 0].T
    value = np.repeat(call.value[0, :, 0, :, None], logits.shape[1], axis=2)
    rounded = machine.rounding_errors(FlushMachine(call.dtype, True), logits, value)
    exact = exact_output(call)
    moved = max(np.max(np.abs(exact_output(call, how) - exact)) for how in ("matmul", "reversed"))
    return (bound + rounded) * float(np.max(np.abs(call.value))) + 3.0 * moved


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tolerance", HALVES)
def test_kernel_obeys_what_it_reports(dtype: str, tolerance: float) -> None:
    """Certified and verified blocks: |o - o_exact| <= (E + E_round) V; others: ordinary attention.

    Nothing that the certifier certifies is recomputed, and the verdicts are those that
    ``completeness`` reports. Catches a stabilizer, a check or a bound of the kernel that differs
    from the theorem's.
    """
    seen = np.zeros(4, int)
    for index, name in enumerate((*HALVES[tolerance], *HARD)):
        call = call_of(name, dtype, log2_value=(-60.0, 0.0, 60.0)[index % 3])
        with np.errstate(all="ignore"):
            out, _, fields = run(call, tolerance=tolerance)
            found = certify.certify(
                *call.arrays, **call.arguments, tolerance=tolerance, block_q=128
            )
            exact = exact_output(call)
        verdict = fields["verdict"].astype(int)
        seen += np.bincount(verdict, minlength=4)
        sure = found.certified[0, 0]
        assert np.all(verdict[sure] == theorem.CERTIFIED), f"{name}: certified, yet {verdict}"
        with np.errstate(all="ignore"):
            predicted = completeness.judge(call, found)[0, 0]
        assert np.array_equal(predicted, verdict), f"{name}: {predicted} is reported as measured"
        bound = np.where(verdict <= theorem.VERIFIED, fields["error_bound"], 0.0)
        assert np.all(bound <= tolerance), name
        error = np.max(np.abs(out - exact), axis=1)
        allowed = allowed_errors(call, np.repeat(bound.astype(np.float64), 128)[:130])
        assert np.all(error <= allowed), f"{name}, {verdict}: {np.max(error / allowed)}"
    assert seen[0] > 15 and seen[1] > 0 and seen[2] > 0 and seen[3] == 0, seen


def test_flushes_show_without_the_check() -> None:
    """path="clis" alone is wrong where the verdict is "recomputed", and "auto" is right.

    Catches a machine that flushes nothing, on which the test above would prove nothing.
    """
    rng = np.random.default_rng(72)
    query, key, value = (
        rng.standard_normal((size, 64)).astype(np.float32) for size in (130, 300, 300)
    )
    query *= 100.0
    arrays = [array[None, :, None] for array in (query, key, value * np.float32(2.0**-60))]
    call = Call(arrays[0], arrays[1], arrays[2], "float32", 1.0)
    exact = exact_output(call)
    largest = np.max(np.abs(call.value))
    with np.errstate(all="ignore"):
        raw, _, fields = run(call, path="clis")
        good, _, again = run(call)
    assert fields["verdict"][0] == again["verdict"][0] == theorem.RECOMPUTED
    wrong = np.nan_to_num(np.abs(raw - exact), nan=np.inf) > 0.1 * largest
    assert np.any(wrong)
    assert np.all(np.abs(good - exact) <= 1e-2 * largest)


def ordinary(dtype: str = "float32", keys: int = 300) -> list[np.ndarray]:
    call = call_of("gaussian 1", dtype)
    return [call.query, call.key[:, :keys], call.value[:, :keys]]


def both(
    arrays: list[np.ndarray], dtype: str = "float32", **masking: Any
) -> tuple[certify.Certificate, np.ndarray, np.ndarray, np.ndarray]:
    """The certifier's certificate, and the kernel's output, lse and verdicts."""
    call = Call(arrays[0], arrays[1], arrays[2], dtype, families.SCALE, **masking)
    with np.errstate(all="ignore"):
        found = certify.certify(*call.arrays, **call.arguments, block_q=128)
        out, lse, fields = run(call)
    return found, out, lse, fields["verdict"]


def definition(arrays: list[np.ndarray]) -> np.ndarray:
    """Plain float64 attention, NaN and infinities as they fall."""
    query, key, value = (array[0, :, 0].astype(np.float64) for array in arrays)
    with np.errstate(all="ignore"):
        logits = (query @ key.T) * families.SCALE
        weights = np.exp(logits - np.max(logits, axis=1, keepdims=True))
        return (weights / weights.sum(axis=1, keepdims=True)) @ value


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("argument", ["query", "key", "value"])
def test_not_finite_inputs(argument: str, bad: float) -> None:
    """Not certified, recomputed, never NaN where the definition is finite.

    A bad query costs its own row and block; a bad value its own channel. Catches a maximum or a
    comparison that loses a NaN, and one bad row that spoils others.
    """
    arrays = ordinary()
    place = ("query", "key", "value").index(argument)
    arrays[place][0, 7, 0, 3] = bad
    found, out, _, verdict = both(arrays)
    expected = definition(arrays)
    finite = np.isfinite(expected)
    assert np.all(np.isfinite(out[finite])) and np.allclose(
        out[finite], expected[finite], atol=1e-4
    )
    assert not np.any(np.isfinite(out[~finite]) & np.isnan(expected[~finite])), "a NaN is hidden"
    blocks = [False, True] if argument == "query" else [False, False]
    assert found.certified[0, 0].tolist() == blocks
    if argument == "key":
        # Rows to which an infinite key gives -inf are right without it, and may be verified.
        assert verdict[0] == theorem.RECOMPUTED and verdict[1] != theorem.CERTIFIED
    else:
        assert (verdict != theorem.RECOMPUTED).tolist() == blocks


def test_one_key() -> None:
    """A single key: certified, and the output is its value."""
    for dtype in DTYPES:
        arrays = ordinary(dtype, keys=1)
        found, out, _, verdict = both(arrays, dtype)
        assert found.certified.all() and np.all(verdict == theorem.EXACT)
        assert np.array_equal(out, np.broadcast_to(arrays[2][0, 0, 0], out.shape))


def test_zero_length() -> None:
    """No key within key_lengths: certified, exact zeros, lse -inf; no keys at all: the same."""
    arrays = ordinary()
    found, out, lse, _ = both(arrays, key_lengths=np.array([0]))
    assert found.certified.all() and np.all(found.error_bound == 0.0)
    assert np.all(out == 0.0) and np.all(np.isneginf(lse))
    empty = [arrays[0], arrays[1][:, :0], arrays[2][:, :0]]
    out, lse, fields = run(Call(empty[0], empty[1], empty[2], "float32", families.SCALE))
    assert np.all(out == 0.0) and np.all(np.isneginf(lse))
    assert np.all(fields["verdict"] == theorem.EXACT)
    with pytest.raises(ValueError, match="key: got shape"):
        certify.certify(*empty)


def test_all_keys_masked() -> None:
    """Rows that see nothing: zeros and -inf, whatever the others see. Catches l for the mask."""
    arrays = ordinary()
    mask = np.ones((1, 1, 130, 300), bool)
    mask[..., 5, :] = False
    found, out, lse, _ = both(arrays, attn_mask=mask)
    assert found.certified.all() and found.error_bound[0, 0, 5] == 0.0
    assert np.all(out[5] == 0.0) and np.isneginf(lse[5])
    others = np.arange(130) != 5
    assert np.allclose(out[others], definition(arrays)[others], atol=1e-4)
    found, out, lse, _ = both(arrays, attn_mask=np.zeros((1, 1, 130, 300), bool))
    assert found.certified.all() and np.all(out == 0.0) and np.all(np.isneginf(lse))


def test_zero_values() -> None:
    """V = 0: certified before the loop by both, and exact zeros."""
    for dtype in DTYPES:
        arrays = ordinary(dtype)
        arrays[2] = np.zeros_like(arrays[2])
        found, out, _, verdict = both(arrays, dtype)
        assert found.certified.all() and np.all(verdict == theorem.CERTIFIED)
        assert np.all(out == 0.0)


def test_subnormal_values() -> None:
    """Subnormal V: the certifier, which sees the numbers, refuses; a machine reads V = 0, gives 0.

    The kernel's verdict is about the values as they are read. At 1e-30 both certify, and the output
    is right. Catches a division by a V that is flushed, and a floor that is left out.
    """
    for dtype in DTYPES:
        arrays = ordinary(dtype)
        arrays[2] = np.sign(arrays[2]) * np.float32(1e-40)
        found, out, _, verdict = both(arrays, dtype)
        assert not found.certified.any() and np.all(np.isposinf(found.error_bound))
        assert np.all(out == 0.0) and np.all(verdict == theorem.CERTIFIED)
        arrays[2] = in_dtype(np.sign(arrays[2]) * np.float32(1e-30), dtype)
        found, out, _, verdict = both(arrays, dtype)
        assert found.certified.all() and np.all(verdict == theorem.CERTIFIED)
        assert np.allclose(out, definition(arrays), rtol=0.0, atol=2.0**-7 * 1e-30)
