"""The ``certify`` command: what it prints, writes and refuses."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from safetensors.numpy import save_file
from typer.testing import CliRunner

from certify.bounds import RECORDED_BOUNDS
from certify.cli import app
from certify.commands.record import GROUP, add_contributed
from certify.recording import Recording, read_recording, write_recording
from tests.certify import families
from tests.certify.families import call_arrays, draw
from tests.certify.recordings import (
    CERTIFIED,
    EVIL,
    VERIFIED,
    block,
    layer_of,
    recording_of,
    with_lane,
)

ROOT = Path(__file__).parents[2]

COMMANDS = ("audit", "report", "explain", "weights")


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def audit(*arguments: object) -> Any:
    return run("audit", *arguments)


@pytest.fixture
def tensors(tmp_path: Path) -> Path:
    """Two heads: one with room to spare, one that only its row sums prove."""
    rng = np.random.default_rng(61)
    heads = [draw(families.gaussian(bits), rng, 64, 512, 64) for bits in (3.0, 60.0)]
    query, key, value = call_arrays(heads, "float32")
    arrays = {"query": query.values, "key": key.values, "value": value.values}
    path = tmp_path / "qkv.safetensors"
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)
    return path


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """A recording: one head certified, one verified, one recomputed."""
    sums = {"row_sum_min": 0.5, "row_sum_max": 2.0}
    run_of = [{"verdict": float(verdict), **sums} for verdict in (CERTIFIED, VERIFIED, 2)]
    path = tmp_path / "calls.safetensors"
    heads = [block(50.0), block(431.0), block(431.0)]
    write_recording(path, recording_of(layer_of(heads, run=run_of), not_recorded=5))
    return path


def save_bfloat16(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """A safetensors file written by hand: length of the header, header, bytes."""
    header, data = {}, b""
    for name, array in arrays.items():
        part = (array.view(np.uint32) >> 16).astype("<u2").tobytes()
        span = [len(data), len(data) + len(part)]
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": span}
        data += part
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_audit_says_which_heads(tensors: Path, tmp_path: Path) -> None:
    """Catches verdicts of the wrong head, and a JSON that disagrees with the table."""
    report = tmp_path / "audit.json"
    result = audit(tensors, "--scale", families.SCALE, "--json", report)
    assert result.exit_code == 0, result.output
    assert "1 of 2 query blocks are certified" in result.output
    heads = json.loads(report.read_text())["heads"]
    assert [head["worst_verdict"] for head in heads] == ["certified", "verified"]
    assert heads[0]["smallest_margin_bits"] > 100 > 0 > heads[1]["smallest_margin_bits"]
    assert "more than the budget" in heads[1]["why"]


def test_without_row_sums_nothing_is_verified(tensors: Path) -> None:
    """Catches a verdict from row sums that were not computed."""
    result = audit(tensors, "--scale", families.SCALE, "--no-row-sums", "--require-share", 0.6)
    assert result.exit_code == 1 and "50.0% recomputed" in result.output


def test_bfloat16_files_need_no_library(tensors: Path, tmp_path: Path) -> None:
    """The same tensors in bfloat16, read by bit operations. Catches bytes read as another type."""
    rng = np.random.default_rng(61)
    heads = [draw(families.gaussian(bits), rng, 64, 512, 64) for bits in (3.0, 60.0)]
    query, key, value = (array.values for array in call_arrays(heads, "bfloat16"))
    path, gaps = tmp_path / "half.safetensors", []
    save_bfloat16(path, {"query": query, "key": key, "value": value})
    for file in (path, tensors):
        assert audit(file, "--scale", families.SCALE, "--json", tmp_path / "a.json").exit_code == 0
        gaps.append(json.loads((tmp_path / "a.json").read_text())["heads"][0]["worst_gap_bits"])
    assert gaps[0] == pytest.approx(gaps[1], rel=0.02) and gaps[0] != gaps[1]


def test_options_are_used(tensors: Path, calls: Path, tmp_path: Path) -> None:
    """Catches an option that is parsed and forgotten."""
    assert "tolerance 2^-1 " in audit(calls, "--tolerance", 0.5).output
    assert "tolerance 2^-12" in audit(calls).output
    for option in ("--causal", "--soft-cap=3"):
        gaps = []
        for options in ((), (option,)):
            assert not audit(tensors, *options, "--json", tmp_path / "a.json").exit_code
            gaps.append(json.loads((tmp_path / "a.json").read_text())["heads"][0]["worst_gap_bits"])
        assert gaps[0] != gaps[1]
    ball = tmp_path / "ball.json"
    audit(tensors, "--scale", families.SCALE, "--bounds", "ball", "--json", ball)
    auto = tmp_path / "auto.json"
    audit(tensors, "--scale", families.SCALE, "--json", auto)
    gaps = [json.loads(f.read_text())["heads"][1]["worst_gap_bits"] for f in (ball, auto)]
    assert gaps[0] > gaps[1]


def test_a_recording_is_audited(calls: Path) -> None:
    """Verdicts as judged and as run, and calls left out. Catches a table of the wrong counts."""
    result = audit(calls)
    assert result.exit_code == 0, result.output
    assert "1 of 3 query blocks are certified" in result.output
    assert "33.3% certified, 33.3% verified, 33.3% recomputed" in result.output
    assert "As run at tolerance 2^-12: 1 certified, 1 verified, 1 recomputed." in result.output
    assert "5 calls were left out" in result.output


@pytest.mark.parametrize(
    ("option", "share", "code"),
    [
        ("--require-share", 0.66, 0),
        ("--require-share", 0.67, 1),
        ("--require-certified-share", 0.33, 0),
        ("--require-certified-share", 0.34, 1),
        ("--require-share", 0, 0),
        ("--require-share", 1.5, 2),
    ],
)
def test_required_shares(calls: Path, option: str, share: float, code: int) -> None:
    """Catches a share of the wrong verdicts, and an exit code that says nothing."""
    result = audit(calls, option, share)
    assert result.exit_code == code, result.output
    assert ("below" in result.stderr) == (code == 1)


def test_an_empty_recording_meets_no_share(tmp_path: Path) -> None:
    """Nothing is proved of nothing. Catches 0 of 0 taken for all."""
    path = tmp_path / "empty.safetensors"
    write_recording(path, recording_of())
    assert audit(path).exit_code == 0
    assert audit(path, "--require-share", 0.5).exit_code == 1


def test_contradictions_are_loud(tensors: Path, tmp_path: Path) -> None:
    """A tampered file: said in words, exit code 1. Catches a check whose result is dropped."""
    path = tmp_path / "calls.safetensors"
    options = ("--scale", families.SCALE, "--save-recording", path, "--keep-rows", 16)
    assert audit(tensors, *options).exit_code == 0
    fine = audit(path)
    assert fine.exit_code == 0 and "2 of 2 heads agree" in fine.output
    recording = read_recording(path)
    layer = with_lane(recording.layers[0], "upper:ball", lambda bits: bits - 400.0)
    evil = type(layer)(
        EVIL, layer.settings, layer.bounds, layer.certificate, layer.passes, layer.kept
    )
    write_recording(path, Recording([evil], RECORDED_BOUNDS, recording.tolerance))
    tampered = audit(path)
    assert tampered.exit_code == 1
    assert "contradicts itself" in tampered.output and "ball: row" in tampered.output
    assert EVIL in tampered.output
    result = run("report", path, "-o", tmp_path / "r.html")
    assert "contradicts itself" in result.output and result.exit_code == 0


def test_a_saved_recording_says_the_same(tensors: Path, tmp_path: Path) -> None:
    """Through the file and back. Catches numbers that change on the way."""
    path = tmp_path / "calls.safetensors"
    heads = []
    for file, options in (
        (tensors, ("--scale", families.SCALE, "--save-recording", path)),
        (path, ()),
    ):
        assert audit(file, *options, "--json", tmp_path / "a.json").exit_code == 0
        heads.append(json.loads((tmp_path / "a.json").read_text())["heads"])
    assert heads[0] == heads[1] and len(heads[0]) == 2


def test_report_writes_all_it_names(calls: Path, tmp_path: Path) -> None:
    """Page, JSON and CSV of the same audit. Catches one that is left out."""
    files = [tmp_path / name for name in ("r.html", "r.json", "r.csv")]
    options = ("-o", files[0], "--json", files[1], "--csv", files[2], "--title", EVIL)
    result = run("report", calls, *options)
    assert result.exit_code == 0, result.output
    page = files[0].read_text(encoding="utf-8")
    assert "&lt;script&gt;" in page and "<script" not in page and "33.3%" in page
    assert json.loads(files[1].read_text())["query_blocks"]["recomputed"] == 1
    with files[2].open(newline="", encoding="utf-8") as file:
        assert [line["worst_verdict"] for line in csv.DictReader(file)] == [
            "certified",
            "verified",
            "recomputed",
        ]


def refused(result: Any, *words: str) -> None:
    assert result.exit_code == 2, result.output
    message = result.stderr.strip()
    assert message.startswith("error: ") and "\n" not in message and "Traceback" not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("command", [("audit",), ("report",), ("explain", "--head", "0")])
def test_files_that_are_none(
    tensors: Path, calls: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """Missing, truncated, foreign, newer, a directory, a pickle: one line and exit code 2."""

    def given(path: Path) -> Any:
        output = ("-o", tmp_path / "r.html") if command == ("report",) else ()
        return run(command[0], path, *command[1:], *output)

    refused(given(tmp_path / "none.safetensors"), "none.safetensors", "cannot be read")
    refused(given(tmp_path), "cannot be read")
    for whole in (tensors.read_bytes(), calls.read_bytes()):
        for name, content in {
            "truncated": whole[:-100],
            "header": whole[:20],
            "empty": b"",
            "text": b"not tensors at all",
            "pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix.",
        }.items():
            path = tmp_path / f"{name}.safetensors"
            path.write_bytes(content)
            refused(given(path), "not a complete .safetensors file")
    path = tmp_path / "other.safetensors"
    save_file({"weight": np.ones((2, 2), np.float32)}, path)
    refused(given(path), "lacks query, key, value", "weight")
    metadata_of = {"schema": "certify.recording", "version": "2", "layout": "{}"}
    save_file({"weight": np.ones(2, np.float32)}, path, metadata=metadata_of)
    refused(given(path), "Upgrade")
    save_file({"weight": np.ones(2, np.float32)}, path, metadata={**metadata_of, "version": "1"})
    refused(given(path), "damaged")
    assert not (tmp_path / "r.html").exists()


def test_files_of_something_else(tmp_path: Path) -> None:
    """Tensors of the wrong shape or dtype: the message says which."""
    path = tmp_path / "other.safetensors"
    four = np.ones((1, 4, 1, 8), np.float32)
    save_file({"query": four, "key": four, "value": four.astype(np.int32)}, path)
    refused(audit(path), "value has dtype I32")
    save_file({"query": four[0], "key": four, "value": four}, path)
    refused(audit(path), "query: got shape")
    save_file({"query": four, "key": four, "value": np.ones((1, 4, 1, 16), np.float32)}, path)
    refused(audit(path), "value: got head_dim 16", "key of 8")


def test_bad_options(tensors: Path, calls: Path, tmp_path: Path) -> None:
    """Catches an option whose error only shows after the work, or leaves half a file."""
    before = sorted(tmp_path.iterdir())
    refused(audit(tensors, "--tolerance", "1e-9"), "tolerance")
    refused(audit(calls, "--tolerance", "1e-9"), "tolerance")
    refused(audit(tensors, "--bounds", "boxes"), "bounds", "auto, ball")
    refused(audit(tensors, "--scale", "nan"), "scale")
    refused(audit(tensors, "--soft-cap", "-1"), "soft_cap")
    refused(audit(calls, "--scale", "1"), "--scale", "is a recording")
    refused(audit(calls, "--causal"), "--causal", "is a recording")
    refused(audit(calls, "--save-recording", tmp_path / "x"), "--save-recording")
    for command, option in (
        ("audit", "--json"),
        ("audit", "--csv"),
        ("audit", "--save-recording"),
        ("report", "--output"),
    ):
        there = run(command, tensors, option, tmp_path / "none" / "a.json")
        refused(there, option, "cannot be written")
        refused(run(command, tensors, option, tmp_path), option, "is a directory")
    assert audit(tensors, "--tolerance", "small").exit_code == 2
    assert audit().exit_code == 2
    assert sorted(tmp_path.iterdir()) == before


def test_longest_name_of_a_table(calls: Path, tmp_path: Path) -> None:
    """Catches a temporary name that is longer than the file's own, which the disk refuses."""
    path = tmp_path / f"{'a' * 250}.json"
    assert audit(calls, "--json", path).exit_code == 0
    assert json.loads(path.read_text())["heads"]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_runs_as_printed(tmp_path: Path, command: str) -> None:
    """The example of each sub-command's --help. Catches an example that rots, or wraps."""
    help_text = run(command, "--help").output
    example = help_text[help_text.index("Example") :].split("\n", 1)[1]
    assert f"certify {command} " in example
    python = shlex.quote(sys.executable)
    script = re.sub(r"^ +certify ", f" {python} -m certify.cli ", example, flags=re.MULTILINE)
    script = re.sub(r"^ +python ", f" {python} ", script, flags=re.MULTILINE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["sh", "-e", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    expected = {
        "audit": "32 kept rows of 4 heads bounded again: 4 of 4",
        "report": "wrote report.html",
        "explain": "Layer qkv, head 2: certified",
        "weights": "certified",
    }
    assert expected[command] in done.stdout
    for name in re.findall(r"(?:--json|--csv|--output|--save-recording) (\S+)", example):
        assert (tmp_path / name).stat().st_size > 0


def test_help_names_every_command() -> None:
    """Catches a command that is not listed, or that needs an argument to explain itself."""
    result = run("--help")
    assert result.exit_code == 0
    for name in (*COMMANDS, "record"):
        assert re.search(rf"^  {name} +\w", result.output, re.MULTILINE), name


class _Entry:
    """An entry point of a package that may be missing."""

    def __init__(self, name: str, target: Any) -> None:
        self.name, self.value, self._target = name, "somewhere.commands:run", target

    def load(self) -> Any:
        if isinstance(self._target, Exception):
            raise self._target
        return self._target


def with_entries(monkeypatch: pytest.MonkeyPatch, *entries: _Entry) -> typer.Typer:
    def found(*, group: str) -> list[_Entry]:
        return list(entries) if group == GROUP else []

    monkeypatch.setattr(metadata, "entry_points", found)
    made = typer.Typer(no_args_is_help=True)
    made.callback()(lambda: None)
    add_contributed(made)
    return made


def test_record_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not installed, or not importable: one line, exit code 2. Catches a traceback of an import."""
    for entries in ((), (_Entry("record", ImportError("No module named 'torch'")),)):
        made = with_entries(monkeypatch, *entries)
        for arguments in (["record"], ["record", "model", "--steps", "3"], ["record", "--help"]):
            result = CliRunner().invoke(made, arguments)
            refused(result, "certify record", "pip install 'torch-clis[xla]'")


def test_commands_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments, --help and exit codes reach them. Catches an option that is swallowed."""

    def record(model: str, steps: int = 1) -> None:
        """Recorded by another package."""
        typer.echo(f"{model} {steps}")
        raise typer.Exit(steps)

    made = with_entries(monkeypatch, _Entry("record", record), _Entry("extra", record))
    result = CliRunner().invoke(made, ["record", "tiny", "--steps", "3"])
    assert (result.exit_code, result.output.strip()) == (3, "tiny 3")
    help_text = CliRunner().invoke(made, ["record", "--help"]).output
    assert "Recorded by another package" in help_text and "--steps" in help_text
    assert CliRunner().invoke(made, ["extra", "--nonsense"]).exit_code == 2
    listed = CliRunner().invoke(made, ["--help"]).output
    assert "Comes with somewhere" in listed


def test_certify_imports_nothing_heavy() -> None:
    """numpy, safetensors, typer and rich; matplotlib only to draw. Catches a slow import."""
    code = (
        "import sys, certify, certify.cli, certify.report, certify.charts; "
        "heavy = {'jax', 'torch', 'matplotlib', 'ml_dtypes', 'scipy', 'PIL'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
