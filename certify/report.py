"""A recorder's totals as a table of the verdicts and as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from certify.files import write_atomically
from certify.page import (
    heading,
    page,
    paragraph,
    picture,
    settings_table,
    table,
    verdict_section,
)
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


def verdict_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A rich table of the verdicts: layer x head, or one line per layer when there are many heads.

    Args:
        rows: totals, as described in ``certify.totals``.

    Raises:
        ValueError: where a row lacks a field.
    """
    body = lines(rows, condense=len(rows) > ROWS_SHOWN_SINGLY)
    overall = figures(Totals.of_rows(rows))
    # Names of bounds are long: one caption says them for all. "exact" only where it occurs.
    exact = COLUMNS.index("exact")
    hidden = {len(COLUMNS) - 1} | ({exact} if overall[exact - 2] in ("0%", MISSING) else set())
    table = Table(
        title="Attention verdicts by layer and head (margins in bits)",
        caption=None if overall[-1] == MISSING else _plain(f"bound used: {overall[-1]}"),
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_footer=len(rows) > 1,
    )
    for index, (name, total) in enumerate(zip(COLUMNS, ["all", "", *overall], strict=True)):
        if index in hidden:
            continue
        table.add_column(
            name,
            footer=_plain(total),
            justify="left" if name in TEXT_COLUMNS else "right",
            no_wrap=name in ("layer", "head"),
            overflow="fold",
        )
    for line in body:
        table.add_row(*(_plain(cell) for i, cell in enumerate(line) if i not in hidden))
    return table


def _plain(text: str) -> Text:
    """Text that rich shows as it is: names from a model are no markup."""
    return Text(text)


def write_html(
    path: Path, *, title: str, rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> None:
    """Write one self-contained page: overall verdicts, heat map of margins, the table, settings.

    It loads nothing from elsewhere, every text is escaped, and the file appears whole or not at
    all. Without matplotlib it says so in place of the heat map.

    Args:
        path: where to write; the directory must exist.
        rows: totals, as described in ``certify.totals``.
        settings: shown as a table of names and values.

    Raises:
        ValueError: where a row lacks a field.
        OSError: where the file cannot be written.
    """
    write_atomically(Path(path), _page(title, list(rows), settings))


def _page(title: str, rows: list[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
    parts = [heading("Verdicts"), verdict_section(Totals.of_rows(rows))]
    if rows:
        parts += [heading("Smallest margin by layer and head"), _heat_map_section(rows)]
        body = lines(rows, condense=False)
        parts += [heading("Every head"), table(COLUMNS, body, text=TEXT_COLUMNS)]
    else:
        parts.append(paragraph("No attention call was recorded.", "note"))
    parts += [heading("Settings"), settings_table(list(settings.items()))]
    return page(title, parts)


def _heat_map_section(rows: Sequence[Mapping[str, Any]]) -> str:
    if all(Totals.of_row(row).margin is None for row in rows):
        return paragraph("No call asked for a proof: every block took an exact path.", "note")
    note = (
        "Budget minus gap in bits, the smallest over all calls, batch elements and query blocks. "
        "Above 0 the proof before the loop holds with that much to spare; below 0 it failed by "
        "that much and the row sums decided. Grey: no proof was asked for."
    )
    alternative = "Heat map of the smallest margin in bits, layer by head"
    return paragraph(note, "note") + picture(lambda: margin_figure(rows), alternative)


def margin_figure(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A matplotlib figure: the smallest margin in bits of every layer and head."""
    import numpy as np

    from certify.charts import heat_map

    layers = by_layer(rows)
    heads = 1 + max(int(row["head"]) for row in rows)
    margin = np.full((len(layers), heads), np.nan)
    for line, members in enumerate(layers.values()):
        for row in members:
            value = Totals.of_row(row).margin
            margin[line, int(row["head"])] = np.nan if value is None else value
    return heat_map(margin, list(layers), [str(head) for head in range(heads)], "head")
