"""One table three ways: for the terminal, for the README, for a program."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Column:
    """Heading, and whether numbers stand to the right."""

    heading: str
    right: bool = True


def show(
    console: Console, title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]]
) -> None:
    """Print a rich table."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column.heading, justify="right" if column.right else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def markdown(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """The table in Markdown."""
    lines = [" | ".join(column.heading for column in columns)]
    lines.append("|".join("---:" if column.right else "---" for column in columns))
    lines += [" | ".join(row) for row in rows]
    return "\n".join(f"| {line} |" if "---" not in line else f"|{line}|" for line in lines)


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a document; numbers that JSON lacks are refused.

    Raises:
        ValueError: for a NaN or an infinity in it.
    """
    path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def share(part: int | None, whole: int) -> str:
    """ "100%", "37%"; never rounded up to all or down to none; "-" for what does not apply."""
    if part is None or whole == 0:
        return "-"
    percent = 100.0 * part / whole
    if 0 < part < whole:
        percent = min(max(percent, 1.0), 99.0)
    return f"{percent:.0f}%"
