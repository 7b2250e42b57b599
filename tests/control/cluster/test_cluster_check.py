"""`stoker cluster check` on two or three real hosts, with real faults: each is named, and the rest is still checked."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import at_length, at_length_but, wait_for
from netcluster import HOSTNAME, NetCluster, _run
from stoker.contract.evidence import Finding
from stoker.control.cluster import hosts as hostlist
from stoker.control.cluster import transport
from stoker.control.cluster.agent_pool import AgentPool
from stoker.control.cluster.connectivity import quick_check
from stoker.control.cluster.probes import ProbeBatch
from stoker.control.doctor.check import exit_code

SPEED = {
    "between.all-reduce",
    "between.slow-link",
    "between.speed-differs",
}  # what a busy machine may look like, and the check then says


class Report:
    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        assert done.stdout.startswith("{"), done.stderr
        self.code = done.returncode
        self.json: dict[str, Any] = json.loads(done.stdout)
        self.findings: dict[str, list[str]] = {}
        for one in self.json["findings"]:
            self.findings.setdefault(one["id"], []).append(one["text"])
        self.hosts = {one["name"]: one for one in self.json["facts"]["hosts"]}

    @property
    def between(self) -> set[str]:
        """The doctor's findings depend on the machine the test runs on."""
        return {id for id in self.findings if id.startswith("between.")}

    def only(self, id: str) -> str:
        """The one finding between hosts; those about their common name, and that no all-reduce was tried, come with it."""
        assert self.between - {"between.hostname", *SPEED} - {id} == set() and id in self.between, self.findings
        assert len(self.findings[id]) == 1, self.findings
        return self.findings[id][0]


def check(cluster: NetCluster, *flags: str, file: Path | None = None, json_too: bool = True) -> Any:
    path = file or cluster.file()
    argv = [
        sys.executable,
        "-m",
        "stoker.cli.main",
        "cluster",
        "check",
        "--hosts",
        str(path),
        *flags,
        *(["--json"] if json_too else []),
    ]
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=cluster.folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return Report(done) if json_too else done


def test_healthy_hosts_side_by_side_with_an_all_reduce_the_price_of_a_step_and_nothing_to_tune(
    netcluster: NetCluster,
) -> None:
    file = netcluster.file()
    before = file.read_text()
    report = check(netcluster, "--tune", file=file)
    assert report.between - SPEED == {"between.hostname"} and report.code == exit_code(
        [Finding(one["id"], one["level"], "") for one in report.json["findings"]]
    )
    assert {one["level"] for one in report.json["findings"] if one["id"] == "between.hostname"} == {"ok"}
    assert "share the hostname stk-clone, which resolves on no host" in report.findings["between.hostname"][0]
    reduce = report.json["facts"]["reduce"]
    assert reduce["backend"] == "gloo" and reduce["world"] == 3 and len(reduce["times"]) == 5 and not reduce["error"]
    assert {one["interface"] for one in report.hosts.values()} == {"eth0"} and all(
        abs(one["skew"]) < 1 for one in report.hosts.values()
    )
    assert len(report.json["facts"]["pairs"]) == 6 and all(
        pair["big"] and pair["rate"] > 0 and not any(pair["ports"].values()) for pair in report.json["facts"]["pairs"]
    )
    assert "1.1 B bf16 gradients over" in report.json["price"]["sentence"]
    assert "has no setting to try" in report.json["tuned"][0] and file.read_text() == before
    assert wait_for(lambda: True if not any(netcluster.pids(i) for i in range(3)) else None, 10)


def test_the_table_for_people(netcluster: NetCluster) -> None:
    done = check(netcluster, "--quick", file=netcluster.file((1, 1)), json_too=False)
    lines = done.stdout.splitlines()
    assert lines[0].split() == [host.name for host in netcluster.hosts[:2]]
    assert any(line.startswith("torch ") for line in lines) and any(
        line.startswith("· between.hostname: ") for line in lines
    )


DOWN: list[tuple[Callable[[NetCluster], None], str]] = [
    (lambda cluster: cluster.cut(2), "no route to it: it is switched off, unplugged or on another network"),
    (lambda cluster: cluster.stop_sshd(2), "connection refused: nothing listens on its ssh port"),
    (lambda cluster: cluster.change_host_key(2), "its host key changed since it was last known"),
]


@pytest.mark.parametrize(
    ("fault", "words"),
    [DOWN[0], *(pytest.param(*other, marks=at_length) for other in DOWN[1:])],  # test_multihost.py has the others
    ids=["host-down", "sshd-refusing", "host-key-changed"],
)
def test_a_host_that_can_t_be_asked_is_named_and_the_others_are_checked(
    netcluster: NetCluster, fault: Callable[[NetCluster], None], words: str
) -> None:
    fault(netcluster)
    report = check(netcluster, "--quick")
    assert report.code == 2 and report.only("between.host").startswith(f"{netcluster.hosts[2].name}: {words}")
    assert {(pair["source"], pair["target"]) for pair in report.json["facts"]["pairs"]} == {
        (a.name, b.name) for a in netcluster.hosts[:2] for b in netcluster.hosts[:2] if a != b
    }


def test_a_port_blocked_in_one_direction(netcluster: NetCluster) -> None:
    netcluster.block(0, 1)
    report = check(netcluster, "--quick", file=netcluster.file((1, 1)))
    text = report.only("between.port-blocked")
    assert text.startswith(f"{netcluster.hosts[0].name} → {netcluster.hosts[1].name}: ports 295") and text.endswith(
        "do not answer (the other direction works): a firewall"
    )
    assert report.code == 2


def test_a_firewall_that_is_open_for_the_store_s_port_only(netcluster: NetCluster) -> None:
    netcluster.block(1, 0, ports="30000-65535")
    text = check(netcluster, "--quick", file=netcluster.file((1, 1))).only("between.port-blocked")
    assert (
        text.startswith(f"{netcluster.hosts[1].name} → {netcluster.hosts[0].name}: port ")
        and "does not answer, while port 295" in text
    )


def test_an_mtu_hole_between_two_hosts(netcluster: NetCluster) -> None:
    for host in netcluster.hosts:
        _run("ip", "-n", host.namespace, "link", "set", "eth0", "gso_max_segs", "1")
    netcluster.nft_rule(1, f"ip saddr {netcluster.hosts[0].address} ip length > 1400 drop")
    text = check(netcluster, "--quick", file=netcluster.file((1, 1))).only("between.mtu")
    assert text.startswith(
        f"{netcluster.hosts[0].name} → {netcluster.hosts[1].name}: small messages arrive, full-size packets (1500 bytes) are lost"
    )
    assert text.endswith("packets of up to 1400 bytes arrive")


def test_an_mtu_hole_on_the_way_to_a_host(netcluster: NetCluster) -> None:
    """ssh itself hangs in it: without a look of our own it would be just another timeout."""
    netcluster.mtu_hole(1)
    text = check(netcluster, "--quick", "--ssh-option=-oServerAliveInterval=1").only("between.mtu")
    assert text.startswith(f"this machine → {netcluster.hosts[1].name}: small packets arrive") and text.endswith(
        "packets of up to 1400 bytes arrive"
    )


@pytest.mark.parametrize("flags", at_length_but([("--quick",)], [(), ("--quick",)]), ids=["whole", "quick"])
def test_another_torch_version_in_a_second_environment(netcluster: NetCluster, flags: tuple[str, ...]) -> None:
    venv = netcluster.folder / "second venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    package = next((venv / "lib").glob("python3*")) / "site-packages" / "torch"
    for name, text in (
        ("__init__", "from torch.version import __version__\nfrom torch import version, cuda, distributed\n"),
        ("version", "__version__ = '2.12.0'\ncuda = None\n"),
        ("cuda", ""),
        ("distributed", ""),
    ):
        package.mkdir(exist_ok=True)
        (package / f"{name}.py").write_text(text)
    file = netcluster.file(per_host=[{}, {}, {"python": str(venv / "bin" / "python")}])
    first, _, third = netcluster.hosts
    report = check(netcluster, *flags, file=file)
    text = report.only("between.torch")
    assert (
        text.startswith(f"{third.name} has torch 2.12.0; {first.name} and ")
        and report.code == 2
        and report.json["facts"]["reduce"] is None
    )


def test_another_script(netcluster: NetCluster) -> None:
    for n, host in enumerate(netcluster.hosts):
        (host.workdir / "train.py").write_text(f"import part\nprint({n == 1})\n")
        (host.workdir / "part.py").write_text("pass\n")
    report = check(netcluster, "--quick", "train.py", file=netcluster.file((1, 1)))
    assert (
        report.code == 2
        and report.only("between.program")
        == f"{netcluster.hosts[1].name}: train.py differs from host {netcluster.hosts[0].name}'s"
    )


def test_a_clock_that_is_off_by_five_minutes(netcluster: NetCluster) -> None:
    """A wall clock can't be set for one namespace: this host's Python reads it through a wrapper, and nothing else is replaced."""
    wrapper = netcluster.folder / "python-of-a-late-clock"
    wrapper.write_text(
        f"#!{sys.executable}\nimport sys, time\nreal = time.time\ntime.time = lambda: real() - 300\nat = sys.argv.index('-c')\n"
        "code, sys.argv = sys.argv[at + 1], ['-c', *sys.argv[at + 2 :]]\nexec(compile(code, '<string>', 'exec'), {'__name__': '__main__'})\n"
    )
    wrapper.chmod(0o755)
    report = check(netcluster, "--quick", file=netcluster.file(per_host=[{}, {"python": str(wrapper)}]))
    assert (
        report.only("between.clock") == f"{netcluster.hosts[1].name}: its clock is 5.0 minutes behind the other hosts'"
    )
    assert -301 < report.hosts[netcluster.hosts[1].name]["skew"] < -299


def test_a_slow_link(netcluster: NetCluster) -> None:
    netcluster.slow(1, 50)
    report = check(netcluster)
    assert report.only("between.slow-link").startswith(f"{netcluster.hosts[1].name}: all its traffic moves at ")
    assert 1e6 < report.json["price"]["bandwidth"] < 6.5e6 and report.json["facts"]["reduce"]["times"]


def test_a_hostname_on_loopback(netcluster: NetCluster) -> None:
    netcluster.resolve(0, f"127.0.1.1 {HOSTNAME}")
    texts = check(netcluster, "--quick", file=netcluster.file((1, 1))).findings["between.hostname"]
    assert any(
        text.startswith(f"{netcluster.hosts[0].name}'s hostname {HOSTNAME} resolves to 127.0.1.1, which is loopback")
        for text in texts
    )


def test_this_machine_may_be_one_of_the_hosts_and_one_without_torch_or_python_is_named(netcluster: NetCluster) -> None:
    bare = netcluster.folder / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    file = netcluster.file(per_host=[{"python": str(bare / "bin" / "python")}, {"python": "/no/such/python"}])
    told = json.loads(file.read_text())
    told["hosts"].append({"host": "localhost", "local": True, "slots": 1})
    file.write_text(json.dumps(told))
    report = check(netcluster, "--quick", file=file)
    assert report.findings["between.torch-missing"] == [
        f"{netcluster.hosts[0].name}: import torch fails: No module named 'torch'"
    ]
    assert report.findings["between.host"] == [
        f"{netcluster.hosts[1].name}: no Python: /no/such/python does not exist there"
    ]
    assert (
        report.hosts["localhost"]["address"] == netcluster.address
        and report.hosts["localhost"]["interface"] == netcluster.bridge
    )


@pytest.fixture
def second_network(netcluster: NetCluster) -> Iterator[NetCluster]:
    """Another interface on every host, and the first one slow."""
    bridge, links = f"{netcluster.tag}c", [f"{netcluster.tag}w{n}" for n in range(3)]
    _run("ip", "link", "add", bridge, "type", "bridge", "forward_delay", "0")
    try:
        _run("ip", "link", "set", bridge, "up")
        for n, (host, link) in enumerate(zip(netcluster.hosts, links, strict=True)):
            _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth1", "netns", host.namespace)
            _run("ip", "link", "set", link, "master", bridge, "up")
            _run("ip", "-n", host.namespace, "addr", "add", f"10.251.77.{n + 1}/24", "dev", "eth1")
            _run("ip", "-n", host.namespace, "link", "set", "eth1", "up")
            netcluster.slow(n, 300)
        yield netcluster
    finally:
        for link in (*links, bridge):
            subprocess.run(["ip", "link", "del", link], capture_output=True, check=False)


@at_length  # half a minute of all-reduces
def test_tune_keeps_what_helps_in_the_hosts_file(second_network: NetCluster) -> None:
    file = second_network.file(slots=(1, 1))
    report = check(second_network, "--tune", file=file)
    assert "GLOO_SOCKET_IFNAME=eth1 gives" in report.json["tuned"][0] and json.loads(file.read_text())["env"] == {
        "GLOO_SOCKET_IFNAME": "eth1"
    }
    assert hostlist.read_hosts_file(str(file)).env == {"GLOO_SOCKET_IFNAME": "eth1"}


# ---- without the command ----


@pytest.fixture
def one_agent() -> Iterator[ProbeBatch]:
    found: list[ProbeBatch] = []
    members = AgentPool(
        [transport.start_local_agent(-1)],
        lambda member, message, payload: found[0].on_message(member.host, message, payload) and None,
        lambda member, line: None,
    )
    found.append(ProbeBatch(members.all, members.pump))
    try:
        yield found[0]
    finally:
        members.close()


def test_a_stranger_without_the_token_gets_nothing_and_the_listeners_go(one_agent: ProbeBatch) -> None:
    question = one_agent.ask("net", {"": {"address": "127.0.0.1", "token": "secret" * 4}}, 30.0)
    ports = one_agent.partial_answers(question, 1, 10.0)[""]["ports"]
    with socket.create_connection(("127.0.0.1", ports[0]), 5) as stranger:
        stranger.sendall(b"x" * 24 + b"\0\0\0\1y")
        with contextlib.suppress(ConnectionResetError):  # closed with our bytes unread: a reset
            assert stranger.recv(1) == b""
    with socket.create_connection(("127.0.0.1", ports[1]), 5) as friend:
        friend.sendall(b"secret" * 4 + b"\0\0\0\1y")
        assert friend.recv(1) == b"."
    one_agent.send(question, {"": {"do": "end"}})
    assert one_agent.wait(10.0, lambda host: host in question.answers, [""]) == [] and question.answers[""] == {}
    for port in ports:
        with socket.socket() as late:
            assert late.connect_ex(("127.0.0.1", port)) != 0


def test_a_probe_that_fails_or_is_ended_is_an_answer(one_agent: ProbeBatch) -> None:
    assert "no probe 'nix'" in one_agent.answers(one_agent.ask("nix", {"": {}}, 60.0), 100.0)[""]["error"]
    assert "error" in one_agent.answers(one_agent.ask("clock", {"": {"wrong": 1}}, 60.0), 100.0)[""]
    question = one_agent.ask("net", {"": {"address": "127.0.0.1", "token": "t"}}, 250.0)
    one_agent.partial_answers(question, 1, 100.0)
    one_agent.cancel(question)
    assert "without an answer" in one_agent.answers(question, 100.0)[""]["error"]
    assert "time" in one_agent.answers(one_agent.ask("clock", {"": {}}, 60.0), 100.0)[""]


def test_the_quick_part_before_a_run(netcluster: NetCluster) -> None:
    netcluster.block(0, 1)
    hosts = hostlist.read_hosts_file(str(netcluster.file((1, 1))))
    found: list[ProbeBatch] = []
    members = AgentPool(
        transport.connect_all(hosts),
        lambda member, message, payload: found[0].on_message(member.host, message, payload) and None,
        lambda member, line: None,
    )
    found.append(ProbeBatch(members.all, members.pump))
    try:
        findings = quick_check(found[0], hosts, {host.name: host.address for host in netcluster.hosts[:2]})
    finally:
        members.close()
    assert {finding.id: finding.level for finding in findings} == {
        "between.port-blocked": "fail",
        "between.hostname": "ok",
    }
