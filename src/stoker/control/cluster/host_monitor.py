"""Gauges of other hosts, by ssh, with nothing installed there: one thread a host, so that a dead one holds up nobody."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from stoker.contract import protocol
from stoker.contract.env_vars import MACHINE
from stoker.contract.errors import Refusal
from stoker.contract.frozen import frozen, replace
from stoker.contract.text import escape, parse_json
from stoker.contract.typed_values import read_frozen
from stoker.control.cluster.hosts import Host, Hosts
from stoker.control.cluster.ssh import afresh
from stoker.control.cluster.sync_target import SyncRefused, SyncTarget, SyncTimeout
from stoker.control.machine.gauges import Gauges
from stoker.control.machine.model import OFFLINE, GpuGauges, HostGauges

HostReading = tuple[HostGauges, tuple[GpuGauges, ...]]

OFFLINE_S = 8.0  # without a reading
_AGAIN_S = 2.0  # between two attempts to reach a host
_FAR_END = "stoker.control.agent.gauge_server"


@frozen
class _Reading:
    host: HostGauges
    gpus: tuple[GpuGauges, ...]


class HostMonitor:
    """The hosts of a hosts file, watched until `close`."""

    def __init__(self, hosts: Hosts, interval: float) -> None:
        self._watches = [_Watch(host, hosts, interval) for host in hosts.hosts]
        for watch in self._watches:
            watch.start()

    def readings(self) -> list[HostReading]:
        """The newest of each host, at once."""
        return [watch.reading() for watch in self._watches]

    def wait(self, seconds: float) -> None:
        """Until every host has answered twice (rates need two readings), or it is known why it does not."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not all(watch.settled for watch in self._watches):
            time.sleep(0.05)

    def close(self) -> None:
        for watch in self._watches:
            watch.close()


class _Watch:
    """One host."""

    def __init__(self, host: Host, hosts: Hosts, interval: float) -> None:
        self._host, self._hosts, self._interval = host, hosts, interval
        self._silence_s = max(OFFLINE_S - 3.0, 2.5 * interval)
        self._newest: HostReading | None = None
        self._when = self._since = time.monotonic()
        self._count = 0
        self._reason = ""
        self._far: SyncTarget | None = None
        self._closing = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name=f"gauges of {self._host.name}", daemon=True).start()

    @property
    def settled(self) -> bool:
        return self._count >= 2 or bool(self._reason)

    def reading(self) -> HostReading:
        newest, reason, now = self._newest, self._reason, time.monotonic()
        if newest is not None and not reason and now - self._when <= max(OFFLINE_S, self._silence_s):
            return newest
        silent = now - (self._when if newest is not None else self._since)
        why = reason or (
            "connecting" if newest is None and silent < OFFLINE_S else f"no word from it for {silent:.0f} s"
        )
        last = newest[0].time if newest is not None else 0.0
        return HostGauges(self._host.name, last, OFFLINE, why), ()

    def close(self) -> None:
        self._closing.set()
        self._end()

    def _end(self) -> None:
        if self._far is not None:
            self._far.stop()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._look_here() if self._host.here else self._look_there()
            except Exception as problem:  # of a thread nobody would hear of it
                self._reason = escape(f"{type(problem).__name__}: {problem}", 300)
            self._closing.wait(_AGAIN_S)

    def _take(self, host: HostGauges, cards: tuple[GpuGauges, ...]) -> None:
        """Under the name that the hosts file has for it, which is also the one of a run's ranks there."""
        name = self._host.name
        self._newest = replace(host, name=name), tuple(replace(card, host=name) for card in cards)
        self._when = time.monotonic()
        self._count += 1
        self._reason = ""

    def _look_here(self) -> None:
        gauges = Gauges(os.environ.get(MACHINE))
        try:
            while not self._closing.is_set():
                self._take(*gauges.read())
                self._closing.wait(self._interval)
        except Refusal as refusal:
            self._reason = refusal.line

    def _look_there(self) -> None:
        far = self._far = None
        try:
            far = self._far = SyncTarget(self._host, afresh(self._hosts), _FAR_END, self._silence_s, str(self._interval))
            far.start()
            while not self._closing.is_set():
                reading = _read(*far.answer())
                self._take(reading.host, reading.gpus)
                far.send(b"\n")
        except (SyncRefused, SyncTimeout, protocol.ProtocolError, OSError, EOFError) as problem:
            if far is not None:
                self._reason = escape(far.why(problem), 300) or "the connection was lost"
            elif isinstance(problem, FileNotFoundError):
                self._reason = "there is no ssh client on the PATH"
            else:
                self._reason = escape(str(problem), 300)
        finally:
            self._end()


def _read(message: protocol.Message, payload: bytes) -> _Reading:
    if message.get("is") != "gauges":
        raise protocol.ProtocolError("it sent something that is not a reading")
    try:
        data: Any = parse_json(payload)
        return read_frozen(_Reading, data)
    except ValueError as problem:
        raise protocol.ProtocolError(f"its reading can't be used: {problem}") from None
