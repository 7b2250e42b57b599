"""Where the snapshots of `stoker top` come from: what is there, or a made-up cluster. (A recorded run: player.py.)"""

from __future__ import annotations

import time
from typing import Protocol

from stoker.control.show.gather import Gatherer, HostReading
from stoker.control.show.snapshot import Snapshot
from stoker.control.show.top.demo import demo_snapshot

_FIRST_S = 10.0  # that one picture waits for other hosts
_BEFORE_S = 250.0  # that the demonstration has run already: its card was cool for a while
_GAP_S = 0.3  # between two readings: rates need two


class Elsewhere(Protocol):
    """Other hosts (control/cluster/elsewhere.py)."""

    def readings(self) -> list[HostReading]: ...

    def wait(self, seconds: float) -> None: ...

    def close(self) -> None: ...


class Live:
    """This machine, or other hosts instead; and the runs of a folder."""

    status = ""

    def __init__(self, root: str, interval: float, everybody: bool = False, elsewhere: Elsewhere | None = None) -> None:
        self.interval = interval
        self._gatherer = Gatherer(root, everybody, machine=elsewhere is None)
        self._elsewhere = elsewhere

    def look(self, watched: tuple[str, ...]) -> Snapshot:
        return self._gatherer.snapshot(watched, self._elsewhere.readings() if self._elsewhere is not None else ())

    def look_once(self) -> Snapshot:
        """One that has rates, too, and of every host an answer or the reason why there is none."""
        if self._elsewhere is not None:
            self._elsewhere.wait(_FIRST_S)
            return self.look(())
        self.look(())
        time.sleep(_GAP_S)
        return self.look(())

    def seek(self, what: str) -> str:
        return ""

    def close(self) -> None:
        if self._elsewhere is not None:
            self._elsewhere.close()


class Demo:
    status = "demo"

    def __init__(self, interval: float, hosts: int = 2, gpus: int = 4) -> None:
        self.interval = interval
        self._begun, self._size = time.time() - _BEFORE_S, (hosts, gpus)

    def look(self, watched: tuple[str, ...]) -> Snapshot:
        return demo_snapshot(time.time(), self._begun, *self._size)

    def look_once(self) -> Snapshot:
        return self.look(())

    def seek(self, what: str) -> str:
        return ""

    def close(self) -> None:
        return None
