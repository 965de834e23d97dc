"""One mutant per clause of the check after the loop; each must fail its named check."""

from __future__ import annotations

import inspect
import sys
import textwrap
from typing import Any

import pytest

from tests.certify import checks, checks_after_loop
from tests.certify.mutants_after_loop import MUTANTS, Mutant

CHECKS = checks.CHECKS | checks_after_loop.CHECKS
PACKAGES = ("certify", "jax_kernels", "tests.certify.checks", "tests.certify.measures")


def mutated(mutant: Mutant) -> Any:
    """The function, compiled anew from its changed source in a copy of its module's namespace."""
    source = textwrap.dedent(inspect.getsource(mutant.function))
    for old, new in mutant.changes:
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
        source = source.replace(old, new)
    namespace = dict(vars(sys.modules[mutant.function.__module__]))
    source = "from __future__ import annotations\n" + source
    exec(compile(source, f"<{mutant.fault}>", "exec"), namespace)
    return namespace[mutant.name]


def install(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the mutant in the place of the function in its owner and wherever it is imported."""
    original, changed = mutant.function, mutated(mutant)
    places = [module for name, module in sys.modules.items() if name.startswith(PACKAGES)]
    for place in (mutant.owner, *places):
        for name, member in list(vars(place).items()):
            if member is original:
                monkeypatch.setattr(place, name, changed)


@pytest.mark.parametrize("name", checks_after_loop.CHECKS)
def test_check_holds(name: str) -> None:
    """The package as it is; each check's docstring says which fault it would catch."""
    CHECKS[name]()


def test_bfloat16_kernel_holds() -> None:
    """Catches a look that only float32 kernels take: bfloat16 has another largest output."""
    checks_after_loop.check_kernel_after_loop("bfloat16")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault)
def test_mutant_fails_its_check(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    install(mutant, monkeypatch)
    with pytest.raises(AssertionError):
        CHECKS[mutant.check]()


def test_faults_are_named_once() -> None:
    """Two mutants of one name would hide that a clause has none."""
    names = [mutant.fault for mutant in MUTANTS]
    assert len(names) == len(set(names))
