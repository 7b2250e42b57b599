"""What may happen between a run's steps: a stop before every rank is known, a rank that can't be killed, a driver that is slow, a host that is back and unfit."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from conftest import Stoker, machine_json, wait_for
from forked_ranks import free_port
from netcluster import NetCluster
from stoker.contract import protocol
from stoker.contract.errors import EX_UNAVAILABLE, Refusal
from stoker.contract.evidence import RankError, RankExit, Verdict
from stoker.control.cluster import file_sync, transport
from stoker.control.cluster.agent_pool import AgentPool
from stoker.control.launch import rendezvous, supervise
from stoker.control.launch.agents import Agents
from stoker.control.launch.attempt import Attempt
from stoker.control.launch.run import Endpoint, Run
from stoker.control.launch.supervise import Supervisor
from stoker.control.plan.targets import NodeGroup, RendezvousConfig

# ---- the agent ----


class Alone:
    """An agent by itself, and all it says."""

    def __init__(self, folder: Path) -> None:
        self.heard: list[dict[str, Any]] = []
        links = [transport.start_local_agent(-1)]
        self.members = AgentPool(links, lambda _, message, payload: self.heard.append(message), lambda *_: None)
        self.member = self.members.all[0]
        (folder / "machine.json").write_text(json.dumps(machine_json(0)))
        self.member.say(
            {
                "do": "open",
                "run": f"alone-{os.getpid()}",
                "dir": str(folder),
                "recorded": str(folder / "machine.json"),
                "host": "",
                "former": [],
            }
        )
        assert self.until("host"), self.member.gone

    def until(self, kind: str, seconds: float = 30) -> dict[str, Any] | None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.member.gone:
            found = next((one for one in self.heard if one["is"] == kind), None)
            if found is not None:
                return found
            self.members.pump(0.1)
        return None

    def start(self, *argv: str) -> None:
        self.heard.clear()
        common = {"attempt": 0, "env": {}, "unset": [], "shim": False, "split": False, "cwd": "", "numa": False}
        rank = {"rank": 0, "argv": list(argv), "env": {}, "gpu": None, "pci": None}
        self.member.say(
            {
                "do": "start",
                "common": common,
                "ranks": [rank],
                "gate": {"slots": 1, "slot_s": 60, "total_s": 60},
                "ram_limit": None,
            }
        )


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Alone]:
    agent = Alone(tmp_path)
    yield agent
    agent.members.close()


def test_more_than_a_pipe_holds_goes_out_as_fast_as_it_is_read() -> None:
    """64 pipes full: written at each ping only, they would take half a minute."""
    link = transport.spawn_agent(
        ["sh", "-c", "echo STOKER-AGENT 1; head -c 4194304 | wc -c >&2; cat >/dev/null"], "gpu1"
    )
    link.first_bytes = bytes(4 << 20)
    counted: list[str] = []
    members = AgentPool([link], lambda *_: None, lambda _, line: counted.append(line.strip()))
    deadline = time.monotonic() + 15
    while not counted and time.monotonic() < deadline:
        members.pump(60)
    assert counted == [str(4 << 20)]
    members.close()


def test_what_a_login_printed_is_not_why_its_agent_was_lost_later() -> None:
    told = f"echo welcome to STOKER; sleep 0.3; printf %s {shlex.quote(protocol.SENTINEL.decode())}"
    members = AgentPool([transport.spawn_agent(["sh", "-c", told], "gpu1")], lambda *_: None, lambda *_: None)
    member = members.all[0]
    deadline = time.monotonic() + 10
    while not member.gone and time.monotonic() < deadline:
        members.pump(0.1)
    members.close()
    assert (
        member.decoder.greeting
        and member.gone == "its agent ended, or the connection to it broke, without an error message"
    )


def test_an_agent_told_to_finish_while_its_ranks_live_says_how_they_ended_and_lives_on(alone: Alone) -> None:
    for _ in range(3):
        alone.start("sleep", "100")
        alone.member.say({"do": "stop", "signal": int(signal.SIGTERM), "grace": 5.0, "at_once": []})
        alone.member.say({"do": "finish", "grace": 0.0})
        assert alone.until("finished"), alone.member.gone
        words = [one["is"] for one in alone.heard if one["is"] != "ping"]
        assert words.index("up") < words.index("stopping") and next(one for one in alone.heard if one["is"] == "exit")[
            "code"
        ] in (-signal.SIGTERM, -signal.SIGKILL)
    alone.heard.clear()
    alone.member.say({"do": "look"})
    assert alone.until("host"), "it is there for the next attempt"


def test_a_look_that_takes_longer_than_anybody_stays_silent_does_not_end_the_agent(stoker: Stoker) -> None:
    """As a driver without persistence mode may: the recorded machine is a pipe that nobody writes to for a while."""
    slow = stoker.cwd / "slow.json"
    os.mkfifo(slow)

    def write() -> None:
        time.sleep(11)
        slow.write_text(json.dumps(machine_json(0)))

    threading.Thread(target=write, daemon=True).start()
    done = stoker("run", "--no-preflight", stoker.script("ok.py", "print('ran')"), env={"STOKER_MACHINE": str(slow)})
    assert done.code == 0 and "ran" in done.out, done.err


# ---- the coordinator ----


def plan_of(ranks: int, *hosts: str) -> Any:
    places = [
        SimpleNamespace(rank=rank, host=hosts[rank % len(hosts)], label=f"CPU{rank}", gpu=None) for rank in range(ranks)
    ]
    return SimpleNamespace(places=places, ranks=range(ranks), world_size=ranks, place=lambda rank: places[rank])


def test_an_attempt_that_is_stopped_waits_for_the_word_of_every_host() -> None:
    attempt = Attempt(0, plan_of(2, "a", "b"))
    attempt.stopping = True
    assert not attempt.all_ended, "host b may have started its rank without our having heard of it"
    attempt.stopping_hosts.add("a")
    assert not attempt.all_ended
    attempt.stopping_hosts.add("b")
    assert attempt.all_ended, "neither has"
    attempt.pids[1] = 42
    assert not attempt.all_ended


def test_an_echo_waits_for_the_look_at_those_that_live_however_late_it_comes() -> None:
    """The machine is busy: an inspection was under way when the echo came, and the answer to ours takes seconds."""
    attempt = Attempt(0, plan_of(2, ""))
    attempt.begin_watch(300.0, 1800.0)
    began = time.monotonic()
    attempt.watch.note_steps(0, 20, 20, 0.1, began)
    attempt.watch.note_steps(1, 20, 20, 0.1, began)
    (before,) = attempt.watch.next_actions(began + 60)
    error = RankError(
        "RuntimeError",
        "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete",
        module="builtins",
    )
    attempt.ends[0] = RankExit(0, "", "CPU0", 41, 1, time.time(), error=error)
    now = time.time()
    assert not attempt.must_stop(now, 1.0)
    attempt.watch.take_answer("", cast(Any, before).order["ask"], b"{}", began + 61)
    assert attempt.watch.next_actions(began + 61) == [] and not attempt.must_stop(now + 2, 1.0), (
        "that look began before the failure"
    )
    (after,) = attempt.watch.next_actions(began + 61.1)
    assert not attempt.must_stop(now + 9, 1.0)
    seen = {
        "1": {
            "state": "S",
            "syscall": "clock_nanosleep",
            "samples": [[{"main": True, "frames": [["stuck", "train.py", 9, []]]}]],
        }
    }
    attempt.watch.take_answer("", cast(Any, after).order["ask"], json.dumps(seen).encode(), began + 68)
    attempt.watch.next_actions(began + 68)
    assert attempt.must_stop(now + 9, 1.0)
    stall = attempt.evidence().stall
    assert stall is not None and (stall.kind, stall.rank) == ("sleep", 1)


def test_an_echo_does_not_wait_for_ever_for_a_look_that_nobody_answers() -> None:
    attempt = Attempt(0, plan_of(2, ""))
    attempt.begin_watch(300.0, 1800.0)
    attempt.ends[0] = RankExit(
        0, "", "CPU0", 41, 1, time.time(), error=RankError("DistBackendError", "lost", module="torch.distributed")
    )
    now = time.time()
    assert [attempt.must_stop(now + seconds, 1.0) for seconds in (0, 2, 60)] == [False, False, True]


def test_a_rank_that_can_not_be_killed_is_named_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "UNKILLABLE_S", 0.3)
    attempt = Attempt(0, plan_of(2, ""))
    attempt.begin_watch(300.0, 1800.0)
    attempt.pids = {0: 41, 1: 42}
    said: list[str] = []
    pool = SimpleNamespace(pump=lambda seconds: time.sleep(0.01), say=lambda order: None)
    options = SimpleNamespace(
        grace=0.0, shutdown_timeout=None, stop_after_steps=None, quiet=True, hang_timeout=0.0, dump_stacks=None
    )
    supervisor = Supervisor(
        attempt,
        cast(Any, options),
        cast(Any, SimpleNamespace(pool=pool, clients=[], by_name={})),
        None,
        cast(Any, SimpleNamespace(take=iter([signal.SIGTERM, *[0] * 10_000]).__next__)),
        cast(Any, SimpleNamespace(dir=".", event=lambda *a, **k: None)),
        cast(Any, SimpleNamespace(settle=lambda record: None)),
        lambda line, color="": said.append(line),
    )
    attempt.watch_failed = True
    supervisor.follow()
    assert attempt.ends.keys() == {0, 1} and all(end.code is None and end.ours for end in attempt.ends.values())
    assert (
        said[-1]
        == "stoker: rank 0 (CPU 0, pid 41), rank 1 (CPU 1, pid 42) can't be killed: stuck in the kernel; the run continues without waiting"
    )


def test_a_host_that_is_back_and_can_not_be_planned_with_is_sent_away_again() -> None:
    class Members:
        has_enough_hosts = True
        host_count_text = "2 of 2 hosts"

        def __init__(self) -> None:
            self.joined, self.sent = ["b"], list[str]()

        def update_agents(self) -> bool:
            return bool(self.joined)

        def exclude_joined(self, why: str) -> None:
            self.sent.append(why)
            self.joined = []

    membership = Members()

    def plan_again() -> Any:
        if membership.joined:
            raise Refusal("host b: the NVIDIA driver is not loaded", EX_UNAVAILABLE)
        return plan

    run = Run.__new__(Run)
    run.planner = cast(Any, SimpleNamespace(plan_again=plan_again))
    run.output = cast(Any, SimpleNamespace(replan=lambda plan: None))
    run.log = lambda line, color="": None  # type: ignore[method-assign]
    endpoint = Endpoint("127.0.0.1", 29500)
    run._reserve = lambda plan: (plan, endpoint)  # type: ignore[method-assign]
    host_setup = cast(Any, SimpleNamespace(find_addresses=lambda: None))
    plan, verdict = cast(Any, SimpleNamespace(lines=(), argv=())), Verdict("failed", "launch.regroup", "", 70)
    assert run._plan_with_current_hosts(plan, verdict, cast(Any, membership), host_setup) == (plan, endpoint)
    assert membership.sent == ["host b: the NVIDIA driver is not loaded"]


def test_a_copy_is_for_those_that_are_there_and_min_hosts_goes_on_without_the_rest(
    stoker: Stoker, netcluster: NetCluster
) -> None:
    netcluster.stop_sshd(2)
    done = stoker(
        "run",
        "--hosts",
        str(netcluster.file()),
        "--min-hosts",
        "2",
        "--sync",
        "--no-preflight",
        stoker.script("ok.py", "print('ran')"),
    )
    assert done.code == 0 and "starting with 2 of 3 hosts" in done.err and done.out.count("ran") == 3, done.err


def test_a_copy_that_breaks_for_any_reason_is_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_self: object) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(file_sync._Copy, "_exchange", broken)
    one = file_sync._Copy(cast(Any, SimpleNamespace(name="a")), cast(Any, None), cast(Any, None), "/there")
    one.run()
    assert one.failure == "MemoryError: none left"


# ---- machines started by hand ----


def met(port: int, count: int, most: int = 0, last_call: float = 0.0) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    told = RendezvousConfig(count, None, "127.0.0.1", port, "job", most, last_call)

    def meet() -> None:
        try:
            found.append(rendezvous.join_machines(told, 1, lambda: 29999, lambda: time.sleep(0.01), lambda line: None))
        except Exception as problem:
            found.append(problem)

    thread = threading.Thread(target=meet, daemon=True)
    thread.start()
    return thread, found


def knock(port: int) -> socket.socket:
    def once() -> socket.socket | None:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        except ConnectionRefusedError:
            return None

    made = wait_for(once, 10)
    assert made is not None
    return cast(socket.socket, made)


def test_strangers_and_machines_that_left_do_not_count_where_machines_meet() -> None:
    port = free_port()
    thread, found = met(port, 3)
    rude = knock(port)
    rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    rude.close()  # a reset, as a port scan's
    hello = json.dumps({"job": "job", "count": 3, "ranks": 1}).encode() + b"\n"
    gone = knock(port)
    gone.sendall(hello)
    time.sleep(0.5)
    gone.close()  # stopped, and started again
    guests = []
    for _ in range(2):
        guests.append(knock(port))
        guests[-1].sendall(hello[:7])
        time.sleep(0.1)
        guests[-1].sendall(hello[7:])
    thread.join(100)
    assert found == [NodeGroup(3, 0, 0, 3, "127.0.0.1", 29999)]
    assert [json.loads(guest.makefile().readline())["rank"] for guest in guests] == [1, 2]


@pytest.mark.parametrize(("guests", "most", "last_call", "nodes"), [(0, 3, 0.5, 1), (1, 3, 4.0, 2), (2, 3, 250.0, 3)])
def test_more_machines_than_are_needed_may_come_until_the_last_call_is_over(
    guests: int, most: int, last_call: float, nodes: int
) -> None:
    port = free_port()
    thread, found = met(port, 1, most, last_call)
    ways = [knock(port) for _ in range(guests)]
    for way in ways:
        way.sendall(json.dumps({"job": "job", "count": 1, "ranks": 2}).encode() + b"\n")
    thread.join(100)
    assert found == [NodeGroup(nodes, 0, 0, 1 + 2 * guests, "127.0.0.1", 29999)]
    answers = [json.loads(way.makefile().readline()) for way in ways]
    assert sorted(answers, key=lambda answer: answer["rank"]) == [  # whoever was heard first
        {"rank": n + 1, "first": 1 + 2 * n, "world": 1 + 2 * guests, "port": 29999, "nodes": nodes}
        for n in range(guests)
    ]


def test_a_signal_while_a_restart_waits_for_the_other_machine_has_a_verdict(stoker: Stoker) -> None:
    script = stoker.script("fails.py", "raise SystemExit(3)")
    port = free_port()
    where = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}")
    first = stoker.start("run", *where, "--max-restarts", "2", "--name", "first", script, stdout=subprocess.PIPE)
    second = stoker.start("run", *where, "--name", "second", script)
    assert second.wait(60) == 3 and first.stdout is not None
    while b"starting again" not in (line := first.stdout.readline()):
        assert line, "it ended"
    while b"waiting at" not in (line := first.stdout.readline()):
        assert line, "it ended"
    first.send_signal(signal.SIGINT)
    out, _ = first.communicate(timeout=60)
    assert first.returncode == 130, out
    verdict = json.loads(next((stoker.cwd / "runs").glob("*-first")).joinpath("verdict.json").read_text())
    assert (verdict["cause"], verdict["exit_code"]) == ("launch.stopped", 130) and "between two attempts" in verdict[
        "summary"
    ], verdict


def test_what_the_agent_says_of_a_port_it_can_not_have_is_said() -> None:
    first = SimpleNamespace(host="", gone="", answers={})
    first.say = lambda order: first.answers.update(
        refused={"line": "the agent could not reserve: Address family not supported by protocol", "code": 71}
    )
    agents = Agents.__new__(Agents)
    agents.by_name = {}
    agents._signals = cast(Any, SimpleNamespace(take=lambda: 0))
    agents.pool = cast(Any, SimpleNamespace(all=[first], pump=lambda seconds: time.sleep(0.01)))
    with pytest.raises(Refusal, match="did not reserve a port: the agent could not reserve: Address family"):
        agents.reserve("::1", 29500, True)


# ---- the training loop ----


def stopped_after(world: int, slow: bool, when: str, saved: list[int] | None = None) -> list[int]:
    """The steps a loop launches when it is told to stop in its fourth: `when` "early" in it, so that its own numbers can carry that, or "late".

    `saved`: a checkpoint is due in its third, and this gets the step after which it was made."""
    pytest.importorskip("torch")
    from stoker.training.loop.run import Answers, Loop, Task

    class Plain(Task):
        def hear(self, launched: Any) -> Answers:
            return launched

        def summary(self) -> str:
            return ""

    launched: list[int] = []
    keeper: Any = SimpleNamespace(
        saver=SimpleNamespace(busy=lambda: False, close=lambda: None), wanted=False, saved_step=None, folder="", tensors={},
        time_due=lambda: False, step_due=lambda done, steps: False, end_due=lambda whole: False,
    )  # fmt: skip
    group: Any = SimpleNamespace(first=True, world=world)
    voice: Any = SimpleNamespace(say_once=lambda line: None)
    profile: Any = SimpleNamespace(step=lambda: None, close=lambda: None)
    loop = Loop(Plain(), keeper, group, voice, profile, first=0, steps=100)
    loop._save_if_free = lambda: saved.append(loop.done) if saved is not None else None  # type: ignore[method-assign]
    for step in loop.over(range(100)):
        launched.append(step)
        if step == 3 and when == "early":
            loop.stopping = True
        stop, save, busy, _ = loop.words()
        save = save or (saved is not None and step == 2)
        if step == 3:
            loop.stopping = True
        loop.launched(Answers(stop, save, busy, slow))
    return launched


@pytest.mark.parametrize(
    ("world", "slow", "when", "last"),
    [
        (1, False, "late", 3),
        (1, True, "late", 3),
        (2, True, "early", 3),
        (2, True, "late", 4),
        (2, False, "early", 4),
        (2, False, "late", 5),
    ],
)
def test_a_stop_waits_for_no_more_steps_than_the_ranks_need_to_agree(
    monkeypatch: pytest.MonkeyPatch, world: int, slow: bool, when: str, last: int
) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert stopped_after(world, slow, when)[-1] == last
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("slow", [False, True])
def test_a_checkpoint_that_is_due_is_made_however_slow_steps_are(monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    saved: list[int] = []
    try:
        stopped_after(2, slow, "late", saved)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert saved == ([3] if slow else [4]), "of the third step: at once, or when the fourth is on its way"
