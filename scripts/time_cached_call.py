"""What a call of the op costs in Python once its program is cached: no device work is timed.

python scripts/time_cached_call.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import torch_xla
import typer
from rich.console import Console
from rich.table import Table

import torch_clis

WARM_UP = 20


def median_milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Median duration of ``call`` in milliseconds; what it traced is dropped unexecuted."""
    durations = []
    for _ in range(WARM_UP + repeats):
        start = time.perf_counter()
        result = call()
        durations.append(time.perf_counter() - start)
        del result
    return 1e3 * statistics.median(durations[WARM_UP:])


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Calls to take the median of.")] = 1000,
    length: Annotated[int, typer.Option(min=1, help="Tokens.")] = 2048,
    heads: Annotated[int, typer.Option(min=1, help="Heads of 128 channels.")] = 2,
) -> None:
    """Time cached calls of torch_clis.attention on the XLA device.

    Example: python scripts/time_cached_call.py --repeats 200
    """
    device = torch_xla.device()
    inputs = [torch.randn(1, length, heads, 128).to(device) for _ in range(3)]
    learnt = [tensor.clone().requires_grad_() for tensor in inputs]
    torch_xla.sync()
    table = Table(title=f"Python time of a cached call, median of {repeats}")
    table.add_column("call")
    table.add_column("milliseconds", justify="right")
    with torch.no_grad():
        plain = median_milliseconds(lambda: torch_clis.attention(*inputs), repeats)
    table.add_row("without gradients", f"{plain:.3f}")
    recorded = median_milliseconds(lambda: torch_clis.attention(*learnt), repeats)
    table.add_row("recording gradients", f"{recorded:.3f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
