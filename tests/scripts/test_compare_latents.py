"""compare_latents.py: what demo.sh's verdict rests on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

RunScript = Callable[..., subprocess.CompletedProcess[str]]

SHAPE = (1, 4, 2, 8, 8)


def write_runs(directory: Path, errors: dict[str, float], compilations: list[int]) -> None:
    """Five runs whose latents are the same noise plus an alternating error of the given size."""
    from compare_latents import RUNS

    base = np.random.default_rng(0).uniform(-1, 1, SHAPE).astype(np.float32)
    base.flat[0] = 1.0
    sign = np.where(np.arange(base.size) % 2, 1.0, -1.0).reshape(SHAPE).astype(np.float32)
    row = {"certified": 6, "verified": 1, "recomputed": 1, "exact": 0}
    for name in RUNS:
        record = {
            "certificates": [row] if name.startswith("clis") else [],
            "steps": [{"seconds": 1.0, "compilations": count} for count in compilations],
            "compilations_per_step": compilations,
        }
        (directory / f"{name}.json").write_text(json.dumps(record))
        latents = base + errors.get(name, 0.0) * sign
        save_file({"latents": latents}, directory / f"{name}.safetensors")


# The yardstick is 1e-2, so CLiS in bfloat16 may be off by 2e-2.
GOOD = {"clis-float32": 5e-6, "clis-bfloat16": 1.9e-2, "native-narrow-bfloat16": 1e-2}


@pytest.mark.parametrize(
    ("errors", "compilations", "code", "failed"),
    [
        (GOOD, [2, 0, 0], 0, None),
        ({**GOOD, "clis-float32": 2e-5}, [2, 0, 0], 1, "float32"),
        ({**GOOD, "clis-bfloat16": 2.1e-2}, [2, 0, 0], 1, "bfloat16"),
        (GOOD, [2, 0, 1], 1, "no compilation"),
    ],
)
def test_verdict(
    run_script: RunScript,
    tmp_path: Path,
    errors: dict[str, float],
    compilations: list[int],
    code: int,
    failed: str | None,
) -> None:
    """Fault: a check that cannot fail, or fails for another reason than it says."""
    write_runs(tmp_path, errors, compilations)
    done = run_script("compare_latents.py", tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    failing = [line for line in done.stdout.splitlines() if line.startswith("FAILS")]
    assert len(failing) == (failed is not None)
    assert failed is None or failing[0].split("FAILS")[1].strip().startswith(failed)
    assert "75.0%" in done.stdout  # certified: 6 of 8


def test_missing_run_is_named(run_script: RunScript, tmp_path: Path) -> None:
    done = run_script("compare_latents.py", tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "clis-float32.json is missing" in done.stderr


def test_nan_latents_are_refused(run_script: RunScript, tmp_path: Path) -> None:
    """Fault: NaN compares as no difference."""
    write_runs(tmp_path, {**GOOD, "clis-float32": float("nan")}, [1, 0])
    done = run_script("compare_latents.py", tmp_path)
    assert done.returncode == 2
    assert "NaN" in done.stderr
