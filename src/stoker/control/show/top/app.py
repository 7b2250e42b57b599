"""The screen in a terminal, by Textual: keys and mouse in, frames out, on one widget. Snapshots come from a thread; no frame waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import ClassVar, Protocol

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.app import App, ComposeResult
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from stoker.contract.errors import Refusal
from stoker.contract.frozen import replace
from stoker.control.show.snapshot import Snapshot
from stoker.control.show.top.frame import Frame, make_frame
from stoker.control.show.top.table import RUN, Line
from stoker.control.show.top.view import (
    BACK,
    BROWSE,
    FASTER,
    FILTER,
    FORTH,
    PAUSE,
    QUIT,
    SLOWER,
    STOP,
    Effect,
    View,
    append_to_filter,
    chosen_run,
    drop_deleted_run,
    move_cursor,
    press,
    select_row,
)  # fmt: skip

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


_WHEEL = 3  # rows


class Source(Protocol):
    """Where snapshots come from. `look` may take its time: it is called in a thread."""

    interval: float

    @property
    def status(self) -> str:
        """For the header."""
        ...

    def look(self, watched: tuple[str, ...]) -> Snapshot: ...

    def seek(self, what: str) -> str:
        """Of a recording: back, forth, faster, slower. What to tell the person at the keyboard."""
        ...


class Fresh(Message):
    """From the thread that looks."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self.snapshot = snapshot


class TopApp(App[None]):
    ENABLE_COMMAND_PALETTE = False
    CSS: ClassVar[str] = "Screen { background: ansi_default; }"
    BINDINGS: ClassVar = []

    def __init__(self, source: Source, view: View, stop: Callable[[str], str]) -> None:
        super().__init__(ansi_color=True)
        self._source, self._stop = source, stop
        self.view = view
        self.frame: Frame | None = None
        self.snapshot = Snapshot(0.0)
        self._taken = time.monotonic()
        self._ending, self._hurry = threading.Event(), threading.Event()
        self.board = Board(self.draw)

    def compose(self) -> ComposeResult:
        yield self.board

    def on_mount(self) -> None:
        self.board.focus()
        threading.Thread(target=self._look, name="snapshots", daemon=True).start()
        self.set_interval(max(1.0, self._source.interval), self._tick)

    def on_unmount(self) -> None:
        self._ending.set()
        self._hurry.set()

    # ---- snapshots: in a thread ----

    def _look(self) -> None:
        while not self._ending.is_set():
            begun = time.monotonic()
            run = chosen_run(self.snapshot, self.view)
            try:
                snapshot = self._source.look((run.id,) if run is not None else ())
            except Refusal as refusal:
                snapshot = replace(self.snapshot, problems=(refusal.line,))
            except Exception as problem:  # a damaged folder must not end the screen: it is shown
                snapshot = replace(self.snapshot, problems=(f"{type(problem).__name__}: {problem}",))
            if self._ending.is_set():
                return
            self.post_message(Fresh(snapshot))
            self._hurry.wait(max(0.05, self._source.interval - (time.monotonic() - begun)))
            self._hurry.clear()

    def on_fresh(self, message: Fresh) -> None:
        self._taken = time.monotonic()
        if not self.view.paused:
            self.snapshot = message.snapshot
            self.view = drop_deleted_run(self.view, self.snapshot)
            self.draw()

    def _tick(self) -> None:
        """Where snapshots stay out, the header says so."""
        if time.monotonic() - self._taken > self._source.interval + 1.0 and not self.view.paused:
            self.draw()

    # ---- frames ----

    def draw(self) -> None:
        width, height = self.board.size
        age = time.monotonic() - self._taken
        self.frame = make_frame(self.snapshot, self.view, width, height, age, self._source.status)
        self.view = self.frame.view
        self.board.show(self.frame.lines)

    # ---- keys and mouse ----

    def on_key(self, event: events.Key) -> None:
        event.prevent_default()
        event.stop()
        sign = event.character or "" if event.is_printable else ""
        place = self.frame.places.get(self.view.focus) if self.frame is not None else None
        page = max(1, place.height - 2) if place is not None else 10
        before = chosen_run(self.snapshot, self.view)
        self.view, effect = press(self.view, event.key, sign, self.snapshot, page)
        if effect is not None:
            self._do(effect)
        if chosen_run(self.snapshot, self.view) != before:
            self._hurry.set()
        self.draw()

    def on_paste(self, event: events.Paste) -> None:
        if self.view.mode == FILTER:
            self.view = append_to_filter(self.view, event.text)
            self.draw()

    def on_click(self, event: events.Click) -> None:
        spot = self.frame.at(event.screen_x, event.screen_y) if self.frame is not None else None
        if spot is None or self.view.mode != BROWSE:
            return
        panel, key = spot
        self.view = replace(self.view, focus=panel)
        if key:
            self.view = select_row(self.view, panel, key)
        self.draw()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._wheel(event, _WHEEL)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._wheel(event, -_WHEEL)

    def _wheel(self, event: events.MouseEvent, by: int) -> None:
        spot = self.frame.at(event.screen_x, event.screen_y) if self.frame is not None else None
        if spot is not None and spot[0] != RUN and self.view.mode == BROWSE:
            self.view = move_cursor(replace(self.view, focus=spot[0]), spot[0], by, self.snapshot)
            self.draw()

    def _do(self, effect: Effect) -> None:
        if effect.what == QUIT:
            self.exit()
        elif effect.what == STOP:
            run = self.snapshot.run(effect.run)
            self.view = replace(self.view, note=self._stop(run.dir) if run is not None else "this run is gone")
        elif effect.what in (BACK, FORTH, FASTER, SLOWER, PAUSE):
            self.view = replace(self.view, note=self._source.seek(effect.what))
            self._hurry.set()
