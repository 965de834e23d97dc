"""The ``certify`` command."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from certify.arithmetic import DEFAULT_TOLERANCE
from certify.bounds import BOUND_NAMES
from certify.certificate import Certificate, certify
from certify.files import write_atomically
from certify.formats import FloatArray
from certify.tensors import read_tensors

USAGE_ERROR = 2

AUDIT_EXAMPLE = """\b
Example, with a file made on the spot:
  python -c "import numpy as np; from safetensors.numpy import save_file; \\
    draw = np.random.default_rng(0).standard_normal; \\
    save_file({name: draw((1, 2048, 4, 64), np.float32) \\
    for name in ('query', 'key', 'value')}, 'qkv.safetensors')"
  certify audit qkv.safetensors --json audit.json
"""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def commands() -> None:
    """What can be proved about attention whose softmax stabilizer is fixed before the KV loop."""


@app.command(epilog=AUDIT_EXAMPLE)
def audit(
    file: Annotated[
        Path,
        typer.Argument(
            help="A .safetensors file with tensors query, key and value, each [B, S, H, D], "
            "bfloat16, float16 or float32; key and value may have fewer heads.",
            show_default=False,
        ),
    ],
    tolerance: Annotated[
        float, typer.Option(help="Largest |o - o_exact| / max|v| beyond ordinary rounding.")
    ] = DEFAULT_TOLERANCE,
    scale: Annotated[
        float | None,
        typer.Option(help="Logits are scale * query . key.", show_default="head_dim ** -0.5"),
    ] = None,
    bounds: Annotated[
        str, typer.Option(help=f"auto or one of {', '.join(BOUND_NAMES[1:])}.")
    ] = "auto",
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Also write the table to this file.", show_default=False),
    ] = None,
) -> None:
    """Certify the attention of recorded query, key and value, per batch element and head."""
    console = Console()
    try:
        if json_file is not None:
            _refuse_directory(json_file)
        tensors = read_tensors(file, ("query", "key", "value"))
        _check_head_dim(tensors["key"], tensors["value"])
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("certifying heads", total=None)
            certificate = certify(
                tensors["query"],
                tensors["key"],
                tensors["value"],
                scale=scale,
                tolerance=tolerance,
                bounds=bounds,
                progress=lambda done, total: progress.update(task, completed=done, total=total),
            )
        rows = audit_rows(certificate)
        if json_file is not None:
            settings = {"file": str(file), "tolerance": tolerance, "scale": scale, "bounds": bounds}
            _write_json(json_file, {**settings, "heads": rows})
    except ValueError as error:
        _fail(str(error))
    console.print(_audit_table(rows, certificate))


def audit_rows(certificate: Certificate) -> list[dict[str, Any]]:
    """One row per (batch element, head): verdict, blocks certified, worst figures.

    Margins and gaps are in bits; None stands for "nothing can be proved".
    """
    margin = certificate.margin
    batch, heads, blocks = certificate.certified.shape
    rows = []
    for element, head in np.ndindex(batch, heads):
        index = (element, head)
        certified = int(certificate.certified[index].sum())
        codes = certificate.bound_used[index]
        worst = int(np.argmin(margin[index]))
        rows.append(
            {
                "batch": int(element),
                "head": int(head),
                "verdict": "certified" if certified == blocks else "check",
                "certified": certified,
                "blocks": blocks,
                "smallest_margin_bits": _finite(margin[index][worst]),
                "gap_bits": _finite(certificate.gap[index][worst]),
                "budget_bits": _finite(certificate.budget[index][worst]),
                "bound_used": sorted({BOUND_NAMES[int(code)] for code in codes}),
                "largest_error_bound": _finite(np.max(certificate.error_bound[index])),
            }
        )
    return rows


def _finite(number: Any) -> float | None:
    return float(number) if np.isfinite(number) else None


def _audit_table(rows: list[dict[str, Any]], certificate: Certificate) -> Table:
    certified = sum(row["certified"] for row in rows)
    table = Table(
        title="Certified before the loop (margin and gap in bits)",
        caption=f"{certified} of {certificate.certified.size} query blocks of up to "
        f"{certificate.block_q} rows are certified at tolerance {certificate.tolerance:.3g}. The "
        "others are checked after the loop by their row sums, and recomputed if that fails.",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("batch", "head", "blocks", "margin", "gap", "error"):
        table.add_column(name, justify="right")
    table.add_column("bound", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in rows:
        style = "green" if row["verdict"] == "certified" else "yellow"
        bits = (row["smallest_margin_bits"], row["gap_bits"])
        error = row["largest_error_bound"]
        table.add_row(
            str(row["batch"]),
            str(row["head"]),
            f"{row['certified']}/{row['blocks']}",
            *("-" if number is None else f"{number:.1f}" for number in bits),
            "-" if error is None else f"{error:.1e}",
            ", ".join(row["bound_used"]) or "-",
            f"[{style}]{row['verdict']}[/{style}]",
        )
    return table


def _check_head_dim(key: FloatArray, value: FloatArray) -> None:
    """The library certifies any width of value; the kernels, whose calls are recorded, need one."""
    shapes = [array.values.shape for array in (key, value)]
    if all(len(shape) == 4 for shape in shapes) and shapes[0][3] != shapes[1][3]:
        raise ValueError(
            f"value: got head_dim {shapes[1][3]} beside a key of {shapes[0][3]}; the kernels need "
            "one head_dim for query, key and value. Record the value of the same call."
        )


def _refuse_directory(path: Path) -> None:
    if os.path.isdir(path):
        raise ValueError(f"--json {path}: is a directory. Give the name of a file to write.")


def _write_json(path: Path, document: dict[str, Any]) -> None:
    try:
        write_atomically(path, json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be written ({error.strerror}). Give a file in a directory that exists."
        ) from error


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(USAGE_ERROR)


def main() -> None:
    """Entry point of the ``certify`` command."""
    app()


if __name__ == "__main__":
    main()
