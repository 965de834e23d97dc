"""Named checks: each asserts one property of the package and raises AssertionError where it fails.

The suite runs every check on the package as it is, and again on mutants of it (``test_mutants``).
"""

from __future__ import annotations

from collections.abc import Callable

from tests.certify import (
    checks_bounds,
    checks_call,
    checks_masks,
    checks_saving,
    checks_theorem,
)

CHECKS: dict[str, Callable[[], None]] = {
    name.removeprefix("check_"): function
    for module in (checks_theorem, checks_bounds, checks_saving, checks_call, checks_masks)
    for name, function in vars(module).items()
    if name.startswith("check_")
}
