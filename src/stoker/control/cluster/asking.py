"""Questions to several agents at once: each host answers in its own time, and one that is gone holds up nobody."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from stoker.contract import protocol
from stoker.control.cluster.answers import read_answer, read_word


class Agent(Protocol):
    """One host's agent, as control/launch's Member is."""

    host: str
    gone: str

    def say(self, message: protocol.Message) -> None: ...


class Question:
    """Asked of some hosts; filled as they answer."""

    def __init__(self, name: str, what: str, hosts: list[str]) -> None:
        self.name = name
        self.what = what
        self.hosts = hosts
        self.asked = time.time()
        self.received = dict.fromkeys(hosts, 0)  # bytes
        self.more: dict[str, list[Any]] = {host: [] for host in hosts}  # what a probe said before its end
        self.answers: dict[str, Any] = {}
        self.heard: dict[str, float] = {}  # when the answer came, by our clock


class Asking:
    """`pump(seconds)` waits for the next word of any agent and has it delivered to `hear`."""

    _numbers = itertools.count(1)

    def __init__(self, agents: list[Any], pump: Callable[[float], None]) -> None:
        self.agents: dict[str, Agent] = {agent.host: agent for agent in agents}
        self._pump = pump
        self._open: dict[str, Question] = {}

    @property
    def here(self) -> list[str]:
        return [host for host, agent in self.agents.items() if not agent.gone]

    def hear(self, host: str, message: protocol.Message, payload: bytes) -> bool:
        """False where it was not for us."""
        question = self._open.get(message["ask"]) if message["is"] == "probe" else None
        if question is None:
            return False
        if host not in question.more:
            raise protocol.ProtocolError(f"it answers {question.what!r}, which it was not asked")
        question.received[host] += len(payload)
        if question.received[host] > protocol.PAYLOAD_LIMIT:
            raise protocol.ProtocolError(f"it does not come to an end about {question.what!r}")
        if not message.get("more"):
            question.answers[host] = read_answer(question.what, payload)
            question.heard[host] = time.time()
        else:
            question.more[host].append(read_word(payload))
        return True

    def ask(self, what: str, args: Mapping[str, Mapping[str, Any]], seconds: float) -> Question:
        question = Question(f"check-{next(self._numbers)}", what, list(args))
        self._open[question.name] = question
        for host, one in args.items():
            self.agents[host].say(
                {"do": "probe", "ask": question.name, "what": what, "args": dict(one), "seconds": seconds}
            )
        return question

    def tell(self, question: Question, words: Mapping[str, Any]) -> None:
        for host, word in words.items():
            self.agents[host].say({"do": "tell", "ask": question.name, "word": word})

    def end(self, question: Question) -> None:
        for host in question.hosts:
            if host not in question.answers:
                self.agents[host].say({"do": "unprobe", "ask": question.name})

    def wait(self, seconds: float, done: Callable[[str], bool], hosts: list[str]) -> list[str]:
        """Until `done(host)` of every host that is still there. Returns those that did not get there."""
        deadline = time.monotonic() + seconds
        while True:
            waiting = [host for host in hosts if not done(host)]
            left = deadline - time.monotonic()
            if left <= 0 or all(self.agents[host].gone for host in waiting):
                return waiting
            self._pump(min(left, 0.5))

    def answers(self, question: Question, seconds: float) -> dict[str, Any]:
        """host -> answer; {"error": ...} where there is none."""
        self.wait(seconds, lambda host: host in question.answers, question.hosts)
        return {
            host: question.answers[host] if host in question.answers else self._silence(host) for host in question.hosts
        }

    def words(self, question: Question, count: int, seconds: float) -> dict[str, Any]:
        """host -> the count-th early word of a probe, or {"error": ...}: it ended first, or said nothing in time."""
        self.wait(seconds, lambda host: len(question.more[host]) >= count or host in question.answers, question.hosts)
        found = {}
        for host in question.hosts:
            said = question.more[host]
            found[host] = said[count - 1] if len(said) >= count else question.answers.get(host) or self._silence(host)
        return found

    def _silence(self, host: str) -> dict[str, str]:
        return {"error": self.agents[host].gone or "no answer"}
