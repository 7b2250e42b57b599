"""The one widget of the screen: lines of pieces, each in its style."""

from __future__ import annotations

from collections.abc import Callable

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from stoker.control.show.top.cells import Line

# The terminal's own sixteen colours: they fit its theme, light or dark.
_LOOKS = {
    "": Style.null(),
    "dim": Style(dim=True),
    "bold": Style(bold=True),
    "good": Style(color="green"),
    "warn": Style(color="yellow"),
    "bad": Style(color="red", bold=True),
    "accent": Style(color="cyan"),
    "head": Style(dim=True, underline=True),
    "focus": Style(bold=True, reverse=True),
    "cursor": Style(reverse=True),
}


def style_of(name: str) -> Style:
    found = _LOOKS.get(name)
    if found is None:  # "cursor bad"
        found = _LOOKS[name] = Style.combine([_LOOKS.get(word, Style.null()) for word in name.split()])
    return found


def strip_of(line: Line) -> Strip:
    """Pieces, not markup: foreign text stays text."""
    return Strip([Segment(text, style_of(style)) for text, style in line])


class Board(Widget, can_focus=True):
    DEFAULT_CSS = "Board { width: 1fr; height: 1fr; }"

    def __init__(self, resized: Callable[[], None]) -> None:
        super().__init__()
        self._resized = resized
        self.lines: tuple[Line, ...] = ()

    def on_resize(self) -> None:
        self._resized()

    def render_line(self, y: int) -> Strip:
        return strip_of(self.lines[y]) if y < len(self.lines) else Strip.blank(self.size.width)

    def show(self, lines: tuple[Line, ...]) -> None:
        """Only lines that have changed are drawn."""
        before, self.lines = self.lines, lines
        width = self.size.width
        if len(before) != len(lines):
            self.refresh()
            return
        changed = [Region(0, y, width, 1) for y, line in enumerate(lines) if line != before[y]]
        if changed:
            self.refresh(*changed)
