"""Shares certified on named families: a bound must not become sound by giving up."""

from __future__ import annotations

import numpy as np
import pytest

import certify
from tests.certify import families
from tests.certify.families import FAMILIES, SCALE, Family, call_arrays, draw

SINKS = {
    f"sink {side} {bits:g}": families.sink(side, bits=bits)
    for side in ("aligned", "anti", "mixed")
    for bits in (500.0, 1500.0)
}


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
    """At least 99% up to a standard deviation of 15 bits."""
    assert share(families.gaussian(bits), keys, heads=8) >= 0.99


@pytest.mark.parametrize("keys", [2048, 8192])
@pytest.mark.parametrize("name", SINKS)
def test_sink_heads_certify(name: str, keys: int) -> None:
    """At least 95% of heads with one huge key, along or against the queries."""
    assert share(SINKS[name], keys, heads=4) >= 0.95


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
