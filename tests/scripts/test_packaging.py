"""What an installed copy holds beside the modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("package", ["certify", "jax_kernels", "torch_clis"])
def test_types_are_installed(tmp_path: Path, package: str) -> None:
    """Fault: no py.typed in the wheel, so that type checkers ignore every annotation."""
    directories = ("egg_info", "--egg-base", tmp_path, "build_py", "--build-lib", tmp_path / "lib")
    command = [sys.executable, "setup.py", "--quiet", *map(str, directories)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "lib" / package / "__init__.py").is_file()
    assert (tmp_path / "lib" / package / "py.typed").is_file()
