"""The scripts as a user runs them, and one tiny checkpoint of each kind for all tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = ROOT / "scripts"

RunScript = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def run_script() -> RunScript:
    """Run scripts/NAME with arguments in a fresh interpreter."""

    def run(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command: Sequence[str] = [sys.executable, str(SCRIPTS / name), *map(str, arguments)]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=600, check=False
        )

    return run


@pytest.fixture(scope="session")
def tiny_wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with one transformer, in a directory with a space in its name."""
    from make_tiny_checkpoint import TinyWan, write_checkpoint

    directory = tmp_path_factory.mktemp("one expert") / "tiny wan"
    write_checkpoint(directory, seed=0, two_experts=False, sizes=TinyWan())
    return directory


@pytest.fixture(scope="session")
def tiny_wan_two_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from make_tiny_checkpoint import TinyWan, write_checkpoint

    directory = tmp_path_factory.mktemp("two-experts") / "tiny-wan"
    write_checkpoint(directory, seed=0, two_experts=True, sizes=TinyWan())
    return directory
