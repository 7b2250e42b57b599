"""Draws the screen of `stoker top` with Textual, on one widget. A thread takes the snapshots, so that no frame waits for one."""

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
    drop_deleted_run,
    find_chosen_run,
    handle_key,
    move_cursor,
    select_row,
)  # fmt: skip

# Use the terminal's sixteen colors, which fit its light or dark theme.
_STYLES = {
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
_WHEEL_ROWS = 3  # rows per notch of the mouse wheel


def style_of(name: str) -> Style:
    style = _STYLES.get(name)
    if style is None:  # a combination such as "cursor bad"
        style = _STYLES[name] = Style.combine([_STYLES.get(part, Style.null()) for part in name.split()])
    return style


class Board(Widget, can_focus=True):
    """The widget that fills the screen."""

    DEFAULT_CSS = "Board { width: 1fr; height: 1fr; }"

    def __init__(self, on_resized: Callable[[], None]) -> None:
        super().__init__()
        self._on_resized = on_resized
        self.lines: tuple[Line, ...] = ()

    def on_resize(self) -> None:
        self._on_resized()

    def render_line(self, y: int) -> Strip:
        if y >= len(self.lines):
            return Strip.blank(self.size.width)
        # Use segments instead of markup, so that brackets in the text of a run are shown unchanged.
        return Strip([Segment(text, style_of(style)) for text, style in self.lines[y]])

    def show(self, lines: tuple[Line, ...]) -> None:
        """Draw the lines that have changed."""
        before, self.lines = self.lines, lines
        width = self.size.width
        if len(before) != len(lines):
            self.refresh()
            return
        changed = [Region(0, y, width, 1) for y, line in enumerate(lines) if line != before[y]]
        if changed:
            self.refresh(*changed)


class Source(Protocol):
    """A source of snapshots. `take_snapshot` is called in a thread and may block."""

    interval: float

    @property
    def status(self) -> str:
        """A text for the header, or ""."""
        ...

    def take_snapshot(self, watched: tuple[str, ...]) -> Snapshot: ...

    def seek(self, command: str) -> str:
        """Execute a command of a replay (back, forth, faster, slower, pause) and return a note for the user."""
        ...


class SnapshotTaken(Message):
    """Posted by the thread that takes snapshots."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self.snapshot = snapshot


class TopApp(App[None]):
    """The Textual application. `stop` stops the run in a directory and returns a note for the user."""

    ENABLE_COMMAND_PALETTE = False
    CSS: ClassVar[str] = "Screen { background: ansi_default; }"
    BINDINGS: ClassVar = []

    def __init__(self, source: Source, view: View, stop: Callable[[str], str]) -> None:
        super().__init__(ansi_color=True)
        self._source, self._stop = source, stop
        self.view = view
        self.frame: Frame | None = None
        self.snapshot = Snapshot(0.0)
        self._taken_at = time.monotonic()
        self._ending, self._wake = threading.Event(), threading.Event()
        self.board = Board(self.draw)

    def compose(self) -> ComposeResult:
        yield self.board

    def on_mount(self) -> None:
        self.board.focus()
        threading.Thread(target=self._take_snapshots, name="snapshots", daemon=True).start()
        self.set_interval(max(1.0, self._source.interval), self._draw_if_late)

    def on_unmount(self) -> None:
        self._ending.set()
        self._wake.set()

    # ---- snapshots ----

    def _take_snapshots(self) -> None:
        """Take snapshots until the screen is closed. Runs in a thread."""
        while not self._ending.is_set():
            began = time.monotonic()
            run = find_chosen_run(self.snapshot, self.view)
            try:
                snapshot = self._source.take_snapshot((run.id,) if run is not None else ())
            except Refusal as refusal:
                snapshot = replace(self.snapshot, problems=(refusal.line,))
            except Exception as problem:  # show it in the footer: a damaged folder must not end the program
                snapshot = replace(self.snapshot, problems=(f"{type(problem).__name__}: {problem}",))
            if self._ending.is_set():
                return
            self.post_message(SnapshotTaken(snapshot))
            self._wake.wait(max(0.05, self._source.interval - (time.monotonic() - began)))
            self._wake.clear()

    def on_snapshot_taken(self, message: SnapshotTaken) -> None:
        self._taken_at = time.monotonic()
        if not self.view.paused:
            self.snapshot = message.snapshot
            self.view = drop_deleted_run(self.view, self.snapshot)
            self.draw()

    def _draw_if_late(self) -> None:
        """Draw again if the next snapshot is late, so that the header shows the age of the data."""
        if time.monotonic() - self._taken_at > self._source.interval + 1.0 and not self.view.paused:
            self.draw()

    # ---- frames ----

    def draw(self) -> None:
        width, height = self.board.size
        age = time.monotonic() - self._taken_at
        self.frame = make_frame(self.snapshot, self.view, width, height, age, self._source.status)
        self.view = self.frame.view
        self.board.show(self.frame.lines)

    # ---- keys and mouse ----

    def on_key(self, event: events.Key) -> None:
        event.prevent_default()
        event.stop()
        character = event.character or "" if event.is_printable else ""
        area = self.frame.areas.get(self.view.focus) if self.frame is not None else None
        page = max(1, area.height - 2) if area is not None else 10
        before = find_chosen_run(self.snapshot, self.view)
        self.view, effect = handle_key(self.view, event.key, character, self.snapshot, page)
        if effect is not None:
            self._apply(effect)
        if find_chosen_run(self.snapshot, self.view) != before:
            self._wake.set()
        self.draw()

    def on_paste(self, event: events.Paste) -> None:
        if self.view.mode == FILTER:
            self.view = append_to_filter(self.view, event.text)
            self.draw()

    def on_click(self, event: events.Click) -> None:
        target = self.frame.find_row_at(event.screen_x, event.screen_y) if self.frame is not None else None
        if target is None or self.view.mode != BROWSE:
            return
        panel, key = target
        self.view = replace(self.view, focus=panel)
        if key:
            self.view = select_row(self.view, panel, key)
        self.draw()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._scroll(event, _WHEEL_ROWS)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._scroll(event, -_WHEEL_ROWS)

    def _scroll(self, event: events.MouseEvent, rows: int) -> None:
        target = self.frame.find_row_at(event.screen_x, event.screen_y) if self.frame is not None else None
        if target is not None and target[0] != RUN and self.view.mode == BROWSE:
            self.view = move_cursor(replace(self.view, focus=target[0]), target[0], rows, self.snapshot)
            self.draw()

    def _apply(self, effect: Effect) -> None:
        if effect.name == QUIT:
            self.exit()
        elif effect.name == STOP:
            run = self.snapshot.run(effect.run)
            note = self._stop(run.dir) if run is not None else "this run no longer exists"
            self.view = replace(self.view, note=note)
        elif effect.name in (BACK, FORTH, FASTER, SLOWER, PAUSE):
            self.view = replace(self.view, note=self._source.seek(effect.name))
            self._wake.set()
