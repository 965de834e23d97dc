"""An audit as JSON and as CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from certify.audit import BITS_PER_BIN, NUM_BINS, AuditResult, Counts, LayerAudit
from certify.facts import BlockFacts
from certify.judgement import REASONS
from certify.theorem import VERDICTS
from certify.words import why

SCHEMA = "certify.audit"
SCHEMA_VERSION = 1

COLUMNS = (
    "layer",
    "head",
    *VERDICTS,
    "blocks",
    "smallest_margin_bits",
    "smallest_measured_margin_bits",
    "largest_error_bound",
    "bound_used",
    "worst_pass",
    "worst_batch",
    "worst_block",
    "worst_verdict",
    "worst_gap_bits",
    "worst_budget_bits",
    "why",
)

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")


def head_rows(result: AuditResult) -> list[dict[str, Any]]:
    """One row per layer and head: totals, the numbers of the worst block, and why in words."""
    rows = []
    worst = [facts for layer in result.layers for facts in layer.worst]
    for row, facts in zip(result.rows(), worst, strict=True):
        rows.append({**row, **_worst_fields(facts)})
    return rows


def _worst_fields(facts: BlockFacts) -> dict[str, Any]:
    return {
        "worst_pass": facts.pass_index,
        "worst_batch": facts.batch,
        "worst_block": facts.block,
        "worst_verdict": facts.verdict,
        "worst_gap_bits": facts.gap,
        "worst_budget_bits": facts.budget,
        "why": why(facts),
    }


def to_json(result: AuditResult, about: dict[str, Any]) -> str:
    """One JSON object: shares, heads, steps, histograms. Numbers that are not finite are null."""
    document = {
        "schema": SCHEMA,
        "version": SCHEMA_VERSION,
        **about,
        "tolerance": result.tolerance,
        "recorded_tolerance": result.recorded_tolerance,
        "bounds": result.family,
        "query_blocks": dict(zip(VERDICTS, result.counts, strict=True)),
        "certified_share": result.certified_share,
        "proved_share": result.proved_share,
        "calls_not_recorded": result.not_recorded,
        "faults": result.faults,
        "kept_rows": [
            {
                "layer": check.layer,
                "pass": check.pass_index,
                "batch": check.batch,
                "head": check.head,
                "rows": check.num_rows,
                "checked": check.checked,
                "faults": list(check.faults),
                "note": check.note,
            }
            for check in result.kept
        ],
        "heads": head_rows(result),
        "steps": [_steps(layer) for layer in result.layers],
        "gap_histogram": {
            "bits_per_bin": BITS_PER_BIN,
            "gaps": {
                family: _sum([layer.gaps[index] for layer in result.layers])
                for index, family in enumerate(result.families)
            },
            "budgets": _sum([layer.budgets for layer in result.layers]),
        },
        "settings": dict(result.settings),
    }
    return json.dumps(_without_infinities(document), indent=1, allow_nan=False) + "\n"


def _sum(histograms: Sequence[Counts]) -> list[int]:
    counts: list[int] = np.sum([np.zeros(NUM_BINS, np.int64), *histograms], axis=0).tolist()
    return counts


def _steps(layer: LayerAudit) -> dict[str, Any]:
    counts = layer.verdicts.sum(axis=1)
    return {
        "layer": layer.name,
        "pass": layer.passes.tolist(),
        "smallest_margin_bits": layer.margin.min(axis=1).tolist(),
        **{name: counts[:, code].tolist() for code, name in enumerate(VERDICTS)},
        "not_certified_because": {
            name: int(count)
            for name, count in zip(REASONS[1:], layer.reasons.sum(axis=0)[1:], strict=True)
            if count
        },
    }


def _without_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _without_infinities(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_infinities(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def to_csv(result: AuditResult) -> str:
    """One line per layer and head. Text that a spreadsheet would take for a formula is quoted."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(COLUMNS)
    for row in head_rows(result):
        used = sorted(row["bound_used"].items(), key=lambda item: -item[1])
        cells = {**row, "bound_used": " ".join(f"{name}:{count}" for name, count in used)}
        writer.writerow([safe_cell(cells[name]) for name in COLUMNS])
    return buffer.getvalue()


def safe_cell(value: Any) -> Any:
    if isinstance(value, str):
        return f"'{value}" if value.startswith(_FORMULA_STARTS) else value
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return value
