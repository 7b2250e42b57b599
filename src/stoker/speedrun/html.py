"""The report as one HTML file: nothing is fetched, it reads on a phone, in light and dark, and prints. Everything that
is text is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

from stoker.speedrun.plots import COLOURS, Drawing
from stoker.speedrun.report_style import DARK, STYLE
from stoker.training.stages.blocks import BAD, GOOD, Block, Bullets, Cell, Code, Figure, Heading, Table, Text


def page(title: str, blocks: Iterable[Block], drawings: dict[str, Drawing]) -> str:
    style = STYLE.replace("LIGHT", _variables(COLOURS)).replace("DARK", _variables(DARK))
    body = "\n".join(_block(block, drawings) for block in blocks)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport"'
        ' content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _variables(colours: dict[str, str]) -> str:
    return "; ".join(f"--{name}: {value}" for name, value in colours.items())


def _block(block: Block, drawings: dict[str, Drawing]) -> str:
    match block:
        case Heading(text=text):
            return f"<h2>{escape(text)}</h2>"
        case Text(text=text, lead=lead):
            look = ' class="lead"' if lead else ""
            return f"<p{look}>{_words(text)}</p>"
        case Bullets(items=items):
            return f"<ul>{''.join(f'<li>{_words(item)}</li>' for item in items)}</ul>"
        case Code(lines=lines):
            return f"<pre>{escape(chr(10).join(lines))}</pre>"
        case Table():
            return _table(block)
        case Figure(name=name, caption=caption):
            if name not in drawings:
                return ""
            return f"<figure>{inline(name, drawings[name].svg, caption)}<figcaption>{_words(caption)}.</figcaption></figure>"
    raise AssertionError(f"no way to write a {type(block).__name__}")


def _table(table: Table) -> str:
    caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    head = "".join(f'<th scope="col">{escape(word)}</th>' for word in table.head)
    rows = "".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in table.rows)
    look = f' class="words{" stack" * table.stacked}"' if table.words else ""
    return f'<div class="wide"><table{look}>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cell(cell: Cell) -> str:
    look = f' class="{cell.tone}"' if cell.tone in (GOOD, BAD) else ""
    small = f"<small>{_words(cell.small)}</small>" if cell.small else ""
    return f"<td{look}>{_words(cell.text)}{small}</td>"


def _words(text: str) -> str:
    """Escaped, and no line ends between a number and its percent sign."""
    return escape(text).replace(" %", "&nbsp;%")


def inline(name: str, svg: str, caption: str) -> str:
    """A drawing inside the page: its colours become the page's, its ids get its name (two figures would share their
    glyphs' ids).
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.S)
    opening, rest = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', opening)
    svg = f'<svg {box[0] if box else ""} role="img" aria-label="{escape(caption)}">{rest}'
    svg = re.sub(r'\bid="([^"]*)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'href="#|url\(#', lambda found: f"{found[0]}{name}-", svg)
    for variable, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return svg
