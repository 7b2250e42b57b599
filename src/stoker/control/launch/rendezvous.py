"""Machines started by hand without numbers: they meet at --rdzv-endpoint. Who owns that address listens, numbers the others as they come
and tells everybody. One line of JSON from each, one back; the listening ends with that.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from typing import Any

from stoker.contract.names import EX_TEMPFAIL, EX_UNAVAILABLE, Refusal
from stoker.contract.quantities import span
from stoker.control.launch.nodes import Meeting, Nodes

PATIENCE_S = 600.0  # torchrun's
AGAIN_S = 0.5
_HELLO_S = 5.0
_LONGEST = 4096


def meet(told: Meeting, ranks: int, store_port: Callable[[], int], rest: Callable[[], None], say: Callable[[str], None]) -> Nodes:
    """`store_port`: reserves the port of rank 0's store, called on the machine that becomes number 0. `rest`: called while waiting; may raise to stop it."""
    deadline = time.monotonic() + PATIENCE_S
    family, kind, _, _, where = _resolve(told)
    with socket.socket(family, kind) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            own.bind(where)  # only its owner can: that machine is number 0
            own.listen(1024)
        except OSError:
            return _ask(told, ranks, where, family, deadline, rest, say)
        say(f"stoker: waiting at {told.address}:{told.port} for {_more(told)}")
        return _receive(told, ranks, own, deadline, store_port, rest)


def _resolve(told: Meeting) -> Any:
    try:
        return socket.getaddrinfo(told.address, told.port, type=socket.SOCK_STREAM)[0]
    except OSError as problem:
        raise Refusal(f"--rdzv-endpoint {told.address}:{told.port}: {problem.strerror}", EX_UNAVAILABLE, cause="launch.nodes") from problem


def _more(told: Meeting) -> str:
    if told.most <= told.count:
        return f"{told.count - 1} more machine(s)"
    at_least = f"{told.count - 1} to " if told.count > 1 else "up to "
    return f"{at_least}{told.most - 1} more machine(s), {span(told.last_call)} after the last that is needed"


def _receive(told: Meeting, ranks: int, own: socket.socket, deadline: float, store_port: Callable[[], int], rest: Callable[[], None]) -> Nodes:
    own.settimeout(0.2)
    guests: list[tuple[socket.socket, int]] = []
    last_call = 0.0  # when it ends; 0: there are not enough yet
    try:
        while len(guests := [guest for guest in guests if _stays(guest[0])]) < max(told.most, told.count) - 1:
            rest()
            if len(guests) < told.count - 1:
                last_call = 0.0
            elif not last_call:
                last_call = time.monotonic() + told.last_call
            elif time.monotonic() > last_call:
                break
            if not last_call and time.monotonic() > deadline:
                line = f"{len(guests) + 1} of {told.count} machines came to {told.address}:{told.port} within {span(PATIENCE_S)}"
                raise Refusal(line, EX_TEMPFAIL, cause="launch.nodes")
            try:
                guest, _ = own.accept()
            except TimeoutError:
                continue
            hello = _wait_line(guest, min(deadline, time.monotonic() + _HELLO_S), rest)
            if hello.get("job") != told.name or hello.get("count") != told.count or not isinstance(hello.get("ranks"), int):
                with guest, contextlib.suppress(OSError):  # a stranger that asks nothing need not hear it
                    _send(guest, {"refused": f"another job meets there: {told.count} machines, --rdzv-id {told.name or 'none'}"})
                continue
            guests.append((guest, hello["ranks"]))
        world = ranks + sum(count for _, count in guests)
        port, first, nodes = store_port(), ranks, 1 + len(guests)
        for number, (guest, count) in enumerate(guests, 1):
            _send(guest, {"rank": number, "first": first, "world": world, "port": port, "nodes": nodes})
            first += count
        return Nodes(nodes, 0, 0, world, told.address, port)
    finally:
        for guest, _ in guests:
            guest.close()


def _ask(told: Meeting, ranks: int, where: Any, family: int, deadline: float, rest: Callable[[], None], say: Callable[[str], None]) -> Nodes:
    said = False
    while True:
        with socket.socket(family, socket.SOCK_STREAM) as way:
            way.settimeout(2.0)
            problem = ""
            try:
                way.connect(where)
                _send(way, {"job": told.name, "count": told.count, "ranks": ranks})
                answer = _wait_line(way, deadline, rest)
            except OSError as refused:
                answer, problem = {}, refused.strerror or str(refused)
        if "refused" in answer:
            raise Refusal(f"--rdzv-endpoint {told.address}:{told.port}: {answer['refused']}", EX_UNAVAILABLE, cause="launch.nodes")
        if answer:
            return Nodes(answer["nodes"], answer["rank"], answer["first"], answer["world"], told.address, answer["port"])
        if not said:
            said = True
            say(f"stoker: nobody answers at {told.address}:{told.port} yet ({problem or 'closed'}); trying for up to {span(PATIENCE_S)}")
        if time.monotonic() > deadline:
            raise Refusal(f"nobody answered at {told.address}:{told.port} within {span(PATIENCE_S)}: {problem}", EX_TEMPFAIL, cause="launch.nodes")
        until = time.monotonic() + AGAIN_S
        while time.monotonic() < until:
            rest()


def _wait_line(way: socket.socket, deadline: float, rest: Callable[[], None]) -> dict[str, Any]:
    """The others may come minutes later: in pieces, so that signals and pings get their turn."""
    way.settimeout(0.2)
    data = b""
    while not data.endswith(b"\n") and time.monotonic() < deadline:
        rest()
        try:
            more = way.recv(_LONGEST)
        except TimeoutError:
            continue
        except OSError:
            break
        if not more or len(data) > _LONGEST:
            break
        data += more
    return _read(data)


def _stays(guest: socket.socket) -> bool:
    """Who was stopped and started again comes a second time: its first connection is closed by then."""
    if guest.fileno() < 0:
        return False
    guest.setblocking(False)
    try:
        stays = guest.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        stays = True
    except OSError:
        stays = False
    guest.settimeout(_HELLO_S)
    if not stays:
        guest.close()
    return stays


def _read(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _send(way: socket.socket, word: dict[str, Any]) -> None:
    way.sendall(json.dumps(word).encode() + b"\n")
