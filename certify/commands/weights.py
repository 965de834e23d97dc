"""``certify weights``: what a checkpoint's weights prove of every input."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from certify import arithmetic
from certify.commands.common import (
    REFUSED,
    CsvOption,
    JsonOption,
    bar,
    failing_in_one_line,
    refuse_directories,
    writing,
)
from certify.export import safe_cell
from certify.files import write_atomically
from certify.static import DEFAULT_NUM_KEYS, StaticCertificate, static_certificates
from certify.words import tolerance_text

EXAMPLE = """\b
Example, with a checkpoint of norms made on the spot:
  python -c "import json, os; import numpy as np; \\
    from safetensors.numpy import save_file; os.makedirs('tiny', exist_ok=True); \\
    json.dump(dict(model_type='qwen3', num_attention_heads=4, num_key_value_heads=2, \\
    head_dim=64), open('tiny/config.json', 'w')); \\
    save_file({f'model.layers.{i}.self_attn.{n}_norm.weight': \\
    np.full(64, 1 + 3 * i, np.float32) for i in range(2) for n in 'qk'}, \\
    'tiny/model.safetensors')"
  certify weights tiny --csv tiny.csv
"""


def weights(
    path: Annotated[
        Path,
        typer.Argument(
            help="A directory as diffusers or transformers saves it: config.json beside "
            ".safetensors files, or a pipeline with model_index.json.",
            show_default=False,
        ),
    ],
    num_keys: Annotated[
        int, typer.Option(help="Keys that attention sums over; fewer are covered as well.")
    ] = DEFAULT_NUM_KEYS,
    tolerance: Annotated[
        float, typer.Option(help="Largest |o - o_exact| / max|v| beyond ordinary rounding.")
    ] = arithmetic.DEFAULT_TOLERANCE,
    dtype: Annotated[
        str, typer.Option(help="What the model will run in: bfloat16, float16 or float32.")
    ] = "bfloat16",
    json_file: JsonOption = None,
    csv_file: CsvOption = None,
    require_share: Annotated[
        float | None,
        typer.Option(
            help="Exit with 1 if a smaller share of all heads is certified.",
            min=0.0,
            max=1.0,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Certify from weights alone.

    What a checkpoint's QK norms and soft caps prove of every input, before the model runs.
    """
    console = Console()
    with failing_in_one_line():
        _check_num_keys(num_keys)
        arithmetic.validate_tolerance(tolerance)
        refuse_directories({"--json": json_file, "--csv": csv_file})
        with bar("reading layers", console) as progress:
            certificates = static_certificates(path, dtype=dtype, progress=progress)
        if not certificates:
            raise ValueError(f"{path}: no attention layer found among its tensors.")
        rows = [_layer_row(layer, num_keys, tolerance) for layer in certificates]
        settings = {"path": str(path), "num_keys": num_keys, "tolerance": tolerance, "dtype": dtype}
        _write(json_file, json.dumps({**settings, "layers": rows}, indent=2) + "\n")
        _write(csv_file, _csv_text(rows))
    console.print(_table(rows))
    _explain(console, certificates, rows, settings)
    heads = sum(row["heads"] for row in rows)
    share = sum(row["certified_heads"] for row in rows) / heads
    if require_share is not None and not share >= require_share:
        typer.echo(f"share of certified heads: {share:.4g}, below {require_share:.4g}", err=True)
        raise typer.Exit(REFUSED)


def _layer_row(layer: StaticCertificate, num_keys: int, tolerance: float) -> dict[str, Any]:
    """One layer's figures: lists are per head, bits; None stands for "no claim" or "no value"."""
    gap = layer.gap(num_keys)
    certified = layer.certified(num_keys, tolerance)
    low, high = layer.value_window(num_keys, tolerance)
    verdict = "certified for some heads" if certified.any() else "not"
    if certified.all():
        verdict = "certified for every input"
    if not np.isfinite(layer.logit_bound).any():
        verdict = "no claim"
    return {
        "layer": layer.layer,
        "verdict": verdict,
        "reason": layer.reason,
        "heads": layer.heads,
        "certified_heads": int(certified.sum()),
        "worst_head": int(np.argmax(layer.logit_bound)),
        "budget_bits": _finite(layer.budget(num_keys, tolerance)),
        "logit_bound_bits": [_finite(bits) for bits in layer.logit_bound],
        "gap_bits": [_finite(bits) for bits in gap],
        "certified": certified.tolist(),
        "value_low": [_finite(value) for value in low],
        "value_high": [float(value) if value > 0 else None for value in high],
    }


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        title="Certified from the weights alone (bits, of each layer's worst head)",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        title_justify="left",
    )
    table.add_column("layer, norm", overflow="fold")
    for name in ("heads", "worst", "bound", "gap"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("if max|v| in", no_wrap=True)
    table.add_column("certified for", no_wrap=True)
    for row in rows:
        bounds, worst = row["logit_bound_bits"], row["worst_head"]
        claimed = row["verdict"] != "no claim"
        style = "green" if row["verdict"] == "certified for every input" else "yellow"
        norm = row["reason"].split(",")[0] if claimed else "no claim: see below"
        table.add_row(
            f"{escape(row['layer'])}\n[dim]{escape(norm)}[/dim]",
            f"{row['certified_heads']}/{row['heads']}",
            "all" if len(set(bounds)) == 1 else str(worst),
            *(_bits(bits) for bits in (bounds[worst], row["gap_bits"][worst])),
            _window(row),
            f"[{style}]{row['verdict'].removeprefix('certified for ')}[/{style}]",
        )
    return table


def _explain(
    console: Console,
    certificates: Sequence[StaticCertificate],
    rows: Sequence[dict[str, Any]],
    settings: dict[str, Any],
) -> None:
    """In words: what was proved, under which conditions, and what becomes of the rest."""
    certified, heads = (sum(row[key] for row in rows) for key in ("certified_heads", "heads"))
    words = [
        f"{certified} of {heads} heads are certified for every input at tolerance "
        f"{tolerance_text(settings['tolerance'])}, in {settings['dtype']}, with up to "
        f"{settings['num_keys']:,} keys, where the budget is {_bits(rows[0]['budget_bits'])} bits: "
        "no logit is larger than the bound, so the stabilizer needs no statistics of the keys. "
        "Condition: the head's max|v| lies in the window shown, which the kernel checks. An "
        "additive mask is not covered."
    ]
    if any(certificate.fewest_keys is not None for certificate in certificates):
        words.append(
            "Causal layers: the gap allows for rows that see a single key, log2 n bits more."
        )
    if certified < heads:
        words.append("The other heads are certified at run time, from their queries and keys.")
    console.print(Text(" ".join(words)))
    first: dict[str, str] = {}
    for row in rows:
        first.setdefault(row["reason"], row["layer"])
    for reason, count in Counter(row["reason"] for row in rows).items():
        which = first[reason] if count == 1 else f"{count} layers, {first[reason]} the first"
        console.print(Text(f"  {which}: {reason}"))


def _window(row: dict[str, Any]) -> str:
    """The values for which every certified head of the layer is certified."""
    low = [value for value in row["value_low"] if value is not None]
    high = [value for value in row["value_high"] if value is not None]
    if not low or not high:
        return "-"
    return f"2^{math.ceil(math.log2(max(low)))}..2^{math.floor(math.log2(min(high)))}"


def _csv_text(rows: Sequence[dict[str, Any]]) -> str:
    per_head = ("certified", "logit_bound_bits", "gap_bits", "value_low", "value_high")
    output = io.StringIO()
    writer = csv.writer(output)
    writer.writerow(["layer", "head", *per_head, "budget_bits", "reason"])
    for row in rows:
        for head in range(row["heads"]):
            figures = [row[name][head] for name in per_head]
            cells = [row["layer"], head, *figures, row["budget_bits"], row["reason"]]
            writer.writerow([safe_cell(cell) for cell in cells])
    return output.getvalue()


def _bits(number: float | None) -> str:
    return "-" if number is None else f"{number:.1f}"


def _finite(number: Any) -> float | None:
    return float(number) if np.isfinite(number) else None


def _check_num_keys(num_keys: int) -> None:
    if not 1 <= num_keys < arithmetic.LARGEST_NUM_KEYS:
        raise ValueError(
            f"--num-keys {num_keys}: must lie between 1 and {arithmetic.LARGEST_NUM_KEYS - 1}."
        )


def _write(file: Path | None, text: str) -> None:
    if file is not None:
        with writing(file):
            write_atomically(file, text)
