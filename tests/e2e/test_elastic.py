"""Hosts that are lost and come back, on the test cluster: the run goes on with the rest, takes them back, and counts no step twice."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import Stoker, at_length, wait_for
from netcluster import NetCluster
from stoker.control.launch.membership import MAX_RETRY_S, LostHost, Membership

GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
def all_reduce(values):
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()
"""
# The same over rank 0's socket: three attempts of four ranks without the seconds that torch's import takes.
SOCKETS = """
import socket
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    listener = socket.create_server(("", where[1]), backlog=world)
    peers = [listener.accept()[0].makefile("rw") for _ in range(world - 1)]
else:
    while True:
        try:
            peers = [socket.create_connection(where).makefile("rw")]
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
def send(peer, values):
    print(json.dumps(values), file=peer, flush=True)
def receive(peer):
    return json.loads(peer.readline() or sys.exit("a peer is gone"))
def all_reduce(values):
    if rank:
        send(peers[0], values)
        return receive(peers[0])
    total = [sum(column) for column in zip(values, *map(receive, peers))]
    for peer in peers:
        send(peer, total)
    return total
"""
# A job that gives the same curve with any number of ranks: 12 samples a step, shared out; every 5 steps a checkpoint, with all it has done.
JOB = """
import json, os, sys, time
import stoker
{all_reduce}
folder = os.path.join(os.environ["STOKER_RUN_DIR"], "checkpoints")
os.makedirs(folder, exist_ok=True)
found = stoker.resume()
state = json.load(open(found)) if found else {{"step": 0, "w": 1.0, "history": []}}
print("from", state["step"], "with", world, flush=True)
while True:
    step, w = state["step"], state["w"]
    ids = [step * 12 + n for n in range(12)]
    targets = [(one * 7919 % 101) / 101 for one in ids[rank::world]]
    gradient, loss = sum(2 * (w - t) / 12 for t in targets), sum((w - t) ** 2 / 12 for t in targets)
    gradient, loss, enough = all_reduce([gradient, loss, float(rank == 0 and os.path.exists("enough"))])
    state["w"] = w - 0.05 * gradient
    state["history"].append([step, ids, loss])
    state["step"] = step + 1
    print("step", step, flush=True)
    stoker.beat(step=step, loss=loss)
    if state["step"] % 5 == 0 and rank == 0:
        path = os.path.join(folder, f"step-{{state['step']}}.json")
        with open(path + ".tmp", "w") as file:
            json.dump(state, file)
        os.rename(path + ".tmp", path)
        stoker.mark("CHECKPOINT")
    if enough and state["step"] % 5 == 0:
        break
    time.sleep(0.05)
all_reduce([0.0])
os._exit(0)  # torch 2.13 can abort in its own shutdown of gloo, with no launcher at all
"""


def reference(steps: int) -> list[list[Any]]:
    w, history = 1.0, []
    for step in range(steps):
        ids = [step * 12 + n for n in range(12)]
        targets = [(one * 7919 % 101) / 101 for one in ids]
        history.append([step, ids, sum((w - t) ** 2 for t in targets) / 12])
        w -= 0.05 * sum(2 * (w - t) / 12 for t in targets)
    return history


def events(stoker: Stoker, kind: str) -> list[dict[str, Any]]:
    try:
        lines = (stoker.latest / "events.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [one for one in map(json.loads, lines) if one["event"] == kind]


def steps_in(stoker: Stoker, attempt: int) -> int:
    try:
        return (stoker.latest / f"attempt-{attempt}" / "rank-0.log").read_bytes().count(b"step ")
    except FileNotFoundError:
        return 0


def begin(stoker: Stoker, cluster: NetCluster, *flags: str, job: str) -> subprocess.Popen[bytes]:
    script = stoker.script("job.py", job)
    with open(stoker.cwd / "console", "wb") as out:
        run = stoker.start(
            "run", "--no-preflight", "--hosts", str(cluster.file(workdir=str(stoker.cwd))), *flags, script, stdout=out
        )
    assert wait_for(lambda: True if steps_in(stoker, 0) > 12 else None, 60), (stoker.cwd / "console").read_text()
    return run


def console(stoker: Stoker) -> str:
    return (stoker.cwd / "console").read_text()


def agent_of(cluster: NetCluster, host: int) -> int:
    return next(pid for pid in cluster.pids(host) if Path(f"/proc/{pid}/comm").read_text() == "stoker-agent\n")


def cut(cluster: NetCluster) -> None:
    cluster.cut(1)


def kill_agent(cluster: NetCluster) -> None:
    os.kill(agent_of(cluster, 1), signal.SIGKILL)


def stop_agent(cluster: NetCluster) -> None:
    os.kill(agent_of(cluster, 1), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("fault", "all_reduce"),
    [
        (cut, SOCKETS),
        pytest.param(cut, GLOO, marks=at_length),  # a cut is found by the agents' silence, whatever the ranks use
        pytest.param(kill_agent, SOCKETS, marks=at_length),
        pytest.param(stop_agent, SOCKETS, marks=at_length),
    ],
    ids=["cut", "cut_gloo", "kill_agent", "stop_agent"],
)
def test_a_lost_host_is_named_and_the_run_goes_on_without_it_until_it_is_back(
    stoker: Stoker, netcluster: NetCluster, fault: Any, all_reduce: str
) -> None:
    run = begin(stoker, netcluster, "--min-hosts", "2", job=JOB.format(all_reduce=all_reduce))
    lost, others = netcluster.hosts[1].name, [netcluster.hosts[0].name, netcluster.hosts[2].name]
    there_before = set(netcluster.pids(1))
    assert len(there_before) >= 3, "an agent, its guardian and a rank"
    fault(netcluster)
    began = time.monotonic()
    assert wait_for(lambda: events(stoker, "host-lost") or None, 12), console(stoker)
    print(f"lost after {time.monotonic() - began:.1f} s")
    assert wait_for(
        lambda: True if not there_before & set(netcluster.pids(1)) else None, 15 - (time.monotonic() - began)
    ), "left running on the cut-off side"
    print(f"nothing left after {time.monotonic() - began:.1f} s")
    assert wait_for(lambda: True if steps_in(stoker, 1) else None, 40), console(stoker)
    print(f"first step of the next attempt after {time.monotonic() - began:.1f} s")
    assert f"host {lost} is lost" in console(stoker)
    assert re.search(r"; continuing with 2 of 3 hosts; newest checkpoint: step-[0-9]+\.json", console(stoker))
    assert [one["hosts"] for one in events(stoker, "attempt")][1] in (others, [host.name for host in netcluster.hosts])
    netcluster.repair(1)
    assert wait_for(lambda: events(stoker, "host-joined") or None, 40), console(stoker)
    assert wait_for(lambda: True if steps_in(stoker, len(events(stoker, "attempt")) - 1) > 2 else None, 40), console(
        stoker
    )
    (stoker.cwd / "enough").touch()
    assert run.wait(60) == 0, console(stoker)
    assert events(stoker, "attempt")[-1]["world_size"] == 4 and events(stoker, "host-joined")[0]["on"] == lost
    newest = max((stoker.latest / "checkpoints").glob("step-*.json"), key=lambda path: int(path.stem[5:]))
    history = json.loads(newest.read_text())["history"]
    assert [one[:2] for one in history] == [one[:2] for one in reference(len(history))], (
        "each step once, each with its own samples"
    )
    assert [one[2] for one in history] == pytest.approx([one[2] for one in reference(len(history))], rel=1e-9)


COUNTING = "import stoker, time\nfor n in range(2000):\n    print('step', n, flush=True)\n    time.sleep(0.05)\n"


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        pytest.param(("--min-hosts", "3"), "--min-hosts is 3", marks=at_length),
        ((), "without --min-hosts all are needed"),
    ],
    ids=["three", "all"],
)
def test_below_min_hosts_the_lost_host_is_the_verdict(
    stoker: Stoker, netcluster: NetCluster, asked: tuple[str, ...], says: str
) -> None:
    run = begin(stoker, netcluster, *asked, "--max-restarts", "3", job=COUNTING)
    kill_agent(netcluster)
    assert run.wait(100) == 70, console(stoker)
    verdict = stoker.result().verdict
    assert (verdict["cause"], verdict["host"]) == ("host.lost", netcluster.hosts[1].name)
    assert f"2 of 3 hosts left, and {says}" in verdict["summary"]
    assert any(step.startswith("--min-hosts K") for step in verdict["fix"]) is not bool(asked), verdict["fix"]
    assert re.search(
        r"^stoker: to start it again: stoker run --name [0-9-]+-job --no-preflight --hosts .* job\.py$",
        console(stoker),
        re.M,
    )
    assert verdict["detected_s"] is None and " after it happened" not in stoker("why").out, (
        "nobody saw when it happened"
    )
    assert wait_for(lambda: True if not any(netcluster.pids(n) for n in range(3)) else None, 15)


@at_length
def test_a_coordinator_whose_own_network_is_cut_ends_with_that_word_and_the_hosts_stop_by_themselves(
    stoker: Stoker, netcluster: NetCluster
) -> None:
    run = begin(stoker, netcluster, "--min-hosts", "1", job=COUNTING)
    for n in range(3):
        netcluster.cut(n)
    assert wait_for(lambda: True if not any(netcluster.pids(n) for n in range(3)) else None, 15), "no half may go on"
    assert run.wait(100) == 70, console(stoker)
    assert stoker.result().verdict["cause"] == "host.lost" and "all 3 hosts are lost at the same time" in console(
        stoker
    )


@at_length
def test_a_host_whose_agent_and_guardian_are_frozen_is_taken_over(stoker: Stoker, netcluster: NetCluster) -> None:
    """Nobody there can end its ranks: the next agent does, and only then takes part."""
    run = begin(stoker, netcluster, "--min-hosts", "2", job=COUNTING)
    before = set(netcluster.pids(1))
    for pid in before:
        if Path(f"/proc/{pid}/comm").read_text().startswith("stoker-"):
            os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    assert wait_for(lambda: True if not before & set(netcluster.pids(1)) else None, 15), (
        "left running on the cut-off side"
    )
    print(f"nothing left after {time.monotonic() - began:.1f} s")
    assert wait_for(lambda: events(stoker, "host-back") or None, 60), console(stoker)
    again = r"; starting again with 2 of 3 hosts, from the beginning unless [a-z ]+: no complete checkpoint in runs/"
    assert re.search(again, console(stoker)) and "continuing with" not in console(stoker)
    joins = '; it joins at the next attempt, or once rank 0 has called stoker.mark("CHECKPOINT")'
    assert wait_for(lambda: True if joins in console(stoker) else None, 20), console(stoker)
    run.terminate()
    assert run.wait(100) == 128 + signal.SIGTERM
    assert "restarts: 1 (causes: host.lost, not counted by --max-restarts)" in stoker("why").out
    assert wait_for(lambda: True if not any(netcluster.pids(n) for n in range(3)) else None, 15)


NEEDY = """
import os, time
import stoker, near

open("data/tokens").read()
for n in range(2000):
    print("step", n, flush=True)
    if n % 10 == 9 and os.environ["RANK"] == "0":
        stoker.mark("CHECKPOINT")
    time.sleep(0.05)
"""


@at_length
def test_a_host_that_comes_late_gets_what_sync_and_stage_brought_the_others(
    stoker: Stoker, netcluster: NetCluster
) -> None:
    late = netcluster.hosts[2]
    tokens = stoker.cwd / "tokens" / "tokens"
    tokens.parent.mkdir()
    tokens.write_text("1 2 3")
    (stoker.cwd / "near.py").touch()
    script = stoker.script("job.py", NEEDY)
    netcluster.stop_sshd(2)
    with open(stoker.cwd / "console", "wb") as out:
        run = stoker.start(
            "run",
            "--hosts",
            str(netcluster.file()),
            "--min-hosts",
            "2",
            "--sync",
            "--stage",
            "tokens=data",
            script,
            stdout=out,
        )
    assert wait_for(lambda: True if steps_in(stoker, 0) > 2 else None, 60), console(stoker)
    netcluster.start_sshd(2)
    assert wait_for(lambda: True if steps_in(stoker, 1) > 2 else None, 60), console(stoker)
    assert [one["world_size"] for one in events(stoker, "attempt")] == [3, 4] and (
        late.workdir / "data" / "tokens"
    ).read_text() == "1 2 3"
    assert f"tokens to {late.name} (1 file, " in console(stoker)
    run.terminate()
    assert run.wait(100) == 143, console(stoker)


# ---- a host that comes and goes for weeks ----


def test_former_lives_of_a_host_are_forgotten_in_time() -> None:
    lost = LostHost("cut off", [[1, 1]])
    for life in range(1000):
        lost.remember([[life, 7], [life + 1, 7]])
    assert len(lost.former) <= 100 and lost.former[-2:] == [[999, 7], [1000, 7]]


def test_a_host_may_come_and_go_a_thousand_times() -> None:
    """As often as a month has turns of the longest wait between two tries."""
    agents = SimpleNamespace(by_name={"a": None}, pool=SimpleNamespace(drop=lambda _: None))
    options = SimpleNamespace(min_hosts=1, rejoin="auto")
    events: list[str] = []
    membership = Membership(
        options,  # type: ignore[arg-type]
        agents,  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        events.append,
        lambda kind, **_: events.append(kind),
    )
    for _ in range(1100):
        membership.drop(SimpleNamespace(host="a", gone="it ended", selves=[]))  # type: ignore[arg-type]
    assert events == ["host-lost"] * 1100
    assert membership.lost["a"].next_try <= time.monotonic() + MAX_RETRY_S
