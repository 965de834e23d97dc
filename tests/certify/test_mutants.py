"""One mutant per clause: the package with one clause changed must fail a named check.

A mutant is a piece of source text replaced in one function, compiled in place and put wherever the
package has that function. The same checks hold for the package as it is (``test_checks``), so a
mutant that survives means that a clause is not tested.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from types import ModuleType
from typing import Any

import pytest

from certify import arithmetic, call, rows
from tests.certify import mutants
from tests.certify.checks import CHECKS
from tests.certify.mutants import Mutant
from tests.certify.mutants_masks import MASK_MUTANTS
from tests.certify.mutants_saving import SAVING_MUTANTS

MUTANTS = mutants.MUTANTS + MASK_MUTANTS + SAVING_MUTANTS

PACKAGE = ("certify", "tests.certify.checks", "tests.certify.measures")


def mutated(mutant: Mutant) -> Any:
    """The function, compiled anew from its changed source in a copy of its module's namespace."""
    function = mutant.function
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(mutant.old) == 1, f"{mutant.old!r} occurs {source.count(mutant.old)} times"
    module: ModuleType = sys.modules[function.__module__]
    namespace = dict(vars(module))
    source = "from __future__ import annotations\n" + source.replace(mutant.old, mutant.new)
    exec(compile(source, f"<{mutant.fault}>", "exec"), namespace)
    return namespace[function.__name__]


def install(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the mutant in the place of the function in every module and class that has it."""
    changed = mutated(mutant)
    places: list[Any] = [m for name, m in sys.modules.items() if name.startswith(PACKAGE)]
    places += [call._Rows, rows.HeadBounds]
    found = 0
    for place in places:
        for name, member in list(vars(place).items()):
            if member is mutant.function:
                monkeypatch.setattr(place, name, changed)
                found += 1
    assert found, f"{mutant.function} is nowhere"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault)
def test_mutant_fails_its_check(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    install(mutant, monkeypatch)
    with pytest.raises(AssertionError):
        CHECKS[mutant.check]()


def test_faults_are_named_once() -> None:
    """Two mutants of one name would hide that a clause has none."""
    names = [mutant.fault for mutant in MUTANTS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("constant", "changed", "check"),
    [
        ("BFLOAT16", {"product_flushes": 0}, "loss_is_counted_in_full"),
        ("FLOAT32", {"product_flushes": 1}, "six_passes_are_counted"),
        ("FLOAT32", {"probability_losses": 1}, "loss_is_counted_in_full"),
        ("FLOAT32", {"contraction_factor": 0}, "rounding_slack"),
    ],
)
def test_changed_arithmetic_fails_its_check(
    constant: str, changed: dict[str, int], check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = getattr(arithmetic, constant)
    for name, count in changed.items():
        monkeypatch.setitem(kernel.__dict__, name, count)
    with pytest.raises(AssertionError):
        CHECKS[check]()
