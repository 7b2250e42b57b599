"""What others can get in between: a listener that comes and goes, and words that no rule, plan or check can compute with."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker
from localuser import ATTACKER, needs_root, start_as, wait
from stoker.cli import run
from stoker.contract import listeners
from stoker.contract.shapes import Evidence, RankEnd
from stoker.control.cluster.check import doctor_findings
from stoker.control.cluster.facts import Facts, OneHost
from stoker.control.cluster.hosts import read as read_hosts
from stoker.control.doctor.leftovers import find_others
from stoker.control.launch.attempt import read_around, read_error
from stoker.control.launch.plan import make_plan
from stoker.control.machine.facts import examination_from_json
from stoker.control.machine.model import Gpu, Holder, Machine, machine_from_json
from stoker.control.verdict.judge import judge

# ---- another user's listener ----

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def answer_and_keep(server: socket.socket) -> None:
    with server.accept()[0] as peer, contextlib.suppress(ConnectionResetError):
        peer.sendall(ANSWER)
        while peer.recv(1 << 16):
            pass


def answer_and_close(server: socket.socket) -> None:
    server.accept()[0].sendall(ANSWER)
    server.close()


class Neighbour:
    """Another user, who listens and then does `serve`."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        needs_root()
        told = os.pipe()

        def listen() -> None:
            with socket.socket() as server:
                server.bind(("127.0.0.1", 0))
                server.listen()
                os.write(told[1], str(server.getsockname()[1]).encode())
                serve(server)

        self.pid = start_as(ATTACKER, listen)
        os.close(told[1])
        self.port = int(os.read(told[0], 10))
        os.close(told[0])


def test_an_answer_that_its_sender_no_longer_holds_is_nobodys() -> None:
    """The kernel shows it as root's."""
    neighbour = Neighbour(answer_and_close)
    with socket.create_connection(("127.0.0.1", neighbour.port)) as connected:
        assert wait(neighbour.pid) == 0
        with pytest.raises(ConnectionResetError, match="closed the connection"):
            listeners.answering_users(connected)


def test_ones_own_server_is_known_before_and_after_it_accepts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as connected:
            assert listeners.answering_users(connected) == {os.getuid()}
            with server.accept()[0]:
                assert listeners.answering_users(connected) == {os.getuid()}
            assert listeners.answering_users(connected) == {os.getuid()}  # it listens on


# ---- what a rank printed or a host told, and nobody can compute with ----

LONG, LONGER = "9" * 400, "9" * 5000  # more than a float holds, and than int() reads
TEXTS = {
    "memory of no GPU": f"CUDA out of memory. Tried to allocate {LONG} GiB. GPU 0 has a total capacity of 79.10 GiB",
    "memory of no host": f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {LONG} bytes",
    "a wait without end": "[rank0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE,"
    f" Timeout(ms)=600000) ran for {LONG} milliseconds before timing out.",
    "a culprit of no number": f"the loss is nan on rank {LONGER}",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_numbers_that_are_none_end_in_a_verdict(text: str) -> None:
    """The launcher ended in a traceback, and the run was neither started again nor explained."""
    for kind, module in (("RuntimeError", ""), ("NonFinite", "stoker.training.forensics.culprit")):
        error = read_error({"type": kind, "message": text, "module": module, "file": "train.py", "line": 3})
        verdict = judge(Evidence(1, (RankEnd(0, "", "GPU0", 5, 1, 1.0, error=error),)))
        assert verdict.status == "failed" and verdict.exit_code == 1 and verdict.rank == 0


def test_what_a_host_saw_around_an_end_may_be_anything() -> None:
    told = {
        "kernel": [f"NVRM: Xid (PCI:0000:01:00): {LONGER}, x"],
        "holders": [{"pid": [], "memory": "much"}, {"pid": {}, "memory": {}, "ours": 7}],
    }
    error = read_error({"type": "OutOfMemoryError", "message": "CUDA out of memory. Tried to allocate 2.00 GiB. of 1"})
    end = RankEnd(0, "evil", "evil/GPU0", 5, 1, 1.0, error=error, around=read_around(told))
    assert end.around.holders and judge(Evidence(1, (end,))).exit_code == 1


def test_a_run_that_says_such_a_thing_has_a_verdict(stoker: Stoker) -> None:
    script = stoker.script("oom.py", f"raise RuntimeError({TEXTS['memory of no GPU']!r})\n")
    done = stoker("run", "--nproc-per-node", "1", "--max-restarts", "0", script)
    assert done.code == 1 and "Traceback" not in re.sub("(?m)^.*CPU0:.*$", "", done.err), done.err
    assert json.loads(next((stoker.cwd / "runs").glob("2*/verdict.json")).read_text())["status"] == "failed"


MACHINE: dict[str, Any] = {"schema": 1, "hostname": "x", "cores": 4, "memory_total": 10**10, "memory_available": 10**9}
CARD = {"index": 0, "uuid": "GPU-0", "name": "H100", "memory_total": 8 * 10**10, "memory_used": 0}
EXAMINED: dict[str, Any] = {
    "schema": 1,
    "machine": {**MACHINE, "driver": "570.1", "gpus": [CARD]},
    "health": {"GPU-0": {}},
    "probes": {"GPU-0": {"outcome": "ok"}},
    "torch": {"version": "2.9", "cuda": "12.8", "archs": ["sm_90"], "nccl": "2", "seconds": 1.0},
    "host": {"shm_free": 10**12, "shm_total": 10**12},
    "net": {"hostname": "x", "addresses": ["10.0.0.1"]},
    "environment": {},
}
BENT: dict[str, tuple[str, dict[str, Any]]] = {
    "a CUDA of no version": ("torch.cuda-build", {"torch": {**EXAMINED["torch"], "cuda": "x"}}),
    "a capability of none": ("torch.arch", {"health": {"GPU-0": {"capability": "x.y"}}}),
    "an architecture of one digit": (
        "torch.arch",
        {"torch": {**EXAMINED["torch"], "archs": ["sm_5"]}, "health": {"GPU-0": {"capability": "9.0"}}},
    ),
    "a card without memory": (
        "gpu.held",
        {"machine": {**EXAMINED["machine"], "gpus": [{**CARD, "memory_total": 0, "holders": [{"pid": 1}]}]}},
    ),
}


@pytest.mark.parametrize("name", BENT)
def test_a_check_that_cant_be_made_leaves_the_others(stoker: Stoker, tmp_path: Path, name: str) -> None:
    id, bent = BENT[name]
    told = {**EXAMINED, **bent}
    (tmp_path / "box.json").write_text(json.dumps(told))
    done = stoker("doctor", "--machine", str(tmp_path / "box.json"))
    assert f"? {id}: could not be checked" in done.out and "Traceback" not in done.err, (done.out, done.err)
    facts = Facts(
        (
            OneHost("good", examination=examination_from_json(EXAMINED)),
            OneHost("evil", examination=examination_from_json(told)),
        )
    )
    found = {finding.id: finding for finding in doctor_findings(facts, read_hosts("good,evil"))}
    assert found[id].level == "unknown" and found[id].text.startswith("evil:")


def test_errors_of_a_card_are_counted_once() -> None:
    """Each was looked for among all of them."""
    told = {**EXAMINED, "health": {"GPU-0": {"xids": [*range(300_000), 48]}}}
    facts = Facts((OneHost("evil", examination=examination_from_json(told)),))
    lines = [finding.text for finding in doctor_findings(facts, read_hosts("evil")) if finding.id == "gpu.xid"]
    assert any("Xid 48 (double-bit ECC error), 2 times" in line for line in lines)


def test_a_host_that_says_it_has_no_core_is_planned_for() -> None:
    request = run.parse(["--hosts", "good,evil", "--no-preflight", "--nproc-per-node", "cpu", "train.py"])
    hosts = {host.name: host for host in read_hosts("good,evil").hosts}
    machines = {"good": machine_from_json(MACHINE), "evil": machine_from_json({**MACHINE, "cores": 0})}
    plan = make_plan(request, ["python", "train.py"], {}, machines, {"good": {}, "evil": {}}, False, hosts)
    assert [place.host for place in plan.places] == ["good"] * 4 + ["evil"]


@pytest.mark.parametrize("name", ["", " ", "\t"])
def test_a_process_without_a_name_on_a_gpu_ends_no_clean(name: str) -> None:
    """Any user may call theirs so (PR_SET_NAME), and empty its command line."""
    card = Gpu(0, "GPU-0", holders=(Holder(7, 1, name, "bob"),))
    (found,) = find_others(Machine("x", 1, 1, 1, gpus=(card,)), set(), recorded=True)
    assert "ask bob to end it" in found.advice
