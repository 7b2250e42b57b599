"""How long it takes to look up this host's own name and addresses, and which name server keeps it waiting.

torch looks up both for each new connection. A server that does not answer costs 5 to 30 s a lookup, and fails none.
"""

from __future__ import annotations

import fcntl
import functools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from stoker.contract.frozen import frozen
from stoker.contract.process import read_kernel_file

SLOW_S = 1.5  # a lookup that takes longer holds up connections; a server far away answers in 0.3 s
ANSWER_S = 0.7
_SIOCGIFADDR = 0x8915
# The root's name servers: a question that each server answers, or passes on.
_QUESTION = struct.pack("!6H", 0x5354, 0x0100, 1, 0, 0, 0) + b"\0" + struct.pack("!2H", 2, 1)


@frozen
class Lookups:
    addresses: tuple[str, ...] = ()  # what the host's own name resolves to
    error: str | None = None  # why it resolves to none
    slow: bool = False  # some lookup has not ended within SLOW_S
    silent_servers: tuple[str, ...] = ()  # name servers that do not answer; asked only where it is slow


def look_up(name: str, interfaces: tuple[str, ...]) -> Lookups:
    own = next((address for address in map(_address, interfaces) if address), None)
    forward = _Lookup(lambda: sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}))
    lookups = [forward]
    if own is not None:
        address = own, 0
        lookups.append(_Lookup(lambda: socket.getnameinfo(address, 0)))
    deadline = time.monotonic() + SLOW_S
    for lookup in lookups:
        lookup.thread.join(max(0.0, deadline - time.monotonic()))
    slow = any(lookup.thread.is_alive() for lookup in lookups)
    return Lookups(tuple(forward.answer), forward.error, slow, _silent(_servers()) if slow else ())


class _Lookup:
    """In a thread: a lookup can't be stopped. A process that waits no longer leaves by os._exit()."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.answer: Any = ()
        self.error: str | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.answer = self._function()
        except OSError as problem:
            self.error = str(problem)


def _address(interface: str) -> str | None:
    """Its first IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            answer = fcntl.ioctl(one.fileno(), _SIOCGIFADDR, struct.pack("256s", os.fsencode(interface)[:15]))
        except OSError:
            return None  # it has none
    return socket.inet_ntoa(answer[20:24])


def _servers() -> tuple[str, ...]:
    words = (line.split() for line in read_kernel_file("/etc/resolv.conf").splitlines())
    return tuple(line[1] for line in words if len(line) > 1 and line[0] == "nameserver")[
        :3
    ]  # the C library reads three


def _silent(servers: tuple[str, ...]) -> tuple[str, ...]:
    """Those that give no answer of any kind within ANSWER_S; all are asked at once."""
    questions = [(server, _Lookup(functools.partial(_ask, server))) for server in servers]
    for _, question in questions:
        question.thread.join(ANSWER_S + 0.3)
    return tuple(server for server, question in questions if not question.answer)


def _ask(server: str) -> bytes:
    with socket.socket(socket.AF_INET6 if ":" in server else socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.settimeout(ANSWER_S)
        one.connect((server.partition("%")[0], 53))
        one.send(_QUESTION)
        return one.recv(4096)
