"""Simulated agents for benchmarks/coordinator.py: one process that speaks the real protocol for many hosts, as real agents with busy ranks do.

    coordinator_agent.py connect SOCKET ARGS...   stands in for ssh: hands its own stdin and stdout over to the player, and waits
    coordinator_agent.py play SOCKET --ranks 8    the player: ends the ranks when its stdin is closed, then says what they printed

What a rank says: imports for 2 s, then a step every 0.5 s with a line of output; 12 collectives a step in its flight recorder. What its agent
makes of that follows control/agent: a line goes out as it comes, streams then rest until the next tenth of a second, beats go out twice a
second at most, a ping every second, each with the first wake at which it is due.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import os
import random
import selectors
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEP_S = 0.5
IMPORTS_S = 2.0
REST_S = 0.1
COLLECTIVES = 12  # a step: the buckets of a DDP model
REMEMBERED = 400  # collectives the flight recorder's answer has
MACHINE = Path(__file__).resolve().parent.parent / "tests" / "machines" / "box8-healthy.json"


def connect(path: str, argv: list[str]) -> None:
    """In place of ssh. The file descriptors themselves go to the player: nothing is copied in between."""
    player = socket.socket(socket.AF_UNIX)
    player.connect(path)
    socket.send_fds(player, [json.dumps(argv).encode()], [0, 1])
    null = os.open(os.devnull, os.O_RDWR)
    for handle in (1, 2):
        os.dup2(null, handle)
    os.dup2(player.fileno(), 0)
    os.execv("/bin/cat", ["cat"])  # small, and ends when the player closes its end


class Agent:
    """One host's."""

    def __init__(
        self, player: Player, connection: socket.socket, number: int, argv: list[str], orders: int, answers: int
    ) -> None:
        import shlex

        from stoker.contract import protocol

        self._protocol = protocol
        self._player = player
        self._connection = connection
        self._number = number
        self.host = argv[argv.index("--") + 1]
        self._orders, self._answers = orders, answers
        self._bundle = int(shlex.split(argv[-1])[-2])  # bytes of the agent's files, which come first
        self._decoder = protocol.Decoder()
        self._outbox = bytearray()
        self._ranks: list[int] = []
        self._split = False
        self._beaten: dict[int, int] = {}  # ranks that have stepped since the last beats, and their step
        self._stepped: set[int] = set()
        self._beats_at = self._ping_at = self._vitals_at = 0.0
        self._step = 0
        self.closed = False

    # ---- the protocol ----

    def read(self) -> None:
        try:
            data = os.read(self._orders, 1 << 18)
        except BlockingIOError:
            return
        if not data:
            self.close()
            return
        if self._bundle:
            swallowed = min(self._bundle, len(data))
            self._bundle -= swallowed
            data = data[swallowed:]
            if not self._bundle:
                self._outbox += self._protocol.SENTINEL
        for order, _ in self._decoder.feed(data):
            self._obey(order)
        self.flush()

    def say(self, message: dict[str, Any], payload: bytes = b"") -> None:
        self._outbox += self._protocol.encode(message, payload)

    def flush(self) -> None:
        while self._outbox and not self.closed:
            try:
                del self._outbox[: os.write(self._answers, memoryview(self._outbox)[: 1 << 18])]
            except BlockingIOError:
                self._player.at(time.monotonic() + 0.01, self.flush)
                return
            except BrokenPipeError:
                self.close()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._player.forget(self._orders)
            for handle in (self._orders, self._answers):
                os.close(handle)
            self._connection.close()

    def _obey(self, order: dict[str, Any]) -> None:
        do = order["do"]
        if do in ("open", "look"):
            self.say(
                {
                    "is": "host",
                    "machine": self._machine(),
                    "held": {},
                    "pid": 1000,
                    "guardian": 999,
                    "selves": [[999, 1], [1000, 2]],
                    "found": [],
                    "visible": None,
                }
            )
        elif do == "lock":
            self.say({"is": "locked", "refused": {}})
        elif do == "reserve":
            self.say({"is": "port", "port": order["port"] or 29500})
        elif do == "start":
            self._start(order)
        elif do == "probe":
            self._probe(order)
        elif do == "tell" and order["word"]["do"] == "meet":
            passes = {"rtt": 0.0002, "segment": 1448, "big": True}
            met = {
                name: {"ports": dict.fromkeys(map(str, peer["ports"]), ""), **passes}
                for name, peer in order["word"]["peers"].items()
            }
            self.say(
                {"is": "probe", "ask": order["ask"], "what": "net", "more": True}, json.dumps(met).encode() + b"\n"
            )
        elif do == "unprobe":
            self._answer(order, {"error": "it ended without an answer: it took too long, or was ended"})
        elif do == "inspect":
            self.say({"is": "inspection", "ask": order["ask"]}, json.dumps(self._inspect(order)).encode() + b"\n")
        elif do == "stop":
            self.end_ranks(ours=True)
        elif do == "finish":
            self.say({"is": "finished", "stopped": [], "gpus_held": [], "stuck": []})
        elif do == "close":
            self.flush()
            self.close()

    def _machine(self) -> dict[str, Any]:
        machine: dict[str, Any] = json.loads(json.dumps(self._player.machine))
        for gpu in machine["gpus"]:
            gpu["uuid"] = f"GPU-{self._number:08x}-0000-0000-0000-{gpu['index']:012x}"
        return machine

    def _answer(self, order: dict[str, Any], answer: Any) -> None:
        self.say(
            {"is": "probe", "ask": order["ask"], "what": order.get("what", "net")}, json.dumps(answer).encode() + b"\n"
        )

    def _probe(self, order: dict[str, Any]) -> None:
        what, args = order["what"], order["args"]
        if what == "net":
            self.say(
                {"is": "probe", "ask": order["ask"], "what": "net", "more": True},
                json.dumps({"ports": [29500, 40000 + self._number]}).encode() + b"\n",
            )
        elif what == "route":
            way = {"interface": "eth0", "source": self.host, "mtu": 1500}
            self._answer(
                order,
                {
                    "routes": {to: {**way, "address": to} for to in args["to"]},
                    "addresses": {"lo": ["127.0.0.1"], "eth0": [self.host]},
                    "hostname": self.host,
                    "hostname_resolves_to": [self.host],
                    "reached_at": self.host,
                },
            )
        elif what == "ready":
            self._answer(order, {"problems": [], "shared": True, "unwritable": ""})
        elif what == "files":
            self._answer(
                order, {"script": "ab" * 32, "package": "cd" * 32, "names": {"train.py": "ab" * 32}, "paths": {}}
            )
        elif what == "builds":
            torch = {"python": "3.12.3", "version": "2.13.0+cu130", "cuda": "13.0"}
            self._answer(order, {"hostname": self.host, "resolves": {self.host: [self.host]}, "torch": torch})
        elif what == "clock":
            self._answer(order, {"time": time.time()})
        else:
            self._answer(order, {"error": f"this agent has no probe {what!r}"})

    # ---- the ranks ----

    def _start(self, order: dict[str, Any]) -> None:
        now = time.monotonic()
        self._split = order["common"]["split"]
        self._ranks = [spec["rank"] for spec in order["ranks"]]
        for rank in self._ranks:
            self.say({"is": "up", "rank": rank, "pid": 2000 + rank, "time": time.time()})
        self._player.at(now + 0.1, self._begun)
        self._player.at(now + IMPORTS_S, self._imported)
        self._wake_later(now)
        self._player.started(self)

    def _memory(self, rank: int, where: str, note: str = "") -> None:
        self.say(
            {
                "is": "mem",
                "rank": rank,
                "at": where,
                "note": note,
                "rss": 3_500_000_000,
                "host_used": 90_000_000_000,
                "host_total": 1_080_000_000_000,
                "gpu": [40_000_000_000, 85_899_345_920],
            }
        )

    def _begun(self) -> None:
        for rank in self._ranks:
            self._memory(rank, "START")
        self.flush()

    def _imported(self) -> None:
        for rank in self._ranks:
            self._memory(rank, "POST-IMPORT")
            self.say({"is": "groups", "rank": rank, "groups": "0=*"})
        self.flush()

    def _wake_later(self, now: float) -> None:
        """Until the first step: the loop's own pause."""
        self._wake(now)
        if not self._step and not self.closed:
            self._player.at(now + STEP_S, lambda: self._wake_later(time.monotonic()))

    def step(self, number: int, when: float) -> None:
        """All ranks make this step about now; each prints its line a moment later."""
        if self.closed:
            return
        self._step = number
        moments = sorted((when + random.random() * self._player.jitter, rank) for rank in self._ranks)
        for moment, rank in moments:
            self._player.at(moment, lambda rank=rank: self._print(rank, number))
        rest = (moments[-1][0] // REST_S + 1) * REST_S  # as the relay does: all streams wake together
        self._player.at(rest, lambda: self._wake(time.monotonic()))

    def _print(self, rank: int, number: int) -> None:
        if self.closed or rank not in self._ranks:
            return
        loss = 2.0 + 9.0 / (number + 1) + 0.01 * random.random()
        line = (
            f"step {number} | loss {loss:.4f} | lr 3.00e-04 | grad norm {random.random():.4f} | 12.8k tokens/s | 61.3"
            " GB\n".encode()
        )
        self.say({"is": "out", "rank": rank, "fd": 1 if self._split else 0}, line)
        self._beaten[rank] = number
        self._player.lines += 1
        self._wake(time.monotonic())

    def _wake(self, now: float) -> None:
        """What the agent's loop does whenever it wakes."""
        if self.closed or not self._ranks:
            return
        if now - self._ping_at >= self._protocol.PING_S:
            self._ping_at = now
            self.say({"is": "ping"})
        if now - self._beats_at >= STEP_S:
            self._beats_at = now
            if self._beaten:
                ns = time.time_ns()
                self.say(
                    {
                        "is": "beats",
                        "ranks": {
                            str(rank): [number, ns, 1, round(STEP_S + random.random() * 0.005, 4), []]
                            for rank, number in self._beaten.items()
                        },
                    }
                )
                first = [rank for rank in self._beaten if rank not in self._stepped]
                for rank in first:
                    self.say({"is": "first-step", "rank": rank, "time": ns / 1e9})
                    self._memory(rank, "POST-MODEL", "at its first step")
                self._stepped.update(first)
                self._beaten = {}
            elif not self._step and now - self._vitals_at >= 2.0:
                self._vitals_at = now
                self.say(
                    {
                        "is": "vitals",
                        "ranks": {str(rank): ["R", round(now % 1000, 2), int(now * 1000)] for rank in self._ranks},
                    }
                )
        self.flush()

    def _inspect(self, order: dict[str, Any]) -> dict[str, Any]:
        asked = [rank for rank in self._ranks if order.get("ranks") is None or rank in order["ranks"]]
        if not order.get("timings"):
            main = {"thread": "MainThread", "main": True, "active": True, "frames": [["step", "train.py", 10, ""]]}
            return {str(rank): {"pid": 2000 + rank, "state": "S", "samples": [[main]], "groups": []} for rank in asked}
        newest, ns = self._step * COLLECTIVES, time.time_ns()
        numbers = range(max(1, newest - REMEMBERED), newest)
        pause = int(STEP_S * 1e9 / COLLECTIVES)
        return {
            str(rank): {
                "timings": [["0", n, ns - (newest - n) * pause + random.randrange(1_000_000), "nccl"] for n in numbers]
            }
            for rank in asked
        }

    def end_ranks(self, ours: bool = False) -> None:
        for rank in self._ranks:
            self.say(
                {
                    "is": "exit",
                    "rank": rank,
                    "code": 0,
                    "time": time.time(),
                    "ours": ours,
                    "error": None,
                    "elastic": None,
                    "stack": "",
                    "steps": self._step,
                    "core": False,
                    "oom_killed": False,
                    "around": {},
                }
            )
        self._ranks = []
        self.flush()


class Player:
    """All agents, in one select loop with a list of what is due when."""

    def __init__(self, path: str, ranks: int, jitter: float) -> None:
        self.jitter = jitter  # ranks that leave a collective together print within this time
        self.machine = {**json.loads(MACHINE.read_text())["machine"], "schema": 1}
        self.machine["gpus"] = self.machine["gpus"][:ranks]
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(256)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(0, selectors.EVENT_READ, self._told_to_end)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._agents: list[Agent] = []
        self._ready: set[str] = set()
        self._ending = False
        self.lines = 0
        self.latest_s = (
            0.0  # how late a step was told, at worst: a player that can't keep up would flatter the coordinator
        )

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._count), act))

    def forget(self, handle: int) -> None:
        self._selector.unregister(handle)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        data, handles, _, _ = socket.recv_fds(connection, 1 << 20, 2)
        for handle in handles:
            os.set_blocking(handle, False)
        agent = Agent(self, connection, len(self._agents), json.loads(data), *handles)
        self._agents.append(agent)
        self._selector.register(handles[0], selectors.EVENT_READ, agent.read)

    def _told_to_end(self) -> None:
        if not os.read(0, 4096):
            self._selector.unregister(0)
            self._ending = True
            for agent in self._agents:
                agent.end_ranks()

    def started(self, agent: Agent) -> None:
        self._ready.add(agent.host)
        if len(self._ready) == len(self._agents):
            first = time.monotonic() + IMPORTS_S + 1.0
            self.at(first, lambda: self._step(1, first))

    def _step(self, number: int, when: float) -> None:
        if self._ending:
            return
        self.latest_s = max(self.latest_s, time.monotonic() - when)
        for agent in self._agents:
            agent.step(number, when)
        self.at(when + STEP_S, lambda: self._step(number + 1, when + STEP_S))

    def play(self) -> None:
        while not (self._ending and all(agent.closed for agent in self._agents)):
            pause = max(0.0, self._due[0][0] - time.monotonic()) if self._due else 1.0
            for key, _ in self._selector.select(min(pause, 1.0)):
                key.data()
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
        print(
            json.dumps(
                {"lines": self.lines, "latest_s": round(self.latest_s, 3), "cpu_s": round(time.process_time(), 1)}
            ),
            flush=True,
        )


def main() -> None:
    if sys.argv[1] == "connect":
        connect(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("play", choices=["play"])
    parser.add_argument("socket")
    parser.add_argument("--ranks", type=int, default=8, metavar="N", help="of each host, 8 at most")
    parser.add_argument("--jitter", type=float, default=0.005, metavar="S")
    told = parser.parse_args()
    Player(told.socket, told.ranks, told.jitter).play()


if __name__ == "__main__":
    main()
