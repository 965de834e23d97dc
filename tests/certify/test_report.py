"""The page and the table: escaping, self-containment, atomic writing, figures that add up."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from certify.report import margin_figure, verdict_table, write_html
from certify.totals import ROWS_SHOWN_SINGLY, Totals


def row(layer: str, head: int, margin: float | None = 50.0, **counts: int) -> dict[str, Any]:
    verdicts = {"certified": 0, "verified": 0, "recomputed": 0, "exact": 0} | counts
    return {
        "layer": layer,
        "head": head,
        **verdicts,
        "blocks": sum(verdicts.values()),
        "smallest_margin_bits": margin,
        "bound_used": {"blocks+sentinels": verdicts["certified"], "none": 0},
        "largest_error_bound": 1.6e-5 if verdicts["certified"] else None,
    }


def many_rows() -> list[dict[str, Any]]:
    rows = [
        row(f"blocks.{i}.attn1", head, 100.0 + head, certified=4)
        for i in range(6)
        for head in range(12)
    ]
    rows[15] = row("blocks.1.attn1", 3, -40.0, certified=1, verified=1, recomputed=2)
    return rows


def printed(rows: list[dict[str, Any]], width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(verdict_table(rows))
    return console.export_text()


def written(path: Path, rows: list[dict[str, Any]], **settings: Any) -> str:
    write_html(path, title=settings.pop("title", "report"), rows=rows, settings=settings)
    return path.read_text(encoding="utf-8")


EVIL = "<script>alert('x')</script>\"&[bold]"


def test_every_text_is_escaped(tmp_path: Path) -> None:
    """Layer names, settings, bounds and title come from files. Catches markup that gets through."""
    evil = row(EVIL, 0, certified=1)
    evil["bound_used"] = {EVIL: 1}
    page = written(tmp_path / "page.html", [evil], title=EVIL, **{EVIL: EVIL})
    assert "<script" not in page and page.count("&lt;script&gt;") >= 6
    assert EVIL in printed([evil], width=400)


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    """Catches a font, script or picture from elsewhere: every link is a data URI."""
    page = written(tmp_path / "page.html", many_rows(), tolerance=2.0**-12)
    links = re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?([^\"')\s>]+)", page)
    assert len(links) == 1 and links[0].startswith("data:image/svg+xml;base64,")
    picture = base64.b64decode(links[0].split(",", 1)[1]).decode("utf-8")
    assert picture.rstrip().endswith("</svg>")
    assert not re.findall(r"(?:xlink:)?href=\"(?!#|data:)", picture)


def test_the_page_shows_the_figures(tmp_path: Path) -> None:
    """Catches shares computed from the wrong total: 285 of 288 blocks are certified."""
    page = written(tmp_path / "page.html", many_rows(), tolerance=0.000244140625)
    assert "0.000244140625" in page
    assert ">99.0%<" in page and ">285<" in page and ">2<" in page
    assert page.count("<tr>") > 72


def test_a_page_of_nothing(tmp_path: Path) -> None:
    """No rows, or rows that asked for no proof. Catches a minimum of nothing."""
    assert "No attention call was recorded" in written(tmp_path / "empty.html", [])
    exact = written(tmp_path / "exact.html", [row("a", 0, None, exact=3)])
    assert "every block took an exact path" in exact
    assert "certified" in printed([]) and "bound used" not in printed([])
    assert "100%" in printed([row("a", 0, None, exact=3)])


def test_a_failed_write_leaves_the_old_page(tmp_path: Path) -> None:
    """Catches a page written in place: half a page, or a stray temporary file."""
    path = tmp_path / "page.html"
    written(path, many_rows())
    before = path.read_bytes()
    with pytest.raises(ValueError, match="smallest_margin_bits"):
        write_html(
            path,
            title="t",
            rows=[
                {
                    "layer": "a",
                    "head": 0,
                    **dict.fromkeys(("certified", "verified", "recomputed", "exact"), 1),
                }
            ],
            settings={},
        )
    assert path.read_bytes() == before
    with pytest.raises(OSError):
        write_html(tmp_path / "missing" / "page.html", title="t", rows=[], settings={})
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]


def test_few_heads_are_shown_singly() -> None:
    """Catches heads merged where there is room for all."""
    text = printed(many_rows()[12:24])
    assert len(re.findall(r"^ *blocks\.1\.attn1", text, re.MULTILINE)) == 12
    assert "-40.0" in text and "25.0%" in text and "50.0%" in text


def test_many_heads_are_condensed_and_the_worst_is_named() -> None:
    """Catches a bad head that disappears in its layer's average."""
    rows = many_rows()
    assert len(rows) > ROWS_SHOWN_SINGLY
    lines = [line for line in printed(rows).splitlines() if "blocks." in line]
    assert len(lines) == 6
    assert "12, worst 3" in lines[1] and "-40.0" in lines[1] and "93.8%" in lines[1]
    assert "12, worst 0" in lines[0] and "100%" in lines[0]


def test_tables_fit_a_terminal() -> None:
    """80 columns without a cut-off figure. Catches an ellipsis in place of a number."""
    for rows in (many_rows(), many_rows()[:12]):
        assert "\u2026" not in printed(rows, width=80)


def test_nearly_all_is_not_all() -> None:
    """One block in 100,000 is not 0%, and the rest are not 100%. Catches rounding that hides it."""
    shares = Totals.of_row(row("a", 0, certified=99_999, recomputed=1)).shares()
    assert shares == ["99.9%", "0%", "0.1%", "0%"]


def test_infinite_margins_are_drawn() -> None:
    """A margin of -inf or NaN: nothing can be proved. Catches a colour scale of NaN."""
    rows = [
        row("a", 0, float("-inf"), recomputed=1),
        row("a", 1, float("nan"), exact=1),
        row("b$x", 0),
    ]
    figure = margin_figure(rows)
    figure.canvas.draw()
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["a", r"b\$x"]
    assert "-inf" in printed(rows)
