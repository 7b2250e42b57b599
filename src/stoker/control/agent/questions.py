"""What the agent has children look at: ranks that may be stuck (inspection.py), and questions about this host, the probes.
They may block; the agent goes on.

A probe is a plain function in a file of PROBES: what it returns is its answer. One that has something to say before its
end yields that: those words are marked "more". It may also be told more while it runs: JSON lines on its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from stoker.contract import protocol
from stoker.contract.process import process, send
from stoker.contract.untrusted import printable
from stoker.control.agent import kernel
from stoker.control.agent.inspection import Inspection
from stoker.control.agent.relay import Relay
from stoker.control.agent.spawn import Rank
from stoker.control.agent.sweep import Sweeper


class Questions:
    def __init__(self, selector: selectors.BaseSelector, relay: Relay, sweeper: Sweeper) -> None:
        self._selector = selector
        self._relay = relay
        self._sweeper = sweeper
        self._inspections: dict[int, Inspection] = {}
        self._probes: dict[int, Probe] = {}

    def inspect(self, order: protocol.Message, ranks: Iterable[Rank]) -> None:
        """Stacks and the flight recorder may take seconds, and a sick kernel may keep whoever asks. One at a time."""
        asked = [rank for rank in ranks if order.get("ranks") is None or rank.rank in order["ranks"]]
        if asked and not self._inspections:
            one = Inspection(order, asked)
            self._inspections[one.handle] = one
            self._sweeper.spare.add(one.pid)  # ends by itself, and is nothing the ranks left behind
            self._selector.register(one.handle, selectors.EVENT_READ, "look")
        else:
            self._relay.say({"is": "inspection", "ask": order["ask"]}, b"{}\n")

    def probe(self, order: protocol.Message) -> None:
        one = Probe(order)
        self._probes[one.handle] = one
        self._sweeper.spare.add(one.pid)
        self._selector.register(one.handle, selectors.EVENT_READ, "look")

    def tell(self, order: protocol.Message) -> None:
        """To a probe that runs: a word, or its end."""
        for one in self._probes.values():
            if one.ask == order["ask"]:
                one.tell(order["word"]) if order["do"] == "tell" else one.end()

    def read(self, handle: int) -> None:
        if handle in self._inspections:
            looked = self._inspections[handle]
            if looked.read():
                self._forget(handle, looked.pid)
                del self._inspections[handle]
                self._relay.say({"is": "inspection", "ask": looked.ask}, looked.answer())
            return
        one = self._probes[handle]
        for message, payload in one.read():
            if "more" not in message:
                self._forget(handle, one.pid)
                del self._probes[handle]
            self._relay.say(message, payload)

    def _forget(self, handle: int, pid: int) -> None:
        self._selector.unregister(handle)
        self._sweeper.spare.discard(pid)


LIMIT_S = 60.0  # where the order does not say
_MORE, _LAST = b"+", b"="


class Probe:
    """Started by an order {"ask", "what", "args", "seconds"}."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.ask, self.what = order["ask"], order["what"]
        self._words = b""
        self._answered = False
        self.handle, write = os.pipe()
        told, self._tell = os.pipe()
        os.set_blocking(self.handle, False)
        os.set_blocking(self._tell, False)
        agent = os.getpid()
        try:
            self.pid = os.fork()
        except OSError:
            for handle in (self.handle, write, told, self._tell):
                os.close(handle)
            raise
        if self.pid == 0:
            _in_child(order, told, write, agent)
        os.close(write)
        os.close(told)
        self._me = process(self.pid)

    def read(self) -> Iterator[tuple[protocol.Message, bytes]]:
        """What to tell; the one without "more" is the last, and `handle` is closed by then."""
        try:
            data = os.read(self.handle, 1 << 18)
        except BlockingIOError:
            return
        *lines, self._words = (self._words + data).split(b"\n")
        for line in lines:
            if line.startswith(_MORE):
                yield {"is": "probe", "ask": self.ask, "what": self.what, "more": True}, line[1:] + b"\n"
            else:
                self._answer = line[1:]
                self._answered = True
        if not data:
            os.close(self.handle)
            os.close(self._tell)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)  # its pipe is closed by its end
            nothing = json.dumps({"error": "it ended without an answer: it took too long, or was ended"}).encode()
            yield (
                {"is": "probe", "ask": self.ask, "what": self.what},
                (self._answer if self._answered else nothing) + b"\n",
            )  # some transports pass whole lines on only

    def tell(self, word: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended: its answer is on its way
            os.write(self._tell, json.dumps(word).encode() + b"\n")

    def end(self) -> None:
        """Its answer is not wanted any more. Its pipe closes, and that is told like any other end."""
        if self._me is not None:
            send(self._me, signal.SIGKILL)


def _in_child(order: dict[str, Any], told: int, write: int, agent: int) -> None:
    """Never returns."""
    try:
        kernel.die_with_parent(agent)
        os.dup2(told, 0)
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(write, 3)
        os.closerange(
            4, 4096
        )  # the protocol's, the guardian's and the ranks' ends: their closing must mean what it means
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, float(order.get("seconds", LIMIT_S)))
        for mark, word in _answers(order["what"], order.get("args") or {}):
            text = mark + json.dumps(word).encode() + b"\n"
            while text:
                text = text[os.write(3, text) :]
    except BaseException as problem:
        os.write(
            2,
            printable(f"stoker: a probe ({order['what']}) failed: {type(problem).__name__}: {problem}").encode()
            + b"\n",
        )
    os._exit(0)


def _answers(what: str, args: dict[str, Any]) -> Iterator[tuple[bytes, Any]]:
    """What can go wrong on a host is an answer too: {"error": ...}."""
    if what not in PROBES:
        yield _LAST, {"error": f"this agent has no probe {what!r}"}
        return
    try:
        found = find(what)(**args)
        if isinstance(found, Iterator):
            for word in found:
                yield _MORE, word
            found = {}
    except Exception as problem:
        found = {"error": f"{type(problem).__name__}: {problem}" if not isinstance(problem, OSError) else str(problem)}
    yield _LAST, found


# ---- the probes. Adding one: a file with a function of the probe's name, and its line here ----

# name -> the file of this folder it is in; imported when asked for, in the forked child (probing.py)
PROBES = {
    "builds": "probe_builds",
    "clock": "probe_builds",
    "examine": "probe_examine",
    "files": "probe_files",
    "names": "probe_builds",
    "net": "probe_net",
    "ready": "probe_ready",
    "route": "probe_route",
    "setup": "probe_setup",
    "torch": "probe_torch",
}


def find(name: str) -> Callable[..., Any]:
    from importlib import import_module  # in the child: the agent itself does without

    found: Callable[..., Any] = getattr(import_module(f"stoker.control.agent.{PROBES[name]}"), name)
    return found
