"""``certify audit``: every verdict evaluated again from the recorded numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from certify.arithmetic import DEFAULT_TOLERANCE
from certify.audit import AuditResult
from certify.commands.common import (
    MAKE_TENSORS,
    REFUSED,
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
from certify.recording import Recording, write_recording
from certify.report import verdict_table
from certify.tensor_recording import CallOptions
from certify.theorem import VERDICTS
from certify.totals import percent
from certify.words import as_run, tolerance_text

EXAMPLE = f"""\b
Example, with tensors made on the spot; the second line audits a recording of them:
{MAKE_TENSORS}\
  certify audit qkv.safetensors --save-recording calls.safetensors --keep-rows 8
  certify audit calls.safetensors --tolerance 0.001 --require-share 0.95 --csv audit.csv
"""

FAULTS_SHOWN = 20

Share = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        show_default=False,
        help="Exit with 1 if a smaller share of the query blocks is certified, verified or exact.",
    ),
]
CertifiedShare = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        show_default=False,
        help="Exit with 1 if a smaller share of the query blocks is certified.",
    ),
]


def audit(
    file: FileArgument,
    tolerance: ToleranceOption = None,
    require_share: Share = None,
    require_certified_share: CertifiedShare = None,
    bounds: BoundsOption = "auto",
    json_file: JsonOption = None,
    csv_file: CsvOption = None,
    scale: ScaleOption = None,
    causal: CausalOption = False,
    soft_cap: SoftCapOption = None,
    row_sums: RowSumsOption = True,
    save_recording: Annotated[
        Path | None,
        typer.Option(help="Of tensors: also write a recording of the call.", show_default=False),
    ] = None,
    keep_rows: Annotated[
        int, typer.Option(min=0, help="Query rows of each head that --save-recording keeps.")
    ] = 0,
) -> None:
    """Evaluate every verdict again.

    From the numbers of a recording, for any tolerance, or from query, key and value.

    Exit code 1 where a required share is not met or the recording contradicts itself, 2 where the
    file or an option is wrong.
    """
    console = Console()
    outputs = {"--json": json_file, "--csv": csv_file, "--save-recording": save_recording}
    with failing_in_one_line():
        refuse_directories(outputs)
        options = CallOptions(
            scale=scale,
            causal=causal,
            soft_cap=soft_cap,
            tolerance=DEFAULT_TOLERANCE if tolerance is None else tolerance,
            row_sums=row_sums,
            keep_rows=keep_rows,
        )
        given = {
            "--scale": scale,
            "--causal": causal,
            "--soft-cap": soft_cap,
            "--save-recording": save_recording,
        }
        recording = load(file, options, given, console)
        result = audited(recording, tolerance, bounds, console)
        write_tables(result, json_file, csv_file, {"file": str(file)})
        if save_recording is not None:
            _save(save_recording, recording)
    console.print(verdict_table(result.rows()))
    _print_summary(console, result)
    _print_faults(console, result)
    _print_kept(console, result)
    missed = _missed(result, require_share, require_certified_share)
    for line in missed:
        typer.echo(line, err=True)
    if missed or result.faults:
        raise typer.Exit(REFUSED)


def _save(path: Path, recording: Recording) -> None:
    with writing(path):
        write_recording(path, recording)


def _print_summary(console: Console, result: AuditResult) -> None:
    counts, total = result.counts, sum(result.counts)
    shares = ", ".join(
        f"{percent(count, total)} {name}"
        for name, count in zip(VERDICTS, counts, strict=True)
        if count
    )
    certified = counts[VERDICTS.index("certified")]
    say(
        console,
        f"{certified} of {total} query blocks are certified at tolerance "
        f"{tolerance_text(result.tolerance)} ({shares or 'nothing recorded'}).",
    )
    if result.as_run:
        say(console, as_run(result))
    if result.not_recorded:
        say(console, f"{result.not_recorded} calls were left out of the recording.")


def _print_faults(console: Console, result: AuditResult) -> None:
    faults = result.faults
    if not faults:
        return
    say(console, "The recording contradicts itself; do not rely on it:", "bold red")
    for line in faults[:FAULTS_SHOWN]:
        say(console, f"  {line}", "red")
    if len(faults) > FAULTS_SHOWN:
        say(console, f"  and {len(faults) - FAULTS_SHOWN} more", "red")


def _print_kept(console: Console, result: AuditResult) -> None:
    checked = [check for check in result.kept if check.checked]
    if checked:
        rows = sum(check.num_rows for check in checked)
        agree = sum(not check.faults for check in checked)
        say(
            console,
            f"{rows} kept rows of {len(checked)} heads bounded again: {agree} of {len(checked)} "
            "heads agree with the recording.",
        )
    for note in {check.note for check in result.kept if not check.checked}:
        count = sum(check.note == note for check in result.kept)
        say(console, f"Kept rows of {count} heads not checked: {note}.")


def _missed(result: AuditResult, proved: float | None, certified: float | None) -> list[str]:
    lines = []
    for required, share, what in (
        (proved, result.proved_share, "certified, verified or exact"),
        (certified, result.certified_share, "certified"),
    ):
        if required is not None and not share >= required:
            lines.append(f"share of query blocks {what}: {share:.4g}, below {required:.4g}")
    return lines
