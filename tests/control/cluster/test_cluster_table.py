"""What a check makes of its facts: findings, table, price, tuning. Without any network."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import machine_json
from stoker.cli import cluster as command
from stoker.contract.errors import Refusal
from stoker.contract.frozen import replace
from stoker.control.cluster import check_rules, check_table
from stoker.control.cluster.all_reduce import (
    Trial,
    compute_step_costs,
    describe_step_costs,
    list_candidates,
    parse_count,
    replace_env,
    write_env,
)
from stoker.control.cluster.check_facts import AllReduceFacts, ClusterFacts, HostFacts, MtuHole, PairFacts
from stoker.control.cluster.cluster_check import doctor_findings
from stoker.control.cluster.hosts import Host, Hosts
from stoker.control.doctor.check import exit_code
from stoker.control.machine.examination import Examination, TorchBuild, examination_from_json

NAMES = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
GBIT = 118e6


def host(number: int, **more: Any) -> HostFacts:
    name = NAMES[number]
    hostnames = {f"node{n}": (address,) for n, address in enumerate(NAMES)}
    given = {
        "address": name,
        "interface": "eth0",
        "mtu": 1500,
        "speed": 1000,
        "physical": True,
        "hostname": f"node{number}",
        "resolves": hostnames,
        "skew": 0.01,
        "skew_error": 0.005,
        "python": "3.11.7",
        "torch": TorchBuild("2.13.0+cu126", "12.6", ("sm_86",), "2.27.3", 2.0),
        "files": {"script train.py": "a" * 64},
    }
    return HostFacts(name, **{**given, **more})


def facts(
    *changed: HostFacts,
    pairs: dict[tuple[int, int], dict[str, Any]] | None = None,
    reduce: AllReduceFacts | None = None,
) -> ClusterFacts:
    hosts = {one.name: one for one in (*(host(n) for n in range(3)), *changed)}
    plain = {"ports": {29500: "", 41234: ""}, "rtt": 2e-4, "segment": 1448, "big": True, "rate": GBIT}
    made = [
        PairFacts(NAMES[a], NAMES[b], **{**plain, **(pairs or {}).get((a, b), {})})
        for a in range(3)
        for b in range(3)
        if a != b
    ]
    there = [pair for pair in made if not any(hosts[end].error for end in (pair.source, pair.target))]
    return ClusterFacts(
        tuple(hosts[name] for name in NAMES),
        tuple(there),
        reduce or AllReduceFacts(3, "gloo", 1 << 24, (0.21, 0.2, 0.19)),
        29500,
    )


def said(found: ClusterFacts) -> dict[str, str]:
    return {finding.id: finding.text for finding in check_rules.run_rules(found)}


def test_three_equal_hosts_have_no_finding() -> None:
    assert check_rules.run_rules(facts()) == []


NO_ANSWER = {"ports": {29500: "does not answer", 41234: "does not answer"}, "rtt": None, "big": None, "rate": None}
CASES = [
    (facts(host(2, error="no route to it")), "between.host", "10.0.0.3: no route to it"),
    (facts(host(1, address=None)), "between.route", "10.0.0.2: none of its interfaces has a route to the other hosts"),
    (facts(host(2, address="10.0.0.1")), "between.same-host", "10.0.0.1 and 10.0.0.3 are the same machine, 10.0.0.1"),
    (facts(pairs={(0, 1): NO_ANSWER}), "between.port-blocked", "10.0.0.1 → 10.0.0.2: ports 29500 and 41234 do not answer (the other direction works): a firewall"),
    (facts(pairs={(0, 1): {"ports": {29500: "", 41234: "is refused"}}}), "between.port-blocked",
     "10.0.0.1 → 10.0.0.2: port 41234 is refused, while port 29500 is open (the other direction works): a firewall that rejects"),
    (facts(pairs={(1, n): {"ports": {}, "error": "can't listen on 10.0.0.2, port 29500: Address already in use"} for n in (0, 2)}), "between.port-blocked",
     "10.0.0.2: can't listen on 10.0.0.2, port 29500: Address already in use"),
    (facts(pairs={(a, b): NO_ANSWER for a in range(3) for b in range(3)}), "between.port-blocked", "no host reaches any other: ports 29500 and 41234 do not answer"),
    (facts(pairs={(1, 2): {"big": False, "passes": 1400}}), "between.mtu",
     "10.0.0.2 → 10.0.0.3: small messages arrive, full-size packets (1500 bytes) are lost without an error message: an MTU black hole; packets of up to 1400 bytes arrive"),
    (facts(host(0, error="timed out", hole=MtuHole(1400))), "between.mtu",
     "this machine → 10.0.0.1: small packets arrive, full-size ones are lost without an error message: an MTU black hole; packets of up to 1400 bytes arrive"),
    (facts(host(0, mtu=9000)), "between.mtu-differs", "the interfaces have different MTUs: 10.0.0.1 9000, 10.0.0.2 1500, 10.0.0.3 1500"),
    (facts(host(2, skew=300.0)), "between.clock", "10.0.0.3: its clock is 5.0 minutes ahead of the other hosts'"),
    (facts(host(1, skew=-3.0)), "between.clock", "10.0.0.2: its clock is 3.0 s behind the other hosts'"),
    (facts(host(2, torch=TorchBuild("2.12.0", None))), "between.torch", "10.0.0.3 has torch 2.12.0; 10.0.0.1 and 10.0.0.2 have 2.13.0+cu126, CUDA 12.6, NCCL 2.27.3"),
    (facts(host(1, torch=TorchBuild(error="No module named 'torch'"))), "between.torch-missing", "10.0.0.2: import torch fails: No module named 'torch'"),
    (facts(host(0, python="3.12.1")), "between.python", "10.0.0.1 has Python 3.12; 10.0.0.2 and 10.0.0.3 have 3.11"),
    (replace(facts(), program=("host 10.0.0.2: train.py differs from host 10.0.0.1's; copy it with --sync",)), "between.program",
     "10.0.0.2: train.py differs from host 10.0.0.1's"),
    (facts(host(1, files={"data d": "b" * 64}), *(host(n, files={"data d": "a" * 64}) for n in (0, 2))), "between.files",
     "10.0.0.2 has data d bbbbbbbb; 10.0.0.1 and 10.0.0.3 have aaaaaaaa; the contents differ"),
    (facts(host(1, files={"model m": ""}), *(host(n, files={"model m": "a" * 64}) for n in (0, 2))), "between.files", "model m does not exist on 10.0.0.2"),
    (facts(host(1, speed=100), pairs={ends: {"rate": 11e6} for ends in ((0, 1), (1, 0), (1, 2), (2, 1))}), "between.speed-differs",
     "10.0.0.2: the link speed is 100 Mbit/s, on other hosts 1000; every step waits for it"),
    (facts(pairs={ends: {"rate": 6e6} for ends in ((0, 1), (1, 0), (1, 2), (2, 1))}), "between.slow-link",
     "10.0.0.2: all its traffic moves at 48 Mbit/s, the other pairs 944 Mbit/s or more; every step waits for it"),
    (facts(pairs={(0, 1): {"rate": 6e6}}), "between.slow-link", "10.0.0.1 → 10.0.0.2: 48 Mbit/s, the best pair 944 Mbit/s; every step waits for it"),
    (facts(pairs={(a, b): {"rate": 10e6} for a in range(3) for b in range(3)}), "between.slow-link", "all pairs are slow, 80 Mbit/s at worst; every step waits for the slowest pair"),
    (facts(reduce=AllReduceFacts(3, "gloo", error="10.0.0.2: did not finish within 20 s")), "between.all-reduce", "a gloo all-reduce over 3 hosts failed: 10.0.0.2: did not finish within 20 s"),
    (facts(reduce=AllReduceFacts(3, "gloo", 1 << 20, (0.2, 0.2, 0.2))), "between.all-reduce", "the all-reduce moves 55.9 Mbit/s per link, a single connection reaches 944 Mbit/s"),
    (facts(host(0, hostname="box", resolves={"box": ("127.0.1.1",)})), "between.hostname", "10.0.0.1's hostname box resolves to 127.0.1.1, which is loopback; `stoker run` passes addresses"),
    (facts(*(host(n, hostname="clone", resolves={"clone": ()}) for n in range(3))), "between.hostname",
     "10.0.0.1, 10.0.0.2 and 10.0.0.3 share the hostname clone, which resolves on no host"),
    (facts(*(host(n, resolves={"node0": (), "node1": ("10.0.0.2",), "node2": ("10.0.0.3",)}) for n in range(3))), "between.hostname",
     "the hostname node0 does not resolve on any host"),
]  # fmt: skip


@pytest.mark.parametrize(("found", "id", "text"), CASES, ids=[f"{id}-{n}" for n, (_, id, _) in enumerate(CASES)])
def test_a_fault_has_one_finding_that_names_the_host(found: ClusterFacts, id: str, text: str) -> None:
    texts = [finding.text for finding in check_rules.run_rules(found) if finding.id == id]
    assert len(texts) == 1 and texts[0].startswith(text)


def test_every_check_between_hosts_has_a_case() -> None:
    assert set(check_rules.CHECKS) == {id for _, id, _ in CASES}


def test_a_blocked_pair_says_that_no_all_reduce_was_tried() -> None:
    assert (
        "no all-reduce was tried" in said(replace(facts(pairs={(0, 1): NO_ANSWER}), reduce=None))["between.all-reduce"]
    )


def examination(**more: Any) -> Examination:
    return examination_from_json(
        {
            "schema": 1,
            "machine": machine_json(0),
            "environment": more,
            "host": {"shm_total": 10**10, "shm_free": 10**10, "disk_free": 10**11},
        }
    )


def test_the_doctor_s_findings_of_several_hosts_are_said_once_with_all_names() -> None:
    slow = examination(CUDA_LAUNCH_BLOCKING="1")
    found = facts(host(0, examination=slow), host(1, examination=examination()), host(2, examination=slow))
    hosts = Hosts(tuple(Host(name, name) for name in NAMES))
    texts = [finding.text for finding in doctor_findings(found, hosts) if finding.id == "env.slow"]
    assert texts == ["10.0.0.1 and 10.0.0.3: CUDA_LAUNCH_BLOCKING=1 waits for every kernel; use it only for debugging"]
    codes = {
        level: exit_code([replace(check_rules.run_rules(CASES[0][0])[0], level=level)])
        for level in ("warn", "fail", "unknown")
    }
    assert codes == {"warn": 1, "fail": 2, "unknown": 3}


def test_the_table_has_hosts_as_columns_and_marks_what_differs() -> None:
    found = facts(host(2, torch=TorchBuild("2.12.0", None), skew=300.0), host(1, files={"script train.py": ""}))
    lines = check_table.format_table(found)
    assert lines[0].split() == list(NAMES)
    rows = {line[: line.index("  ")].strip(): line for line in lines[1:]}
    assert rows["torch"].endswith("≠ 2.12.0") and rows["torch"].count("≠") == 1
    assert (
        rows["clock"].endswith("≠ +300.0 s")
        and rows["script train.py"].split("  ")[-1].strip() == "hash aaaaaaaa"
        and "≠ missing" in rows["script train.py"]
    )
    assert rows["reaches hosts"].endswith("2 of 2 others")
    assert "≠" not in rows["interface"] and "1000 Mbit/s" in rows["interface"]


def test_a_host_that_does_not_answer_keeps_its_column_and_many_hosts_are_folded() -> None:
    lines = check_table.format_table(facts(host(1, error="no route to it")))
    assert lines[0].split() == ["10.0.0.1", "10.0.0.2", "✗", "10.0.0.3"]
    folded = check_table.format_table(facts(), width=60)
    assert [line.split() for line in folded if line.strip().startswith("10.")] == [
        ["10.0.0.1"],
        ["10.0.0.2"],
        ["10.0.0.3"],
    ] and max(map(len, folded)) <= 60


def test_the_price_of_a_step_is_the_ring_s() -> None:
    full, lora = compute_step_costs(1.1e9, 3, 117.5e6)
    assert round(full.seconds, 1) == 25.0 and round(lora.seconds, 2) == 0.05
    assert (
        describe_step_costs(1.1e9, 3, 117.5e6)
        == "1.1 B bf16 gradients over 940 Mbit/s: 25 s/step; LoRA (1.13 M, fp32): 0.051 s"
    )
    assert compute_step_costs(1e9, 1, 1e9)[0].seconds == 0.0
    assert [parse_count(text) for text in ("1.1B", "350M", "124000000")] == [1.1e9, 350e6, 124e6]
    with pytest.raises(ValueError, match="is not a number of parameters"):
        parse_count("many")


def test_bus_bandwidth_is_what_each_link_carries() -> None:
    assert AllReduceFacts(4, "gloo", 100, (1.0, 9.0, 2.0)).bus == 75.0 and AllReduceFacts(2, "gloo").bus is None


@pytest.mark.parametrize(
    ("rates", "default", "helps"),
    [
        ((110, 111, 112, 113), (100, 101, 102, 103), True),
        ((102, 103, 102, 103), (100, 100, 101, 101), False),  # 2 %
        ((110, 130, 90, 150), (100, 101, 102, 103), False),  # better in the median, and not outside the spread
        ((150, 150), (100, 100), False),  # dropped early
        ((80, 81, 82, 83), (100, 101, 102, 103), False),
    ],
)
def test_a_setting_stays_only_if_it_is_better_beyond_the_spread(
    rates: tuple[float, ...], default: tuple[float, ...], helps: bool
) -> None:
    assert Trial({"NCCL_ALGO": "Ring"}, rates, default).helps is helps


def test_only_interfaces_that_lead_to_other_hosts_are_tried() -> None:
    addresses = {
        name: {
            "lo": ["127.0.0.1"],
            "eth0": [name],
            "eth1": [f"10.1.0.{n}"],
            "docker0": ["172.17.0.1"],
            "mgmt": ["192.168.0.1"],
        }
        for n, name in enumerate(NAMES)
    }
    assert list_candidates("gloo", dict.fromkeys(NAMES, "eth0"), addresses) == [
        {"GLOO_SOCKET_IFNAME": "eth1"},
        {"GLOO_SOCKET_IFNAME": "eth0,eth1"},
    ]
    one = {name: {"lo": ["127.0.0.1"], "eth0": [name]} for name in NAMES}
    assert list_candidates("gloo", dict.fromkeys(NAMES, "eth0"), one) == []
    assert {name for env in list_candidates("nccl", dict.fromkeys(NAMES, "eth0"), one) for name in env} == {
        "NCCL_SOCKET_NTHREADS",
        "NCCL_NSOCKS_PERTHREAD",
        "NCCL_ALGO",
        "NCCL_PROTO",
    }


FILE = """# my lab
hosts:   # in rank order
  - {host: 10.0.0.1, slots: 2}
  - host: 10.0.0.2   # the slow one
"""


@pytest.mark.parametrize(
    "text",
    [
        FILE,
        FILE + "env: {NCCL_ALGO: Ring}\n",
        FILE + "env:\n  NCCL_ALGO: Ring   # old\n\n  NCCL_PROTO: LL\n",
        "env:\n  A: '1'\n\n# next\n" + FILE,
        FILE.rstrip(),
    ],
)
def test_the_env_block_of_a_hosts_file_is_replaced_and_the_rest_stays(text: str) -> None:
    changed = replace_env(text, {"NCCL_SOCKET_NTHREADS": "4"})
    assert yaml.safe_load(changed) == {**yaml.safe_load(FILE), "env": {"NCCL_SOCKET_NTHREADS": "4"}}
    assert all(line in changed.splitlines() for line in FILE.splitlines()) and ("# next" in text) == (
        "# next" in changed
    )
    assert yaml.safe_load(replace_env(changed, {})) == yaml.safe_load(FILE)
    assert replace_env(changed, {"NCCL_SOCKET_NTHREADS": "4"}) == changed


def test_a_hosts_file_whose_env_can_t_be_replaced_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("{hosts: [{host: a}]}\n")
    with pytest.raises(Refusal, match="by hand"):
        write_env(str(path), {"NCCL_ALGO": "Ring"})
    assert path.read_text() == "{hosts: [{host: a}]}\n" and list(tmp_path.iterdir()) == [path]
    path.write_text(json.dumps({"hosts": [{"host": "a"}], "env": {"A": "1"}}))
    write_env(str(path), {"NCCL_ALGO": "Ring"})
    assert json.loads(path.read_text()) == {"hosts": [{"host": "a"}], "env": {"NCCL_ALGO": "Ring"}}


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["chek"], "unknown command `stoker cluster chek` (did you mean check?); use check or init"),
        (["check", "--hosts", "a,b", "--tune"], "--tune writes to a hosts file"),
        (["check", "--hosts", "a,b", "--tune", "--quick"], "--tune writes to a hosts file"),
        (["check", "--hosts", "a,b", "--parameters", "lots"], "is not a number of parameters"),
        (["check"], "--hosts is missing"),
    ],
)
def test_what_can_t_be_checked_is_refused_in_one_line(
    argv: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal) as refused:
        command.main(argv)
    assert line in refused.value.line and "\n" not in refused.value.line


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_a_hosts_file_is_never_more_open_than_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """Its env may hold secrets, and other users can read what is open to them only for a moment."""
    path = tmp_path / "cluster.yaml"
    path.write_text("hosts: [{host: a}, {host: b}]\nenv:\n  HF_TOKEN: hf_7xq\n")
    path.chmod(mode)
    modes: list[int] = []
    opened = os.open

    def watched(name: Any, flags: int, *more: Any, **others: Any) -> int:
        handle = opened(name, flags, *more, **others)
        if flags & os.O_CREAT:
            modes.append(os.fstat(handle).st_mode & 0o777)
        return handle

    monkeypatch.setattr(os, "open", watched)
    write_env(str(path), {"HF_TOKEN": "hf_7xq", "NCCL_ALGO": "Ring"})
    assert modes == [0o600]
    assert path.stat().st_mode & 0o777 == mode and "NCCL_ALGO" in path.read_text()
