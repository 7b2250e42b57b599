"""Shows the progress of an operation that takes longer than two seconds, and its remaining time:

    with Progress("hashing", size, unit="B") as progress:
        for block in blocks:
            progress.tick(len(block))

On a terminal it is a bar, which is removed at the end or on an exception. A rank draws the bar through its launcher,
which shows it behind the rank's name; for `stoker attach` the newest state is also in the run directory. Without a
terminal, `say` gets a line every five seconds.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from stoker.contract import env_vars, layout, terminal
from stoker.contract.frozen import as_json, frozen
from stoker.contract.safe_io import read_json, write_json
from stoker.contract.typed_values import read_frozen
from stoker.contract.units import format_bytes, format_clock

SCHEMA = 1
AFTER_S = 2.0  # shorter operations end before anybody reads their bar
REDRAW_S = 0.2
SAVE_S = 1.0
SAY_S = 5.0
MAX_WIDTH, MIN_WIDTH = 20, 5  # columns between the brackets of a bar
BYTES = "B"


@frozen
class ProgressState:
    what: str
    done: float
    total: float
    unit: str = ""  # what `total` counts, unless that is obvious; "B": bytes
    note: str = ""
    rate: float | None = None  # per second
    left: float | None = None  # seconds

    def bar(self, columns: int) -> str:
        """Return a bar that fits in this many columns: a shorter one if there are few, or only a percentage."""
        numbers = f"{self._numbers()} | ETA {format_clock(self.left)}"
        width = min(columns - len(f"{self.what} [] {numbers}"), MAX_WIDTH)
        if width < MIN_WIDTH:
            return f"{self.what} {100 * self._fraction:.0f} % | ETA {format_clock(self.left)}"
        full = int(width * self._fraction)
        return f"{self.what} [{'█' * full}{'·' * (width - full)}] {numbers}"

    def line(self) -> str:
        return f"{self.what}: {self._numbers()}, {100 * self._fraction:.0f} %, ETA {format_clock(self.left)}"

    @property
    def _fraction(self) -> float:
        return min(max(self.done / self.total, 0.0), 1.0) if self.total > 0 else 0.0

    def _numbers(self) -> str:
        if self.unit == BYTES:
            size, unit = (2**30, "GiB") if self.total >= 2**30 else (2**20, "MiB")
            rate = f", {format_bytes(self.rate)}/s" if self.rate else ""
            numbers = f"{self.done / size:.1f}/{self.total / size:.1f} {unit}{rate}"
        else:
            numbers = f"{self.done:,.0f}/{self.total:,.0f}{' ' + self.unit if self.unit else ''}"
        return f"{numbers} | {self.note}" if self.note else numbers


class Progress:
    """A context manager that shows the progress of one operation."""

    def __init__(
        self, what: str, total: float, *, unit: str = "", done: float = 0, say: Callable[[str], None] | None = None
    ) -> None:
        """`done` is what was finished before the start. `say` prints the lines if there is no terminal."""
        self._what, self.total, self._unit, self._done_before, self.done = what, total, unit, done, done
        self._say = say
        self._started_at = self._said_at = time.monotonic()
        self._drawn_at = self._saved_at = 0.0
        self._shows_bar = terminal.shows_bars()
        self._file = ""
        run_dir = os.environ.get(env_vars.RUN_DIR, "")
        # Only rank 0 writes the state, if the run directory is on this host.
        if "RANK" in os.environ and run_dir and terminal.may_draw() and os.path.isdir(run_dir):
            self._file = os.path.join(run_dir, layout.PROGRESS)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *problem: object) -> None:
        self.end()

    def tick(self, count: float = 1) -> None:
        self.at(self.done + count)

    def at(self, done: float, note: str = "", left: float | None = None) -> None:
        """Set what is done. `left` is a better estimate of the remaining seconds than the mean rate gives."""
        self.done = done
        now = time.monotonic()
        seconds = now - self._started_at
        if seconds < AFTER_S:
            return
        draw = self._shows_bar and now - self._drawn_at >= REDRAW_S
        save = self._file and now - self._saved_at >= SAVE_S
        say = self._say is not None and not self._shows_bar and now - self._said_at >= SAY_S
        if not (draw or save or say):
            return
        rate = (done - self._done_before) / seconds
        if left is None and rate > 0:
            left = (self.total - done) / rate
        state = ProgressState(self._what, done, self.total, self._unit, note, rate, left)
        if draw:
            self._drawn_at = now
            terminal.draw_bar(state.bar(terminal.bar_width()))
        if say and self._say is not None:
            self._said_at = now
            self._say(state.line())
        if save:
            self._saved_at = now
            with contextlib.suppress(OSError):  # a full disk or a removed folder costs only the bar of `stoker attach`
                write_json(self._file, {"schema": SCHEMA, **as_json(state)}, durable=False)

    def end(self) -> None:
        if self._drawn_at:
            terminal.clear_bar()
        if self._saved_at:
            remove_progress(os.path.dirname(self._file))


def read_progress(run_dir: str) -> ProgressState | None:
    """Return the state of rank 0's long operation, or None if there is none or it has another version."""
    try:
        state: Any = read_json(os.path.join(run_dir, layout.PROGRESS))
        if not isinstance(state, dict) or state.pop("schema", None) != SCHEMA:
            return None
        return read_frozen(ProgressState, state)
    except (OSError, ValueError):
        return None


def remove_progress(run_dir: str) -> None:
    """Remove the state file, also one that a killed rank left behind."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(run_dir, layout.PROGRESS))
