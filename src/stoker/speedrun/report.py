"""The report of a speedrun: report.md, report.html and plots/ in its directory. Of a chain that is not finished, too.

    python -m stoker.speedrun.report runs/speedrun-cpu

report_summary.py, report_results.py and report_chain.py decide what is in it, this file how it is written. The page is one
file: nothing is fetched, it reads on a phone, in light and dark, and prints. Everything that is text is escaped.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from html import escape as escape_html

from stoker.contract.errors import EX_CANTCREAT, EX_USAGE, Refusal
from stoker.contract.safe_io import write_atomic
from stoker.contract.text import escape
from stoker.speedrun import report_chain, report_results, report_summary
from stoker.speedrun.gather import Chain, gather
from stoker.speedrun.plots import COLOURS, Drawing, draw
from stoker.speedrun.state import PLOTS
from stoker.training.stages.blocks import BAD, GOOD, Block, Bullets, Cell, Code, Figure, Heading, Table, Text

TITLE = "Speedrun report"
_MARKUP = re.compile(r"([\\`*_\[\]|~#$!])")
# How the page looks on a phone, in light and dark, on paper. LIGHT and DARK stand for the colours, which the figures share.
DARK = {
    "ink": "#e6e6e6",
    "paper": "#15181c",
    "grid": "#3a4048",
    "blue": "#5ab4f0",
    "orange": "#ff9d5c",
    "grey": "#9aa4ae",
}

STYLE = """
:root { color-scheme: light dark; LIGHT; --soft: #f3f5f7; --good: #006b4e; --bad: #a33a00; }
@media (prefers-color-scheme: dark) { :root { DARK; --soft: #1e2329; --good: #3ccfa0; --bad: #ff9d5c; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem; margin: 0 auto; padding: 1rem; }
body { overflow-wrap: break-word; }
h1 { font-size: 1.5rem; line-height: 1.2; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid var(--grid); padding-bottom: .2rem; }
.lead { font-size: 1.08rem; font-weight: 600; background: var(--soft); padding: .8rem 1rem; border-radius: .4rem; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .4rem 0; white-space: pre-line; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--grid); text-align: right; vertical-align: top; white-space: nowrap; }
thead th { white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); padding-left: 0; }
small { display: block; white-space: pre-line; font-size: .8rem; font-weight: 400; opacity: .85; }
table:not(.words) small { white-space: pre; }
.words { width: 100%; }
.words th, .words td { text-align: left; white-space: normal; }
.words td { white-space: pre-line; }
.words td:first-child { width: 8.5rem; }
.stack td:first-child { width: 50%; }
.good { color: var(--good); font-weight: 600; }
.bad { color: var(--bad); font-weight: 600; }
figure { margin: 1.2rem 0; max-width: 36rem; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { font-size: .88rem; opacity: .85; }
pre { background: var(--soft); padding: .8rem 1rem; border-radius: .4rem; font-size: .88rem; white-space: pre-wrap; }
@media screen and (max-width: 40rem) {
  .stack thead { display: none; }
  .stack tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--grid); }
  .stack td { display: block; border: 0; padding: .1rem 0; }
  th, td { padding: .35rem .4rem; }
  td:first-child { white-space: normal; }
  .words td:first-child { width: 6rem; }
  .stack td:first-child { width: auto; font-weight: 600; }
  .stack small { display: inline; margin-left: .4rem; }
}
@page { margin: 15mm; }
@media print {
  figure { max-width: 11cm; }
  :root { LIGHT; --soft: #f3f5f7; --good: #006b4e; --bad: #a33a00; }
  body { max-width: none; padding: 0; font-size: 11pt; }
  .wide { overflow: visible; }
  figure, tr, pre, caption { break-inside: avoid; }
  h2, caption { break-after: avoid; }
  table { font-size: 9pt; }
  th, td { padding: .2rem .35rem; }
}
"""


def write(folder: str) -> None:
    chain = gather(folder)
    try:
        drawings = draw(chain)
        unable = ""
    except ImportError as problem:
        drawings, unable = (
            {},
            f"No plots: {problem}; run `pip install matplotlib`, then `stoker speedrun --only report`.",
        )
    blocks = tuple(contents(chain, unable))
    try:
        os.makedirs(os.path.join(folder, PLOTS), exist_ok=True)
        for name, drawing in drawings.items():
            write_atomic(os.path.join(folder, PLOTS, f"{name}.svg"), drawing.svg.encode())
            write_atomic(os.path.join(folder, PLOTS, f"{name}.png"), drawing.png)
        write_atomic(os.path.join(folder, "report.html"), page(TITLE, blocks, drawings).encode("utf-8", "replace"))
        write_atomic(os.path.join(folder, "report.md"), markdown(TITLE, blocks, drawings).encode("utf-8", "replace"))
    except OSError as problem:
        raise Refusal(
            f"the report can't be written in {folder}: {problem.strerror or problem}", EX_CANTCREAT
        ) from problem


def contents(chain: Chain, unable: str = "") -> Iterator[Block]:
    """What a tired reader wants first comes first."""
    yield from report_summary.summary(chain)
    if unable:
        yield Text(unable)
    yield from report_results.effects(chain)
    yield from report_results.models_table(chain)
    yield from report_results.training(chain)
    yield from report_results.own_sections(chain)
    yield from report_results.samples(chain)
    yield from report_chain.hardware(chain)
    yield from report_chain.bill(chain)
    yield from report_chain.failures(chain)
    yield from report_chain.going_on(chain)


def markdown(title: str, blocks: Iterable[Block], drawings: dict[str, Drawing]) -> str:
    parts = [f"# {plain(title)}"]
    for block in blocks:
        match block:
            case Heading(text=text):
                parts.append(f"## {plain(text)}")
            case Text(text=text, lead=lead):
                parts.append(f"**{plain(text)}**" if lead else plain(text))
            case Bullets(items=items):
                parts.append("\n".join(f"- {plain(item)}" for item in items))
            case Code(lines=lines):
                parts.append("\n".join(f"    {escape(line.replace(chr(10), ' '))}" for line in lines))
            case Table():
                parts.append(_table(block))
            case Figure(name=name, caption=caption):
                if name in drawings:
                    parts.append(f"![{plain(caption)}]({PLOTS}/{name}.png)\n\n{plain(caption)}.")
    return "\n\n".join(parts) + "\n"


def plain(text: str) -> str:
    """Nothing in it is markup, and it stays on one line: what models write may look like anything."""
    safe = _MARKUP.sub(r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))
    return "<br>".join(escape(line.strip()) for line in safe.splitlines() if line.strip())


def _table(table: Table) -> str:
    side = ":--" if table.words else "--:"
    lines = [
        f"| {' | '.join(plain(word) for word in table.head)} |",
        f"|:--|{'|'.join([side] * (len(table.head) - 1))}|",
    ]
    lines += [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in table.rows]
    return (f"**{plain(table.title)}**\n\n" if table.title else "") + "\n".join(lines)


def _cell(cell: Cell) -> str:
    return plain(cell.text) + (f"<br>{plain(cell.small)}" if cell.small else "")


def page(title: str, blocks: Iterable[Block], drawings: dict[str, Drawing]) -> str:
    style = STYLE.replace("LIGHT", _variables(COLOURS)).replace("DARK", _variables(DARK))
    body = "\n".join(_html_block(block, drawings) for block in blocks)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport"'
        ' content="width=device-width, initial-scale=1">\n'
        f"<title>{escape_html(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<h1>{escape_html(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _variables(colours: dict[str, str]) -> str:
    return "; ".join(f"--{name}: {value}" for name, value in colours.items())


def _html_block(block: Block, drawings: dict[str, Drawing]) -> str:
    match block:
        case Heading(text=text):
            return f"<h2>{escape_html(text)}</h2>"
        case Text(text=text, lead=lead):
            look = ' class="lead"' if lead else ""
            return f"<p{look}>{_words(text)}</p>"
        case Bullets(items=items):
            return f"<ul>{''.join(f'<li>{_words(item)}</li>' for item in items)}</ul>"
        case Code(lines=lines):
            return f"<pre>{escape_html(chr(10).join(lines))}</pre>"
        case Table():
            return _html_table(block)
        case Figure(name=name, caption=caption):
            if name not in drawings:
                return ""
            return f"<figure>{inline(name, drawings[name].svg, caption)}<figcaption>{_words(caption)}.</figcaption></figure>"
    raise AssertionError(f"no way to write a {type(block).__name__}")


def _html_table(table: Table) -> str:
    caption = f"<caption>{escape_html(table.title)}</caption>" if table.title else ""
    head = "".join(f'<th scope="col">{escape_html(word)}</th>' for word in table.head)
    rows = "".join(f"<tr>{''.join(_html_cell(cell) for cell in row)}</tr>" for row in table.rows)
    look = f' class="words{" stack" * table.stacked}"' if table.words else ""
    return f'<div class="wide"><table{look}>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _html_cell(cell: Cell) -> str:
    look = f' class="{cell.tone}"' if cell.tone in (GOOD, BAD) else ""
    small = f"<small>{_words(cell.small)}</small>" if cell.small else ""
    return f"<td{look}>{_words(cell.text)}{small}</td>"


def _words(text: str) -> str:
    """Escaped, and no line ends between a number and its percent sign."""
    return escape_html(text).replace(" %", "&nbsp;%")


def inline(name: str, svg: str, caption: str) -> str:
    """A drawing inside the page: its colours become the page's, its ids get its name (two figures would share their
    glyphs' ids).
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.S)
    opening, rest = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', opening)
    svg = f'<svg {box[0] if box else ""} role="img" aria-label="{escape_html(caption)}">{rest}'
    svg = re.sub(r'\bid="([^"]*)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'href="#|url\(#', lambda found: f"{found[0]}{name}-", svg)
    for variable, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return svg


def main(argv: list[str]) -> int:
    try:
        if len(argv) != 1 or argv[0].startswith("-"):
            raise Refusal("give one speedrun directory: python -m stoker.speedrun.report runs/speedrun-cpu", EX_USAGE)
        write(argv[0])
    except Refusal as refusal:
        print(f"stoker: {refusal.line}", file=sys.stderr, flush=True)
        return refusal.code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
