"""Which blocks of named families are certified, verified or recomputed, and what another gate does.

A block is 2,048 query rows. "certified" is certify.certify()'s verdict. "verified" follows from the
row sum that the loop would give, from the exact log-sum-exp and the stabilizer that the theorem
chooses; its place on the grid is not known outside the kernel, so either end must do. Gate errors
are measured on the rows of a block that lie deepest below the gate's stabilizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import certify
from certify import arithmetic, theorem
from certify.arithmetic import DEFAULT_TOLERANCE, arithmetic_for
from evidence import calls, families, gates
from evidence.calls import Call, in_dtype

ROWS = 2048
HEAD_DIM = 128
GATE_ROWS = 16
"""Rows of a block on which the gate's error is measured: those with the least left of them."""


Step = Callable[[], None]

NAMED: dict[str, families.Family] = {
    **{f"Gaussian, {bits} bits": families.gaussian(bits) for bits in (1, 15, 20, 25, 30, 40, 60)},
    **{f"Student-t, {bits} bits": families.student(bits) for bits in (5, 15)},
    "sink, aligned": families.sink("aligned"),
    "sink, opposite": families.sink("anti"),
    "sink, both ways": families.sink("mixed"),
    "four sinks": families.sink("mixed", count=4),
    "128 sinks": families.many_sinks,
    "outlier channel": families.outlier_channel(30.0),
    "constant offset, 30 bits": families.offset(30.0),
    "constant offset, 5,000 bits": families.offset(5000.0),
    "orthogonal outliers, small values": families.orthogonal_outliers,
    "Gaussian, 0.5 bits, beside orthogonal keys": families.beside_orthogonal_keys(0.5),
    "clusters": families.clusters,
}
"""Values are Gaussian but where the name says so."""

CAUSAL = (
    "Gaussian, 1 bits",
    "Gaussian, 15 bits",
    "Gaussian, 30 bits",
    "sink, aligned",
    "sink, opposite",
    "sink, both ways",
    "four sinks",
    "constant offset, 5,000 bits",
    "orthogonal outliers, small values",
)


@dataclass(frozen=True)
class FamilyShares:
    """Counts of one family at one length: blocks, verdicts, the gate's, and the median gap."""

    family: str
    num_keys: int
    blocks: int
    certified: int
    verified: int
    recomputed: int
    gate_accepts: int | None
    gate_wrong: int | None
    median_gap: float
    budget: float


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    name: str
    num_keys: int
    family: families.Family
    causal: bool = False


def draw_call(
    line: Line, rng: np.random.Generator, *, rows: int, head_dim: int, dtype: str = "bfloat16"
) -> Call:
    """One head of a family as a call."""
    head = families.draw(line.family, rng, rows, line.num_keys, head_dim)
    query, key, value = (in_dtype(array, dtype)[None, :, None] for array in head)
    return Call(query, key, value, dtype, families.SCALE, causal=line.causal)


def verified_rows(
    certificate: certify.Certificate, log_sum: np.ndarray, dtype: str, num_keys: int
) -> np.ndarray:
    """bool [B, H, S_q]: rows that would pass the check after the loop, wherever the grid lies.

    The numerator is finite where row sum x max|v| is.
    """
    limits = theorem.limits(
        certificate.value_high,
        value_low=certificate.value_low,
        num_keys=num_keys,
        tolerance=certificate.tolerance,
        kernel=arithmetic_for(dtype),
        xp=np,
    )
    top = certificate.lower + limits.lower_room - arithmetic.VERIFY_MARGIN
    in_advance = np.isfinite(certificate.stabilizer)
    with np.errstate(all="ignore"):
        lowest, highest = (
            np.exp2(log_sum - np.where(in_advance, certificate.stabilizer, edge))
            for edge in (top, top - arithmetic.GRID_SPACING)
        )
        in_range = highest * certificate.value_high < 2.0**127
    passes = theorem.row_sum_passes(lowest, limits) & theorem.row_sum_passes(highest, limits)
    return passes & in_range


def judge(call: Call, certificate: certify.Certificate) -> np.ndarray:
    """Verdict codes of the blocks [B, H, blocks]: 0 certified, 1 verified, 2 recomputed."""
    log_sum = calls.log_sum_exp(call.logits())
    # A row that sees nothing is exactly 0.
    rows = verified_rows(certificate, log_sum, call.dtype, call.shape[3]) | np.isneginf(log_sum)
    starts = np.arange(0, call.shape[2], certificate.block_q)
    passes = np.logical_and.reduceat(rows, starts, axis=2)
    code = np.where(passes, theorem.VERIFIED, theorem.RECOMPUTED)
    return np.where(certificate.certified, theorem.CERTIFIED, code)


def gate_on(call: Call, tolerance: float, head: int = 0) -> tuple[bool, bool]:
    """Whether the centred gate accepts a head of a call of one block, and whether it is wrong."""
    own = head // (call.query.shape[2] // call.key.shape[2])
    query = call.kernel_query()[0, :, head]
    key, value = call.key[0, :, own], call.value[0, :, own]
    gate = gates.centred_gate(query, key)
    if not gate.accepts:
        return False, False
    largest = np.max(gate.logits, axis=1)
    deepest = np.argsort(largest - gate.stabilizer)[:GATE_ROWS]
    errors = gates.fixed_stabilizer_errors(gate.logits[deepest], value, gate.stabilizer[deepest])
    return True, bool(np.any(errors > tolerance))


def plan(lengths: tuple[int, ...]) -> list[Line]:
    """All lines of the table, with causal versions of a few."""
    found = [Line(name, n, NAMED[name]) for n in lengths for name in NAMED]
    return found + [Line(name, n, NAMED[name], True) for n in lengths for name in CAUSAL]


def shares(
    line: Line,
    rng: np.random.Generator,
    *,
    heads: int,
    tolerance: float = DEFAULT_TOLERANCE,
    progress: Step | None = None,
) -> FamilyShares:
    """Verdicts of ``heads`` blocks of a family, and the gate's (which knows no masks)."""
    codes, gaps, accepts, wrong, budget = [], [], 0, 0, 0.0
    for _ in range(heads):
        call = draw_call(line, rng, rows=ROWS, head_dim=HEAD_DIM)
        certificate = certify.certify(
            *call.arrays, **call.arguments, tolerance=tolerance, block_q=ROWS
        )
        codes.append(judge(call, certificate).ravel())
        gaps.append(float(np.max(certificate.gap)))
        budget = float(np.min(certificate.budget))
        if not line.causal:
            accepted, failed = gate_on(call, tolerance)
            accepts, wrong = accepts + accepted, wrong + failed
        if progress is not None:
            progress()
    verdicts = np.concatenate(codes)
    return FamilyShares(
        family=f"{line.name}, causal" if line.causal else line.name,
        num_keys=line.num_keys,
        blocks=len(verdicts),
        certified=int(np.sum(verdicts == theorem.CERTIFIED)),
        verified=int(np.sum(verdicts == theorem.VERIFIED)),
        recomputed=int(np.sum(verdicts == theorem.RECOMPUTED)),
        gate_accepts=None if line.causal else accepts,
        gate_wrong=None if line.causal else wrong,
        median_gap=float(np.median(gaps)),
        budget=budget,
    )
