"""Sends probes to several agents in one batch and checks their answers. A lost host does not delay the others."""

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


class PendingProbe:
    """A probe that runs on several hosts, with the answers received so far."""

    def __init__(self, id: str, what: str, hosts: list[str]) -> None:
        self.id = id
        self.what = what
        self.hosts = hosts
        self.sent_at = time.time()
        self.partial: dict[str, list[Any]] = {host: [] for host in hosts}  # host -> answers before the final one
        self.answers: dict[str, Any] = {}  # host -> final answer
        self.answered_at: dict[str, float] = {}  # host -> time of the final answer, by this machine's clock


@contextlib.contextmanager
def open_probe_batch(hosts: Hosts) -> Iterator[ProbeBatch]:
    """Start agents on these hosts that only run probes, and end them after the block."""
    links = transport.connect_all(hosts)
    pool = AgentPool(links, lambda client, *message: batch.on_message(client.host, *message), lambda client, line: None)
    batch = ProbeBatch(pool.all, pool.pump)
    try:
        yield batch
    finally:
        pool.close()


class ProbeBatch:
    """Sends probes to agents and collects the answers.

    `pump(seconds)` must wait for messages and pass them to `on_message`.
    """

    _numbers = itertools.count(1)

    def __init__(self, agents: list[AgentClient], pump: Callable[[float], None]) -> None:
        self.agents = {agent.host: agent for agent in agents}
        self._pump = pump
        self._pending: dict[str, PendingProbe] = {}

    def on_message(self, host: str, message: protocol.Message, payload: bytes) -> bool:
        """Store an answer. Return False if the message belongs to no probe of this batch."""
        probe = self._pending.get(message["ask"]) if message["is"] == "probe" else None
        if probe is None:
            return False
        if message.get("more"):
            probe.partial[host].append(read_partial_answer(payload))
        else:
            probe.answers[host] = read_answer(probe.what, payload)
            probe.answered_at[host] = time.time()
        return True

    def ask(self, what: str, args: Mapping[str, Mapping[str, Any]], seconds: float) -> PendingProbe:
        """Start a probe on each host of `args` (host -> arguments). It may run for `seconds` there."""
        probe = PendingProbe(f"check-{next(self._numbers)}", what, list(args))
        self._pending[probe.id] = probe
        for host, host_args in args.items():
            order = {"do": "probe", "ask": probe.id, "what": what, "args": dict(host_args), "seconds": seconds}
            self.agents[host].say(order)
        return probe

    def send(self, probe: PendingProbe, orders: Mapping[str, Any]) -> None:
        """Send orders (host -> order) to a running probe."""
        for host, order in orders.items():
            self.agents[host].say({"do": "tell", "ask": probe.id, "word": order})

    def cancel(self, probe: PendingProbe) -> None:
        """End the probe on the hosts that have not answered yet."""
        for host in probe.hosts:
            if host not in probe.answers:
                self.agents[host].say({"do": "unprobe", "ask": probe.id})

    def wait(self, seconds: float, done: Callable[[str], bool], hosts: list[str]) -> list[str]:
        """Wait until `done(host)` is true for every host that is not lost. Return the hosts for which it is not."""
        deadline = time.monotonic() + seconds
        while True:
            waiting = [host for host in hosts if not done(host)]
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0 or all(self.agents[host].gone for host in waiting):
                return waiting
            self._pump(min(seconds_left, 0.5))

    def answers(self, probe: PendingProbe, seconds: float) -> dict[str, Any]:
        """Wait for the final answers. Return host -> answer, or {"error": ...} for a host that did not answer."""
        self.wait(seconds, lambda host: host in probe.answers, probe.hosts)
        return {
            host: probe.answers[host] if host in probe.answers else self._missing_answer(host, seconds)
            for host in probe.hosts
        }

    def partial_answers(self, probe: PendingProbe, count: int, seconds: float) -> dict[str, Any]:
        """Wait for the partial answers number `count`. Return host -> answer, or {"error": ...} if the probe failed."""
        self.wait(seconds, lambda host: len(probe.partial[host]) >= count or host in probe.answers, probe.hosts)
        return {
            host: probe.partial[host][count - 1]
            if len(probe.partial[host]) >= count
            else probe.answers.get(host) or self._missing_answer(host, seconds)
            for host in probe.hosts
        }

    def _missing_answer(self, host: str, seconds: float) -> dict[str, str]:
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

# The fields of each probe's final answer. The final answers of net and torch are empty; callers check their partial ones.
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


def read_partial_answer(payload: bytes) -> dict[str, Any]:
    """Return an answer of any probe, with control characters in its texts escaped. Raises ProtocolError."""
    answer: dict[str, Any] = _escape_texts(protocol.read_payload("dict[str, Any]", payload, "its answer"))
    return answer


def read_answer(what: str, payload: bytes) -> dict[str, Any]:
    """Return the final answer of a probe with the fields of its type, or {"error": ...}."""
    answer = read_partial_answer(payload)
    if "error" in answer:
        return {"error": answer["error"]}
    if what == "examine":
        from stoker.control.machine.examination import examination_from_json

        try:
            examination_from_json(answer)
        except ValueError as problem:
            return _invalid_answer(what, problem)
        return answer
    return check_answer(_FINAL[what], answer, what) if what in _FINAL else answer


def check_answer(fields: Mapping[str, Any], answer: Any, what: str) -> dict[str, Any]:
    """Return the answer if it has these fields or is an error, else {"error": ...}."""
    if isinstance(answer, dict) and set(answer) == {"error"}:
        return answer
    try:
        return typed_values.read_fields(fields, answer)
    except ValueError as problem:
        return _invalid_answer(what, problem)


def _invalid_answer(what: str, problem: ValueError) -> dict[str, Any]:
    return {"error": f"its answer about {what} can't be used: {problem}"}


def _escape_texts(value: Any) -> Any:
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, dict):
        return {escape(name): _escape_texts(item) for name, item in value.items()}
    return [_escape_texts(item) for item in value] if isinstance(value, list) else value


def measure_clock_skew(batch: ProbeBatch, hosts: list[str], times: int = 3) -> dict[str, tuple[float, float]]:
    """Return host -> (maximum error, seconds that its clock is ahead of ours), from its fastest answer, as NTP does.

    The host read its clock at some moment of the round trip, so half the round trip bounds the error.
    """
    best: dict[str, tuple[float, float]] = {}
    for _ in range(times):  # not in one batch, where the probes would delay each other
        probe = batch.ask("clock", {name: {} for name in hosts}, 5.0)
        for name, answer in batch.answers(probe, 3.0).items():
            if "time" in answer:
                half = (probe.answered_at[name] - probe.sent_at) / 2
                measured = (half, answer["time"] - probe.sent_at - half)
                best[name] = min(best.get(name, measured), measured)
    return best
