"""Shares certified and verified on named families: a bound must not become sound by giving up."""

from __future__ import annotations

import numpy as np
import pytest

import certify
from certify import theorem
from evidence import completeness, families, gates
from evidence.completeness import CAUSAL, NAMED, FamilyShares, Line, shares
from tests.certify.families import FAMILIES, SCALE, Family, call_arrays, draw

SINKS = ("sink, aligned", "sink, opposite", "sink, both ways", "four sinks")


def measured(name: str, keys: int, heads: int, *, causal: bool = False) -> FamilyShares:
    """Verdicts of blocks of 2,048 rows at head_dim 128 and the default tolerance."""
    line = Line(name, keys, NAMED[name], causal)
    return shares(line, np.random.default_rng(51), heads=heads)


def share(family: Family, keys: int, heads: int, **arguments: object) -> float:
    """Share of the query blocks of 2,048 rows certified at the default tolerance."""
    rng = np.random.default_rng(51)
    drawn = [draw(family, rng, 2048, keys, 128) for _ in range(heads)]
    arrays = call_arrays(drawn, "bfloat16")
    certificate = certify.certify(*arrays, scale=SCALE, **arguments)  # type: ignore[arg-type]
    return float(np.mean(certificate.certified))


@pytest.mark.parametrize("keys", [2048, 8192])
@pytest.mark.parametrize("bits", [1.0, 3.0, 10.0, 15.0])
def test_gaussian_heads_certify(bits: float, keys: int) -> None:
    """At least 99% up to a standard deviation of 15 bits, where a few rows in a block decide."""
    assert share(families.gaussian(bits), keys, heads=40 if bits == 15.0 else 8) >= 0.99


@pytest.mark.parametrize("keys", [2048, 8192])
@pytest.mark.parametrize("bits", [20, 25, 30])
def test_gaussian_heads_are_certified_or_verified(bits: int, keys: int) -> None:
    """At least 99% up to 30 bits: the lower bound must be good where the upper is not."""
    found = measured(f"Gaussian, {bits} bits", keys, heads=6)
    assert (found.certified + found.verified) / found.blocks >= 0.99


@pytest.mark.parametrize("keys", [2048, 8192])
@pytest.mark.parametrize("name", SINKS)
def test_sink_heads_certify(name: str, keys: int) -> None:
    """At least 95% of heads with huge keys, along or against the queries; also under causal."""
    assert share(NAMED[name], keys, heads=4) >= 0.95
    causal = measured(name, keys, heads=2, causal=True)
    assert causal.certified / causal.blocks >= 0.95


@pytest.mark.parametrize("side", ["aligned", "anti", "mixed"])
def test_stronger_sinks_certify(side: str) -> None:
    """1,500 bits. Catches a slack that grows with the sink."""
    assert share(families.sink(side, bits=1500.0), 2048, heads=4) >= 0.95


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_heads_need_no_second_pass(name: str) -> None:
    """Causal versions are certified or verified. Catches L from keys that a row does not see."""
    found = measured(name, 2048, heads=2, causal=True)
    assert found.recomputed == 0


@pytest.mark.parametrize(
    "name",
    ["four sinks", "many sinks", "offset 30", "offset 5000", "orthogonal outliers", "two runs"],
)
def test_other_structure_certifies(name: str) -> None:
    """Heads whose difficulty is structure: centring, blocks or sentinels each must help."""
    assert share(FAMILIES[name], 2048, heads=2) == 1.0


def test_each_part_of_the_bounds_is_needed() -> None:
    """Sentinels certify sinks and blocks certify runs. Catches a family that "auto" forgets."""
    sink, runs = families.sink("mixed"), FAMILIES["two runs"]
    assert share(sink, 2048, 2, bounds="blocks") == 0.0
    assert share(sink, 2048, 2, bounds="blocks+sentinels") == 1.0
    assert share(runs, 2048, 2, bounds="ball+sentinels") == 0.0
    assert share(runs, 2048, 2, bounds="blocks+sentinels") == 1.0


def test_hopeless_heads_are_not_certified() -> None:
    """Gaussian logits of 60 bits have no structure to prove anything from."""
    assert share(families.gaussian(60.0), 2048, heads=2) == 0.0
    heavy = measured("Student-t, 15 bits", 8192, heads=2)
    assert heavy.recomputed > 0, "the report would say that everything is verified"


def test_predicted_verdicts_are_those_of_the_rows_alone() -> None:
    """A row sum at either end of the check moves the verdict. Catches a check on one side only."""
    line = Line("small", 600, families.gaussian(20.0))
    call = completeness.draw_call(line, np.random.default_rng(52), rows=8, head_dim=64)
    found = certify.certify(*call.arrays, **call.arguments, block_q=1, bounds="ball")
    exact = found.lower.astype(np.float64)
    for shift, passes in ((1.0, True), (-3.0, False), (230.0, True), (330.0, False)):
        rows = completeness.verified_rows(found, exact + shift, "bfloat16", 600)
        open_rows = np.isnan(found.stabilizer)
        assert np.all(rows[open_rows] == passes), shift


def test_the_other_gate() -> None:
    """Its formulas: accepted by |q||k| of centred keys alone, wrong where products flush."""
    found = measured("orthogonal outliers, small values", 2048, heads=2)
    assert found.gate_accepts == found.gate_wrong == found.certified == 2
    sink = measured("sink, aligned", 2048, heads=2)
    assert sink.gate_accepts == 0
    offset = measured("constant offset, 5,000 bits", 2048, heads=2)
    assert (offset.gate_accepts, offset.gate_wrong) == (2, 0)


def test_gate_errors_by_hand() -> None:
    """Products of 2^-100 and 2^-30 flush, those of 2^-90 do not."""
    logits = np.array([[-100.0, -100.0], [-90.0, -90.0]])
    value = np.array([[2.0**-30], [2.0**-30]], np.float32)
    errors = gates.fixed_stabilizer_errors(logits, value, np.zeros(2))
    assert errors.tolist() == [1.0, 0.0]
    query, key = np.array([[3.0, 4.0]], np.float32), np.array([[7.0, 0.0], [1.0, 0.0]], np.float32)
    verdict = gates.centred_gate(query, key)
    assert verdict.bound.tolist() == [15.0] and verdict.stabilizer.tolist() == [-73.0]
    assert verdict.accepts and not gates.centred_gate(15 * query, key).accepts
    assert verdict.logits.tolist() == [[9.0, -9.0]]


def test_verdict_codes_follow_the_rows() -> None:
    """One row that fails takes its block with it; rows that see nothing fail nothing."""
    line = Line("small", 300, families.gaussian(3.0))
    call = completeness.draw_call(line, np.random.default_rng(53), rows=40, head_dim=16)
    call.query[0, 13] *= np.float32(1e5)
    found = certify.certify(*call.arrays, **call.arguments, block_q=16, bounds="blocks")
    codes = completeness.judge(call, found)[0, 0].tolist()
    assert codes[1:] == [theorem.CERTIFIED] * 2 and codes[0] != theorem.CERTIFIED
