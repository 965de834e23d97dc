"""A recorder's totals: verdict counts per layer and head, added up and put in words.

A row of totals belongs to one head of one layer:

    {"layer": "blocks.3.attn1", "head": 0, "certified": n, "verified": n, "recomputed": n,
     "exact": n, "blocks": n, "smallest_margin_bits": float | None, "bound_used": {name: n},
     "largest_error_bound": float | None}

Counts are of (call, batch element, query block). The margin is budget - gap in bits: what the proof
before the loop had to spare; negative where it failed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from certify.theorem import VERDICTS

ROWS_SHOWN_SINGLY = 64
"""With more rows than this, a table shows one line per layer and names its worst head."""

COLUMNS = ("layer", "head", *VERDICTS, "margin", "error", "bound used")
TEXT_COLUMNS = ("layer", "head", "bound used")

MISSING = "-"


@dataclass(frozen=True)
class Totals:
    """Verdict counts of one or more heads, and their worst figures.

    Attributes:
        counts: query blocks per verdict, in the order of ``VERDICTS``.
        margin: smallest margin in bits; None where no block asked for a proof.
        bound_used: blocks per bound name.
        error: largest error bound; None where nothing was proved.
    """

    counts: tuple[int, ...]
    margin: float | None
    bound_used: Mapping[str, int]
    error: float | None

    @property
    def blocks(self) -> int:
        return sum(self.counts)

    def shares(self) -> list[str]:
        """Percentages per verdict. 100% and 0% are only said where they are exact."""
        return [percent(count, self.blocks) for count in self.counts]

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Totals:
        """Read one row of totals.

        Raises:
            ValueError: where a field is missing.
        """
        try:
            return cls(
                counts=tuple(int(row[name]) for name in VERDICTS),
                margin=_number(row["smallest_margin_bits"]),
                bound_used={str(name): int(count) for name, count in row["bound_used"].items()},
                error=_number(row["largest_error_bound"]),
            )
        except KeyError as missing:
            raise ValueError(f"rows: a row lacks the field {missing}.") from missing

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, Any]]) -> Totals:
        """Add rows up."""
        each = [cls.of_row(row) for row in rows]
        bound_used: dict[str, int] = {}
        for totals in each:
            for name, count in totals.bound_used.items():
                bound_used[name] = bound_used.get(name, 0) + count
        return cls(
            counts=tuple(sum(totals.counts[i] for totals in each) for i in range(len(VERDICTS))),
            margin=min((t.margin for t in each if t.margin is not None), default=None),
            bound_used=bound_used,
            error=max((t.error for t in each if t.error is not None), default=None),
        )


def _number(value: Any) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def percent(part: int, whole: int) -> str:
    """100% and 0% are only said where they are exact."""
    if not whole:
        return MISSING
    percent = 100.0 * part / whole
    if 0 < part < whole:
        percent = min(max(percent, 0.1), 99.9)
    return f"{percent:.1f}%" if 0 < part < whole else f"{percent:.0f}%"


def _bound_text(bound_used: Mapping[str, int]) -> str:
    """Names of the bounds behind the blocks, the most frequent first."""
    used = [(-count, name) for name, count in bound_used.items() if count and name != "none"]
    return ", ".join(name for _, name in sorted(used)) or MISSING


def figures(totals: Totals) -> list[str]:
    """The cells of ``COLUMNS`` after layer and head."""
    margin = MISSING if totals.margin is None else f"{totals.margin:.1f}"
    error = MISSING if totals.error is None else f"{totals.error:.1e}"
    return [*totals.shares(), margin, error, _bound_text(totals.bound_used)]


def _severity(row: Mapping[str, Any]) -> tuple[float, float]:
    """Sorts heads from the worst: most blocks recomputed, then the smallest margin."""
    totals = Totals.of_row(row)
    recomputed = totals.counts[VERDICTS.index("recomputed")] / max(totals.blocks, 1)
    return -recomputed, math.inf if totals.margin is None else totals.margin


def by_layer(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Rows grouped by layer, in the order in which the layers first appear."""
    layers: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        layers.setdefault(str(row["layer"]), []).append(row)
    return layers


def lines(rows: Sequence[Mapping[str, Any]], *, condense: bool) -> list[list[str]]:
    """Cells of the table: a line per head, or a line per layer that names its worst head."""
    if not condense:
        return [[str(row["layer"]), str(row["head"]), *figures(Totals.of_row(row))] for row in rows]
    result = []
    for layer, heads in by_layer(rows).items():
        worst = min(heads, key=_severity)
        name = f"{len(heads)}, worst {worst['head']}"
        result.append([layer, name, *figures(Totals.of_rows(heads))])
    return result
