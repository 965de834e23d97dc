"""Every named check holds for the package; its docstring says which fault it would catch."""

from __future__ import annotations

import pytest

from tests.certify.checks import CHECKS


@pytest.mark.parametrize("name", CHECKS)
def test_check_holds(name: str) -> None:
    CHECKS[name]()
