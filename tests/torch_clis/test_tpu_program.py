"""What PyTorch users' graphs become on a TPU, read from the compiled program."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HEADS, HEAD_DIM = 5, 128
MOVES = ("copy", "transpose", "pad", "reverse", "gather", "concatenate")
"""copy-start is not among them: XLA prefetches operands into VMEM with it, beside other work."""
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(\S+) = \(?\w+\[([\d,]*)\][^=]*? ([\w-]+)\(")
ROOT = Path(__file__).resolve().parents[2]


def _compiled(program: str, length: int, topology: str) -> str:
    result = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("tpu_program.py")),
            program,
            str(length),
            topology,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def _large_moves(text: str, elements: int) -> list[str]:
    """Instructions that only move data, with a result of at least ``elements``."""
    found = []
    for line in text.splitlines():
        match = INSTRUCTION.match(line)
        if not match or match[3] not in MOVES or not match[2]:
            continue
        if math.prod(int(size) for size in match[2].split(",")) >= elements:
            found.append(line.strip()[:160])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v6e:1x1", "tpu7x:2x2x1"])
@pytest.mark.parametrize("length", [8192, 8190])
def test_op_moves_no_large_array(length: int, topology: str) -> None:
    """Fault: torch's reshapes or a ragged length put a transpose, pad or copy around the kernel."""
    text = _compiled("op", length, topology)
    assert text.count('custom_call_target="tpu_custom_call"') >= 3  # statistics, fixed, online
    assert "conditional(" in text
    assert _large_moves(text, length * HEAD_DIM) == []


@pytest.mark.slow
def test_wan_layer_moves_no_large_array() -> None:
    """Fault: the rotary embedding or the head split of the processor transposes Q or K."""
    length = 8190
    text = _compiled("layer", length, "v6e:1x1")
    assert text.count('custom_call_target="tpu_custom_call"') >= 3
    whole = length * HEADS * HEAD_DIM
    moves = [move for move in _large_moves(text, whole) if " pad(" not in move]
    assert moves == []  # pads: the shifts of the rotary embedding, inside its fusion


@pytest.mark.slow
def test_recording_compiles() -> None:
    """Fault: what is recorded has no program for TPU, or replaces the kernels by something else."""
    text = _compiled("recorded", 8190, "v6e:1x1")
    assert text.count('custom_call_target="tpu_custom_call"') >= 3
    assert "record_bounds_program" in text
