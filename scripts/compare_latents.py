"""Do CLiS and native attention give the same video? Compares latents of generate_wan.py runs.

Example:  python scripts/compare_latents.py clis-demo
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table
from safetensors.numpy import load_file

from command_line import UserError, console, run

FLOAT32_TOLERANCE = 1e-5
# The yardstick in bfloat16: what two native runs that accumulate in different dtypes differ by.
BFLOAT16_FACTOR = 2.0
VERDICTS = ("certified", "verified", "recomputed", "exact")
RUNS = (
    "clis-float32",
    "native-float32",
    "clis-bfloat16",
    "native-bfloat16",
    "native-narrow-bfloat16",  # native attention that accumulates in bfloat16 as well
)

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@dataclass(frozen=True)
class Run:
    """One run's latents and the JSON beside its video."""

    name: str
    latents: np.ndarray
    record: dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """Latents `first` against `second`: largest difference, and root mean square of it.

    `relative` is to the largest absolute latent, `relative_mean_square` to the root mean square.
    """

    first: str
    second: str
    absolute: float
    relative: float
    relative_mean_square: float


def read_run(directory: Path, name: str) -> Run:
    record, latents = (directory / f"{name}{suffix}" for suffix in (".json", ".safetensors"))
    for path in (record, latents):
        if not path.is_file():
            raise UserError(f"{path} is missing; run scripts/demo.sh, which writes it")
    return Run(name, load_file(latents)["latents"], json.loads(record.read_text(encoding="utf-8")))


def difference(first: Run, second: Run) -> Difference:
    if not (np.isfinite(first.latents).all() and np.isfinite(second.latents).all()):
        raise UserError(f"{first.name} or {second.name} has NaN or infinite latents; report it")
    delta = first.latents.astype(np.float64) - second.latents
    reference = second.latents.astype(np.float64)
    return Difference(
        first=first.name,
        second=second.name,
        absolute=float(np.abs(delta).max()),
        relative=float(np.abs(delta).max() / np.abs(reference).max()),
        relative_mean_square=float(np.linalg.norm(delta) / np.linalg.norm(reference)),
    )


def verdict_shares(record: dict[str, Any]) -> dict[str, float]:
    """Share of each verdict over all (batch, head, query block) of the run."""
    counts: Counter[str] = Counter()
    for row in record["certificates"]:
        counts.update({verdict: row[verdict] for verdict in VERDICTS})
    total = counts.total()
    return {verdict: counts[verdict] / total if total else 0.0 for verdict in VERDICTS}


def differences_table(differences: list[tuple[Difference, str]]) -> Table:
    table = Table(title="Latents: largest difference")
    for heading in (
        "run",
        "against",
        "absolute",
        "relative",
        "relative, root mean square",
        "allowed",
    ):
        table.add_column(heading, justify="left" if heading in ("run", "against") else "right")
    for item, allowed in differences:
        figures = (item.absolute, item.relative, item.relative_mean_square)
        table.add_row(item.first, item.second, *(f"{figure:.2e}" for figure in figures), allowed)
    return table


def runs_table(runs: dict[str, Run]) -> Table:
    table = Table(title="Runs")
    table.add_column("run")
    for heading in (*VERDICTS, "seconds per step", "compilations per step"):
        table.add_column(heading, justify="right")
    for name, one in runs.items():
        shares = verdict_shares(one.record)
        cells = [
            f"{shares[verdict]:.1%}" if one.record["certificates"] else "-" for verdict in VERDICTS
        ]
        warm = [step["seconds"] for step in one.record["steps"] if not step["compilations"]]
        seconds = f"{sum(warm) / len(warm):.2f}" if warm else "-"
        per_step = " ".join(map(str, one.record["compilations_per_step"]))
        table.add_row(name, *cells, seconds, per_step)
    return table


@app.command()
def main(
    directory: Annotated[Path, typer.Argument(help="Where demo.sh wrote its runs.")],
) -> None:
    """Compare the demo's runs; exit code 1 where CLiS and native differ by more than is allowed.

    Example: python scripts/compare_latents.py clis-demo
    """
    runs = {name: read_run(directory, name) for name in RUNS}
    exact = difference(runs["clis-float32"], runs["native-float32"])
    yardstick = difference(runs["native-narrow-bfloat16"], runs["native-bfloat16"])
    rounded = difference(runs["clis-bfloat16"], runs["native-bfloat16"])
    allowed = BFLOAT16_FACTOR * yardstick.relative
    allowed_mean_square = BFLOAT16_FACTOR * yardstick.relative_mean_square
    console.print(
        differences_table(
            [
                (exact, f"{FLOAT32_TOLERANCE:.0e}"),
                (rounded, f"{allowed:.2e}, {allowed_mean_square:.2e}"),
                (yardstick, "the yardstick"),
            ]
        )
    )
    console.print(runs_table(runs))
    recompiled = [
        name for name, one in runs.items() if any(one.record["compilations_per_step"][1:])
    ]
    checks = {
        f"float32: CLiS equals native within {FLOAT32_TOLERANCE:.0e} relative": exact.relative
        < FLOAT32_TOLERANCE,
        "bfloat16: CLiS and native differ by at most twice the yardstick": (
            rounded.relative <= allowed and rounded.relative_mean_square <= allowed_mean_square
        ),
        "no compilation from the second denoising step on": not recompiled,
    }
    for text, holds in checks.items():
        console.print(
            f"[{'green' if holds else 'bold red'}]{'holds' if holds else 'FAILS'}[/]  {text}"
        )
    if not all(checks.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    run(app)
