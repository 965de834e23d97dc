"""What the sub-commands share: reading a file, writing what was asked for, failing in one line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from certify.audit import AuditResult, audit_recording
from certify.export import to_csv, to_json
from certify.files import write_atomically
from certify.recording import Recording, is_recording, read_recording
from certify.tensor_recording import CallOptions, record_tensors
from certify.tensors import read_tensors

REFUSED, USAGE_ERROR = 1, 2

TENSORS = ("query", "key", "value")

MAKE_TENSORS = """\
  python -c "import numpy as np; from safetensors.numpy import save_file; \\
    draw = np.random.default_rng(0).standard_normal; \\
    save_file({name: draw((1, 2048, 4, 64), np.float32) \\
    for name in ('query', 'key', 'value')}, 'qkv.safetensors')"
"""
"""The lines of an example that make a file of query, key and value."""

FileArgument = Annotated[
    Path,
    typer.Argument(
        help="A recording (from 'certify record'), or a .safetensors file with tensors query, key "
        "and value, each [B, S, H, D], bfloat16, float16 or float32; key and value may have fewer "
        "heads.",
        show_default=False,
    ),
]
ToleranceOption = Annotated[
    float | None,
    typer.Option(
        help="Largest |o - o_exact| / max|v| beyond ordinary rounding.",
        show_default="that of the recording, or 2^-12",
    ),
]
BoundsOption = Annotated[
    str, typer.Option(help="Judge by this family of bounds alone; auto: the best per row.")
]
ScaleOption = Annotated[
    float | None,
    typer.Option(
        help="Of tensors: logits are scale * query . key.", show_default="head_dim ** -0.5"
    ),
]
CausalOption = Annotated[
    bool, typer.Option("--causal", help="Of tensors: a query sees keys up to its position.")
]
SoftCapOption = Annotated[
    float | None,
    typer.Option(help="Of tensors: logits become cap * tanh(logits / cap).", show_default="none"),
]
RowSumsOption = Annotated[
    bool,
    typer.Option(
        help="Of tensors: compute the exact row sums, which tell verified from recomputed; takes "
        "S_q * S_k products a head."
    ),
]
JsonOption = Annotated[
    Path | None,
    typer.Option("--json", help="Also write everything to this file.", show_default=False),
]
CsvOption = Annotated[
    Path | None,
    typer.Option("--csv", help="Also write a line per layer and head.", show_default=False),
]


def fail(message: str) -> NoReturn:
    """One line on standard error; exit code 2."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(USAGE_ERROR)


@contextmanager
def failing_in_one_line() -> Iterator[None]:
    """Turn a ValueError into one line and exit code 2."""
    try:
        yield
    except ValueError as error:
        fail(str(error))


def refuse_directories(paths: Mapping[str, Path | None]) -> None:
    """Find out before the work that a file cannot be written.

    Raises:
        ValueError: for a directory, or a file in none.
    """
    for option, path in paths.items():
        if path is None:
            continue
        if os.path.isdir(path):
            raise ValueError(f"{option} {path}: is a directory. Give the name of a file to write.")
        if not os.path.isdir(path.parent):
            raise ValueError(
                f"{option} {path}: cannot be written (no such directory). Give a file in a "
                "directory that exists."
            )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into one line.

    Raises:
        ValueError: in place of it.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be written ({error.strerror}). Give a file in a directory that exists."
        ) from error


def load(file: Path, options: CallOptions, given: Mapping[str, Any], console: Console) -> Recording:
    """The recording of a file, or of the call whose query, key and value it holds.

    Args:
        given: options of tensors that were given, by name; a recording has its own.

    Raises:
        ValueError: for a file that is neither.
    """
    if is_recording(file):
        for name, value in given.items():
            if value not in (None, False):
                raise ValueError(f"{name}: {file} is a recording, whose calls have their own.")
        return read_recording(file)
    tensors = read_tensors(file, TENSORS)
    with bar("bounding heads", console) as progress:
        return record_tensors(file.stem, tensors, options, progress)


@contextmanager
def bar(what: str, console: Console) -> Iterator[Callable[[int, int], None]]:
    """A progress bar, as the function that moves it."""
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def audited(
    recording: Recording, tolerance: float | None, bounds: str, console: Console
) -> AuditResult:
    """``audit_recording`` with a progress bar."""
    with bar("auditing layers", console) as progress:
        return audit_recording(recording, tolerance=tolerance, family=bounds, progress=progress)


def write_tables(
    result: AuditResult, json_file: Path | None, csv_file: Path | None, about: dict[str, Any]
) -> None:
    """Write the JSON and the CSV that were asked for.

    Raises:
        ValueError: where one cannot be written.
    """
    texts = ((json_file, lambda: to_json(result, about)), (csv_file, lambda: to_csv(result)))
    for path, text in texts:
        if path is not None:
            with writing(path):
                write_atomically(path, text())


def say(console: Console, text: str, style: str = "") -> None:
    """Print text as it is: names from a file are no markup."""
    console.print(Text(text, style=style), soft_wrap=True)
