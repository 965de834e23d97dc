"""What people look at: a table of the verdicts and a self-contained HTML page."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from certify.files import write_atomically
from certify.theorem import VERDICTS
from certify.totals import (
    COLUMNS,
    MISSING,
    ROWS_SHOWN_SINGLY,
    TEXT_COLUMNS,
    Totals,
    by_layer,
    figures,
    lines,
)

LARGEST_SHOWN = 250.0
"""Bits at which the colours of the heat map end: about the whole room that float32 has."""


def verdict_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A rich table of the verdicts: layer x head, or one line per layer when there are many heads.

    Args:
        rows: totals, as described in ``certify.totals``.

    Raises:
        ValueError: where a row lacks a field.
    """
    body = lines(rows, condense=len(rows) > ROWS_SHOWN_SINGLY)
    overall = figures(Totals.of_rows(rows))
    # The last column is the bound. Where all lines say the same, one caption says it for all.
    same_bound = len({line[-1] for line in body} - {MISSING}) <= 1
    shown = len(COLUMNS) - 1 if same_bound else len(COLUMNS)
    table = Table(
        title="Attention verdicts by layer and head (margins in bits)",
        caption=f"bound used: {overall[-1]}" if same_bound else None,
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_footer=len(rows) > 1,
    )
    for name, total in zip(COLUMNS[:shown], ["all", "", *overall], strict=False):
        table.add_column(
            name,
            footer=_plain(total),
            justify="left" if name in TEXT_COLUMNS else "right",
            no_wrap=name in ("layer", "head"),
            overflow="fold",
        )
    for line in body:
        table.add_row(*(_plain(cell) for cell in line[:shown]))
    return table


def _plain(text: str) -> Text:
    """Text that rich shows as it is: names from a model are no markup."""
    return Text(text)


def write_html(
    path: Path, *, title: str, rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> None:
    """Write one self-contained page: overall verdicts, heat map of margins, the table, settings.

    It loads nothing from elsewhere, every text is escaped, and the file appears whole or not at
    all.

    Args:
        path: where to write; the directory must exist.
        rows: totals, as described in ``certify.totals``.
        settings: shown as a table of names and values.

    Raises:
        ValueError: where a row lacks a field.
        OSError: where the file cannot be written.
        ImportError: where matplotlib is missing.
    """
    page = _page(title, list(rows), settings)
    write_atomically(Path(path), page)


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
       color: #1b1f24; background: #fff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #d8dee4; text-align: left; }
td.number, th.number { text-align: right; }
img { max-width: 100%; }
.bar { display: flex; height: 1.4rem; border-radius: 4px; overflow: hidden; margin: .5rem 0; }
.certified { background: #2a7f4f; } .verified { background: #6fb98f; }
.recomputed { background: #d9822b; } .exact { background: #9aa5b1; }
.key { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px;
       margin-right: .4rem; }
.note { color: #57606a; max-width: 60rem; }
"""

_MEANING = {
    "certified": "proved before the loop that the fixed stabilizer cannot change the answer",
    "verified": "proved after the loop, from the row sums it computed",
    "recomputed": "neither proof held; done again with online softmax",
    "exact": "the true row maximum was used from the start",
}


def _page(title: str, rows: list[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
    parts = [
        f"<h1>{escape(title)}</h1>",
        "<h2>Verdicts</h2>",
        _verdict_section(Totals.of_rows(rows)),
    ]
    if rows:
        parts += ["<h2>Smallest margin by layer and head</h2>", _heat_map_section(rows)]
        parts += ["<h2>Every head</h2>", _html_table(COLUMNS, lines(rows, condense=False))]
    else:
        parts.append('<p class="note">No attention call was recorded.</p>')
    lines_of_settings = [[str(name), str(value)] for name, value in settings.items()]
    parts += ["<h2>Settings</h2>", _html_table(("setting", "value"), lines_of_settings)]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _html_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    classes = [
        "" if name in (*TEXT_COLUMNS, "setting", "value") else ' class="number"' for name in header
    ]

    def row(cells: Sequence[str], tag: str) -> str:
        inside = zip(classes, cells, strict=True)
        return "<tr>" + "".join(f"<{tag}{c}>{escape(t)}</{tag}>" for c, t in inside) + "</tr>"

    body = "\n".join(row(line, "td") for line in lines)
    return f"<table><thead>{row(header, 'th')}</thead><tbody>\n{body}\n</tbody></table>"


def _verdict_section(overall: Totals) -> str:
    shares = dict(zip(VERDICTS, overall.shares(), strict=True))
    widths = {
        name: 100.0 * count / max(overall.blocks, 1)
        for name, count in zip(VERDICTS, overall.counts, strict=True)
    }
    bar = "".join(
        f'<div class="{name}" style="width:{widths[name]:.3f}%" '
        f'title="{name} {shares[name]}"></div>'
        for name in VERDICTS
    )
    lines = "".join(
        f'<tr><td><span class="key {name}"></span>{name}</td><td class="number">{shares[name]}</td>'
        f'<td class="number">{count}</td><td>{escape(_MEANING[name])}</td></tr>'
        for name, count in zip(VERDICTS, overall.counts, strict=True)
    )
    return (
        f'<div class="bar">{bar}</div><table><thead><tr><th>verdict</th>'
        '<th class="number">share</th>'
        f'<th class="number">query blocks</th><th>meaning</th></tr></thead><tbody>{lines}</tbody>'
        "</table>"
    )


def _heat_map_section(rows: Sequence[Mapping[str, Any]]) -> str:
    note = (
        "Budget minus gap in bits, the smallest over all calls, batch elements and query blocks. "
        "Above 0 the proof before the loop holds with that much to spare; below 0 it failed by "
        "that much and the row sums decided. Grey: no proof was asked for."
    )
    if all(Totals.of_row(row).margin is None for row in rows):
        return '<p class="note">No call asked for a proof: every block took an exact path.</p>'
    image = base64.b64encode(_heat_map_svg(rows)).decode("ascii")
    return (
        f'<p class="note">{note}</p>'
        '<img alt="Heat map of the smallest margin in bits, layer by head" '
        f'src="data:image/svg+xml;base64,{image}">'
    )


def _heat_map_svg(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Layer x head, coloured by the smallest margin; grey where there is none."""
    figure = margin_figure(rows)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def margin_figure(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A matplotlib figure: the smallest margin in bits of every layer and head."""
    import numpy as np
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    layers = by_layer(rows)
    heads = 1 + max(int(row["head"]) for row in rows)
    margin = np.full((len(layers), heads), np.nan)
    for line, members in enumerate(layers.values()):
        for row in members:
            value = Totals.of_row(row).margin
            margin[line, int(row["head"])] = np.nan if value is None else value
    size = (min(16.0, 3.5 + 0.28 * heads), min(40.0, 2.0 + 0.24 * len(layers)))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.set_facecolor("#c9d1d9")
    mesh = axes.pcolormesh(
        np.clip(margin, -LARGEST_SHOWN, LARGEST_SHOWN),
        cmap="RdYlGn",
        norm=Normalize(-LARGEST_SHOWN, LARGEST_SHOWN),
        edgecolors="white",
        linewidth=0.5,
    )
    axes.invert_yaxis()
    axes.set_yticks(np.arange(len(layers)) + 0.5, [_label(name) for name in layers])
    step = max(1, heads // 20)
    axes.set_xticks(np.arange(0, heads, step) + 0.5, [str(h) for h in range(0, heads, step)])
    axes.set_xlabel("head")
    figure.colorbar(mesh, ax=axes, label="bits", extend="both")
    return figure


def _label(name: str) -> str:
    """A layer's name for an axis: no mathematics, and not longer than the picture is wide."""
    short = name if len(name) <= 40 else f"{name[:18]}...{name[-18:]}"
    return short.replace("$", r"\$")
