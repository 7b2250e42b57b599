"""Reads the gauges of other hosts over their transports, for `stoker top`, `web` and `metrics`. They need no installation.

Each host is read by a separate thread, so a dead host does not delay the others.
"""

from __future__ import annotations

import os
import threading
import time

from stoker.contract import protocol
from stoker.contract.env_vars import MACHINE
from stoker.contract.errors import Refusal
from stoker.contract.frozen import frozen, replace
from stoker.contract.text import escape, parse_json
from stoker.contract.typed_values import read_frozen
from stoker.control.cluster.file_sync import RemoteProgram
from stoker.control.cluster.hosts import Host, Hosts
from stoker.control.cluster.ssh import with_unshared_connections
from stoker.control.machine.gauges import Gauges
from stoker.control.machine.model import OFFLINE, GpuGauges, HostGauges

HostReading = tuple[HostGauges, tuple[GpuGauges, ...]]

OFFLINE_S = 8.0  # a host without a reading for this long is shown as offline
_RETRY_S = 2.0  # pause between two attempts to reach a host


@frozen
class _Reading:
    """The payload of a message from a gauge server."""

    host: HostGauges
    gpus: tuple[GpuGauges, ...]


class HostMonitor:
    """Reads the gauges of all hosts of a hosts file until `close`."""

    def __init__(self, hosts: Hosts, interval: float) -> None:
        self._watches = [_HostWatch(host, hosts, interval) for host in hosts.hosts]
        for watch in self._watches:
            threading.Thread(target=watch.run, name=f"gauges of {watch.name}", daemon=True).start()

    def readings(self) -> list[HostReading]:
        """Return the newest reading of each host, without waiting."""
        return [watch.reading() for watch in self._watches]

    def wait(self, seconds: float) -> None:
        """Wait until every host has answered twice (a rate needs two readings) or has failed."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not all(watch.is_ready for watch in self._watches):
            time.sleep(0.05)

    def close(self) -> None:
        for watch in self._watches:
            watch.close()


class _HostWatch:
    """Reads the gauges of one host."""

    def __init__(self, host: Host, hosts: Hosts, interval: float) -> None:
        self.name = host.name
        self._host, self._hosts, self._interval = host, hosts, interval
        self._silence_s = max(OFFLINE_S - 3.0, 2.5 * interval)
        self._newest: HostReading | None = None
        self._updated_at = time.monotonic()
        self._count = 0
        self._failure = ""
        self._program: RemoteProgram | None = None
        self._closing = threading.Event()

    @property
    def is_ready(self) -> bool:
        return self._count >= 2 or bool(self._failure)

    def reading(self) -> HostReading:
        """Return the newest reading, or one with the reason why the host is offline."""
        newest, failure, silent = self._newest, self._failure, time.monotonic() - self._updated_at
        if newest is not None and not failure and silent <= max(OFFLINE_S, self._silence_s):
            return newest
        if not failure:
            connecting = newest is None and silent < OFFLINE_S
            failure = "connecting" if connecting else f"no answer for {silent:.0f} s"
        return HostGauges(self.name, newest[0].time if newest is not None else 0.0, OFFLINE, failure), ()

    def close(self) -> None:
        self._closing.set()
        self._stop_program()

    def _stop_program(self) -> None:
        if self._program is not None:
            self._program.stop()

    def run(self) -> None:
        """Read until `close`. After a failure, try again every 2 s."""
        while not self._closing.is_set():
            try:
                self._read_local() if self._host.here else self._read_remote()
            except Exception as problem:  # an exception of a thread would go unnoticed
                self._failure = escape(f"{type(problem).__name__}: {problem}", 300)
            self._closing.wait(_RETRY_S)

    def _update(self, host: HostGauges, gpus: tuple[GpuGauges, ...]) -> None:
        """Store a reading under the host's name in the hosts file, because run records use that name too."""
        self._newest = replace(host, name=self.name), tuple(replace(gpu, host=self.name) for gpu in gpus)
        self._updated_at = time.monotonic()
        self._count += 1
        self._failure = ""

    def _read_local(self) -> None:
        gauges = Gauges(os.environ.get(MACHINE))
        try:
            while not self._closing.is_set():
                self._update(*gauges.read())
                self._closing.wait(self._interval)
        except Refusal as refusal:
            self._failure = refusal.line

    def _read_remote(self) -> None:
        program = self._program = None
        hosts = with_unshared_connections(self._hosts)
        try:
            program = self._program = RemoteProgram(
                self._host, hosts, "stoker.control.agent.gauge_server", self._silence_s, str(self._interval)
            )
            program.start()
            while not self._closing.is_set():
                reading = _parse_reading(*program.answer())
                self._update(reading.host, reading.gpus)
                program.send(b"\n")
        except (protocol.ProtocolError, OSError) as problem:
            if program is not None:
                self._failure = escape(program.explain(problem), 300) or "the connection was lost"
            elif isinstance(problem, FileNotFoundError):
                self._failure = "ssh is not on the PATH"
            else:
                self._failure = escape(str(problem), 300)
        finally:
            self._stop_program()


def _parse_reading(message: protocol.Message, payload: bytes) -> _Reading:
    if message.get("is") != "gauges":
        raise protocol.ProtocolError("it sent a message that is not a reading")
    try:
        return read_frozen(_Reading, parse_json(payload))
    except ValueError as problem:
        raise protocol.ProtocolError(f"its reading is invalid: {problem}") from None
