"""Audit a recording: the theorem and every verdict evaluated again, layer by layer, and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from certify import arithmetic
from certify.facts import (
    BlockFacts,
    block_facts,
    family_gaps,
    validate_family,
    winning_family,
    worst_block,
)
from certify.formats import Float32
from certify.judgement import (
    CONTRADICTION,
    NOT_RECORDED,
    REASONS,
    Judged,
    judge,
    lanes_of,
)
from certify.kept import KeptCheck, check_kept
from certify.recorded_layers import LayerPasses, LayerSettings
from certify.recording import Recording, read_recording
from certify.theorem import CERTIFIED, EXACT, VERDICTS, VERIFIED

Counts = npt.NDArray[np.int64]

BITS_SHOWN = 512
"""Gaps at or above this many bits share the last bin of a histogram."""

BITS_PER_BIN = 4

NUM_BINS = BITS_SHOWN // BITS_PER_BIN + 1

PLANE_RANGE = (-256, 256)
"""Bits of proved and measured margin that the plane of both shows; what lies outside is clipped."""

BITS_PER_PLACE = 2

PLANE_BINS = (PLANE_RANGE[1] - PLANE_RANGE[0]) // BITS_PER_PLACE

NOT_RUN = len(VERDICTS)
"""Index of the blocks that the kernels did not run, after those of ``VERDICTS``."""


@dataclass(frozen=True, eq=False)
class LayerAudit:
    """What an audit found in one layer. Arrays lead with calls P and heads H.

    Attributes:
        name: unique in the audit: the shape is added where a layer was seen with several.
        verdicts: int64 [P, H, 4], query blocks by verdict.
        as_run: int64 [H, 5], by the verdict of the run; the last counts what was not run.
        reasons: int64 [H, len(REASONS)], why blocks are not certified.
        winners: int64 [H, families], which family has the smallest worst gap ("auto" aside).
        margin: float32 [P, H], smallest; -inf where nothing can be proved; inf where no block asks.
        measured: float32 [P, H], smallest distance of a row sum from the edges of its check.
        error: float32 [P, H], largest proven error; -inf where nothing is proved.
        worst: the worst block of each head.
        gaps: int64 [families, NUM_BINS], how often each gap occurs.
        budgets: int64 [NUM_BINS].
        plane: int64 [PLANE_BINS, PLANE_BINS], proved margin by measured margin.
        overclaimed: blocks whose run claimed what their numbers do not prove.
        refuted: blocks whose row sums lie where their bounds do not let them lie.
        disputed: blocks that the run recomputed though their numbers certify them.
        kept: the rows that were kept, bounded again.
    """

    name: str
    settings: LayerSettings
    passes: npt.NDArray[np.int32]
    verdicts: Counts
    as_run: Counts
    reasons: Counts
    winners: Counts
    margin: Float32
    measured: Float32
    error: Float32
    worst: tuple[BlockFacts, ...]
    gaps: Counts
    budgets: Counts
    plane: Counts
    overclaimed: int
    refuted: int
    disputed: int
    kept: tuple[KeptCheck, ...]


@dataclass(frozen=True, eq=False)
class AuditResult:
    """All layers, at one tolerance and by one family of bounds ("auto": the best per row)."""

    layers: tuple[LayerAudit, ...]
    families: tuple[str, ...]
    family: str
    tolerance: float
    recorded_tolerance: float
    not_recorded: int
    settings: Mapping[str, Any]

    @property
    def counts(self) -> tuple[int, ...]:
        """Query blocks by verdict, in the order of ``VERDICTS``."""
        total = np.zeros(len(VERDICTS), np.int64)
        for layer in self.layers:
            total += layer.verdicts.sum(axis=(0, 1))
        return tuple(int(count) for count in total)

    @property
    def as_run(self) -> dict[str, int]:
        """Query blocks by the verdict of the run; those that the kernels did not run left out."""
        total = np.zeros(NOT_RUN + 1, np.int64)
        for layer in self.layers:
            total += layer.as_run.sum(axis=0)
        return {name: int(n) for name, n in zip(VERDICTS, total, strict=False) if n}

    @property
    def certified_share(self) -> float:
        """Share of blocks proved before the loop; 0 where there are none."""
        return self._share(CERTIFIED)

    @property
    def proved_share(self) -> float:
        """Share of blocks certified, verified, or exact by construction: not recomputed."""
        return self._share(CERTIFIED, VERIFIED, EXACT)

    def _share(self, *verdicts: int) -> float:
        counts = self.counts
        return sum(counts[code] for code in verdicts) / max(sum(counts), 1)

    @property
    def faults(self) -> list[str]:
        """Disagreements, one line each: kept rows, and runs that claimed too much."""
        lines = []
        for layer in self.layers:
            if layer.overclaimed:
                lines.append(
                    f"{layer.name}: the run claims a proof of {layer.overclaimed} query blocks "
                    "that their recorded numbers do not give"
                )
            if layer.refuted:
                lines.append(
                    f"{layer.name}: the row sums of {layer.refuted} query blocks lie outside of "
                    "what their bounds promise"
                )
            if layer.disputed:
                lines.append(
                    f"{layer.name}: the run recomputed {layer.disputed} query blocks that their "
                    "recorded numbers certify"
                )
            contradictions = int(layer.reasons[:, CONTRADICTION].sum())
            if contradictions:
                lines.append(
                    f"{layer.name}: {contradictions} query blocks recorded a lower bound above "
                    "the upper bound"
                )
            for check in layer.kept:
                where = f"{check.layer}, pass {check.pass_index}, head {check.head}"
                lines += [f"{where}: {fault}" for fault in check.faults]
        return lines

    @property
    def kept(self) -> tuple[KeptCheck, ...]:
        return tuple(check for layer in self.layers for check in layer.kept)

    def rows(self) -> list[dict[str, Any]]:
        """One row of totals per layer and head, as ``certify.totals`` describes them, and more."""
        return [row for layer in self.layers for row in _head_rows(layer, self.families)]


def audit_recording(
    recording: Recording | Path,
    *,
    tolerance: float | None = None,
    family: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> AuditResult:
    """Evaluate theorem and verdict again from the recorded numbers.

    Args:
        recording: or the file of one.
        tolerance: None: the one that it was recorded with.
        family: the bounds to judge by: "auto" or one that was recorded.
        progress: called with (layers done, layers in all).

    Raises:
        ValueError: for a file that is none, a tolerance out of range, a family not recorded.
    """
    if not isinstance(recording, Recording):
        recording = read_recording(Path(recording))
    if tolerance is None:
        tolerance = recording.tolerance
    arithmetic.validate_tolerance(tolerance)
    validate_family(recording, family)
    total = len(recording.layers)
    layers: list[LayerAudit] = []
    names: set[str] = set()
    for done, layer in enumerate(recording.layers, start=1):
        name = _unused_name(layer, names)
        names.add(name)
        layers.append(_audit_layer(layer, name, recording, tolerance, family))
        if progress is not None:
            progress(done, total)
    return AuditResult(
        layers=tuple(layers),
        families=recording.families,
        family=family,
        tolerance=tolerance,
        recorded_tolerance=recording.tolerance,
        not_recorded=recording.not_recorded,
        settings={**recording.settings, "created by": recording.created_by},
    )


def _unused_name(layer: LayerPasses, names: set[str]) -> str:
    """A layer that was called with several shapes appears once for each."""
    settings = layer.settings
    name = layer.name
    if name in names:
        name = f"{layer.name} ({settings.num_queries} x {settings.num_keys})"
    number = 2
    while name in names:
        name = f"{layer.name} ({settings.num_queries} x {settings.num_keys}, {number})"
        number += 1
    return name


def _audit_layer(
    layer: LayerPasses, name: str, recording: Recording, tolerance: float, family: str
) -> LayerAudit:
    lanes = lanes_of(layer, recording.fields)
    judged = judge(
        lanes,
        dtype=layer.settings.dtype,
        family=family,
        recorded_tolerance=recording.tolerance,
        tolerance=tolerance,
    )
    gaps = family_gaps(lanes, recording.families)
    winner = winning_family(gaps)
    there = judged.verdict != NOT_RECORDED
    known = there & np.any(np.isfinite(gaps), axis=0)
    # NaN, the verdict of what was not run, is above every code too.
    as_run = np.where(judged.as_run <= EXACT, judged.as_run, NOT_RUN).astype(np.int8)
    error = np.where(np.isfinite(judged.error), judged.error, -np.inf)

    def facts(head: int) -> BlockFacts:
        place = worst_block(judged, head)
        return block_facts(layer, name, lanes, judged, recording, tolerance, family, place, winner)

    return LayerAudit(
        name=name,
        settings=layer.settings,
        passes=layer.passes,
        verdicts=_count(judged.verdict, there, len(VERDICTS), keep=(0, 2)),
        as_run=_count(as_run, there, NOT_RUN + 1, keep=(2,)),
        reasons=_count(judged.reason, there, len(REASONS), keep=(2,)),
        winners=_count(winner, known, len(recording.families), keep=(2,)),
        margin=np.min(np.where(there, judged.margin, np.inf), axis=(1, 3)),
        measured=_smallest(judged.measured),
        error=np.max(np.where(there, error, -np.inf), axis=(1, 3)),
        worst=tuple(facts(head) for head in range(layer.settings.heads)),
        gaps=np.stack([_histogram(gap, there) for gap in gaps]),
        budgets=_histogram(judged.limits.budget, there),
        plane=_plane(judged, there),
        overclaimed=int(np.sum(judged.overclaimed)),
        refuted=int(np.sum(judged.refuted & there)),
        disputed=int(np.sum(judged.disputed)),
        kept=tuple(check_kept(layer, recording.fields)),
    )


def _count(codes: Any, where: Any, number: int, *, keep: tuple[int, ...]) -> Counts:
    """How often each code occurs, along the axes that are not kept; int64 [*kept, number]."""
    away = tuple(axis for axis in range(codes.ndim) if axis not in keep)
    parts = [np.sum((codes == code) & where, axis=away, dtype=np.int64) for code in range(number)]
    return np.stack(parts, axis=-1)


def _smallest(array: Float32) -> Float32:
    """[P, B, H, Q] -> [P, H] without the NaN; NaN where there is nothing else."""
    smallest = np.min(np.where(np.isnan(array), np.inf, array), axis=(1, 3))
    return np.where(np.all(np.isnan(array), axis=(1, 3)), np.nan, smallest).astype(np.float32)


def _histogram(bits: Float32, where: npt.NDArray[np.bool_]) -> Counts:
    """Counts by ``BITS_PER_BIN``; what is larger than shown or not finite falls in the last bin."""
    known = bits[where]
    bins = np.where(known < BITS_SHOWN, np.maximum(known, 0.0) / BITS_PER_BIN, NUM_BINS - 1)
    return np.bincount(bins.astype(np.int64), minlength=NUM_BINS).astype(np.int64)


def _plane(judged: Judged, where: npt.NDArray[np.bool_]) -> Counts:
    both = where & np.isfinite(judged.margin) & np.isfinite(judged.measured)
    low, high = PLANE_RANGE
    index = [
        (np.clip(axis[both], low, high - 1) - low).astype(np.int64) // BITS_PER_PLACE
        for axis in (judged.margin, judged.measured)
    ]
    flat = np.bincount(index[0] * PLANE_BINS + index[1], minlength=PLANE_BINS**2)
    return flat.reshape(PLANE_BINS, PLANE_BINS).astype(np.int64)


def _head_rows(layer: LayerAudit, families: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for head in range(layer.settings.heads):
        counts = layer.verdicts[:, head].sum(axis=0)
        margin, error = float(layer.margin[:, head].min()), float(layer.error[:, head].max())
        measured = layer.measured[:, head]
        known = measured[~np.isnan(measured)]
        used = dict(zip(families, layer.winners[head].tolist(), strict=True))
        yield {
            "layer": layer.name,
            "head": head,
            **{name: int(counts[code]) for code, name in enumerate(VERDICTS)},
            "blocks": int(counts.sum()),
            "smallest_margin_bits": None if margin == np.inf else margin,
            "smallest_measured_margin_bits": float(known.min()) if known.size else None,
            "bound_used": {name: count for name, count in used.items() if count},
            "largest_error_bound": None if error == -np.inf else error,
            "as_run": {
                name: int(count)
                for name, count in zip((*VERDICTS, "not run"), layer.as_run[head], strict=True)
                if count
            },
        }
