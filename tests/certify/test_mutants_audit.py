"""One mutant per clause of the audit; each must fail its named test."""

from __future__ import annotations

import inspect
import sys
import textwrap
from typing import Any

import pytest

from certify.recorded_layers import LayerPasses
from tests.certify.mutants_audit import MUTANTS, Mutant

PACKAGES = ("certify", "tests.certify.test_audit")


def mutated(mutant: Mutant) -> Any:
    """The function, compiled anew from its changed source in a copy of its module's namespace."""
    source = textwrap.dedent(inspect.getsource(mutant.function))
    assert source.count(mutant.old) == 1, f"{mutant.old!r} occurs {source.count(mutant.old)} times"
    namespace = dict(vars(sys.modules[mutant.function.__module__]))
    source = "from __future__ import annotations\n" + source.replace(mutant.old, mutant.new)
    exec(compile(source, f"<{mutant.fault}>", "exec"), namespace)
    return namespace[mutant.function.__name__]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault)
def test_mutant_fails_its_test(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = mutated(mutant)
    places = [module for name, module in sys.modules.items() if name.startswith(PACKAGES)]
    found = 0
    for place in (*places, LayerPasses):
        for name, member in list(vars(place).items()):
            if member is mutant.function:
                monkeypatch.setattr(place, name, changed)
                found += 1
    assert found
    # pytest.raises that finds nothing raised fails with an exception of its own.
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        mutant.check()


def test_faults_are_named_once() -> None:
    """Two mutants of one name would hide that a clause has none."""
    names = [mutant.fault for mutant in MUTANTS]
    assert len(names) == len(set(names))
