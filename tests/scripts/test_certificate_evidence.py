"""scripts/certificate_evidence.py as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

Run = Callable[..., CompletedProcess[str]]
SCRIPT = "certificate_evidence.py"


def test_search_exits_1_on_a_violation(run_script: Run, tmp_path: Path) -> None:
    """With a clause dropped it ends with 1 and says how many; as it is, with 0."""
    path = tmp_path / "search.json"
    arguments = ("search", "--evaluations", "20000")
    faulty = run_script(SCRIPT, *arguments, "--fault", "product-flushes", "--json", path)
    assert faulty.returncode == 1, faulty.stderr
    document = json.loads(path.read_text())
    assert document["violations"] > 0 and document["best"] > 1.0
    assert document["evaluations"] >= 20000
    fine = run_script(SCRIPT, *arguments)
    assert fine.returncode == 0 and " 0 violations" in fine.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("search", "--fault", "gravity"),
        ("minilm", "--model", "nowhere"),
        ("minilm", "--text", "nowhere.txt"),
        ("completeness", "--heads", "0"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(run_script: Run, arguments: tuple[str, ...]) -> None:
    """Catches a traceback, and an argument that is not named."""
    done = run_script(SCRIPT, *arguments)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and arguments[1] in done.stderr


def test_completeness_prints_markdown(run_script: Run, tmp_path: Path) -> None:
    """A line per family, shares that add up. Catches a family that is dropped."""
    path = tmp_path / "shares.json"
    done = run_script(
        SCRIPT, "completeness", "--heads", "1", "--keys", "300", "--markdown", "--json", path
    )
    assert done.returncode == 0, done.stderr
    families = json.loads(path.read_text())["families"]
    assert done.stdout.count("| 300 |") == len(families) > 25
    for family in families:
        verdicts = family["certified"] + family["verified"] + family["recomputed"]
        assert verdicts == family["blocks"] == 1
    by_name = {family["family"]: family for family in families}
    outliers = by_name["orthogonal outliers, small values"]
    assert (outliers["certified"], outliers["gate_accepts"], outliers["gate_wrong"]) == (1, 1, 1)
