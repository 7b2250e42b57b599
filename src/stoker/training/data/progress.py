"""How far, how fast, how long still: one line on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from stoker.contract import terminal
from stoker.contract.quantities import span

EVERY_S = 5.0
EVERY_ON_A_TERMINAL_S = 0.2


class Progress:
    def __init__(self, what: str, total: int, say: Callable[[str], None]) -> None:
        self.what, self.total, self.say = what, total, say
        self.done = 0
        self.began = self.said = time.monotonic()
        self.terminal = sys.stderr.isatty()
        self.shown = False

    def tick(self, more: int) -> None:
        self.done += more
        now = time.monotonic()
        if now - self.said < (EVERY_ON_A_TERMINAL_S if self.terminal else EVERY_S):
            return
        self.said = now
        rate = self.done / (now - self.began)
        left = span((self.total - self.done) / rate) if rate else "n/a"
        line = (
            f"{self.what}: {self.done / 1e6:.0f}/{self.total / 1e6:.0f} MB, {100 * self.done / max(self.total, 1):.0f}"
            f" %, {rate / 1e6:.1f} MB/s, ETA {left}"
        )
        if self.terminal:
            terminal.draw(line)
            self.shown = True
        else:
            self.say(line)

    def end(self) -> None:
        if self.shown:
            terminal.wipe()
