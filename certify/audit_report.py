"""The page of an audit: everything about a recording that people would look at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from certify import charts
from certify.audit import AuditResult
from certify.facts import BlockFacts
from certify.files import write_atomically
from certify.judgement import REASONS
from certify.page import (
    box,
    folded,
    heading,
    page,
    paragraph,
    picture,
    settings_table,
    share_bars,
    table,
    verdict_section,
)
from certify.theorem import VERDICTS
from certify.totals import MISSING, Totals, percent
from certify.words import as_run, bits, power_of_two, tolerance_text, why

SHOWN_AT_ONCE = 16
"""Lines of a table that are not folded away."""

HEAD_COLUMNS = (
    "layer",
    "head",
    *VERDICTS,
    "proved",
    "measured",
    "error",
    "row sums",
    "bound",
)

_RANK = {name: rank for rank, name in enumerate(("recomputed", "verified", "certified", "exact"))}


def write_audit_report(path: Path, result: AuditResult, title: str) -> None:
    """Write the page, whole or not at all.

    Raises:
        OSError: where the file cannot be written.
    """
    write_atomically(Path(path), audit_page(result, title))


def audit_page(result: AuditResult, title: str) -> str:
    """One self-contained HTML document; every text from the recording is escaped."""
    rows = result.rows()
    overall = Totals.of_rows(rows)
    worst = [facts for layer in result.layers for facts in layer.worst]
    parts = [paragraph(_lead(result), "lead"), verdict_section(overall), *_checks(result)]
    if not overall.blocks:
        parts.append(paragraph("The recording holds no attention call.", "note"))
    else:
        parts += _not_certified(worst)
        parts += _pictures(result)
        parts += [heading("Which bound is the tightest"), *_winners(result)]
        parts += [heading("Every head, the worst first"), _every_head(rows, worst)]
    parts += [heading("Settings"), settings_table(_settings(result))]
    return page(title, parts)


def _lead(result: AuditResult) -> str:
    counts = dict(zip(VERDICTS, result.counts, strict=True))
    total = sum(result.counts)
    heads = sum(layer.settings.heads for layer in result.layers)
    text = (
        f"{_number(total, 'query block')} of {_number(heads, 'head')} in "
        f"{_number(len(result.layers), 'layer')}, judged at "
        f"tolerance {tolerance_text(result.tolerance)}: {percent(counts['certified'], total)} are "
        f"proved before the loop, {percent(counts['verified'], total)} after it by their row sums, "
        f"and {percent(counts['recomputed'], total)} are done again with online softmax."
    )
    if counts["exact"]:
        text += f" {percent(counts['exact'], total)} used the true row maximum from the start."
    if result.tolerance != result.recorded_tolerance:
        text += (
            f" The calls ran with tolerance {tolerance_text(result.recorded_tolerance)}; what the "
            "row sums would be at this one follows from theirs."
        )
    if result.family != "auto":
        text += f" Judged by the {result.family} bound alone."
    return text


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _checks(result: AuditResult) -> list[str]:
    """What speaks for or against the recorded numbers."""
    parts = [paragraph(as_run(result), "note")] if result.as_run else []
    faults = result.faults
    if faults:
        shown, more = faults[:20], len(faults) - 20
        if more > 0:
            shown = [*shown, f"and {more} more"]
        parts.append(
            box(
                "The recording contradicts itself. Do not rely on it, and report this:",
                shown,
                alarm=True,
            )
        )
    checked = [check for check in result.kept if check.checked]
    if checked and not any(check.faults for check in checked):
        rows = sum(check.num_rows for check in checked)
        parts.append(
            box(
                f"{_number(rows, 'kept query row')} of {_number(len(checked), 'head')} were "
                "bounded again from their queries and keys: their gaps are within those recorded, "
                "and the bounds enclose the exact log-sum-exp.",
                alarm=False,
            )
        )
    if result.not_recorded:
        parts.append(
            paragraph(f"{result.not_recorded:,} calls were left out to bound the size.", "note")
        )
    return parts


def _severity(facts: BlockFacts) -> tuple[float, float]:
    return _RANK.get(facts.verdict, len(_RANK)), facts.margin


def _not_certified(worst: Sequence[BlockFacts]) -> list[str]:
    """The heads with a block that is only verified or recomputed, and why."""
    bad = sorted((f for f in worst if _RANK.get(f.verdict, 9) <= 1), key=_severity)
    parts = [heading("Not proved before the loop, and why")]
    if not bad:
        parts.append(paragraph("Every block that asked for a proof has one."))
        return parts
    counts = {name: sum(f.reason == name for f in bad) for name in REASONS[1:]}
    reasons = ", ".join(f"{name} ({count})" for name, count in counts.items() if count)
    parts.append(
        paragraph(
            f"{len(bad):,} of {_number(len(worst), 'head')} with at least one such block. What "
            f"stands in the way of the worst one: {reasons}.",
            "note",
        )
    )
    header = ("layer", "head", "worst block", "pass", "why")
    lines = [[f.layer, str(f.head), f.verdict, str(f.pass_index), why(f)] for f in bad]
    parts.append(_long_table(header, lines, text=("layer", "worst block"), words=("why",)))
    return parts


def _long_table(
    header: Sequence[str],
    lines: list[list[str]],
    *,
    text: Sequence[str],
    words: Sequence[str] = (),
) -> str:
    first = table(header, lines[:SHOWN_AT_ONCE], text=text, words=words)
    rest = lines[SHOWN_AT_ONCE:]
    if not rest:
        return first
    return first + folded(f"{len(rest):,} more", table(header, rest, text=text, words=words))


def _pictures(result: AuditResult) -> list[str]:
    parts = [
        heading("Smallest margin by layer and head"),
        paragraph(
            "Budget minus gap in bits, the smallest over all calls. Green: proved with that much "
            "to spare. Brown: the proof before the loop failed by that much, and the row sums "
            "decided.",
            "note",
        ),
        picture(lambda: charts.layer_head_map(result), "Margin by layer and head", wide=True),
    ]
    if any(layer.passes.size > 1 for layer in result.layers):
        parts += [
            heading("Smallest margin by step and layer"),
            paragraph("The same over all heads, call by call.", "note"),
            picture(lambda: charts.step_layer_map(result), "Margin by step and layer", wide=True),
        ]
    parts += [
        heading("Gaps against the budget"),
        paragraph(
            "Each family of bounds by itself: its gap in every query block. What lies left of the "
            "line is proved.",
            "note",
        ),
        picture(lambda: charts.gap_histograms(result), "Distribution of gaps by family"),
        heading("What was proved beside what happened"),
    ]
    if any(layer.plane.any() for layer in result.layers):
        parts += [
            paragraph(
                "The measured margin is how far the row sums stayed inside the edges of their "
                "check. The proof promises at least half of the proved margin on either side: "
                "query blocks lie above the dashed line, and the distance to it is what the "
                "bounds give away. Row sums of 0 or infinity are not drawn.",
                "note",
            ),
            picture(lambda: charts.proved_beside_measured(result), "Proved and measured margin"),
        ]
    else:
        parts.append(paragraph("No row sums were recorded.", "note"))
    return parts


def _winners(result: AuditResult) -> list[str]:
    totals = sum(layer.winners.sum(axis=0) for layer in result.layers)
    counts = [
        (name, int(count)) for name, count in zip(result.families, totals, strict=True) if count
    ]
    return [
        paragraph("The family with the smallest gap in the block's worst row.", "note"),
        share_bars(sorted(counts, key=lambda item: -item[1]), "bound"),
    ]


def _every_head(rows: Sequence[dict[str, Any]], worst: Sequence[BlockFacts]) -> str:
    both = sorted(zip(rows, worst, strict=True), key=lambda pair: _severity(pair[1]))
    lines = [_head_line(row, facts) for row, facts in both]
    note = (
        "Proved and measured: the smallest margins in bits. Row sums: smallest and largest of the "
        "worst query block. Bound: the tightest family of most blocks."
    )
    return paragraph(note, "note") + _long_table(HEAD_COLUMNS, lines, text=("layer", "bound"))


def _head_line(row: dict[str, Any], facts: BlockFacts) -> list[str]:
    totals = Totals.of_row(row)
    measured, error = row["smallest_measured_margin_bits"], row["largest_error_bound"]
    low, high = facts.row_sum_min, facts.row_sum_max
    sums = f"{power_of_two(low)} to {power_of_two(high)}" if low == low else MISSING
    used = max(row["bound_used"], key=lambda name: row["bound_used"][name], default=MISSING)
    return [
        row["layer"],
        str(row["head"]),
        *totals.shares(),
        MISSING if totals.margin is None else bits(totals.margin),
        MISSING if measured is None else bits(measured),
        MISSING if error is None else f"{error:.1e}",
        sums,
        used,
    ]


def _settings(result: AuditResult) -> list[tuple[str, object]]:
    shapes: dict[str, None] = {}
    for layer in result.layers:
        s = layer.settings
        mask = " causal" if s.causal else " masked" if s.masked else ""
        shapes[
            f"{s.num_queries} queries x {s.num_keys} keys, {s.heads} heads of {s.head_dim}, "
            f"{s.dtype}, blocks of {s.block_q} rows{mask}"
        ] = None
    return [
        ("tolerance", f"{result.tolerance:.6g} ({power_of_two(result.tolerance)})"),
        ("tolerance of the calls", f"{result.recorded_tolerance:.6g}"),
        ("bounds", result.family),
        *((f"calls, kind {number}", shape) for number, shape in enumerate(shapes, start=1)),
        *result.settings.items(),
    ]
