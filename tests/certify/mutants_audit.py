"""Mutants of the audit: how recorded numbers are judged, of the kept rows, of what is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from certify import export, facts, judgement, kept, recorded_layers, words
from tests.certify import test_audit, test_audit_report


class Mutant(NamedTuple):
    """``old``, found once in the source of ``function``, becomes ``new``; ``check`` then fails."""

    fault: str
    function: Callable[..., Any]
    old: str
    new: str
    check: Callable[[], None]


def hostile() -> None:
    for lane in test_audit.HOSTILE:
        test_audit.test_hostile_numbers_prove_nothing(lane)


def tampered() -> None:
    for options in ({}, {"causal": True}):
        test_audit.test_tampered_numbers_are_found(options)


def of_tensors() -> None:
    test_audit.test_the_verdict_is_that_of_the_tensors("bfloat16")


MUTANTS = [
    Mutant("S below L", judgement._judge, " & sensible\n", "\n", hostile),
    Mutant(
        "budget ignored",
        judgement._judge,
        "proved = choice.certified & sensible",
        "proved = sensible",
        of_tensors,
    ),
    Mutant(
        "promise ignored",
        judgement._judge,
        "proved | (promised & (gap <= head.budget)) |",
        "proved |",
        test_audit.test_promised_heads,
    ),
    Mutant(
        "promise without a budget",
        judgement._judge,
        "(promised & (gap <= head.budget))",
        "promised",
        test_audit.test_a_promise_needs_its_budget,
    ),
    Mutant(
        "promise for every family",
        judgement._judge,
        '== PROMISED) & (family == "auto")',
        "== PROMISED)",
        test_audit.test_promised_heads,
    ),
    Mutant(
        "rows that see nothing",
        judgement._judge,
        " | sees_nothing\n",
        "\n",
        test_audit.test_what_nothing_is_known_of,
    ),
    Mutant(
        "exact hides row sums",
        judgement._judge,
        "(as_run == EXACT) & unknown &",
        "(as_run == EXACT) &",
        test_audit.test_row_sums_from_exact_logits,
    ),
    Mutant(
        "verified without a claim counted",
        judgement._judge,
        "((as_run == VERIFIED) & ~proved & fails)",
        "False",
        test_audit.test_runs_that_claim_too_much,
    ),
    Mutant(
        "certified without a proof counted",
        judgement._judge,
        "overclaimed = (as_run == CERTIFIED) &",
        "overclaimed = False & (as_run == CERTIFIED) &",
        test_audit.test_runs_that_claim_too_much,
    ),
    Mutant(
        "recomputed though certified",
        judgement._judge,
        "disputed=(as_run == RECOMPUTED) &",
        "disputed=False &",
        test_audit.test_runs_that_claim_too_much,
    ),
    Mutant(
        "row sums do not refute",
        judgement._refuted,
        "from_middle & (measured",
        "False & from_middle & (measured",
        test_audit.test_row_sums_refute_bounds,
    ),
    Mutant(
        "unknown number of keys is one",
        judgement.limits_of,
        "np.full(num_keys.shape, np.nan, np.float32)",
        "np.full(num_keys.shape, 200.0, np.float32)",
        hostile,
    ),
    Mutant(
        "V_lo ignored",
        judgement.limits_of,
        'value_low=lanes["value_low"][where]',
        "value_low=None",
        hostile,
    ),
    Mutant(
        "V_hi taken for V_lo",
        judgement.limits_of,
        'lanes["value_high"][where]',
        'lanes["value_low"][where]',
        hostile,
    ),
    Mutant(
        "ratio ignored",
        judgement.limits_of,
        'value_ratio=lanes["value_ratio"][where]',
        "value_ratio=1.0",
        hostile,
    ),
    Mutant(
        "ratio below one",
        judgement.lanes_of,
        "ratio >= 1.0, ratio",
        "ratio >= 0.0, ratio",
        hostile,
    ),
    Mutant(
        "half a key",
        judgement.lanes_of,
        "(num_keys == np.floor(num_keys)) &",
        "",
        test_audit.test_damaged_numbers_of_keys,
    ),
    Mutant(
        "more keys than there are",
        judgement.lanes_of,
        "(whole & (num_keys <= layer.settings.num_keys))",
        "whole",
        test_audit.test_damaged_numbers_of_keys,
    ),
    Mutant(
        "row sums from the record beside a run",
        judgement._row_sums,
        'lanes["run:verdict"] <= RECOMPUTED',
        'np.zeros_like(lanes["run:verdict"], bool)',
        test_audit.test_row_sums_at_the_edges,
    ),
    Mutant(
        "smallest row sum not looked at",
        judgement._row_sums_pass,
        "theorem.row_sum_passes(low, run_limits) & theorem.row_sum_passes(high, run_limits)",
        "theorem.row_sum_passes(high, run_limits)",
        test_audit.test_row_sums_at_the_edges,
    ),
    Mutant(
        "largest row sum not looked at",
        judgement._row_sums_pass,
        "theorem.row_sum_passes(low, run_limits) & theorem.row_sum_passes(high, run_limits)",
        "theorem.row_sum_passes(low, run_limits)",
        test_audit.test_row_sums_at_the_edges,
    ),
    Mutant(
        "numerator not looked at",
        judgement._row_sums_pass,
        "(claimed | (np.log2(high) <= head.upper_room))",
        "True",
        test_audit.test_row_sums_from_exact_logits,
    ),
    Mutant(
        "a failed run passes",
        judgement._row_sums_pass,
        "in_range & not_failed &",
        "in_range &",
        test_audit.test_row_sums_at_the_edges,
    ),
    Mutant(
        "row sums do not move",
        judgement._row_sums_pass,
        "np.log2(high + head.flush) + move + step",
        "np.log2(high + head.flush) - 9.0",
        test_audit.test_row_sums_move_with_the_tolerance,
    ),
    Mutant(
        "row sums move the other way",
        judgement._row_sums_pass,
        "+ move + step",
        "- move + step",
        test_audit.test_row_sums_move_with_the_tolerance,
    ),
    Mutant(
        "no room for the grid",
        judgement._row_sums_pass,
        "+ move + step",
        "+ move",
        test_audit.test_row_sums_move_with_the_tolerance,
    ),
    Mutant(
        "a proof at a smaller tolerance forgotten",
        judgement._row_sums_pass,
        "return moved | passed",
        "return moved",
        test_audit.test_row_sums_move_with_the_tolerance,
    ),
    Mutant(
        "error of another tolerance",
        judgement._error,
        "if tolerance == recorded:",
        "if True:",
        test_audit.test_errors_are_those_of_the_theorem,
    ),
    Mutant(
        "error without the grid",
        judgement._error,
        "stabilizer + np.float32(arithmetic.GRID_SPACING)",
        "stabilizer - np.float32(8.0)",
        test_audit.test_errors_are_those_of_the_theorem,
    ),
    Mutant(
        "error where nothing is proved",
        judgement._error,
        "np.where(proved, bound, np.inf)",
        "bound",
        hostile,
    ),
    Mutant(
        "kept gaps not compared", kept._wrong_gaps, "~(gap <= allowed)", "gap > np.inf", tampered
    ),
    Mutant(
        "kept rows of another block",
        kept._faults,
        "kept.rows // layer.settings.block_q",
        "kept.rows * 0",
        test_audit.test_kept_rows_of_several_blocks,
    ),
    Mutant(
        "kept rows see every key",
        kept._queries,
        "if not settings.causal:",
        "if True:",
        tampered,
    ),
    Mutant("kept V_lo", kept._wrong_values, 'lanes["value_low"] > low', "low < 0.0", tampered),
    Mutant(
        "kept V_hi",
        kept._wrong_values,
        'np.any(lanes["value_high"] < value_max.max())',
        "False",
        tampered,
    ),
    Mutant(
        "kept n",
        kept._wrong_values,
        'np.any(lanes["num_keys"] != value_max.size)',
        "False",
        tampered,
    ),
    Mutant(
        "the best block shown as the worst",
        facts.worst_block,
        "np.argmin(score)",
        "np.argmax(score)",
        test_audit.test_counts_by_call_and_head,
    ),
    Mutant(
        "same call twice",
        recorded_layers.LayerPasses.__post_init__,
        "np.unique(self.passes).size != self.passes.size",
        "False",
        test_audit.test_calls_have_different_numbers,
    ),
    Mutant(
        "formulas in the CSV",
        export.safe_cell,
        "if value.startswith(_FORMULA_STARTS)",
        "if False",
        test_audit_report.test_csv_is_safe_in_a_spreadsheet,
    ),
    Mutant(
        "NaN in the JSON",
        export.to_json,
        "_without_infinities(document), indent=1, allow_nan=False",
        "document",
        test_audit_report.test_json_is_strict_and_says_the_same,
    ),
    Mutant(
        "too large and too small exchanged",
        words._after_the_loop,
        "low < facts.row_sum_limit",
        "low > facts.row_sum_limit",
        test_audit_report.test_why_in_words,
    ),
]
