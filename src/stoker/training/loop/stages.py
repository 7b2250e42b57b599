"""Where the seconds before the first step went."""

from __future__ import annotations

import os
import time


class Stages:
    """Counted from the start of this process: Python and its imports are part of it."""

    def __init__(self) -> None:
        self._last = self._began = os.stat("/proc/self").st_ctime
        self._parts: list[tuple[str, float]] = []

    def done(self, name: str) -> None:
        now = time.time()
        self._parts.append((name, now - self._last))
        self._last = now

    def said(self) -> str:
        return f"{self._last - self._began:.1f} s: " + ", ".join(
            f"{name} {seconds:.1f}" for name, seconds in self._parts
        )
