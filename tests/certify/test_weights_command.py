"""The ``certify weights`` command: what it prints, writes and refuses."""

from __future__ import annotations

import csv
import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from certify.commands.weights import EXAMPLE, weights
from certify.static import StaticCertificate, static_certificates
from tests.certify.static_cases import SCENARIOS, write_checkpoint

ROOT = Path(__file__).parents[2]

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
app.command(epilog=EXAMPLE)(weights)


def run(*arguments: object, columns: int = 160) -> Any:
    return CliRunner().invoke(
        app, [str(argument) for argument in arguments], env={"COLUMNS": str(columns)}
    )


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Three layers of four heads: certified, too large, and without a norm."""
    scenario = SCENARIOS["qwen3"]()
    tensors = {"model.layers.2.self_attn.q_proj.weight": np.zeros((32, 4))}
    for layer, factor in ((0, 1.0), (1, 5.0)):
        for name, array in scenario.tensors.items():
            tensors[f"model.layers.{layer}.self_attn.{name}"] = factor * array
    return write_checkpoint(tmp_path / "model", scenario.config, tensors)


def test_table_says_which_layers_and_why(checkpoint: Path) -> None:
    """Catches a verdict of the wrong layer, and a layer passed over in silence."""
    result = run(checkpoint)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    rows = {line.split()[0]: line for line in lines if line.split()[:1] and "self_attn" in line}
    assert rows["model.layers.0.self_attn"].rstrip().endswith("every input")
    assert rows["model.layers.1.self_attn"].rstrip().endswith("not")
    assert rows["model.layers.2.self_attn"].rstrip().endswith("no claim")
    assert "4 of 12 heads are certified for every input" in result.output
    assert "RMSNorm per head, rotary pairs half a head apart" in result.output
    assert "  model.layers.2.self_attn: no QK norm: the layer has no q_norm.weight" in result.output
    assert "  2 layers, model.layers.0.self_attn the first: RMSNorm per head" in result.output


def test_files_agree_with_the_library(checkpoint: Path, tmp_path: Path) -> None:
    """Catches figures of another head or setting, and inf written as a number."""
    json_file, csv_file = tmp_path / "a.json", tmp_path / "a.csv"
    settings = ("--num-keys", 4096, "--tolerance", 0.01, "--dtype", "float32")
    result = run(checkpoint, *settings, "--json", json_file, "--csv", csv_file)
    assert result.exit_code == 0, result.output
    document = json.loads(json_file.read_text())
    assert (document["num_keys"], document["tolerance"]) == (4096, 0.01)
    found = static_certificates(checkpoint, dtype="float32")
    lines = list(csv.DictReader(csv_file.open()))
    assert len(lines) == sum(layer.heads for layer in found) == 12
    for layer, certificate in zip(document["layers"], found, strict=True):
        low, high = certificate.value_window(4096, 0.01)
        assert layer["layer"] == certificate.layer and layer["reason"] == certificate.reason
        assert layer["certified"] == certificate.certified(4096, 0.01).tolist()
        for head in range(certificate.heads):
            bound = float(certificate.logit_bound[head])
            line = lines.pop(0)
            assert (line["layer"], line["head"]) == (certificate.layer, str(head))
            if math.isinf(bound):
                assert layer["logit_bound_bits"][head] is None and line["logit_bound_bits"] == ""
            else:
                assert layer["logit_bound_bits"][head] == bound == float(line["logit_bound_bits"])
            if certificate.certified(4096, 0.01)[head]:
                assert (layer["value_low"][head], layer["value_high"][head]) == (
                    float(low[head]),
                    float(high[head]),
                )
            else:
                assert layer["value_low"][head] is layer["value_high"][head] is None


def test_options_are_used(checkpoint: Path, tmp_path: Path) -> None:
    """Catches an option that is parsed and forgotten."""
    file = tmp_path / "a.json"

    def first(*options: object) -> dict[str, Any]:
        assert run(checkpoint, "--json", file, *options).exit_code == 0
        found: dict[str, Any] = json.loads(file.read_text())["layers"][0]
        return found

    usual = first()
    assert first("--num-keys", 128)["budget_bits"] > usual["budget_bits"]
    assert first("--tolerance", 0.5)["budget_bits"] > usual["budget_bits"]
    assert first("--dtype", "float32")["logit_bound_bits"] < usual["logit_bound_bits"]


def test_required_share_decides_the_exit_code(checkpoint: Path) -> None:
    """Catches a gate in a pipeline that always opens. A third of the heads is certified."""
    assert run(checkpoint, "--require-share", 0.33).exit_code == 0
    result = run(checkpoint, "--require-share", 0.34)
    assert result.exit_code == 1
    assert "0.3333, below 0.34" in result.output
    assert run(checkpoint, "--require-share", 1.5).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tolerance", "1e-9"), "tolerance"),
        (("--tolerance", "nan"), "tolerance"),
        (("--num-keys", "0"), "--num-keys"),
        (("--num-keys", str(2**23)), "--num-keys"),
        (("--dtype", "int8"), "dtype"),
        (("--json", "."), "is a directory"),
        (("--csv", "no/such/place.csv"), "cannot be written"),
    ],
)
def test_bad_settings_are_refused_in_one_line(
    arguments: tuple[str, ...], words: str, checkpoint: Path
) -> None:
    """Catches a traceback, and a file half written."""
    result = run(checkpoint, *arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert len(result.output.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["nowhere", "file", "empty"])
def test_bad_paths_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    """Catches a traceback."""
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    result = run(tmp_path / name)
    assert result.exit_code == 2
    (line,) = result.output.strip().splitlines()
    assert line.startswith("error: ")


def test_a_model_without_attention_is_refused(tmp_path: Path) -> None:
    """Catches a share of 0 heads out of 0."""
    write_checkpoint(tmp_path, {"model_type": "qwen3"}, {"conv.weight": np.zeros(3)})
    result = run(tmp_path)
    assert result.exit_code == 2 and "no attention layer" in result.output


def test_names_from_files_are_not_markup(tmp_path: Path) -> None:
    """Catches a layer's name that rich would read as a style."""
    tensors = {"model.[red]x.self_attn.q_norm.weight": np.ones(4)}
    write_checkpoint(tmp_path, {"model_type": "[bold]"}, tensors)
    result = run(tmp_path)
    assert result.exit_code == 0, result.output
    assert "model.[red]x.self_attn" in result.output and "[bold] is not a class" in result.output


def test_names_from_files_cannot_steer_a_terminal(tmp_path: Path) -> None:
    """Catches an escape sequence in a layer's name or a config that reaches the terminal."""
    tensors = {"model.\x1b[31mx.self_attn.q_norm.weight": np.ones(4)}
    write_checkpoint(tmp_path, {"model_type": "qwen\x1b[0m"}, tensors)
    (found,) = static_certificates(tmp_path)
    assert found.layer == r"model.\x1b[31mx.self_attn" and r"qwen\x1b[0m" in found.reason
    assert "\x1b" not in run(tmp_path).output


def test_worst_head_is_named(tmp_path: Path) -> None:
    """Catches the figures of the first head standing for all."""
    scenario = SCENARIOS["olmo2"]()
    tensors = {f"{scenario.layer}.{name}": array for name, array in scenario.tensors.items()}
    write_checkpoint(tmp_path, scenario.config, tensors)
    (found,) = static_certificates(tmp_path)
    worst = int(np.argmax(found.logit_bound))
    assert worst == 1
    (line,) = [line for line in run(tmp_path).output.splitlines() if "self_attn " in line]
    assert line.split()[1:4] == ["0/4", "1", f"{found.logit_bound[1]:.1f}"]


def test_layers_certified_in_part_say_so(tmp_path: Path) -> None:
    """Catches one good head standing for its layer."""
    scenario = SCENARIOS["olmo2"]()
    tensors = {f"{scenario.layer}.{name}": 0.8 * x for name, x in scenario.tensors.items()}
    write_checkpoint(tmp_path, scenario.config, tensors)
    (line,) = [line for line in run(tmp_path).output.splitlines() if "self_attn " in line]
    assert line.split()[1] == "2/4" and line.rstrip().endswith("some heads")


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_fits_its_terminal(columns: int, checkpoint: Path) -> None:
    """Catches figures cut off in a narrow terminal."""
    output = run(checkpoint, columns=columns).output
    assert max(len(line) for line in output.splitlines()) <= columns
    assert "…" not in output


def test_example_runs_as_printed(tmp_path: Path) -> None:
    """Catches an example in --help that does not run."""
    help_text = run("--help", columns=100).output
    assert "certify weights tiny --csv tiny.csv" in help_text
    make = EXAMPLE[EXAMPLE.index("python -c") : EXAMPLE.index("certify weights")]
    command = shlex.split(make.replace("\\\n", ""))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *command[1:]], cwd=tmp_path, env=environment, check=True)
    result = run(tmp_path / "tiny", "--csv", tmp_path / "tiny.csv")
    assert result.exit_code == 0, result.output
    assert "4 of 8 heads are certified for every input" in result.output
    assert len((tmp_path / "tiny.csv").read_text().splitlines()) == 9


def test_progress_reaches_the_last_layer(checkpoint: Path) -> None:
    """Catches a bar that stops short."""
    seen: list[tuple[int, int]] = []
    found: list[StaticCertificate] = static_certificates(
        checkpoint, progress=lambda done, total: seen.append((done, total))
    )
    assert seen == [(index + 1, len(found)) for index in range(len(found))]


def test_csv_holds_no_formulas(tmp_path: Path) -> None:
    """A tensor named like a formula. Catches a spreadsheet that would run it."""
    scenario = SCENARIOS["qwen3"]()
    tensors = {f"=HYPERLINK(1).self_attn.{name}": a for name, a in scenario.tensors.items()}
    path = write_checkpoint(tmp_path / "model", scenario.config, tensors)
    run(path, "--csv", tmp_path / "a.csv")
    cells = (tmp_path / "a.csv").read_text().replace("\n", ",").split(",")
    assert any("HYPERLINK" in cell for cell in cells)
    assert not any(cell.lstrip('"').startswith("=") for cell in cells)
