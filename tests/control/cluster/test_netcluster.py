"""The test cluster's faults are what they say: each is tried by packets, not by looking at the rule that makes it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from conftest import wait_for
from netcluster import SSH_PORT, NetCluster, connects

_LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listening", flush=True)
while True:
    with server.accept()[0] as one:
        total = 0
        while data := one.recv(65536): total += len(data)
        one.sendall(b"%d" % total)
"""
_SEND = """
import socket, sys, time
one = socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)
one.settimeout(float(sys.argv[4]))
began = time.monotonic()
try:
    one.sendall(bytes(int(sys.argv[3])))
    one.shutdown(socket.SHUT_WR)
    print(one.recv(100).decode(), time.monotonic() - began)
except OSError as problem:
    print("lost", problem)
"""


def _listen(cluster: NetCluster, i: int, port: int) -> None:
    server = cluster.start_in(
        i, [sys.executable, "-S", "-c", _LISTEN, cluster.hosts[i].address, str(port)], stdout=subprocess.PIPE
    )
    assert server.stdout is not None and server.stdout.readline() == b"listening\n"


def _send(cluster: NetCluster, source: int, target: int, port: int, size: int, seconds: float = 20) -> list[str]:
    return cluster.run_in(
        source, [sys.executable, "-S", "-c", _SEND, cluster.hosts[target].address, str(port), str(size), str(seconds)]
    ).stdout.split()


def _ssh(cluster: NetCluster, i: int, command: str) -> subprocess.CompletedProcess[str]:
    argv = [
        "ssh",
        "-F",
        str(cluster.folder / "ssh_config"),
        "-o",
        "BatchMode=yes",
        "-o",
        "ConnectTimeout=5",
        "-i",
        str(cluster.identity),
        cluster.hosts[i].address,
        command,
    ]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)


def test_each_host_is_reached_by_ssh_and_is_a_host_of_its_own(netcluster: NetCluster) -> None:
    seen = [
        _ssh(
            netcluster,
            n,
            f"echo $HOME $(cat /proc/sys/kernel/hostname) $(ls /sys/class/net | tr '\\n' ' '); {sys.executable} -c 'import os; print(os.stat(\"/proc/self/ns/net\").st_ino)'",
        )
        for n in range(3)
    ]
    lines = [one.stdout.splitlines() for one in seen]
    assert [line[0] for line in lines] == [f"{host.home} stk-clone eth0 lo" for host in netcluster.hosts], seen
    assert len({line[1] for line in lines}) == 3
    for n in range(3):
        assert connects(netcluster, n, (n + 1) % 3, SSH_PORT) == "yes"
        told = netcluster.run_in(
            n,
            [
                sys.executable,
                "-S",
                "-c",
                "import socket\ntry: print(socket.gethostbyname('stk-clone'))\nexcept OSError: print('unknown')",
            ],
        )
        assert told.stdout == "unknown\n", told


def test_its_processes_are_seen_until_they_end(netcluster: NetCluster) -> None:
    assert netcluster.pids(1) == []
    child = netcluster.start_in(1, ["sleep", "100"])
    assert wait_for(lambda: netcluster.pids(1) or None, 5) == [child.pid] and netcluster.pids(0) == []
    child.kill()
    child.wait()
    assert netcluster.pids(1) == []


def test_a_cut_host_is_out_of_reach_until_it_is_mended(netcluster: NetCluster) -> None:
    netcluster.cut(0)
    assert connects(netcluster, 1, 0, SSH_PORT, 1.0) != "yes" and connects(netcluster, 0, 1, SSH_PORT, 1.0) != "yes"
    assert connects(netcluster, 1, 2, SSH_PORT) == "yes"
    netcluster.repair(0)
    assert wait_for(lambda: True if connects(netcluster, 1, 0, SSH_PORT) == "yes" else None, 10)


def test_a_block_is_silent_and_in_one_direction(netcluster: NetCluster) -> None:
    for n in (0, 1):
        _listen(netcluster, n, 5000)
    assert connects(netcluster, 0, 1, 5000) == "yes"
    netcluster.block(0, 1)
    assert connects(netcluster, 0, 1, 5000, 1.0) == "timed out"
    assert (
        connects(netcluster, 1, 0, 5000) == "yes"
        and connects(netcluster, 2, 1, 5000) == "yes"
        and connects(netcluster, 0, 1, SSH_PORT) == "yes"
    )
    netcluster.heal(1)
    assert connects(netcluster, 0, 1, 5000) == "yes"


def test_a_slow_link_is_slow_and_a_lossy_one_still_delivers(netcluster: NetCluster) -> None:
    _listen(netcluster, 1, 5000)
    size = 2_000_000
    count, _ = _send(netcluster, 0, 1, 5000, size)
    assert int(count) == size
    netcluster.slow(1, 10)
    count, seconds = _send(netcluster, 0, 1, 5000, size)
    assert int(count) == size and 1.2 < float(seconds) < 10, seconds  # 1.6 s at 10 Mbit/s
    netcluster.heal(1)
    netcluster.loss(1, 100)
    assert connects(netcluster, 0, 1, 5000, 1.0) == "timed out"
    netcluster.heal(1)
    netcluster.loss(1, 5)
    count, _ = _send(netcluster, 0, 1, 5000, size // 4)
    assert int(count) == size // 4


def test_an_mtu_hole_swallows_long_packets_only(netcluster: NetCluster) -> None:
    for n in (0, 1):
        _listen(netcluster, n, 5000)
    netcluster.mtu_hole(1)
    for source, target in ((0, 1), (1, 0)):
        assert connects(netcluster, source, target, 5000) == "yes"
        assert _send(netcluster, source, target, 5000, 1000)[0] == "1000"
        assert _send(netcluster, source, target, 5000, 100_000, 2.0)[0] == "lost"
    said = netcluster.run_in(1, ["ip", "-o", "link", "show", "eth0"]).stdout
    assert "mtu 1500" in said


def test_a_stopped_sshd_refuses_and_a_new_host_key_is_noticed(netcluster: NetCluster) -> None:
    netcluster.stop_sshd(0)
    assert "Connection refused" in _ssh(netcluster, 0, "true").stderr
    netcluster.start_sshd(0)
    netcluster.set_env(0, MORE="some thing")
    assert _ssh(netcluster, 0, "echo $MORE").stdout == "some thing\n"
    netcluster.change_host_key(0)
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in _ssh(netcluster, 0, "true").stderr


def test_a_delay_is_felt_where_the_kernel_can(netcluster: NetCluster) -> None:
    _listen(netcluster, 1, 5000)
    netcluster.delay(1, 200)
    began = time.monotonic()
    assert connects(netcluster, 0, 1, 5000, 5.0) == "yes" and time.monotonic() - began > 0.2


def test_nothing_of_a_cluster_is_left(netcluster: NetCluster) -> None:
    cluster = netcluster
    cluster.mtu_hole(0)
    child = cluster.start_in(0, ["sleep", "100"])
    cluster.close()
    assert child.returncode == -9
    for look in (
        ["ip", "netns", "list"],
        ["ip", "-o", "link"],
        *([["nft", "list", "tables"]] if os.path.exists("/usr/sbin/nft") else []),
    ):
        assert cluster.tag not in subprocess.run(look, capture_output=True, text=True, check=True).stdout
    assert not list(Path("/etc/netns").glob(f"{cluster.tag}*"))
