"""What the twenty-eighth review found."""

from __future__ import annotations

import json
import re
import shlex
import socket
from pathlib import Path

import pytest

from conftest import wait_for
from forked_ranks import free_port
from localuser import ATTACKER, needs_root, start_as, wait
from stoker.contract.listeners import listening_users
from stoker.contract.names import Refusal
from stoker.control.launch import rendezvous
from stoker.control.launch.nodes import Meeting

# ---- what the documentation says to start ----


def test_prometheus_is_started_for_this_machine_and_in_a_folder_of_ones_own() -> None:
    root = Path(__file__).parents[2]
    texts = [path.read_text() for path in (*root.glob("docs/**/*.md"), *root.glob("deploy/**/*.yml"))]
    commands = [found for text in texts for found in re.findall(r"prometheus --config\.file=[^`\n]+", text)]
    assert len(commands) >= 2
    for command in commands:
        words = shlex.split(command)
        assert "--web.listen-address=127.0.0.1:9090" in words, (
            "it listens on all interfaces otherwise, without a password"
        )
        assert "--storage.tsdb.path=$HOME/prometheus" in words, "anybody may make a folder below /tmp first"


# ---- the meeting point of several machines, taken by another user before the launcher that would be number 0 ----


def test_a_launch_does_not_join_another_users_meeting() -> None:
    needs_root()
    port = free_port()

    def numbers_us() -> None:
        with socket.socket() as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            own.bind(("127.0.0.1", port))
            own.listen()
            own.settimeout(30.0)  # nothing of it outlives a test that failed
            way, _ = own.accept()
            if way.recv(4096):
                told = {"rank": 1, "first": 1, "world": 2, "port": 29999, "nodes": 2}
                way.sendall(json.dumps(told).encode() + b"\n")

    attacker = start_as(ATTACKER, numbers_us)
    assert wait_for(lambda: listening_users("127.0.0.1", port) or None, 10.0) == {ATTACKER}
    told = Meeting(2, None, "127.0.0.1", port, "job", 0)
    with pytest.raises(Refusal, match=f"port {port} is in use by .*{ATTACKER}"):
        rendezvous.meet(told, 1, lambda: 29999, lambda: None, lambda line: None)
    assert wait(attacker) == 0
