"""What a report is made of: plain text, which each way of writing it (report.py: markdown, html.py) escapes."""

from __future__ import annotations

from stoker.contract.frozen import frozen

GOOD, BAD, SAME = "good", "bad", "same"


@frozen
class Heading:
    text: str


@frozen
class Text:
    text: str
    lead: bool = False  # the sentence a hurried reader reads


@frozen
class Bullets:
    items: tuple[str, ...]


@frozen
class Code:
    lines: tuple[str, ...]


@frozen
class Cell:
    text: str
    small: str = ""  # below the number: its interval
    tone: str = ""


@frozen
class Table:
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    words: bool = False  # cells of prose, wrapped; else numbers
    stacked: bool = False  # on a phone a row's cells stand below each other
    title: str = ""  # a sample's prompt


@frozen
class Figure:
    """Left out where nothing could be drawn."""

    name: str
    caption: str


Block = Heading | Text | Bullets | Code | Table | Figure


def tone_of(judgement: str) -> str:
    tones = {"better": GOOD, "worse": BAD, "no ": SAME}
    return next((tone for begins, tone in tones.items() if judgement.startswith(begins)), "")
