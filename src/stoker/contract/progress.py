"""How far something has come that takes longer than two seconds, and how long it still takes:

    with Progress("hashing", size, unit="B") as progress:
        for block in blocks:
            progress.tick(len(block))

On a terminal it is a bar, gone at the end whatever ends it. A rank has no terminal: its launcher has one, and shows the bar
behind the rank's name; for `stoker attach` the newest state is in the run directory. Elsewhere nothing is drawn; with `say`
a line is printed every few seconds.
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
AFTER_S = 2.0  # what takes less is over before anybody reads its bar
REDRAW_S = 0.2
KEEP_S = 1.0
SAY_S = 5.0
WIDTH, _NARROWEST = 20, 5
BYTES = "B"


@frozen
class ProgressState:
    what: str
    done: float
    total: float
    unit: str = ""  # "B": bytes; else of what `total` counts, if that is no matter of course
    note: str = ""
    rate: float | None = None  # in a second
    left: float | None = None  # seconds

    def bar(self, room: int) -> str:
        """In so many columns: where they are few the bar is shorter, or there is none."""
        about = f"{self._numbers()} | ETA {format_clock(self.left)}"
        width = min(room - len(f"{self.what} [] {about}"), WIDTH)
        if width < _NARROWEST:
            return f"{self.what} {100 * self._share:.0f} % | ETA {format_clock(self.left)}"
        full = int(width * self._share)
        return f"{self.what} [{'█' * full}{'·' * (width - full)}] {about}"

    def line(self) -> str:
        return f"{self.what}: {self._numbers()}, {100 * self._share:.0f} %, ETA {format_clock(self.left)}"

    @property
    def _share(self) -> float:
        return min(max(self.done / self.total, 0.0), 1.0) if self.total > 0 else 0.0

    def _numbers(self) -> str:
        if self.unit == BYTES:
            size, of = (2**30, "GiB") if self.total >= 2**30 else (2**20, "MiB")
            rate = f", {format_bytes(self.rate)}/s" if self.rate else ""
            counted = f"{self.done / size:.1f}/{self.total / size:.1f} {of}{rate}"
        else:
            counted = f"{self.done:,.0f}/{self.total:,.0f}{' ' + self.unit if self.unit else ''}"
        return f"{counted} | {self.note}" if self.note else counted


class Progress:
    def __init__(
        self, what: str, total: float, *, unit: str = "", done: float = 0, say: Callable[[str], None] | None = None
    ) -> None:
        """`done`: before this began. `say`: for the lines where there is no terminal."""
        self._what, self.total, self._unit, self._first, self.done = what, total, unit, done, done
        self._say = say
        self._began = self._said = time.monotonic()
        self._drawn = self._kept = 0.0
        self._terminal = terminal.shows_bars()
        self._file = _file() if "RANK" in os.environ else ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *problem: object) -> None:
        self.end()

    def tick(self, more: float = 1) -> None:
        self.at(self.done + more)

    def at(self, done: float, note: str = "", left: float | None = None) -> None:
        """`left`: seconds, of somebody who knows better than the mean so far."""
        self.done = done
        now = time.monotonic()
        if now - self._began < AFTER_S:
            return
        if self._terminal and now - self._drawn >= REDRAW_S:
            self._drawn = now
            terminal.draw_bar(self._state(now, note, left).bar(terminal.bar_width()))
        elif self._say is not None and not self._terminal and now - self._said >= SAY_S:
            self._said = now
            self._say(self._state(now, note, left).line())
        if self._file and now - self._kept >= KEEP_S:
            self._kept = now
            with contextlib.suppress(OSError):  # a full disk, a folder that is gone: no bar in `stoker attach`
                state = self._state(now, note, left)
                write_json(self._file, {"schema": SCHEMA, **as_json(state)}, durable=False)

    def _state(self, now: float, note: str, left: float | None) -> ProgressState:
        rate = (self.done - self._first) / (now - self._began)
        if left is None and rate > 0:
            left = (self.total - self.done) / rate
        return ProgressState(self._what, self.done, self.total, self._unit, note, rate, left)

    def end(self) -> None:
        if self._drawn:
            terminal.clear_bar()
        if self._kept:
            remove_progress(os.path.dirname(self._file))


def _file() -> str:
    """Of rank 0, where the run directory is on this host."""
    folder = os.environ.get(env_vars.RUN_DIR, "")
    return os.path.join(folder, layout.PROGRESS) if folder and terminal.is_first() and os.path.isdir(folder) else ""


def read_progress(run_dir: str) -> ProgressState | None:
    """Where rank 0 is in what takes it long; None: nobody knows."""
    try:
        found: Any = read_json(os.path.join(run_dir, layout.PROGRESS))
        if not isinstance(found, dict) or found.pop("schema", None) != SCHEMA:
            return None
        return read_frozen(ProgressState, found)
    except (OSError, ValueError):
        return None  # none now, or of another version


def remove_progress(run_dir: str) -> None:
    """What a rank that was killed left behind, too."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(run_dir, layout.PROGRESS))
