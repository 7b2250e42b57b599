"""Questions to several agents at once: each host answers in its own time, and one that is gone holds up nobody."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stoker.contract import protocol, typed_values
from stoker.contract.text import escape
from stoker.control.cluster import transport
from stoker.control.cluster.agent_pool import AgentClient, AgentPool
from stoker.control.cluster.hosts import Hosts


class Question:
    """Asked of some hosts; filled as they answer."""

    def __init__(self, name: str, what: str, hosts: list[str]) -> None:
        self.name = name
        self.what = what
        self.hosts = hosts
        self.asked = time.time()
        self.more: dict[str, list[Any]] = {host: [] for host in hosts}  # what a probe said before its end
        self.answers: dict[str, Any] = {}
        self.heard: dict[str, float] = {}  # when the answer came, by our clock


@contextlib.contextmanager
def meeting(hosts: Hosts) -> Iterator[ProbeBatch]:
    """With the agents of all these hosts, for as long as they are asked."""
    links = transport.reach_all(hosts)
    members = AgentPool(links, lambda member, *said: asking.hear(member.host, *said), lambda member, line: None)
    asking = ProbeBatch(members.all, members.pump)
    try:
        yield asking
    finally:
        members.close()


class ProbeBatch:
    """`pump(seconds)` waits for the next word of any agent and has it delivered to `hear`."""

    _numbers = itertools.count(1)

    def __init__(self, agents: list[AgentClient], pump: Callable[[float], None]) -> None:
        self.agents = {agent.host: agent for agent in agents}
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
            order = {"do": "probe", "ask": question.name, "what": what, "args": dict(one), "seconds": seconds}
            self.agents[host].say(order)
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
            host: question.answers[host] if host in question.answers else self._silence(host, seconds)
            for host in question.hosts
        }

    def words(self, question: Question, count: int, seconds: float) -> dict[str, Any]:
        """host -> the count-th early word of a probe, or {"error": ...}: it ended first, or said nothing in time."""
        self.wait(seconds, lambda host: len(question.more[host]) >= count or host in question.answers, question.hosts)
        early = {host: question.more[host][count - 1 : count] for host in question.hosts}
        return {
            host: said[0] if said else question.answers.get(host) or self._silence(host, seconds)
            for host, said in early.items()
        }

    def _silence(self, host: str, seconds: float) -> dict[str, str]:
        return {"error": self.agents[host].gone or f"no answer within {seconds:.0f} s"}


TORCH = {"version?": "str | None", "cuda?": "str | None", "archs?": "list[str]", "nccl?": "str | None", "seconds?": "float | None", "error?": "str | None",
         "python?": "str | None"}  # fmt: skip
PORTS = {"ports": "tuple[int, int]"}
PAIR = {"ports": "dict[str, str]", "rtt?": "float | None", "segment?": "int | None", "big?": "bool | None",
        "passes?": "int | None"}  # fmt: skip
RATE = {"rate": "float"}
STORE = {"port": "int"}
TIMES = {"bytes": "int", "times": "list[float]"}
_RESOLVES = {"resolves": "dict[str, list[str]]"}

# By the probe's name. One that says several words (net, torch) ends with nothing; users check its words.
_FINAL: dict[str, dict[str, Any]] = {
    "builds": {"hostname": "str", **_RESOLVES, "torch": TORCH},
    "clock": {"time": "float"},
    "files": {"script": "str | None", "package": "str | None", "names": "dict[str, str]", "paths": "dict[str, str | None]"},
    "names": {**_RESOLVES, "links": {"*": {"speed": "int | None", "physical": "bool"}}},
    "ready": {"problems": "list[str]", "shared": "bool", "unwritable": "str"},
    "route": {"routes": {"*": {"interface?": "str | None", "source?": "str", "mtu?": "int | None", "address?": "str", "error?": "str"}},
              "addresses": "dict[str, list[str]]", "hostname": "str", "reached_at": "str | None"},
    "setup": {"gpus": "list[str | None]", "gpu_error": "str | None", "pythons": "list[dict[str, str | None]]"},
}  # fmt: skip


def read_word(payload: bytes) -> dict[str, Any]:
    """Return any word of a probe, its texts printable."""
    word: dict[str, Any] = _clean(protocol.read_payload("dict[str, Any]", payload, "its answer"))
    return word


def read_answer(what: str, payload: bytes) -> dict[str, Any]:
    """Return the last word of a probe with the fields of its kind, or {"error": ...}."""
    word = read_word(payload)
    if "error" in word:
        return {"error": word["error"]}
    if what == "examine":
        from stoker.control.machine.examination import examination_from_json

        try:
            examination_from_json(word)
        except ValueError as problem:
            return _unfit(what, problem)
        return word
    return fitting(_FINAL[what], word, what) if what in _FINAL else word


def fitting(fields: Mapping[str, Any], word: Any, what: str) -> dict[str, Any]:
    """The word, if it has these fields; {"error": ...} otherwise."""
    if isinstance(word, dict) and set(word) == {"error"}:
        return word
    try:
        return typed_values.read_fields(fields, word)
    except ValueError as problem:
        return _unfit(what, problem)


def _unfit(what: str, problem: ValueError) -> dict[str, Any]:
    return {"error": f"its answer about {what} can't be used: {problem}"}


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, dict):
        return {escape(name): _clean(one) for name, one in value.items()}
    return [_clean(one) for one in value] if isinstance(value, list) else value


# ---- clock skew as NTP has it: a clock that was read within a round trip is known to half of that trip ----


def skews(asking: ProbeBatch, hosts: list[str], times: int = 3) -> dict[str, tuple[float, float]]:
    """host -> (half the round trip, seconds it is ahead of us), of its quickest answer."""
    best: dict[str, tuple[float, float]] = {}
    for _ in range(times):  # one after the other: side by side they would wait for each other
        question = asking.ask("clock", {name: {} for name in hosts}, 5.0)
        for name, answer in asking.answers(question, 3.0).items():
            if "time" in answer:
                half = (question.heard[name] - question.asked) / 2
                seen = (half, answer["time"] - question.asked - half)
                best[name] = min(best.get(name, seen), seen)
    return best
