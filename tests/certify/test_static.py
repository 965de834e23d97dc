"""Certificates from weights: every named check on the package as it is."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from certify.static import StaticCertificate
from tests.certify.checks_static import CHECKS, example


@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str) -> None:
    CHECKS[name]()


@given(
    st.lists(st.floats(0, allow_infinity=True, allow_nan=False, width=32), min_size=1, max_size=5),
    st.sampled_from(["bfloat16", "float16", "float32"]),
    st.sampled_from([None, 1, 7]),
)
def test_json_loses_nothing(bits: list[float], dtype: str, fewest: int | None) -> None:
    """Catches a bound rounded in writing, and a lost "no claim"."""
    made = StaticCertificate("a.b", np.array(bits, np.float32), "why", dtype, fewest)
    back = StaticCertificate.from_json(made.to_json())
    assert back.logit_bound.tobytes() == made.logit_bound.tobytes()
    assert (back.layer, back.reason, back.dtype, back.fewest_keys) == ("a.b", "why", dtype, fewest)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "certify.certificate"},
        {"version": 2},
        {"logit_bound": [[1.0]]},
        {"logit_bound": [-1.0]},
        {"logit_bound": None},
        {"logit_bound": []},
        {"dtype": "int8"},
        {"fewest_keys": []},
    ],
)
def test_foreign_json_is_refused(change: dict[str, object]) -> None:
    """Catches a claim read from something else."""
    document = {**json.loads(example().to_json()), **change}
    with pytest.raises(ValueError):
        StaticCertificate.from_json(json.dumps(document))
    for text in ("", "[]", "{}", "null"):
        with pytest.raises(ValueError):
            StaticCertificate.from_json(text)


def test_bounds_are_validated() -> None:
    """Catches NaN taken for a bound, and another dtype."""
    for bound in (
        np.array([np.nan], np.float32),
        np.array([-1.0], np.float32),
        np.array([1.0]),
        np.zeros((1, 1), np.float32),
        np.zeros(0, np.float32),
    ):
        with pytest.raises(ValueError):
            StaticCertificate("a", bound, "")


@given(st.floats(2.0**-14, 0.5), st.floats(1.01, 4.0), st.floats(0.0, 120.0))
def test_a_larger_tolerance_certifies_no_less(tolerance: float, factor: float, bits: float) -> None:
    """Catches a tolerance with the wrong sign; so with fewer keys and a narrower window."""
    cert = StaticCertificate("a", np.array([bits], np.float32), "")
    larger = min(tolerance * factor, 0.9)
    tight, loose = (cert.certified(4096, t)[0] for t in (tolerance, larger))
    assert loose or not tight
    more_keys = cert.certified(8192, tolerance)[0]
    assert tight or not more_keys
    wide = cert.certified(4096, tolerance, 2.0**-20, 2.0**20)[0]
    assert tight or not wide


def test_unprovable_tolerances_are_refused() -> None:
    """Catches a tolerance below exp2's own rounding being called certified."""
    for tolerance in (0.0, 1e-9, 1.0, float("nan")):
        with pytest.raises(ValueError, match="tolerance"):
            example().certified(tolerance=tolerance)
