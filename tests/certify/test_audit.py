"""The audit: verdicts from recorded numbers are those of the tensors, and nothing gets past it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import certify
from certify import arithmetic
from certify.audit import AuditResult, audit_recording
from certify.judgement import REASONS, Judged, judge
from certify.kept import KeptCheck
from certify.recording import LayerPasses, Recording, merge_recordings
from tests.certify.families import FAMILIES, SCALE
from tests.certify.recordings import (
    CERTIFIED,
    EXACT,
    KINDS,
    RECOMPUTED,
    VERIFIED,
    block,
    layer_of,
    recorded,
    recording_of,
    tensors,
    with_lane,
)

TOLERANCES = (2.0**-14, 2.0**-12, 2.0**-7, 0.3)


def verdicts(result: AuditResult) -> list[list[int]]:
    """Counts by verdict of every head of the first layer."""
    counts: list[list[int]] = result.layers[0].verdicts.sum(axis=0).tolist()
    return counts


def judged_heads(
    heads: list[dict[str, float]],
    *,
    run: Sequence[Mapping[str, float]] = (),
    tolerance: float = certify.DEFAULT_TOLERANCE,
    family: str = "auto",
) -> list[str]:
    """The verdict of a single block of each head."""
    made = layer_of(heads, run=run)
    result = audit_recording(recording_of(made), tolerance=tolerance, family=family)
    return [facts.verdict for facts in result.layers[0].worst]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_verdict_is_that_of_the_tensors(dtype: str) -> None:
    """All families at four tolerances. Catches a formula, a lane or a block that is mixed up."""
    names = tuple(FAMILIES)
    arrays = tensors(names, dtype, rows=48, keys=256)
    recording = recorded(arrays, row_sums=False)
    for tolerance in TOLERANCES:
        certificate = certify.certify(*arrays.values(), scale=SCALE, tolerance=tolerance)
        result = audit_recording(recording, tolerance=tolerance)
        certified = [counts[CERTIFIED] for counts in verdicts(result)]
        assert certified == certificate.certified[0, :, 0].astype(int).tolist()
        for head, facts in enumerate(result.layers[0].worst):
            row = int(np.argmax(certificate.gap[0, head]))
            for name in ("gap", "budget", "margin"):
                expected = getattr(certificate, name)[0, head, row]
                assert getattr(facts, name) == expected or not np.isfinite(expected), name


@pytest.mark.parametrize("masks", [{"causal": True}, {"soft_cap": 30.0}])
def test_the_verdict_under_masks(masks: dict[str, Any]) -> None:
    """Never more than the tensors' own certificate. Catches V_lo or a cap that is forgotten."""
    arrays = tensors(rows=100, keys=300)
    for tolerance in TOLERANCES:
        options = dict(masks)
        if "soft_cap" in options:
            options["logits_soft_cap"] = options.pop("soft_cap")
        certificate = certify.certify(*arrays.values(), scale=SCALE, tolerance=tolerance, **options)
        result = audit_recording(recorded(arrays, row_sums=False, **masks), tolerance=tolerance)
        certified = np.array([counts[CERTIFIED] for counts in verdicts(result)])
        allowed = certificate.certified[0, :, 0]
        assert np.all(certified <= allowed) and certified.sum() >= 0.6 * allowed.sum()


def test_each_family_by_itself() -> None:
    """Catches --bounds that judges by another family's lanes."""
    arrays = tensors(("sink anti", "gaussian 15", "gaussian 60"), keys=2048)
    recording = recorded(arrays, row_sums=False)
    for family in certify.bounds.RECORDED_BOUNDS[:-1]:
        certificate = certify.certify(*arrays.values(), scale=SCALE, bounds=family)
        result = audit_recording(recording, family=family)
        assert [counts[CERTIFIED] for counts in verdicts(result)] == certificate.certified[
            0, :, 0
        ].astype(int).tolist()
    with pytest.raises(ValueError, match="the recording holds auto, ball"):
        audit_recording(recording, family="box")


def budget_by_hand(num_keys: float, value: float, tolerance: float, losses: float) -> float:
    """h_max + g_max - 1.5 of the theorem, in float64, for bfloat16 (losses = 2 + 1/V)."""
    kappa = 1.0 + 2.0**-4
    room = tolerance - arithmetic.ARGUMENT_ERROR - 2.0 * 2.0**-126 / value
    upper = 125.0 - max(0.0, math.log2(value)) - math.log2(kappa)
    lower = 126.0 - math.log2(num_keys) + math.log2(room) - math.log2(kappa * (losses + room))
    return upper + lower - 1.5


@settings(max_examples=300, deadline=None)
@given(
    gap=st.floats(150.0, 260.0),
    lower=st.floats(-1e4, 1e4),
    num_keys=st.integers(1, 10**5),
    log_value=st.floats(-100.0, 100.0),
    log_tolerance=st.floats(-14.0, -1.0),
)
def test_against_the_formula_by_hand(
    gap: float, lower: float, num_keys: int, log_value: float, log_tolerance: float
) -> None:
    """Certified exactly where the note's formula says so, 0.1 bit aside. Catches a lost term."""
    value, tolerance = float(np.float32(2.0**log_value)), 2.0**log_tolerance
    head = block(gap, lower=lower, num_keys=num_keys, value=value)
    made = layer_of([head], num_keys=10**5)
    facts = audit_recording(recording_of(made), tolerance=tolerance).layers[0].worst[0]
    budget = budget_by_hand(num_keys, value, tolerance, 2.0 + 1.0 / value)
    assert facts.budget == pytest.approx(budget, abs=0.05)
    if abs(facts.gap - budget) > 0.1:
        assert (facts.verdict == "certified") == (facts.gap < budget)


HOSTILE = {
    "upper:auto": (math.nan, math.inf, -math.inf, 3e38, 0.0),
    "lower:auto": (math.nan, math.inf, -math.inf, -3e38, 1e3),
    "value_high": (math.nan, math.inf, -math.inf, 3e38, 1e-45, 0.0),
    "value_low": (math.nan, math.inf, -1.0, 3e38, 1e-45),
    "value_ratio": (math.nan, math.inf, 0.5, 0.0, 3e38),
    "num_keys": (math.nan,),
}


@pytest.mark.parametrize("lane", HOSTILE)
def test_hostile_numbers_prove_nothing(lane: str) -> None:
    """NaN, infinities, S < L, absurd V, with any row sum. Catches a comparison that NaN passes."""
    for number in HOSTILE[lane]:
        for row_sum in (math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-45):
            run = [{"verdict": math.nan, "row_sum_min": row_sum, "row_sum_max": row_sum}]
            for verdict in (CERTIFIED, VERIFIED, RECOMPUTED, math.nan):
                run[0]["verdict"] = verdict
                head = block(60.0, row_sums=(math.nan, math.inf), **{lane: number})
                facts = audit_recording(recording_of(layer_of([head], run=run))).layers[0].worst[0]
                known = lane != "num_keys" or verdict in (CERTIFIED, VERIFIED, RECOMPUTED)
                assert facts.verdict == ("recomputed" if known else "not recorded")
                assert facts.error == math.inf


@pytest.mark.parametrize("verdict", [17.0, 0.5, -1.0, math.inf])
def test_verdicts_that_do_not_exist(verdict: float) -> None:
    """A layer refuses them. Catches a verdict that is only checked where a file is read."""
    with pytest.raises(ValueError, match="verdict that does not exist"):
        layer_of([block(60.0)], run=[{"verdict": verdict}])


def test_row_sums_at_the_edges() -> None:
    """Verified from the smallest row sum that proves the tolerance to 2^125. Catches a side."""
    lanes = block(500.0, value=0.5)
    limit = audit_recording(recording_of(layer_of([lanes]))).layers[0].worst[0].row_sum_limit
    expected = 2.0**-126 * 1000 * 1.0625 * (2 + 1 / 0.5) / (2.0**-12 - arithmetic.ARGUMENT_ERROR)
    assert limit == pytest.approx(expected, rel=1e-3)
    run = [
        {"verdict": VERIFIED, "row_sum_min": low, "row_sum_max": high}
        for low, high in (
            (limit, 2.0**125),
            (limit * 0.999, 1.0),
            (1.0, 2.0**125 * 1.001),
            (math.nan, 1.0),
            (0.0, 1.0),
        )
    ]
    assert judged_heads([lanes] * 5, run=run) == ["verified", *["recomputed"] * 4]
    failed = [{"verdict": RECOMPUTED, "row_sum_min": 1.0, "row_sum_max": 2.0}]
    assert judged_heads([lanes], run=failed) == ["recomputed"]


def test_row_sums_from_exact_logits() -> None:
    """What was not run is judged by the log-sum-exp, and its numerator by V. Catches l V lost."""
    heads = [
        block(500.0, row_sums=(-20.0, 20.0)),
        block(500.0, row_sums=(-20.0, 120.0), value=2.0**10),
        block(500.0, row_sums=(-120.0, 20.0)),
        block(500.0, row_sums=(math.nan, math.nan)),
    ]
    assert judged_heads(heads) == ["verified", "recomputed", "recomputed", "recomputed"]
    exact = [{"verdict": EXACT}] * 4
    assert judged_heads(heads, run=exact) == ["verified", "recomputed", "recomputed", "exact"]


def test_what_nothing_is_known_of() -> None:
    """Blocks without a record, without a visible row. Catches them counted as proved or failed."""
    nothing = dict.fromkeys(block(), math.nan)
    unseen = block(500.0, visible_rows=0.0, row_sums=(math.nan, math.nan))
    result = audit_recording(recording_of(layer_of([nothing, unseen])))
    assert verdicts(result) == [[0, 0, 0, 0], [1, 0, 0, 0]]
    assert result.layers[0].worst[0].verdict == "not recorded"
    empty = audit_recording(recording_of())
    assert empty.counts == (0, 0, 0, 0) and empty.proved_share == 0.0 and empty.rows() == []


def test_promised_heads() -> None:
    """Bounds from the weights certify what the keys' statistics cannot. Catches them ignored."""
    run = [
        {"verdict": CERTIFIED, "bound_used": code, "gap": 100.0, "row_sum_min": 1.0}
        for code in (certify.BOUND_NAMES.index("weights"), 1)
    ]
    assert judged_heads([block(500.0)] * 2, run=run)[0] == "certified"
    assert judged_heads([block(500.0)] * 2, run=run, family="ball")[0] != "certified"


def test_a_promise_needs_its_budget() -> None:
    """Catches a promise that certifies whatever its gap."""
    code = certify.BOUND_NAMES.index("weights")
    run = [{"verdict": CERTIFIED, "bound_used": code, "gap": gap} for gap in (300.0, math.nan)]
    assert judged_heads([block(500.0)] * 2, run=run) == ["recomputed"] * 2


def test_recomputed_heads_of_real_numbers() -> None:
    """Heads of each kind end where they should. Catches verified and recomputed exchanged."""
    result = audit_recording(recorded(tensors(KINDS, keys=1024)))
    by_name = dict(zip(KINDS, (facts.verdict for facts in result.layers[0].worst), strict=True))
    assert by_name.pop("gaussian 60") == "verified"
    assert set(by_name.values()) == {"certified"}
    arrays = tensors(("gaussian 60",), keys=1024)
    loud = {**arrays, "query": type(arrays["query"])(arrays["query"].values * 64, "bfloat16")}
    facts = audit_recording(recorded(loud)).layers[0].worst[0]
    assert facts.verdict == "recomputed" and facts.reason == "gap above the budget"


def test_other_tolerances_claim_no_more_than_a_recording_made_with_them() -> None:
    """Predicted beside recorded there, 12 pairs. Catches row sums shifted the wrong way."""
    kinds = ("gaussian 15", "gaussian 60", "sink mixed", "clusters", "student 5")
    stretched = {}
    for factor in (1.0, 1.5, 3.0):
        arrays = tensors(kinds, keys=1024, seed=9)
        query = type(arrays["query"])(arrays["query"].values * np.float32(factor), "bfloat16")
        stretched[factor] = {**arrays, "query": query}
    agreed = claims = 0
    for arrays in stretched.values():
        made = {t: recorded(arrays, tolerance=t) for t in TOLERANCES}
        for ran in TOLERANCES:
            for asked in TOLERANCES:
                predicted = np.array(verdicts(audit_recording(made[ran], tolerance=asked)))
                actual = np.array(verdicts(audit_recording(made[asked])))
                np.testing.assert_array_equal(predicted[:, CERTIFIED], actual[:, CERTIFIED])
                smaller = predicted[:, VERIFIED] <= actual[:, VERIFIED]
                # A run that proves less error than it was asked for needs no other stabilizer.
                assert np.all(smaller) or asked > ran
                agreed += int(np.sum(predicted[:, VERIFIED] * actual[:, VERIFIED]))
                claims += int(np.sum(actual[:, VERIFIED]))
    assert claims > 20 and agreed >= 0.9 * claims


def test_row_sums_move_with_the_tolerance() -> None:
    """Stabilizers of uncertified rows rise and fall with it. Catches a move that is lost."""

    def verdict(high: float, tolerance: float, low: float = -50.0) -> str:
        head = block(500.0, row_sums=(low, high), value=1.0)
        return judged_heads([head], tolerance=tolerance)[0]

    same, smaller, larger = 2.0**-12, 2.0**-14, 2.0**-8
    assert [verdict(124.5, same), verdict(124.95, same)] == ["verified", "recomputed"]
    # It falls by log2((2^-12 - E_arg) / (2^-14 - E_arg)) = 2.3 bits, and 1.5 for its grid.
    assert [verdict(high, smaller) for high in (120.8, 121.3)] == ["verified", "recomputed"]
    # At a larger one it rises by 4.1 bits, 1.5 aside, and what was proved stays proved.
    assert [verdict(high, larger) for high in (127.3, 127.7)] == ["verified", "recomputed"]
    assert [verdict(124.5, t) for t in (same * 1.001, larger, 0.5)] == ["verified"] * 3
    nearly = [verdict(high, same / 1.001) for high in (123.3, 123.6)]
    assert nearly == ["verified", "recomputed"]
    assert verdict(0.0, larger, low=-120.0) == "recomputed"


def test_errors_are_those_of_the_theorem() -> None:
    """kappa d (2 + 1/V) + E_arg by hand from L, or from the row sums. Catches one for another."""
    sums = [{"verdict": VERIFIED, "row_sum_min": 2.0**-100, "row_sum_max": 1.0}]
    losses = 1.0625 * 1000 * 2.0**-126 * (2.0 + 1.0 / 2.0)
    made = recording_of(layer_of([block(500.0)], run=sums))
    by_sums = losses / 2.0**-100 + arithmetic.ARGUMENT_ERROR
    assert audit_recording(made).layers[0].worst[0].error == pytest.approx(by_sums, rel=1e-3)
    assert audit_recording(made, tolerance=0.01).layers[0].worst[0].error == pytest.approx(0.01)
    facts = audit_recording(recording_of(layer_of([block(190.0)]))).layers[0].worst[0]
    unknown = block(190.0, row_sums=(math.nan, math.nan))
    facts = audit_recording(recording_of(layer_of([unknown]))).layers[0].worst[0]
    least = 2.0 ** (10.0 - facts.stabilizer)
    lowest = losses / least + arithmetic.ARGUMENT_ERROR
    assert lowest <= facts.error <= losses / (0.49 * least) + arithmetic.ARGUMENT_ERROR


@settings(max_examples=200, deadline=None)
@given(
    gap=st.floats(0.0, 400.0),
    lower=st.floats(-500.0, 500.0),
    num_keys=st.integers(1, 1000),
    log_value=st.floats(-30.0, 30.0),
    verdict=st.sampled_from([math.nan, CERTIFIED, VERIFIED, RECOMPUTED, EXACT]),
    low=st.floats(-150.0, 130.0),
    spread=st.floats(0.0, 250.0),
    recorded_at=st.floats(-14.0, -1.0),
    asked=st.lists(st.floats(-14.0, -0.5), min_size=2, max_size=6),
)
def test_a_larger_tolerance_never_proves_less(
    gap: float,
    lower: float,
    num_keys: int,
    log_value: float,
    verdict: float,
    low: float,
    spread: float,
    recorded_at: float,
    asked: list[float],
) -> None:
    """Certified and proved blocks only grow with it. Catches a penalty that jumps."""
    made = block(gap, lower=lower, num_keys=num_keys, value=2.0**log_value)
    made |= {"run:verdict": verdict, "run:bound_used": 1.0, "run:gap": gap}
    made |= {f"run:row_sum_{side}": math.nan for side in ("min", "max")}
    made |= {"row_sum_log2_min": low, "row_sum_log2_max": low + spread}
    arrays = {name: np.full((1, 1, 1, 1), number, np.float32) for name, number in made.items()}

    def at(exponent: float) -> Judged:
        return judge(
            arrays,
            dtype="bfloat16",
            family="auto",
            recorded_tolerance=2.0**recorded_at,
            tolerance=2.0**exponent,
        )

    ranks = [int(at(exponent).verdict[0, 0, 0, 0]) for exponent in sorted([*asked, recorded_at])]
    assert ranks == sorted(ranks, reverse=True) or set(ranks) == {CERTIFIED, EXACT}


def test_why_it_is_not_certified() -> None:
    """One head for each reason. Catches a reason hidden by another."""
    heads = {
        "certified": block(),
        "gap above the budget": block(500.0),
        "an input is not finite": block(math.nan),
        "the bounds contradict each other": block(-1.0),
        "max|v| outside of the window": block(value=1e-37),
        "logits too large": block(lower=1e6),
        "bounds not recorded": dict.fromkeys(block(), math.nan),
    }
    run = [{"verdict": VERIFIED}] * len(heads)
    result = audit_recording(recording_of(layer_of(list(heads.values()), run=run)))
    assert [facts.reason for facts in result.layers[0].worst] == list(heads)
    assert set(heads) == set(REASONS)
    assert result.layers[0].reasons.sum(axis=0).tolist() == [1] * len(REASONS)


def test_counts_by_call_and_head() -> None:
    """Two calls, three blocks. Catches an axis that is summed twice."""
    one = layer_of([block(), block(500.0, row_sums=(-20.0, 20.0))], passes=(0, 7))
    bounds = np.tile(one.bounds, (1, 1, 1, 3, 1))
    upper = certify.RECORD_FIELDS.index("upper:auto")
    bounds[1, 0, 0, 2, upper] += 1000.0
    certificate = np.tile(one.certificate, (1, 1, 1, 3, 1))
    layer = LayerPasses(
        "layer", settings_with_blocks(one, 3), bounds, certificate, np.array([0, 7], np.int32)
    )
    found = audit_recording(recording_of(layer)).layers[0]
    assert found.verdicts[:, 0].tolist() == [[3, 0, 0, 0], [2, 1, 0, 0]]
    assert found.verdicts[:, 1].tolist() == [[0, 3, 0, 0], [0, 3, 0, 0]]
    assert found.as_run.tolist() == [[0, 0, 0, 0, 6]] * 2
    assert np.argmin(found.margin) == 2 and found.margin[0, 0] > 100
    worst = found.worst[0]
    assert (worst.pass_index, worst.block, worst.verdict) == (7, 2, "verified")
    assert found.gaps[0].sum() == 12 and found.gaps[0][-1] == 1 and found.budgets.sum() == 12


def settings_with_blocks(layer: LayerPasses, blocks: int) -> Any:
    return dataclasses.replace(layer.settings, num_queries=blocks * layer.settings.block_q)


def test_merged_recordings_add_up() -> None:
    """Catches layers lost or doubled."""
    one = recording_of(layer_of([block(), block(500.0)]))
    other = recording_of(layer_of([block(), block(500.0)], passes=(1,)), layer_of([block()]))
    parts = [audit_recording(part).counts for part in (one, other)]
    together = audit_recording(merge_recordings([one, other])).counts
    assert together == tuple(sum(pair) for pair in zip(*parts, strict=True))


def test_a_layer_of_two_shapes_has_two_names() -> None:
    """Catches heads of two shapes added up as if they were one."""
    layers = [layer_of([block()], num_queries=queries) for queries in (8, 5, 3)]
    names = [layer.name for layer in audit_recording(recording_of(*layers)).layers]
    assert names == ["layer", "layer (5 x 1000)", "layer (3 x 1000)"]


def test_damaged_numbers_of_keys() -> None:
    """Fewer keys mean a larger budget. Catches half a key, or more than there are."""
    for number in (0.5, -1.0, 1001.0, math.inf):
        with pytest.raises(ValueError, match="num_keys"):
            audit_recording(recording_of(layer_of([block(num_keys=number)])))
    with pytest.raises(ValueError, match="tolerance"):
        audit_recording(recording_of(layer_of([block()])), tolerance=1e-9)


def kept_checks(recording: Recording) -> tuple[KeptCheck, ...]:
    return audit_recording(recording).kept


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"soft_cap": 50.0}])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_kept_rows_agree(options: dict[str, Any], dtype: str) -> None:
    """What was recorded is what the tensors give. Catches an alarm without a fire."""
    recording = recorded(tensors(dtype=dtype, rows=70, keys=200), keep_rows=9, **options)
    checks = kept_checks(recording)
    assert len(checks) == len(KINDS) and all(check.checked for check in checks)
    assert [fault for check in checks for fault in check.faults] == []
    assert audit_recording(recording).faults == []


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"soft_cap": 50.0}])
def test_tampered_numbers_are_found(options: dict[str, Any]) -> None:
    """Gaps half a bit smaller, V and n changed. Catches a check that compares nothing."""
    recording = recorded(tensors(rows=200, keys=200), keep_rows=50, **options)
    families = [f for f in recording.families if f != "soft cap" or "soft_cap" in options]
    changes: list[tuple[str, Any, str]] = [
        (f"{side}:{family}", lambda bits, s=sign: bits + s * (1.0 + 0.01 * abs(bits)), family)
        for family in families
        for side, sign in (("upper", -1.0), ("lower", 1.0))
    ]
    changes += [
        ("value_high", lambda value: value * 0.9, "V_hi"),
        ("value_low", lambda value: value * 1.1, "V_lo"),
        ("num_keys", lambda number: number - 1, "n:"),
    ]
    for field, change, word in changes:
        tampered = recording_of(with_lane(recording.layers[0], field, change))
        result = audit_recording(tampered)
        assert any(word in line for line in result.faults), (field, result.faults)


def test_kept_rows_of_several_blocks() -> None:
    """Each row beside its own block. Catches rows compared with the first block's record."""
    whole = recorded(tensors(("gaussian 15", "clusters"), rows=96, keys=200), keep_rows=12)
    layer = whole.layers[0]
    arrays = tensors(("gaussian 15", "clusters"), rows=96, keys=200)
    query = arrays["query"].values.copy()
    query[:, 48:] *= 4.0
    louder = {**arrays, "query": type(arrays["query"])(query, "bfloat16")}
    bounds = certify.record(*louder.values(), scale=SCALE, block_q=48)[None]
    kept = recorded(louder, keep_rows=12).layers[0].kept
    made = LayerPasses(
        "layer",
        dataclasses.replace(layer.settings, block_q=48),
        bounds,
        np.full((*bounds.shape[:4], 7), np.nan, np.float32),
        layer.passes,
        kept,
    )
    assert audit_recording(recording_of(made)).faults == []


def test_calls_have_different_numbers() -> None:
    """Catches a call counted twice."""
    with pytest.raises(ValueError, match="same index"):
        layer_of([block()], passes=(1, 1))


def test_kept_rows_behind_a_mask_are_said_to_be_unchecked() -> None:
    """Catches a check that passes for want of a mask."""
    layer = recorded(tensors(rows=20, keys=60), keep_rows=2).layers[0]
    masked = dataclasses.replace(layer, settings=dataclasses.replace(layer.settings, masked=True))
    checks = kept_checks(recording_of(masked))
    assert not any(check.checked for check in checks) and "mask" in checks[0].note


def test_row_sums_refute_bounds() -> None:
    """Without any kept row: S or L moved across the exact sum. Catches bounds taken on trust."""
    recording = recorded(tensors(("gaussian 15",), keys=2048))
    assert audit_recording(recording).faults == []
    layer = recording.layers[0]
    gap = audit_recording(recording).layers[0].worst[0].gap
    for field, sign in (("upper:auto", -0.9), ("lower:auto", 0.9)):
        moved = with_lane(layer, field, lambda bits, s=sign: bits + s * gap)
        faults = audit_recording(recording_of(moved)).faults
        assert len(faults) == 1 and "row sums of 1 query blocks" in faults[0], (field, faults)


def test_runs_that_claim_too_much() -> None:
    """A verdict that its own numbers do not give. Catches verdicts taken on trust."""
    sums = {"row_sum_min": 2.0**-120, "row_sum_max": 1.0}
    for verdict, expected in ((CERTIFIED, 1), (VERIFIED, 1), (RECOMPUTED, 0)):
        made = layer_of([block(500.0)], run=[{"verdict": verdict, **sums}])
        faults = audit_recording(recording_of(made)).faults
        assert len(faults) == expected, (verdict, faults)
    nothing = layer_of([block(), block(visible_rows=0.0)], run=[{"verdict": RECOMPUTED}] * 2)
    faults = audit_recording(recording_of(nothing)).faults
    assert len(faults) == 1 and "recomputed 2 query blocks" in faults[0]
    fine = {"verdict": CERTIFIED, "row_sum_min": 0.5, "row_sum_max": 2.0}
    assert audit_recording(recording_of(layer_of([block()], run=[fine]))).faults == []
