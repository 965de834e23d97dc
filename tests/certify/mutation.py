"""Put a function with one clause changed in the place of the function, wherever that is."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class SourceMutant:
    """Replace ``old`` (found exactly once) by ``new`` in a function; ``check`` must then fail."""

    fault: str
    function: Callable[..., Any]
    old: str
    new: str
    check: str

    def compiled(self) -> Any:
        """The function from its changed source, in a copy of its module's namespace."""
        source = textwrap.dedent(inspect.getsource(self.function))
        assert source.count(self.old) == 1, f"{self.old!r} occurs {source.count(self.old)} times"
        namespace = dict(vars(sys.modules[self.function.__module__]))
        source = "from __future__ import annotations\n" + source.replace(self.old, self.new)
        exec(compile(source, f"<{self.fault}>", "exec"), namespace)
        return namespace[self.function.__name__]

    def install(
        self, monkeypatch: pytest.MonkeyPatch, packages: tuple[str, ...], *classes: type
    ) -> None:
        """In every module of these packages, and in these classes."""
        changed = self.compiled()
        places: list[Any] = [*classes]
        places += [module for name, module in sys.modules.items() if name.startswith(packages)]
        found = 0
        for place in places:
            for name, member in list(vars(place).items()):
                if member is self.function:
                    monkeypatch.setattr(place, name, changed)
                    found += 1
        assert found, f"{self.function} is nowhere"
