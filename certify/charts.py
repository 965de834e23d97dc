"""Pictures of an audit. matplotlib is needed only inside these functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from certify.audit import BITS_PER_BIN, BITS_PER_PLACE, BITS_SHOWN, PLANE_RANGE, AuditResult

LARGEST_SHOWN = 250.0
"""Bits at which the colours of the heat maps end: about the whole room that float32 has."""

TICKS = 20
"""Most labels along an axis."""

FEW_POINTS = 200
"""Up to so many places are drawn as points."""

GREY, INK, BUDGET_COLOUR, BAR_COLOUR = "#d5dadf", "#3b444d", "#b4531f", "#2a7f7a"


def _axes(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def plain_label(name: str) -> str:
    """A layer's name for an axis: no mathematics, and not longer than the picture is wide."""
    short = name if len(name) <= 40 else f"{name[:18]}...{name[-18:]}"
    return short.replace("$", r"\$")


def heat_map(
    margin: npt.NDArray[Any], rows: Sequence[str], columns: Sequence[str], across: str
) -> Any:
    """A matplotlib figure of margins in bits, [rows, columns]; grey where there is none (NaN)."""
    from matplotlib.colors import Normalize

    lines, cells = margin.shape
    size = (min(13.0, 3.8 + 0.26 * cells), min(14.0, max(2.4, 1.6 + 0.24 * lines)))
    figure, axes = _axes(*size)
    axes.set_facecolor(GREY)
    mesh = axes.pcolormesh(
        np.clip(margin, -LARGEST_SHOWN, LARGEST_SHOWN),
        cmap="BrBG",
        norm=Normalize(-LARGEST_SHOWN, LARGEST_SHOWN),
        edgecolors="white",
        linewidth=0.4 if cells * lines <= 2000 else 0.0,
        rasterized=True,
    )
    axes.invert_yaxis()
    for positions, names, set_ticks in (
        (lines, rows, axes.set_yticks),
        (cells, columns, axes.set_xticks),
    ):
        step = max(1, -(-positions // (2 * TICKS if names is rows else TICKS)))
        shown = range(0, positions, step)
        set_ticks(np.asarray(shown) + 0.5, [plain_label(names[i]) for i in shown])
    axes.tick_params(length=0, labelsize=9, colors=INK)
    axes.set_xlabel(across, color=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
    bar = figure.colorbar(mesh, ax=axes, extend="both", pad=0.02, shrink=min(1.0, 6.0 / size[1]))
    bar.set_label("margin, bits", color=INK)
    bar.outline.set_visible(False)
    return figure


def layer_head_map(result: AuditResult) -> Any:
    """Smallest margin over all calls, layer x head."""
    heads = max(layer.settings.heads for layer in result.layers)
    margin = np.full((len(result.layers), heads), np.nan)
    for line, layer in enumerate(result.layers):
        margin[line, : layer.settings.heads] = _without_infinite(layer.margin).min(axis=0)
    names = [layer.name for layer in result.layers]
    return heat_map(margin, names, [str(head) for head in range(heads)], "head")


def step_layer_map(result: AuditResult) -> Any:
    """Smallest margin over all heads, layer x call."""
    calls = sorted({int(number) for layer in result.layers for number in layer.passes})
    place = {number: column for column, number in enumerate(calls)}
    margin = np.full((len(result.layers), len(calls)), np.nan)
    for line, layer in enumerate(result.layers):
        columns = [place[int(number)] for number in layer.passes]
        margin[line, columns] = _without_infinite(layer.margin).min(axis=1)
    names = [layer.name for layer in result.layers]
    return heat_map(margin, names, [str(number) for number in calls], "call of the layer (step)")


def _without_infinite(margin: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """+inf stands for "no block asked": it is drawn grey."""
    return np.where(margin == np.inf, np.nan, margin)


def gap_histograms(result: AuditResult) -> Any:
    """Distribution of the blocks' gaps, a panel per family, with the budget beside it."""
    from matplotlib.figure import Figure

    gaps = np.sum([layer.gaps for layer in result.layers], axis=0)
    budgets = np.sum([layer.budgets for layer in result.layers], axis=0)
    shown = [i for i in range(len(result.families)) if gaps[i, :-1].any() or i == 0]
    figure = Figure(figsize=(9.5, 0.8 + 0.85 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    edges = np.arange(0, BITS_SHOWN + 2 * BITS_PER_BIN, BITS_PER_BIN)
    centre = _middle(budgets[:-1])
    for axes, family in zip(panels, shown, strict=True):
        axes.stairs(gaps[family], edges, fill=True, color=BAR_COLOUR)
        if centre is not None:
            axes.axvline(centre, color=BUDGET_COLOUR, linewidth=1.5)
        name = result.families[family]
        name = "best per row" if name == "auto" else name
        axes.set_ylabel(name, rotation=0, ha="right", va="center", color=INK)
        axes.set_yticks([])
        axes.margins(y=0.08)
        axes.set_xlim(0, edges[-1])
        axes.tick_params(colors=INK, labelsize=9)
        for side in ("top", "left", "right"):
            axes.spines[side].set_visible(False)
    if centre is not None:
        panels[0].annotate(
            f"budget, about {centre:.0f} bits",
            (centre, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(4, -10),
            textcoords="offset points",
            color=BUDGET_COLOUR,
            fontsize=9,
        )
    ticks = list(range(0, BITS_SHOWN, 64))
    panels[-1].set_xticks([*ticks, BITS_SHOWN], [*map(str, ticks), f"{BITS_SHOWN}+"])
    panels[-1].set_xlabel("gap S - L of the block's worst row, bits", color=INK)
    return figure


def _middle(counts: npt.NDArray[np.int64]) -> float | None:
    """The median of a histogram; None where it is empty."""
    if not counts.sum():
        return None
    middle = int(np.searchsorted(np.cumsum(counts), counts.sum() / 2))
    return (middle + 0.5) * BITS_PER_BIN


def proved_beside_measured(result: AuditResult) -> Any:
    """How many blocks have which proved margin and which measured margin."""
    from matplotlib.colors import LogNorm

    plane = np.sum([layer.plane for layer in result.layers], axis=0)
    low, high = PLANE_RANGE
    edges = np.arange(low, high + BITS_PER_PLACE, BITS_PER_PLACE)
    figure, axes = _axes(7.0, 5.0)
    occupied = np.argwhere(plane)
    if len(occupied) <= FEW_POINTS:
        centres = low + (occupied + 0.5) * BITS_PER_PLACE
        axes.scatter(*centres.T, s=26, color=BAR_COLOUR, label="query blocks", zorder=3)
    else:
        counts = np.where(plane > 0, plane, np.nan).T
        mesh = axes.pcolormesh(edges, edges, counts, cmap="viridis_r", norm=LogNorm())
        mesh.set_rasterized(True)
        bar = figure.colorbar(mesh, ax=axes, pad=0.02)
        bar.set_label("query blocks", color=INK)
        bar.outline.set_visible(False)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.axhline(0, color=INK, linewidth=0.8)
    promise = "what the proof promises"
    axes.plot([0, high], [0, high / 2], "--", color=BUDGET_COLOUR, linewidth=1.3, label=promise)
    axes.legend(loc="upper left", frameon=False, fontsize=9, labelcolor=INK)
    axes.set_xlim(_limits(plane.sum(axis=1), edges))
    axes.set_ylim(_limits(plane.sum(axis=0), edges))
    axes.set_xlabel("proved margin: budget - gap, bits", color=INK)
    axes.set_ylabel("measured margin of the row sums, bits", color=INK)
    axes.tick_params(colors=INK, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def _limits(counts: npt.NDArray[np.int64], edges: npt.NDArray[Any]) -> tuple[float, float]:
    """The part of an axis where there is something, 0 included, with a little room."""
    occupied = np.flatnonzero(counts)
    room = 16.0
    return (
        float(min(edges[occupied[0]], 0.0) - room),
        float(max(edges[occupied[-1] + 1], 0.0) + room),
    )
