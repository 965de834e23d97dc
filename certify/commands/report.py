"""``certify report``: the audit as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from certify.arithmetic import DEFAULT_TOLERANCE
from certify.audit_report import write_audit_report
from certify.commands.common import (
    MAKE_TENSORS,
    BoundsOption,
    CausalOption,
    CsvOption,
    FileArgument,
    JsonOption,
    RowSumsOption,
    ScaleOption,
    SoftCapOption,
    ToleranceOption,
    audited,
    failing_in_one_line,
    load,
    refuse_directories,
    say,
    write_tables,
    writing,
)
from certify.tensor_recording import CallOptions

EXAMPLE = f"""\b
Example, with tensors made on the spot:
{MAKE_TENSORS}\
  certify report qkv.safetensors --output report.html --json report.json
"""


def report(
    file: FileArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path(
        "report.html"
    ),
    title: Annotated[
        str | None, typer.Option(help="Of the page.", show_default="the file's name")
    ] = None,
    tolerance: ToleranceOption = None,
    bounds: BoundsOption = "auto",
    json_file: JsonOption = None,
    csv_file: CsvOption = None,
    scale: ScaleOption = None,
    causal: CausalOption = False,
    soft_cap: SoftCapOption = None,
    row_sums: RowSumsOption = True,
) -> None:
    """Write one page to look at.

    Verdicts and why, margins by layer, head and step, bounds, proved beside measured; it loads
    nothing from elsewhere.
    """
    console = Console()
    with failing_in_one_line():
        refuse_directories({"--output": output, "--json": json_file, "--csv": csv_file})
        options = CallOptions(
            scale=scale,
            causal=causal,
            soft_cap=soft_cap,
            tolerance=DEFAULT_TOLERANCE if tolerance is None else tolerance,
            row_sums=row_sums,
        )
        given = {"--scale": scale, "--causal": causal, "--soft-cap": soft_cap}
        recording = load(file, options, given, console)
        result = audited(recording, tolerance, bounds, console)
        with console.status("drawing"), writing(output):
            write_audit_report(output, result, title or f"Certificates of {file.stem}")
        write_tables(result, json_file, csv_file, {"file": str(file)})
    for path in (output, json_file, csv_file):
        if path is not None:
            say(console, f"wrote {path}")
    for fault in result.faults[:1]:
        say(console, f"The recording contradicts itself, see the page: {fault}", "bold red")
