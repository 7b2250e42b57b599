"""Odd values that ranks, hosts and drivers report: each ends in a verdict or a line, never in a traceback."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker, machine_json, wait_for
from stoker.cli import run
from stoker.contract.evidence import Evidence, RankExit
from stoker.contract.text import truncate_json
from stoker.control.cluster.check_facts import ClusterFacts, HostFacts
from stoker.control.cluster.cluster_check import doctor_findings
from stoker.control.cluster.hosts import read_hosts_file as read_hosts
from stoker.control.doctor.leftovers import find_other_processes
from stoker.control.launch.attempt import read_error, read_exit_context
from stoker.control.machine import procfs
from stoker.control.machine.examination import examination_from_json
from stoker.control.machine.model import Gpu, Holder, Machine, machine_from_json
from stoker.control.plan.run_plan import make_plan
from stoker.control.show.web.pages import json_response
from stoker.control.show.web.run_files import RunFolders, read_rows
from stoker.control.verdict.judge import judge

LONG, LONGER = "9" * 400, "9" * 5000  # more than a float holds, and than int() reads
TEXTS = {
    "memory of no GPU": f"CUDA out of memory. Tried to allocate {LONG} GiB. GPU 0 has a total capacity of 79.10 GiB",
    "memory of no host": f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {LONG} bytes",
    "a wait without end": "[rank0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE,"
    f" Timeout(ms)=600000) ran for {LONG} milliseconds before timing out.",
    "a culprit of no number": f"the loss is nan on rank {LONGER}",
}


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


SLOW = "%25:" + "auth: " * 40  # of what takes long, but no longer than it is


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_numbers_that_are_none_end_in_a_verdict(text: str) -> None:
    """The launcher ended in a traceback, and the run was neither started again nor explained."""
    for kind, module in (("RuntimeError", ""), ("NonFinite", "stoker.training.forensics.culprit")):
        error = read_error({"type": kind, "message": text, "module": module, "file": "train.py", "line": 3})
        verdict = judge(Evidence(1, (RankExit(0, "", "GPU0", 5, 1, 1.0, error=error),)))
        assert verdict.status == "failed" and verdict.exit_code == 1 and verdict.rank == 0


def test_what_a_host_saw_around_an_end_may_be_anything() -> None:
    told = {
        "kernel": [f"NVRM: Xid (PCI:0000:01:00): {LONGER}, x"],
        "holders": [{"pid": [], "memory": "much"}, {"pid": {}, "memory": {}, "ours": 7}],
    }
    error = read_error({"type": "OutOfMemoryError", "message": "CUDA out of memory. Tried to allocate 2.00 GiB. of 1"})
    end = RankExit(0, "evil", "evil/GPU0", 5, 1, 1.0, error=error, around=read_exit_context(told))
    assert end.around.holders and judge(Evidence(1, (end,))).exit_code == 1


def test_a_run_that_says_such_a_thing_has_a_verdict(stoker: Stoker) -> None:
    script = stoker.script("oom.py", f"raise RuntimeError({TEXTS['memory of no GPU']!r})\n")
    done = stoker("run", "--nproc-per-node", "1", "--max-restarts", "0", script)
    assert done.code == 1 and "Traceback" not in re.sub("(?m)^.*CPU0:.*$", "", done.err), done.err
    assert json.loads(next((stoker.cwd / "runs").glob("2*/verdict.json")).read_text())["status"] == "failed"


@pytest.mark.parametrize("name", BENT)
def test_a_check_that_cant_be_made_leaves_the_others(stoker: Stoker, tmp_path: Path, name: str) -> None:
    id, bent = BENT[name]
    told = {**EXAMINED, **bent}
    (tmp_path / "box.json").write_text(json.dumps(told))
    done = stoker("doctor", "--machine", str(tmp_path / "box.json"))
    assert f"? {id}: could not be checked" in done.out and "Traceback" not in done.err, (done.out, done.err)
    facts = ClusterFacts(
        (
            HostFacts("good", examination=examination_from_json(EXAMINED)),
            HostFacts("evil", examination=examination_from_json(told)),
        )
    )
    found = {finding.id: finding for finding in doctor_findings(facts, read_hosts("good,evil"))}
    assert found[id].level == "unknown" and found[id].text.startswith("evil:")


def test_errors_of_a_card_are_counted_once() -> None:
    """Each was looked for among all of them."""
    told = {**EXAMINED, "health": {"GPU-0": {"xids": [*range(300_000), 48]}}}
    facts = ClusterFacts((HostFacts("evil", examination=examination_from_json(told)),))
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
    (found,) = find_other_processes(Machine("x", 1, 1, 1, gpus=(card,)), set(), recorded=True)
    assert "ask bob to end it" in found.advice


def test_a_recorded_machine_of_many_cards_or_words_is_checked_once() -> None:
    from stoker.control.doctor.checks.gpu import count
    from stoker.control.machine.model import machine_from_json

    words = ",".join(str(number) for number in range(100_000))
    (finding,) = count({"CUDA_VISIBLE_DEVICES": words}, machine_from_json(machine_json(2)), 0)
    assert len(finding.text) < 600


def test_an_error_that_quotes_much_text_costs_no_agent(stoker: Stoker) -> None:
    """torch's own file, as @record writes it. The agent was taken for lost: no verdict on the rank, and no restart."""
    lines = (
        "import json, os, sys",
        f"text = {SLOW!r} * 3700",
        "json.dump({'message': {'message': text, 'extraInfo': {}}}, open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w'))",
        "sys.exit(3)",
    )
    script = stoker.script("train.py", "\n".join(lines))
    done = stoker("run", "--nproc-per-node", "2", script)
    assert done.code == 3 and "ended with exit code 3" in done.err, done.err


def test_no_word_is_cut_in_two() -> None:
    """Half a secret is not recognized as one."""
    assert truncate_json({"message": "a row: " + "x" * 400}, 300) == {"message": "a row:"}
    assert truncate_json("x" * 400, 164) == "x" * 100


@pytest.mark.parametrize(("words", "shown"), [(["x" * 5000], "…"), (["a b " + "x" * 5000], "a b …")])
def test_a_word_is_not_cut_within(words: list[str], shown: str) -> None:
    with subprocess.Popen([*words, "600"], executable="/bin/sleep") as child:
        try:
            assert wait_for(lambda: procfs.read_command_line(child.pid), 10.0) == shown  # empty for a moment after exec
        finally:
            child.kill()


def test_rows_with_no_numbers_are_shown(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "run.json").write_text("{}")
    (tmp_path / "r" / "rollouts.jsonl").write_text('{"reward": NaN, "parts": {"exact": [-Infinity, 1.5]}}\n')
    found = read_rows(RunFolders(str(tmp_path), everybody=True), "r", "rollouts.jsonl", 0)
    assert found["rows"] == [{"reward": "nan", "parts": {"exact": ["-inf", 1.5]}}]
    assert json.loads(json_response(found).body)["rows"] == found["rows"]
