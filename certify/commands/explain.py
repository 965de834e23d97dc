"""``certify explain``: one head's numbers, step by step, in words."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from certify.arithmetic import DEFAULT_TOLERANCE
from certify.commands.common import (
    MAKE_TENSORS,
    BoundsOption,
    CausalOption,
    FileArgument,
    RowSumsOption,
    ScaleOption,
    SoftCapOption,
    ToleranceOption,
    failing_in_one_line,
    load,
    say,
)
from certify.explanation import Step, explanation
from certify.facts import BlockFacts, head_facts
from certify.recorded_layers import LayerPasses
from certify.recording import Recording
from certify.tensor_recording import CallOptions
from certify.words import bits

EXAMPLE = f"""\b
Example, with tensors made on the spot:
{MAKE_TENSORS}\
  certify explain qkv.safetensors --layer qkv --head 2
"""

NAMES_SHOWN = 12


def explain(
    file: FileArgument,
    head: Annotated[int, typer.Option(help="Index of the query head.", show_default=False)],
    layer: Annotated[
        str | None, typer.Option(help="Name of the layer; needed where there are several.")
    ] = None,
    pass_index: Annotated[
        int | None,
        typer.Option("--pass", help="Call of the layer (step).", show_default="the worst"),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Batch element.", show_default="the worst")
    ] = None,
    tolerance: ToleranceOption = None,
    bounds: BoundsOption = "auto",
    scale: ScaleOption = None,
    causal: CausalOption = False,
    soft_cap: SoftCapOption = None,
    row_sums: RowSumsOption = True,
) -> None:
    """Walk through one head's numbers.

    Budget, bounds, stabilizer, verdict, what was measured and what is missing for a certificate.
    """
    console = Console()
    with failing_in_one_line():
        options = CallOptions(
            scale=scale,
            causal=causal,
            soft_cap=soft_cap,
            tolerance=DEFAULT_TOLERANCE if tolerance is None else tolerance,
            row_sums=row_sums,
        )
        given = {"--scale": scale, "--causal": causal, "--soft-cap": soft_cap}
        recording = load(file, options, given, console)
        facts = head_facts(
            recording,
            find_layer(recording, layer, pass_index),
            head=head,
            pass_index=pass_index,
            batch=batch,
            tolerance=tolerance,
            family=bounds,
        )
    for step in explanation(facts):
        _print(console, step, facts)


def find_layer(recording: Recording, name: str | None, pass_index: int | None) -> LayerPasses:
    """The layer of that name; of several shapes the one that has the call, or the first.

    Raises:
        ValueError: for an unknown name, listing those that there are.
    """
    names = []
    found = None
    for layer in recording.layers:
        names.append(layer.name)
        if layer.name == name and (found is None or pass_index in layer.passes):
            found = layer
    if name is None and len(names) == 1:
        return recording.layers[0]
    if found is None:
        what = "no name was given" if name is None else f"got {name!r}"
        raise ValueError(f"--layer: {what}; the recording has {_listed(names, name)}.")
    return found


def _listed(names: Sequence[str], wanted: str | None) -> str:
    """Some names, those like the wanted one first."""
    different = list(dict.fromkeys(names))
    like = [] if wanted is None else difflib.get_close_matches(wanted, different, NAMES_SHOWN)
    shown = [*like, *(name for name in different if name not in like)][:NAMES_SHOWN]
    more = len(different) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "") if names else "no layer"


def _print(console: Console, step: Step, facts: BlockFacts) -> None:
    console.print(Text(step.title, style="bold"))
    for line in step.lines:
        say(console, f"  {line}")
    if step.shows_bounds:
        console.print(_bounds_table(facts))


def _bounds_table(facts: BlockFacts) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 1))
    for name in ("bound", "L", "S", "gap", "within the budget"):
        table.add_column(name, justify="left" if name == "bound" else "right")
    for family, (upper, lower) in facts.bounds.items():
        gap = upper - lower
        name = "auto (best per row)" if family == "auto" else family
        verdict = "yes" if gap <= facts.budget else "no"
        cells = (name, bits(lower), bits(upper), bits(gap), verdict)
        style = "bold" if family == facts.winner else ""
        table.add_row(*(Text(cell) for cell in cells), style=style)
    return table
