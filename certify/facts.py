"""The numbers of one query block, picked out of a recording: what people ask about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from certify import arithmetic
from certify.formats import Float32
from certify.judgement import NOT_RECORDED, REASONS, Judged, judge, lanes_of
from certify.recorded_layers import LayerPasses, LayerSettings
from certify.recording import Recording
from certify.theorem import CERTIFIED, EXACT, RECOMPUTED, VERDICTS, VERIFIED


@dataclass(frozen=True)
class BlockFacts:
    """The numbers of one query block, as recorded and as judged. Bits, unless said otherwise.

    Attributes:
        verdict, as_run: names of ``VERDICTS``; as_run is "not run" where the kernels did not.
        reason: why it is not certified, one of ``judgement.REASONS``.
        bounds: S and L of the worst row by each recorded family that has a say.
        value_low, value_high: V_lo and V_hi.
        row_sum_min, row_sum_max: NaN where not known.
        error: proven |o - o_exact| / max|v|; inf where nothing is proved.
    """

    layer: str
    settings: LayerSettings
    tolerance: float
    recorded_tolerance: float
    family: str
    pass_index: int
    batch: int
    head: int
    block: int
    verdict: str
    as_run: str
    reason: str
    bounds: dict[str, tuple[float, float]]
    winner: str
    num_keys: float
    visible_rows: float
    value_low: float
    value_high: float
    value_ratio: float
    gap: float
    budget: float
    upper_room: float
    lower_room: float
    stabilizer: float
    row_sum_min: float
    row_sum_max: float
    row_sum_limit: float
    measured: float
    error: float

    @property
    def margin(self) -> float:
        """budget - gap, bits; -inf where nothing can be proved."""
        known = np.isfinite(self.gap) and np.isfinite(self.budget)
        return self.budget - self.gap if known else -np.inf


def family_gaps(lanes: Mapping[str, Float32], families: tuple[str, ...]) -> Float32:
    """[families, P, B, H, Q]; inf where a family has no say or one side is not finite."""
    with np.errstate(all="ignore"):
        gaps = np.stack([lanes[f"upper:{f}"] - lanes[f"lower:{f}"] for f in families])
        return np.where(np.abs(gaps) <= arithmetic.FLOAT32_LARGEST, gaps, np.inf)


def winning_family(gaps: Float32) -> npt.NDArray[np.intp]:
    """[families, ...] -> index of the smallest gap; the first family, "auto", takes no part."""
    if len(gaps) == 1:
        return np.zeros(gaps.shape[1:], np.intp)
    return np.argmin(gaps[1:], axis=0) + 1


_SEVERITY = {RECOMPUTED: -2e9, VERIFIED: -1e9, CERTIFIED: 0.0, EXACT: 1e9, NOT_RECORDED: 2e9}


def worst_block(
    judged: Judged, head: int, calls: slice = slice(None), batch: slice = slice(None)
) -> tuple[int, int, int, int]:
    """(call, batch, head, block): the worst verdict, and among those the smallest margin."""
    verdict = judged.verdict[calls, batch, head]
    score = np.clip(judged.margin[calls, batch, head].astype(np.float64), -1e6, 1e6)
    for code, severity in _SEVERITY.items():
        score += severity * (verdict == code)
    call, element, block = np.unravel_index(int(np.argmin(score)), score.shape)
    first, start = calls.start or 0, batch.start or 0
    return int(call) + first, int(element) + start, head, int(block)


def block_facts(
    layer: LayerPasses,
    name: str,
    lanes: Mapping[str, Float32],
    judged: Judged,
    recording: Recording,
    tolerance: float,
    family: str,
    place: tuple[int, int, int, int],
    winner: npt.NDArray[Any],
) -> BlockFacts:
    """The numbers of one block, out of the arrays of its layer."""
    call, batch, head, block = place

    def at(array: Any) -> float:
        return float(array[place])

    sides = {f: (at(lanes[f"upper:{f}"]), at(lanes[f"lower:{f}"])) for f in recording.families}
    code = int(judged.verdict[place])
    as_run = judged.as_run[place]
    return BlockFacts(
        layer=name,
        settings=layer.settings,
        tolerance=tolerance,
        recorded_tolerance=recording.tolerance,
        family=family,
        pass_index=int(layer.passes[call]),
        batch=batch,
        head=head,
        block=block,
        verdict="not recorded" if code == NOT_RECORDED else VERDICTS[code],
        as_run=VERDICTS[int(as_run)] if as_run <= EXACT else "not run",
        reason=REASONS[int(judged.reason[place])],
        bounds={f: both for f, both in sides.items() if not np.all(np.isnan(both))},
        winner=recording.families[int(winner[place])],
        num_keys=at(lanes["num_keys"]),
        visible_rows=at(lanes["visible_rows"]),
        value_low=at(lanes["value_low"]),
        value_high=at(lanes["value_high"]),
        value_ratio=at(lanes["value_ratio"]),
        gap=at(judged.gap),
        budget=at(judged.limits.budget),
        upper_room=at(judged.limits.upper_room),
        lower_room=at(judged.limits.lower_room),
        stabilizer=at(judged.stabilizer),
        row_sum_min=at(judged.row_sum_min),
        row_sum_max=at(judged.row_sum_max),
        row_sum_limit=at(judged.limits.row_sum_min),
        measured=at(judged.measured),
        error=at(judged.error),
    )


def validate_family(recording: Recording, family: str) -> None:
    """Check the name of a family of bounds.

    Raises:
        ValueError: where the recording has no such family.
    """
    if family not in recording.families:
        raise ValueError(
            f"bounds: got {family!r}; the recording holds {', '.join(recording.families)}."
        )


def head_facts(
    recording: Recording,
    layer: LayerPasses,
    *,
    head: int,
    pass_index: int | None = None,
    batch: int | None = None,
    tolerance: float | None = None,
    family: str = "auto",
) -> BlockFacts:
    """The worst block of one head, of one call and batch element if they are named.

    Raises:
        ValueError: for a head, call or batch element that the layer does not have, a family that
            was not recorded, a tolerance out of range.
    """
    validate_family(recording, family)
    tolerance = recording.tolerance if tolerance is None else tolerance
    arithmetic.validate_tolerance(tolerance)
    heads, elements = layer.settings.heads, layer.bounds.shape[1]
    if not 0 <= head < heads:
        raise ValueError(f"--head: got {head}; layer {layer.name} has heads 0 to {heads - 1}.")
    if batch is not None and not 0 <= batch < elements:
        raise ValueError(f"--batch: got {batch}; the calls have elements 0 to {elements - 1}.")
    calls = slice(None)
    if pass_index is not None:
        where = np.flatnonzero(layer.passes == pass_index)
        if not where.size:
            listed = ", ".join(str(number) for number in layer.passes[:40])
            more = ", ..." if layer.passes.size > 40 else ""
            raise ValueError(f"--pass: got {pass_index}; recorded are {listed}{more}.")
        calls = slice(int(where[0]), int(where[0]) + 1)
    lanes = lanes_of(layer, recording.fields)
    judged = judge(
        lanes,
        dtype=layer.settings.dtype,
        family=family,
        recorded_tolerance=recording.tolerance,
        tolerance=tolerance,
    )
    element = slice(None) if batch is None else slice(batch, batch + 1)
    place = worst_block(judged, head, calls, element)
    gaps = family_gaps(lanes, recording.families)
    winner = winning_family(gaps)
    return block_facts(
        layer, layer.name, lanes, judged, recording, tolerance, family, place, winner
    )
