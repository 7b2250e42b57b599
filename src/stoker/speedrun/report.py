"""The report of a speedrun: report.md, report.html and plots/ in its directory. Of a chain that is not finished, too.

    python -m stoker.speedrun.report runs/speedrun-cpu

report_summary.py, report_results.py, report_models.py, report_samples.py and report_chain.py decide what is in it, this file how it is written.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator

from stoker.contract.names import EX_CANTCREAT, EX_USAGE, Refusal
from stoker.contract.untrusted import printable
from stoker.contract.wholefile import write_whole
from stoker.speedrun import html, report_chain, report_models, report_results, report_samples, report_summary
from stoker.speedrun.gather import Chain, gather
from stoker.speedrun.plots import Drawing, draw
from stoker.training.stages.blocks import Block, Bullets, Cell, Code, Figure, Heading, Table, Text

TITLE = "Speedrun report"
PLOTS = "plots"
_MARKUP = re.compile(r"([\\`*_\[\]|~#$!])")


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
            write_whole(os.path.join(folder, PLOTS, f"{name}.svg"), drawing.svg.encode())
            write_whole(os.path.join(folder, PLOTS, f"{name}.png"), drawing.png)
        write_whole(os.path.join(folder, "report.html"), html.page(TITLE, blocks, drawings).encode("utf-8", "replace"))
        write_whole(os.path.join(folder, "report.md"), markdown(TITLE, blocks, drawings).encode("utf-8", "replace"))
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
    yield from report_models.models_table(chain)
    yield from report_results.training(chain)
    yield from report_results.own_sections(chain)
    yield from report_samples.samples(chain)
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
                parts.append("\n".join(f"    {printable(line.replace(chr(10), ' '))}" for line in lines))
            case Table():
                parts.append(_table(block))
            case Figure(name=name, caption=caption):
                if name in drawings:
                    parts.append(f"![{plain(caption)}]({PLOTS}/{name}.png)\n\n{plain(caption)}.")
    return "\n\n".join(parts) + "\n"


def plain(text: str) -> str:
    """Nothing in it is markup, and it stays on one line: what models write may look like anything."""
    safe = _MARKUP.sub(r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))
    return "<br>".join(printable(line.strip()) for line in safe.splitlines() if line.strip())


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
