"""scripts/env.sh without its downloads: what it reuses, refuses and explains."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
REPORT = 'source "{env}" && printf "%s\\n" "$CLIS_PYTHON_COMMAND" "${{PYTHONPATH:-}}"'


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A bare copy of scripts/ in a directory with a space in its name."""
    root = tmp_path / "my clone"
    (root / "scripts").mkdir(parents=True)
    for name in ("env.sh", "requirements.lock"):
        shutil.copy(ROOT / "scripts" / name, root / "scripts" / name)
    return root


def source_env(
    repository: Path, path: str | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("CLIS_PYTHON", "PYTHONPATH")}
    environment = {**kept, **variables}
    if path is not None:
        environment["PATH"] = path
    script = REPORT.format(env=repository / "scripts" / "env.sh")
    bash = shutil.which("bash") or "/bin/bash"
    return subprocess.run(
        [bash, "-euo", "pipefail", "-c", script],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def fake_venv(repository: Path, checksum: str) -> Path:
    """What a finished set-up leaves, with this interpreter in place of the installed one."""
    venv = repository / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    (venv / ".made-by-clis").touch()
    (venv / ".complete").write_text(checksum + "\n")
    return venv


def lock_checksum(repository: Path) -> str:
    return hashlib.sha256((repository / "scripts" / "requirements.lock").read_bytes()).hexdigest()


def bin_directory(tmp_path: Path, **scripts: str) -> str:
    """A PATH with the usual tools, no Python, and the given scripts."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for tool in ("bash", "dirname", "df", "awk", "sha256sum", "cut", "cat", "uname", "flock"):
        found = shutil.which(tool)
        assert found, tool
        (directory / tool).symlink_to(found)
    for tool in ("rm", "mkdir"):
        (directory / tool).symlink_to(shutil.which(tool) or f"/bin/{tool}")
    for name, text in scripts.items():
        (directory / name).write_text(f"#!{shutil.which('bash')}\n{text}\n")
        (directory / name).chmod(0o755)
    return str(directory)


def test_finished_environment_is_reused(repository: Path) -> None:
    """Fault: gigabytes installed again at every start, or a path cut at a space."""
    venv = fake_venv(repository, lock_checksum(repository))
    done = source_env(repository)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(venv / "bin" / "python"), ""]


@pytest.mark.parametrize("state", ["interrupted", "lock file changed"])
def test_unfinished_or_outdated_environment_is_not_reused(
    repository: Path, tmp_path: Path, state: str
) -> None:
    """Fault: half an installation, or yesterday's, taken for a whole one.

    The only interpreter found here cannot make an environment, so the set-up ends with its reason.
    """
    venv = fake_venv(repository, "0" * 64)
    if state == "interrupted":
        (venv / ".complete").unlink()
    path = bin_directory(
        tmp_path, **{"python3.11": '[[ "$*" == *ensurepip* ]] && exit 0; [[ "$1" == -c ]]'}
    )
    done = source_env(repository, path=path)
    assert done.returncode != 0
    assert "about 9 GB of disk" in done.stdout
    assert "-m venv failed" in done.stderr
    assert not (venv / ".complete").exists()


def test_foreign_environment_is_left_alone(repository: Path) -> None:
    """Fault: somebody's own .venv deleted."""
    keep = repository / ".venv" / "keep"
    keep.mkdir(parents=True)
    done = source_env(repository)
    assert done.returncode != 0
    assert "move it away" in done.stderr
    assert keep.exists()


def test_missing_venv_module_is_explained(repository: Path, tmp_path: Path) -> None:
    """Fault: Debian's Python without python3-venv ends in a traceback."""
    path = bin_directory(tmp_path, **{"python3.12": '[[ "$*" != *ensurepip* ]]'})
    done = source_env(repository, path=path)
    assert done.returncode != 0
    assert "apt install python3.12-venv" in done.stderr


def test_no_python_is_explained(repository: Path, tmp_path: Path) -> None:
    done = source_env(repository, path=bin_directory(tmp_path))
    assert done.returncode != 0
    assert "no Python 3.10 to 3.13 found" in done.stderr
    assert "CLIS_PYTHON" in done.stderr


def test_full_disk_is_refused_before_anything_is_made(repository: Path, tmp_path: Path) -> None:
    """Fault: the set-up dies of a full disk after minutes."""
    path = bin_directory(tmp_path, **{"python3.11": "exit 0"})
    (tmp_path / "bin" / "df").unlink()
    (tmp_path / "bin" / "df").write_text(
        f"#!{shutil.which('bash')}\necho header\necho disk 1 1 2097152 1% /\n"
    )
    (tmp_path / "bin" / "df").chmod(0o755)
    done = source_env(repository, path=path)
    assert done.returncode != 0
    assert "2 GB are free" in done.stderr
    assert not (repository / ".venv").exists()


def test_given_interpreter_is_used_as_it_is(repository: Path) -> None:
    """Fault: an environment made although one was named; the packages not importable from it."""
    done = source_env(repository, CLIS_PYTHON=sys.executable, PYTHONPATH="/elsewhere")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [sys.executable, f"{repository}:/elsewhere"]
    assert not (repository / ".venv").exists()


@pytest.mark.parametrize("name", ["absent", "/bin/false"])
def test_given_interpreter_that_does_not_run(repository: Path, name: str) -> None:
    done = source_env(repository, CLIS_PYTHON=name)
    assert done.returncode != 0
    assert f"CLIS_PYTHON={name}" in done.stderr
    assert done.stderr.count("\n") == 1


def test_given_interpreter_without_packages(repository: Path, tmp_path: Path) -> None:
    """Fault: an ImportError in the middle of the demo instead of the list of what is missing."""
    bare = tmp_path / "bare python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -I "$@"\n')
    bare.chmod(0o755)
    done = source_env(repository, CLIS_PYTHON=str(bare))
    assert done.returncode != 0
    assert "lacks:" in done.stderr
    assert "torch_xla" in done.stderr


def test_lock_file_pins_every_line() -> None:
    """Fault: a range, a host or a local file in the lock; a package pinned twice for one Python."""
    from packaging.requirements import Requirement

    lines = (ROOT / "scripts" / "requirements.lock").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert len(requirements) > 50
    for python in ("3.10", "3.11", "3.12", "3.13"):
        environment = {"python_version": python, "platform_machine": "x86_64"}
        chosen = [r for r in requirements if not r.marker or r.marker.evaluate(environment)]
        names = [requirement.name for requirement in chosen]
        assert len(names) == len(set(names))
        assert {"torch", "torch-xla", "jax", "jaxlib", "libtpu", "diffusers"} <= set(names)
    for requirement in requirements:
        assert requirement.url is None
        assert [clause.operator for clause in requirement.specifier] == ["=="]
