"""Parts of a self-contained HTML page. Every text is escaped here; nothing is loaded."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from certify.theorem import VERDICTS
from certify.totals import Totals

MEANING = {
    "certified": "proved before the loop that the fixed stabilizer cannot change the answer",
    "verified": "proved after the loop, from the row sums it computed",
    "recomputed": "neither proof held; done again with online softmax",
    "exact": "the true row maximum was used from the start",
}

NO_PICTURES = (
    "Pictures need matplotlib: pip install 'torch-clis[plots]', then write this page again. The "
    "tables are complete without it."
)

_STYLE = """
:root { --ink: #1f262d; --soft: #5b6670; --line: #dfe4e8; --band: #f5f7f8; --accent: #2a7f7a; }
* { box-sizing: border-box; }
body { font: 15px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; margin: 0 auto;
       max-width: 72rem; padding: 2rem 1.25rem 4rem; color: var(--ink); background: #fff; }
h1 { font-size: 1.55rem; line-height: 1.25; margin: 0 0 .6rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.6rem 0 .5rem; }
p { margin: .4rem 0 .8rem; max-width: 46rem; }
.lead { font-size: 1.05rem; }
.note { color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem;
        margin: .4rem 0 .8rem; }
th, td { padding: .28rem .9rem .28rem 0; border-bottom: 1px solid var(--line); text-align: left;
         vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
td.words { min-width: 20rem; }
td.name { overflow-wrap: break-word; max-width: 24rem; }
td.words, td.name { hyphens: none; }
figure { margin: .6rem 0 0; overflow-x: auto; }
figure img { max-width: 100%; height: auto; }
figure.wide img { min-width: 34rem; }
.bar { display: flex; height: 1.2rem; border-radius: 5px; overflow: hidden; margin: .8rem 0;
       background: var(--line); }
.certified { background: #2a7f7a; } .verified { background: #8cc7b8; }
.recomputed { background: #c9772c; } .exact { background: #aab4bd; }
td.swatch { white-space: nowrap; }
.key { display: inline-block; width: .75rem; height: .75rem; border-radius: 2px;
       margin-right: .45rem; }
.share { display: inline-block; height: .7rem; border-radius: 2px; background: var(--accent);
         vertical-align: middle; }
.alarm { border-left: 4px solid #b3261e; background: #fdf1f0; padding: .7rem 1rem; margin: 1rem 0; }
.fine { border-left: 4px solid var(--accent); background: var(--band); padding: .7rem 1rem;
        margin: 1rem 0; }
.alarm p, .fine p { margin: 0; max-width: none; } .alarm ul { margin: .4rem 0 0; }
details > summary { cursor: pointer; color: var(--accent); margin: .6rem 0; }
@media (max-width: 40rem) { body { padding: 1rem .9rem 3rem; font-size: 14px; }
  th, td { padding-right: .6rem; }
  table.sentences thead { display: none; }
  table.sentences tr { display: flex; flex-wrap: wrap; gap: 0 .8rem; padding: .4rem 0;
                       border-bottom: 1px solid var(--line); }
  table.sentences td { border: 0; padding: 0; }
  table.sentences td.number::before { content: attr(data-label) " "; color: var(--soft); }
  table.sentences td.words { flex-basis: 100%; min-width: 0; } }
@media print { details > * { display: block; } }
"""


def page(title: str, parts: Sequence[str]) -> str:
    """The whole document; ``parts`` are HTML already."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>{escape(title)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{escape(kind)}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def table(
    header: Sequence[str],
    lines: Sequence[Sequence[str]],
    *,
    text: Sequence[str] = (),
    words: Sequence[str] = (),
) -> str:
    """A table. Columns named in ``text`` and ``words`` (sentences) are left-aligned.

    On a narrow screen a line with sentences becomes a paragraph.
    """

    def kind(name: str) -> str:
        return "words" if name in words else "name" if name in text else "number"

    label = ' data-label="{}"' if words else ""
    classes = [f' class="{kind(name)}"{label.format(escape(name))}' for name in header]

    def row(cells: Sequence[str], tag: str) -> str:
        inside = zip(classes, cells, strict=True)
        return "<tr>" + "".join(f"<{tag}{c}>{escape(t)}</{tag}>" for c, t in inside) + "</tr>"

    body = "\n".join(row(line, "td") for line in lines)
    head = row(header, "th")
    style = ' class="sentences"' if words else ""
    return (
        f'<div class="scroll"><table{style}><thead>{head}</thead><tbody>\n{body}\n</tbody></table>'
        "</div>"
    )


def folded(summary: str, inside: str) -> str:
    """Something long, shown on a click."""
    return f"<details><summary>{escape(summary)}</summary>{inside}</details>"


def box(text: str, lines: Sequence[str] = (), *, alarm: bool) -> str:
    """A framed remark, calm or loud."""
    listed = "".join(f"<li>{escape(line)}</li>" for line in lines)
    listed = f"<ul>{listed}</ul>" if listed else ""
    return f'<div class="{"alarm" if alarm else "fine"}"><p>{escape(text)}</p>{listed}</div>'


def settings_table(settings: Sequence[tuple[str, object]]) -> str:
    """Names and values."""
    lines = [[name, str(value)] for name, value in settings]
    return table(("setting", "value"), lines, text=("setting", "value"))


def picture(draw: Callable[[], Any], alternative: str, *, wide: bool = False) -> str:
    """A matplotlib figure as a picture inside the page; a note where matplotlib is missing."""
    try:
        image = base64.b64encode(_svg(draw())).decode("ascii")
    except ImportError:
        return paragraph(NO_PICTURES, "note")
    kind = ' class="wide"' if wide else ""
    return (
        f'<figure{kind}><img alt="{escape(alternative)}" '
        f'src="data:image/svg+xml;base64,{image}"></figure>'
    )


def _svg(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", dpi=160, metadata={"Date": None})
    return buffer.getvalue()


def verdict_section(overall: Totals) -> str:
    """A bar of the verdicts' shares, and what each verdict means."""
    shares = dict(zip(VERDICTS, overall.shares(), strict=True))
    counts = dict(zip(VERDICTS, overall.counts, strict=True))
    bar = "".join(
        f'<div class="{name}" style="width:{100.0 * counts[name] / max(overall.blocks, 1):.3f}%" '
        f'title="{name} {shares[name]}"></div>'
        for name in VERDICTS
    )
    lines = "".join(
        f'<tr><td class="swatch"><span class="key {name}"></span>{name}</td>'
        f'<td class="number">{shares[name]}</td>'
        f'<td class="number">{counts[name]:,}</td><td>{escape(MEANING[name])}</td></tr>'
        for name in VERDICTS
    )
    return (
        f'<div class="bar">{bar}</div><div class="scroll"><table><thead><tr><th>verdict</th>'
        '<th class="number">share</th>'
        f'<th class="number">query blocks</th><th>meaning</th></tr></thead><tbody>{lines}</tbody>'
        "</table></div>"
    )


def share_bars(counts: Sequence[tuple[str, int]], what: str) -> str:
    """Names with counts, as bars of their share."""
    total = max(sum(count for _, count in counts), 1)
    lines = "".join(
        f'<tr><td>{escape(name)}</td><td class="number">{count:,}</td>'
        f'<td class="number">{100.0 * count / total:.1f}%</td><td style="width:16rem">'
        f'<span class="share" style="width:{100.0 * count / total:.2f}%"></span></td></tr>'
        for name, count in counts
    )
    return (
        f'<div class="scroll"><table><thead><tr><th>{escape(what)}</th>'
        '<th class="number">query blocks</th><th class="number">share</th><th></th></tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )
