"""The page, the JSON and the CSV of an audit: escaped, complete, the same numbers everywhere."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certify import charts
from certify.audit import AuditResult, audit_recording
from certify.audit_report import audit_page, write_audit_report
from certify.export import COLUMNS, to_csv, to_json
from certify.words import power_of_two, why
from tests.certify.recordings import (
    CERTIFIED,
    EVIL,
    EXACT,
    RECOMPUTED,
    VERIFIED,
    block,
    layer_of,
    recorded,
    recording_of,
    tensors,
    with_lane,
)

SUMS = {"row_sum_min": 2.0**-31, "row_sum_max": 4.0}


def audited(*names: str, **settings: Any) -> AuditResult:
    """Two heads, certified and verified, in three calls of each layer."""
    run: list[dict[str, float]] = [
        {"verdict": CERTIFIED, "row_sum_min": 0.5, "row_sum_max": 2.0},
        {"verdict": VERIFIED, **SUMS},
    ]
    layers = [
        layer_of([block(50.0), block(431.0)], run=run, name=name, passes=(0, 1, 2))
        for name in names or ("blocks.0", "blocks.1")
    ]
    return audit_recording(recording_of(*layers, settings=settings, created_by=EVIL))


def test_every_text_is_escaped() -> None:
    """Layer, settings, creator, title, faults. Catches markup of a file that gets into the page."""
    recording = recorded(tensors(("gaussian 1",), rows=20, keys=40), keep_rows=20)
    layer = with_lane(recording.layers[0], "value_high", lambda value: value * 0.5)
    evil = type(layer)(
        EVIL, layer.settings, layer.bounds, layer.certificate, layer.passes, layer.kept
    )
    broken = audit_recording(recording_of(evil, settings={EVIL: EVIL}))
    assert any(EVIL in fault for fault in broken.faults)
    for result in (broken, audited(EVIL, **{EVIL: EVIL})):
        page = audit_page(result, EVIL)
        assert "<script" not in page and "alert('x')" not in page
        assert page.count("&lt;script&gt;") >= 6


def test_the_page_loads_nothing() -> None:
    """Catches a script, a font or a picture from elsewhere: every link is a data URI."""
    page = audit_page(audited(), "title")
    links = re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?([^\"')\s>]+)", page)
    assert len(links) == 4
    assert "<script" not in page and "@import" not in page
    for link in links:
        assert link.startswith("data:image/svg+xml;base64,")
        picture = base64.b64decode(link.split(",", 1)[1]).decode("utf-8")
        assert picture.rstrip().endswith("</svg>")
        assert not re.findall(r"(?:xlink:)?href=\"(?!#|data:)", picture)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables come all the same. Catches a page that needs an optional library."""
    whole = audit_page(audited(), "title")
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    bare = audit_page(audited(), "title")
    assert "torch-clis[plots]" in bare and "torch-clis[plots]" not in whole
    assert "data:image" not in bare
    assert re.findall("<tr>.*?</tr>", bare) == re.findall("<tr>.*?</tr>", whole)


def test_why_in_words() -> None:
    """A sentence for every kind of head. Catches a reason that is said of another head."""
    after = {"verdict": VERIFIED, **SUMS}
    cases: list[tuple[dict[str, float], dict[str, float], str]] = [
        (block(50.0), {}, "Gap 50.0 bits, within the budget of"),
        (block(431.0), after, "Gap 431 bits is more than the budget of"),
        (block(431.0), after, "smallest row sum 2^-31 still proves the tolerance"),
        (block(value=1e-37), {"verdict": RECOMPUTED}, "outside of the window: max|v| is 1e-37"),
        (block(math.nan), {"verdict": RECOMPUTED}, "not finite"),
        (block(lower=1e6), after, "logits are too large"),
        (block(-1.0), after, "lower bound lies above"),
        (block(visible_rows=0.0), {}, "No row sees a key"),
        (
            block(431.0, row_sums=(math.nan, math.nan)),
            {"verdict": EXACT},
            "true row maximum was used (1000 keys)",
        ),
        (
            block(431.0),
            {"verdict": RECOMPUTED, "row_sum_min": 1.0, "row_sum_max": math.inf},
            "largest row sum inf is past the limit",
        ),
        (
            block(431.0),
            {"verdict": RECOMPUTED, "row_sum_min": 0.0, "row_sum_max": 1.0},
            "smallest row sum 0 is below the 2^-",
        ),
        (
            block(431.0, row_sums=(math.nan, math.nan)),
            {},
            "no row sums are known",
        ),
        (
            block(431.0),
            {"verdict": RECOMPUTED, "row_sum_min": 1.0, "row_sum_max": 2.0},
            "the numerator or the output was not finite",
        ),
    ]
    layer = layer_of([lanes for lanes, _, _ in cases], run=[run for _, run, _ in cases])
    worst = audit_recording(recording_of(layer)).layers[0].worst
    for facts, (_, _, words) in zip(worst, cases, strict=True):
        assert words in why(facts), why(facts)
    page = audit_page(audit_recording(recording_of(layer)), "title")
    assert "still proves the tolerance" in page and "past the limit" in page


def test_the_worst_comes_first_and_nothing_is_left_out() -> None:
    """40 heads, some folded away. Catches a table that stops, and an order by name."""
    gaps = [50.0 + 10.0 * head for head in range(40)]
    layer = layer_of([block(gap, row_sums=(-20.0, 20.0)) for gap in gaps])
    page = audit_page(audit_recording(recording_of(layer)), "title")
    table = page[page.index("Every head, the worst first") :]
    heads = [int(head) for head in re.findall(r'class="name">layer</td><td[^>]*>(\d+)', table)]
    assert heads == list(range(39, -1, -1))
    assert "24 more" in table


def test_an_alarm_is_loud_and_a_check_is_said() -> None:
    """Catches a contradiction that the page does not show."""
    recording = recorded(tensors(("gaussian 1",), rows=20, keys=40), keep_rows=20)
    calm = audit_page(audit_recording(recording), "title")
    assert "20 kept query rows of 1 head were" in calm and 'class="alarm"' not in calm
    layer = with_lane(recording.layers[0], "upper:auto", lambda bits: bits - 3.0)
    alarmed = audit_page(audit_recording(recording_of(layer)), "title")
    assert 'class="alarm"' in alarmed and "Do not rely on it" in alarmed


def test_pages_of_little() -> None:
    """No layer, a single call, nothing but exact blocks. Catches a picture of nothing."""
    assert "no attention call" in audit_page(audit_recording(recording_of()), "empty")
    nothing = dict.fromkeys(block(), math.nan)
    exact = layer_of([nothing], run=[{"verdict": EXACT}])
    page = audit_page(audit_recording(recording_of(exact)), "exact")
    assert "100% used the true row maximum" in page and "No row sums were recorded" in page
    unknown = layer_of([nothing])
    assert "no attention call" in audit_page(audit_recording(recording_of(unknown)), "unknown")


def test_a_failed_write_leaves_the_old_page(tmp_path: Path) -> None:
    """Catches half a page in the place of a whole one."""
    path = tmp_path / "page.html"
    write_audit_report(path, audited(), "title")
    before = path.read_bytes()
    with pytest.raises(OSError):
        write_audit_report(tmp_path / "none" / "page.html", audited(), "title")
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_heat_maps_hold_the_margins() -> None:
    """Each cell beside the audit's number. Catches a map that is transposed or shifted."""
    short = layer_of([block(20.0)], name="short", passes=(2,))
    long = layer_of([block(10.0), block(30.0), block(700.0)], name="long", passes=(0, 1, 2))
    result = audit_recording(recording_of(short, long))
    budget = result.layers[0].worst[0].budget
    heads = charts.layer_head_map(result).axes[0].collections[0].get_array()
    expected = np.array([[20.0, np.nan, np.nan], [10.0, 30.0, np.inf]])
    expected = np.maximum(budget - expected, -charts.LARGEST_SHOWN)
    np.testing.assert_allclose(np.ma.filled(heads, np.nan), expected, atol=1e-3)
    steps = charts.step_layer_map(result).axes[0].collections[0].get_array()
    low = -charts.LARGEST_SHOWN
    expected = np.array([[np.nan, np.nan, budget - 20.0], [low, low, low]])
    np.testing.assert_allclose(np.ma.filled(steps, np.nan), expected, atol=1e-3)


def test_histograms_and_plane_count_every_block() -> None:
    """Catches a bin that loses what lies outside. NaN and -inf are no bin of the plane."""
    gaps = (0.0, 3.9, 4.0, 511.9, 512.0, 1e9, math.nan)
    layer = layer_of([block(gap, row_sums=(-3.0, 3.0)) for gap in gaps])
    found = audit_recording(recording_of(layer)).layers[0]
    assert found.gaps[0, [0, 1, 127, 128]].tolist() == [2, 1, 1, 3]
    assert found.gaps[0].sum() == found.budgets.sum() == len(gaps)
    assert found.plane.sum() == len(gaps) - 1


def test_json_is_strict_and_says_the_same() -> None:
    """Round trip through a strict parser. Catches NaN in JSON, and numbers that differ."""
    unknown = block(math.inf, row_sums=(math.nan, math.nan))
    gaps = [block(50.0), unknown, block(431.0)]
    result = audit_recording(recording_of(layer_of(gaps, passes=(0, 5)), not_recorded=3))
    document = json.loads(
        to_json(result, {"file": EVIL}), parse_constant=lambda name: pytest.fail(name)
    )
    assert document["file"] == EVIL and document["calls_not_recorded"] == 3
    assert tuple(document["query_blocks"].values()) == result.counts == (2, 2, 2, 0)
    assert document["proved_share"] == pytest.approx(2 / 3)
    heads = document["heads"]
    assert [head["worst_verdict"] for head in heads] == ["certified", "recomputed", "verified"]
    assert heads[0]["smallest_margin_bits"] == pytest.approx(heads[0]["worst_budget_bits"] - 50.0)
    assert heads[1]["smallest_margin_bits"] is None and heads[1]["largest_error_bound"] is None
    assert document["steps"][0]["pass"] == [0, 5]
    assert document["steps"][0]["verified"] == [1, 1]
    assert sum(document["gap_histogram"]["gaps"]["auto"]) == 6


FORMULAS = ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1")


def test_csv_is_safe_in_a_spreadsheet() -> None:
    """Names that begin as formulas do, commas and quotes. Catches a cell that is executed."""
    worst = block(431.0, row_sums=(math.nan, math.nan))
    layers = [layer_of([worst], name=name) for name in (*FORMULAS, 'a,"b"\n')]
    result = audit_recording(recording_of(*layers))
    lines = list(csv.DictReader(io.StringIO(to_csv(result), newline="")))
    assert tuple(lines[0]) == COLUMNS and len(lines) == len(layers)
    assert [line["layer"] for line in lines] == [*(f"'{name}" for name in FORMULAS), 'a,"b"\n']
    for line in lines:
        assert float(line["smallest_margin_bits"]) < -100 and line["largest_error_bound"] == ""
        texts = [line[name] for name in ("layer", "bound_used", "worst_verdict", "why")]
        assert not any(text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) for text in texts)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (2.0**-31, "2^-31"),
        (0.0, "0"),
        (math.inf, "inf"),
        (math.nan, "not recorded"),
        (3.0, "2^1.6"),
        (-0.5, "-2^-1"),
        (2.0**-12, "2^-12"),
    ],
)
def test_powers_of_two(number: float, text: str) -> None:
    """Catches a logarithm of 0."""
    assert power_of_two(number) == text
