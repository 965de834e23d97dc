"""``certify explain``: the numbers it says are those of the record, and they add up."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from certify.cli import app
from certify.recording import Recording, write_recording
from tests.certify.recordings import (
    EVIL,
    RECOMPUTED,
    VERIFIED,
    block,
    layer_of,
    recorded,
    recording_of,
    tensors,
)


def explained(path: Path, *arguments: object) -> Any:
    return CliRunner().invoke(
        app, ["explain", str(path), *map(str, arguments)], env={"COLUMNS": "200"}
    )


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(recording: Recording) -> Path:
        path = tmp_path / "calls.safetensors"
        write_recording(path, recording)
        return path

    return write


def test_the_budget_adds_up(written: Any) -> None:
    """Every term as printed. Catches a term that is said and not counted."""
    text = explained(written(recorded(tensors(("gaussian 15",), keys=700))), "--head", 0).output
    up = re.search(r"may lie ([\d.]+) bits above the stabilizer: 125 .*?, ([+-]) ([\d.]+)", text)
    down = re.search(
        r"may lie ([\d.]+) bits above L: 126 .*?, - ([\d.]+) for n .*?, - ([\d.]+) for the", text
    )
    budget = re.search(r"Budget = ([\d.]+) \+ ([\d.]+) - 1.5 .*? = ([\d.]+) bits", text)
    assert up and down and budget, text
    assert float(up[1]) == pytest.approx(125 + float(up[2] + up[3]), abs=0.011)
    assert float(down[1]) == pytest.approx(126 - float(down[2]) - float(down[3]), abs=0.021)
    assert float(down[2]) == pytest.approx(math.log2(700), abs=0.006)
    assert float(budget[3]) == pytest.approx(float(up[1]) + float(down[1]) - 1.5, abs=0.016)
    assert "n = 700 keys" in text and "certified" in text.splitlines()[0]


def test_each_bound_and_the_winner(written: Any) -> None:
    """The table is the record. Catches S and L exchanged, and the wrong winner."""
    lanes = block(431.0, row_sums=(-31.0, 2.0))
    lanes |= {"upper:ball": 700.0, "upper:box+sentinels": 90.0}
    run = [{"verdict": VERIFIED, "row_sum_min": 2.0**-31, "row_sum_max": 4.0}]
    text = explained(written(recording_of(layer_of([lanes], run=run))), "--head", 0).output
    assert re.search(r"auto \(best per row\) +10.0 +441 +431 +no", text)
    assert re.search(r"ball +10.0 +700 +690 +no", text)
    assert re.search(r"box\+sentinels +10.0 +90.0 +80.0 +yes", text)
    assert "Tightest family: box+sentinels" in text
    assert "Row sums (of the run) from 2^-31 to 2^2" in text
    assert "As run, at tolerance 2^-12: verified" in text
    assert "A gap smaller by" in text and "The box+sentinels bound gives 80.0 bits" in text


def test_the_worst_block_or_the_one_that_was_asked_for(written: Any) -> None:
    """Two calls, the second worse. Catches --pass and --batch that are parsed and forgotten."""
    better = layer_of([block(20.0), block(20.0)], passes=(3,))
    worse = layer_of([block(40.0), block(20.0)], passes=(8,))
    from certify.recording import merge_recordings

    path = written(merge_recordings([recording_of(better), recording_of(worse)]))
    assert "pass 8" in explained(path, "--head", 0).output
    assert "gap 40.00" in explained(path, "--head", 0).output
    assert "gap 20.00" in explained(path, "--head", 0, "--pass", 3, "--batch", 0).output
    assert "gap 20.00" in explained(path, "--head", 1, "--pass", 8).output


def test_other_verdicts_in_words(written: Any) -> None:
    """NaN, unknown row sums, nothing recorded. Catches a NaN that breaks the walk."""
    heads = [
        block(math.nan),
        block(500.0, row_sums=(math.nan, math.nan)),
        dict.fromkeys(block(), math.nan),
        block(value=1e-37),
        block(lower=1e6),
    ]
    run = [{"verdict": RECOMPUTED}] * 5
    path = written(recording_of(layer_of(heads, run=run)))
    words = ("Finite query", "Row sums are not", "A recording of the bounds", "2^127", "2^18")
    for head, expected in enumerate(words):
        result = explained(path, "--head", head)
        assert result.exit_code == 0 and expected in result.output, result.output
        assert "recomputed" in result.output.splitlines()[0]


def test_unknown_places_are_listed(written: Any) -> None:
    """Catches an error that does not say what there is."""
    names = [f"blocks.{index}.attn1" for index in range(20)]
    layers = [layer_of([block(), block()], name=name, passes=(4, 6)) for name in names]
    path = written(recording_of(*layers))
    there = ("--layer", "blocks.7.attn1", "--head", 0)
    assert explained(path, *there).exit_code == 0
    for arguments, words in (
        (("--layer", "blocks.7.attn", "--head", 0), ("blocks.7.attn1", "and 8 more")),
        (("--head", 0), ("no name was given", "blocks.0.attn1")),
        (("--layer", "blocks.7.attn1", "--head", 2), ("heads 0 to 1",)),
        (("--layer", "blocks.7.attn1", "--head", -1), ("heads 0 to 1",)),
        ((*there, "--pass", 5), ("recorded are 4, 6",)),
        ((*there, "--batch", 1), ("0 to 0",)),
        ((*there, "--bounds", "box"), ("holds auto",)),
        ((*there, "--tolerance", 0), ("tolerance",)),
    ):
        result = explained(path, *arguments)
        assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output
        for word in words:
            assert word in result.stderr, result.stderr


def test_a_layer_of_two_shapes(written: Any) -> None:
    """The one that has the call. Catches the wrong one of two."""
    path = written(
        recording_of(
            layer_of([block()], passes=(0,)), layer_of([block()], num_queries=5, passes=(1,))
        )
    )
    assert "5 queries" in explained(path, "--layer", "layer", "--head", 0, "--pass", 1).output
    assert "8 queries" in explained(path, "--layer", "layer", "--head", 0).output


def test_names_are_no_markup(written: Any) -> None:
    """Catches a layer's name that colours the terminal."""
    path = written(recording_of(layer_of([block()], name=EVIL)))
    assert EVIL in explained(path, "--head", 0).output
