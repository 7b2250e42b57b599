"""What the thirty-first review found: words of hosts and of files in commands that are advised, names of other users' programs in
the kernel's log, other users' events in viewers' memory.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stoker.control.cluster import between
from stoker.control.cluster.asking import read_answer
from stoker.control.cluster.facts import Facts, OneHost, Pair
from stoker.control.cluster.hosts import is_address
from stoker.control.doctor.checks import net
from stoker.control.machine.facts import Net

# ---- words of a host, or of a recorded machine, in a command to copy ----

TRAPS = [
    "203.0.113.9; touch trapped",
    "$(touch trapped)",
    "10.0.0.2%eth0;touch${IFS}trapped",
    "x' ; touch trapped ; echo '",
]


def route(address: str) -> dict[str, Any]:
    ways = {"10.0.0.1": {"interface": "eth0", "source": address, "mtu": 1500, "address": "10.0.0.1"}}
    told = {"routes": ways, "addresses": {"eth0": [address]}, "hostname": "b", "reached_at": address}
    return read_answer("route", json.dumps(told).encode())


@pytest.mark.parametrize("address", [*TRAPS, "UNKNOWN", ""])
def test_a_hosts_word_that_is_no_address_is_not_taken_for_one(address: str) -> None:
    answer = route(address)
    assert answer["reached_at"] is None and "source" not in answer["routes"]["10.0.0.1"] and not is_address(address)


@pytest.mark.parametrize("address", ["10.0.0.2", "fd00::2", "fe80::2%eth0.100", "fe80::2%br-1"])
def test_a_hosts_address_stays(address: str) -> None:
    answer = route(address)
    assert (answer["reached_at"], answer["routes"]["10.0.0.1"]["source"]) == (address, address)


def typed(line: str, folder: Path) -> list[str]:
    """The words that a shell makes of a line whose first one is a program; what else it runs can leave a file."""
    program = line.split()[0]
    argv = ["bash", "-c", f"{program}() {{ printf '%s\\n' \"$@\"; }}; {line}"]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=True)
    assert not [*folder.iterdir()], line
    return done.stdout.splitlines()


@pytest.mark.parametrize("trap", TRAPS)
def test_an_address_and_an_interface_are_one_word_of_a_command(trap: str, tmp_path: Path) -> None:
    hosts = (OneHost("a", address="10.0.0.1"), OneHost("b", address=trap, interface=trap))
    facts = Facts(hosts, (Pair("b", "a", {29500: "does not answer", 29501: ""}, big=False, passes=1000),))
    (blocked,) = between.port_blocked(facts)
    assert typed(f"ufw {blocked.fix.rpartition(':   ufw ')[2]}", tmp_path)[-2:] == ["from", trap]
    (hole,) = between.mtu(facts)
    assert typed(hole.fix.rpartition(" on b and a")[0], tmp_path)[:4] == ["link", "set", "dev", trap]


@pytest.mark.parametrize("trap", TRAPS)
def test_a_recorded_machines_name_is_one_word_of_a_command(trap: str, tmp_path: Path) -> None:
    (found,) = net.hostname(Net(trap, (), ("eth0",), None, None, "no such name"))
    assert typed(found.fix.partition(" >> ")[0], tmp_path) == [f"127.0.1.1 {trap}"]


def test_a_hosts_name_is_one_name_of_a_line_for_etc_hosts() -> None:
    there = [
        OneHost(name, address=f"10.0.0.{place}", hostname=called, resolves={"vm-1.lan": (), "b pypi.org": ()})
        for place, (name, called) in enumerate((("a", "vm-1.lan"), ("b", "b pypi.org")), 1)
    ]
    (found,) = between.hostname(Facts(tuple(there)))
    assert found.fix == "in every /etc/hosts: 10.0.0.1 vm-1.lan; 10.0.0.2 NAME"


# ---- what a viewer keeps of another user's events ----
