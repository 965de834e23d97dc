"""The ``certify`` command: what it prints, writes and refuses."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from certify.cli import app
from tests.certify import families
from tests.certify.families import call_arrays, draw

ROOT = Path(__file__).parents[2]


def audit(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["audit", *(str(argument) for argument in arguments)])


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    rng = np.random.default_rng(61)
    heads = [draw(families.gaussian(bits), rng, 64, 512, 64) for bits in (3.0, 60.0)]
    query, key, value = call_arrays(heads, "float32")
    tensors = {"query": query.values, "key": key.values, "value": value.values}
    path = tmp_path / "qkv.safetensors"
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path)
    return path


def save_bfloat16(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file written by hand: length of the header, header, bytes."""
    header, data = {}, b""
    for name, array in tensors.items():
        part = (array.view(np.uint32) >> 16).astype("<u2").tobytes()
        span = [len(data), len(data) + len(part)]
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": span}
        data += part
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_audit_says_which_heads(recording: Path, tmp_path: Path) -> None:
    """Catches verdicts of the wrong head, and a JSON that disagrees with the table."""
    report = tmp_path / "audit.json"
    result = audit(recording, "--scale", families.SCALE, "--json", report)
    assert result.exit_code == 0, result.output
    assert "1 of 2 query blocks" in result.output
    document = json.loads(report.read_text())
    assert [head["verdict"] for head in document["heads"]] == ["certified", "check"]
    assert document["heads"][0]["smallest_margin_bits"] > 100
    assert document["heads"][1]["largest_error_bound"] is None


def test_bfloat16_files_need_no_library(recording: Path, tmp_path: Path) -> None:
    """The same tensors in bfloat16, read by bit operations. Catches bytes read as another type."""
    rng = np.random.default_rng(61)
    heads = [draw(families.gaussian(bits), rng, 64, 512, 64) for bits in (3.0, 60.0)]
    query, key, value = (array.values for array in call_arrays(heads, "bfloat16"))
    path, gaps = tmp_path / "half.safetensors", []
    save_bfloat16(path, {"query": query, "key": key, "value": value})
    for file in (path, recording):
        assert audit(file, "--scale", families.SCALE, "--json", tmp_path / "a.json").exit_code == 0
        gaps.append(json.loads((tmp_path / "a.json").read_text())["heads"][0]["gap_bits"])
    assert gaps[0] == pytest.approx(gaps[1], rel=0.02) and gaps[0] != gaps[1]


def test_tolerance_and_bounds_are_used(recording: Path) -> None:
    """Catches an option that is parsed and forgotten."""
    loose = audit(recording, "--scale", families.SCALE, "--tolerance", 0.5)
    assert "tolerance 0.5" in loose.output
    ball = audit(recording, "--scale", families.SCALE, "--bounds", "ball")
    assert " ball " in ball.output and "sentinels" not in ball.output


def refused(result: Any, *words: str) -> None:
    assert result.exit_code == 2, result.output
    message = result.stderr.strip()
    assert message.startswith("error: ") and "\n" not in message and "Traceback" not in message
    for word in words:
        assert word in message, message


def test_files_that_are_none(recording: Path, tmp_path: Path) -> None:
    """Missing, truncated, foreign, empty, a directory, a pickle: one line and exit code 2."""
    refused(audit(tmp_path / "none.safetensors"), "none.safetensors", "cannot be read")
    refused(audit(tmp_path), "cannot be read")
    whole = recording.read_bytes()
    for name, content in {
        "truncated": whole[:-100],
        "header": whole[:20],
        "empty": b"",
        "text": b"not tensors at all",
        "pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix.",
    }.items():
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(content)
        refused(audit(path), "not a complete .safetensors file")


def test_files_of_something_else(tmp_path: Path) -> None:
    """Tensors missing, of the wrong shape or dtype: the message says which."""
    path = tmp_path / "other.safetensors"
    save_file({"weight": np.ones((2, 2), np.float32)}, path)
    refused(audit(path), "lacks query, key, value", "weight")
    four = np.ones((1, 4, 1, 8), np.float32)
    save_file({"query": four, "key": four, "value": four.astype(np.int32)}, path)
    refused(audit(path), "value has dtype I32")
    save_file({"query": four[0], "key": four, "value": four}, path)
    refused(audit(path), "query: got shape")
    save_file({"query": four, "key": four, "value": np.ones((1, 4, 1, 16), np.float32)}, path)
    refused(audit(path), "value: got head_dim 16", "key of 8")


def test_bad_options(recording: Path, tmp_path: Path) -> None:
    """Catches an option whose error only shows after the work, or leaves half a file."""
    refused(audit(recording, "--tolerance", "1e-9"), "tolerance")
    refused(audit(recording, "--bounds", "box"), "bounds")
    refused(audit(recording, "--scale", "nan"), "scale")
    refused(audit(recording, "--json", tmp_path / "none" / "a.json"), "cannot be written")
    refused(audit(recording, "--json", tmp_path), "--json", "is a directory", "name of a file")
    assert audit(recording, "--tolerance", "small").exit_code == 2
    assert audit().exit_code == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["qkv.safetensors"]


def test_longest_name_of_a_table(recording: Path, tmp_path: Path) -> None:
    """Catches a temporary name that is longer than the file's own, which the disk refuses."""
    path = tmp_path / f"{'a' * 250}.json"
    assert audit(recording, "--scale", families.SCALE, "--json", path).exit_code == 0
    assert json.loads(path.read_text())["heads"]


def test_the_help_runs_as_printed(tmp_path: Path) -> None:
    """The example of ``certify audit --help``. Catches an example that rots, or wraps."""
    help_text = audit("--help").output
    example = help_text[help_text.index("Example") :].split("\n", 1)[1]
    assert "certify audit qkv.safetensors" in example
    python = shlex.quote(sys.executable)
    script = re.sub(r"^ +certify ", f" {python} -m certify.cli ", example, flags=re.MULTILINE)
    script = re.sub(r"^ +python ", f" {python} ", script, flags=re.MULTILINE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["sh", "-e", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "4 of 4 query blocks" in done.stdout
    assert (tmp_path / "audit.json").exists()


def test_help_of_the_command() -> None:
    """Catches a command that needs an argument to explain itself."""
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0 and "audit" in result.output


def test_certify_imports_nothing_heavy() -> None:
    """numpy, safetensors, typer and rich; matplotlib only to draw. Catches a slow import."""
    code = (
        "import sys, certify, certify.cli, certify.report; "
        "heavy = {'jax', 'torch', 'matplotlib', 'ml_dtypes', 'scipy'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
