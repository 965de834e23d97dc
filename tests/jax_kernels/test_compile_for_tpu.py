"""The real TPU compiler takes the whole op, and nothing of Q, K, V or O is copied in HBM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jax_kernels.compile_for_tpu import large_operations

PROGRAM = Path(__file__).with_name("compile_for_tpu.py")
ROOT = PROGRAM.parents[2]


def compiled(target: str, *arguments: object) -> dict[str, Any]:
    command = [sys.executable, str(PROGRAM), target, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=850)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
@pytest.mark.parametrize("length", [8192, 8190])
@pytest.mark.parametrize("target", ["v6e", "tpu7x"])
def test_no_copies_of_large_arrays(target: str, length: int) -> None:
    """Catches: a layout, tail or alias that makes the compiler copy Q, K, V or O."""
    result = compiled(target, length, length, 5, 128, "bfloat16", "auto")
    assert result["kernels"] == 4  # statistics, sentinels, fixed stabilizer, online
    assert result["large_operations"] == []
    assert result["temporary_bytes"] <= result["query_bytes"] / 10


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v6e", "tpu7x"])
def test_promise_drops_the_statistics(target: str) -> None:
    """Catches: statistics that are computed though nothing reads them; a copy of V for max|v|."""
    result = compiled(target, 8192, 8192, 5, 128, "bfloat16", "promise")
    assert result["kernels"] == 2  # fixed stabilizer, online
    assert result["large_operations"] == []
    assert result["temporary_bytes"] <= result["query_bytes"] / 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        (4096, 4096, 4, 64, "bfloat16", "auto"),
        (4096, 2100, 3, 64, "float32", "auto"),
        (2104, 4096, 2, 128, "float32", "auto"),
        (2100, 4096, 2, 96, "bfloat16", "auto"),
        (2100, 4096, 2, 256, "bfloat16", "auto"),
        (4096, 512, 4, 128, "bfloat16", "auto"),
        (4096, 4096, 4, 128, "bfloat16", "online"),
        (4096, 4096, 4, 128, "bfloat16", "clis"),
    ],
    ids=lambda arguments: "-".join(map(str, arguments)),
)
@pytest.mark.parametrize("target", ["v6e", "tpu7x"])
def test_other_shapes_compile(target: str, arguments: tuple[object, ...]) -> None:
    """Catches: a shape class, dtype or path that lowers in interpret mode only."""
    result = compiled(target, *arguments)
    assert result["kernels"] >= 1
    if arguments[2:4] in ((4, 64), (2, 128), (4, 128)):
        assert result["large_operations"] == []


def test_the_reader_sees_copies() -> None:
    """Catches: a reader of compiled text that finds nothing because it matches nothing."""
    large, small = "bf16[1,8190,640]{2,1,0:T(8,128)(2,1)", "f32[5,8]{1,0:T(8,128)}"
    text = "\n".join(
        [
            f"  %copy.1 = {large}}} copy(%p)",
            f"  ROOT %t = {large}}} transpose(%p), dimensions={{0,2,1}}",
            f"  %pad.3 = {large}}} pad(%p, %c), padding=0_0x0_2x0_0",
            f"  %copy_fusion = {large}}} fusion(%p), kind=kLoop",
            f"  %copy-start = ({large}}}, {large}}}, u32[]{{:S(2)}}) copy-start(%p)",
            f"  %copy-start.1 = ({large}S(1)}}, {large}}}, u32[]{{:S(2)}}) copy-start(%p)",
            f"  %copy.2 = {small} copy(%p)",
            f"  %bitcast.2 = {large}}} bitcast(%p)",
        ]
    )
    assert len(large_operations(text, 8190 * 640 * 2)) == 5


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v6e", "tpu7x"])
def test_statistics_cost_at_most_one_percent(target: str) -> None:
    """Of the op's cycles by the compiler's schedule, at the length of a 720p video.

    Catches: a certificate that is paid for with the time it saves.
    """
    program = PROGRAM.with_name("statistics_share.py")
    command = [sys.executable, str(program), target, "75600", "5", "128"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=850)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{target}: statistics take {found['share']:.2%} of {found['total']} cycles")
    assert found["clis_fixed"] > 13_627 * 2_500, "the schedule was not read"
    assert 0.001 < found["share"] <= 0.01
