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
from stoker.control.agent.inspection import inspect
from stoker.control.agent.relay import Relay
from stoker.control.agent.spawn import Rank
from stoker.control.agent.spy import LOOK_S
from stoker.control.agent.sweep import Sweeper

LIMIT_S = 60.0  # where the order does not say
_MORE, _LAST = b"+", b"="
_NOTHING = {"error": "it ended without an answer: it took too long, or was ended"}


class Questions:
    def __init__(self, selector: selectors.BaseSelector, relay: Relay, sweeper: Sweeper) -> None:
        self._selector = selector
        self._relay = relay
        self._sweeper = sweeper
        self._children: dict[int, Child] = {}

    def inspect(self, order: protocol.Message, ranks: Iterable[Rank]) -> None:
        """Stacks and the flight recorder may take seconds, and a sick kernel may keep whoever asks. One at a time."""
        asked = [rank for rank in ranks if order.get("ranks") is None or rank.rank in order["ranks"]]
        answer: protocol.Message = {"is": "inspection", "ask": order["ask"]}
        if asked and not any(child.answer["is"] == "inspection" for child in self._children.values()):
            self._begin(Child(answer, {}, LOOK_S * 3, lambda: iter([(_LAST, inspect(order, asked))])))
        else:
            self._relay.say(answer, b"{}\n")

    def probe(self, order: protocol.Message) -> None:
        answer: protocol.Message = {"is": "probe", "ask": order["ask"], "what": order["what"]}
        seconds = float(order.get("seconds", LIMIT_S))
        self._begin(Child(answer, _NOTHING, seconds, lambda: _answers(order["what"], order.get("args") or {})))

    def _begin(self, child: Child) -> None:
        self._children[child.handle] = child
        self._sweeper.spare.add(child.pid)  # ends by itself, and is nothing the ranks left behind
        self._selector.register(child.handle, selectors.EVENT_READ, "look")

    def tell(self, order: protocol.Message) -> None:
        """To a probe that runs: a word, or its end."""
        for child in self._children.values():
            if child.answer["ask"] == order["ask"]:
                child.tell(order["word"]) if order["do"] == "tell" else child.end()

    def read(self, handle: int) -> None:
        child = self._children[handle]
        for message, payload in child.read():
            if "more" not in message:
                self._selector.unregister(handle)
                self._sweeper.spare.discard(child.pid)
                del self._children[handle]
            self._relay.say(message, payload)


class Child:
    """Forked. `work` gives its words, marked _MORE, and last its answer; `nothing` is sent where there is none."""

    def __init__(
        self,
        answer: protocol.Message,
        nothing: dict[str, Any],
        seconds: float,
        work: Callable[[], Iterator[tuple[bytes, Any]]],
    ) -> None:
        self.answer = answer
        self._payload = json.dumps(nothing).encode()
        self._words = b""
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
            self._run(work, told, write, agent, seconds)
        os.close(write)
        os.close(told)
        self._me = process(self.pid)

    def _run(self, work: Callable[[], Any], told: int, write: int, agent: int, seconds: float) -> None:
        """In the child. Never returns."""
        try:
            kernel.die_with_parent(agent)
            os.dup2(told, 0)
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.dup2(write, 3)
            # The protocol's, the guardian's and the ranks' ends: their closing must mean what it means.
            os.closerange(4, 4096)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            for mark, word in work():
                text = mark + json.dumps(word).encode() + b"\n"
                while text:
                    text = text[os.write(3, text) :]
        except BaseException as problem:
            what = f"a probe ({self.answer['what']})" if "what" in self.answer else "an inspection"
            line = printable(f"stoker: {what} failed: {type(problem).__name__}: {problem}")
            os.write(2, line.encode() + b"\n")
        os._exit(0)

    def read(self) -> Iterator[tuple[protocol.Message, bytes]]:
        """What to tell; the one without "more" is the last, and `handle` is closed by then."""
        try:
            data = os.read(self.handle, 1 << 18)
        except BlockingIOError:
            return
        *lines, self._words = (self._words + data).split(b"\n")
        for line in lines:
            if line.startswith(_MORE):
                yield {**self.answer, "more": True}, line[1:] + b"\n"
            else:
                self._payload = line[1:]
        if not data:
            os.close(self.handle)
            os.close(self._tell)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)  # its pipe is closed by its end
            yield self.answer, self._payload + b"\n"  # some transports pass whole lines on only

    def tell(self, word: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended: its answer is on its way
            os.write(self._tell, json.dumps(word).encode() + b"\n")

    def end(self) -> None:
        """Its answer is not wanted any more. Its pipe closes, and that is told like any other end."""
        if self._me is not None:
            send(self._me, signal.SIGKILL)


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

# name -> the file of this folder it is in; imported when asked for, in the forked child
PROBES = {
    **dict.fromkeys(("builds", "clock", "examine", "names", "setup"), "probe_builds"),
    **dict.fromkeys(("files", "ready"), "probe_ready"),
    "net": "probe_net",
    "route": "probe_route",
    "torch": "probe_torch",
}


def find(name: str) -> Callable[..., Any]:
    from importlib import import_module  # in the child: the agent itself does without

    found: Callable[..., Any] = getattr(import_module(f"stoker.control.agent.{PROBES[name]}"), name)
    return found
