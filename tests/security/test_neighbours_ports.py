"""Listeners of other users: no role is ready because of them, and none gets a key or a prompt."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest

from conftest import wait_for
from localuser import ATTACKER, needs_root, start_as, wait
from stoker.contract import listeners
from stoker.control.roles.ready_check import MAX_FAILED_CHECKS, ReadyWatch
from stoker.control.roles.role import ReadyRule


def listening(address: str, port: int = 0, dual: bool = False) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    if ":" in address:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not dual)
    made.bind((address, port))
    made.listen()
    return made


class Neighbour:
    """Another user, who listens until this is closed."""

    def __init__(self, address: str, port: int = 0, dual: bool = False) -> None:
        needs_root()
        told, over = os.pipe(), os.pipe()

        def listen() -> None:
            with listening(address, port, dual) as made:
                os.write(told[1], str(made.getsockname()[1]).encode())
                os.close(over[1])
                os.read(over[0], 1)

        self._pid, self._over = start_as(ATTACKER, listen), over[1]
        os.close(told[1])
        os.close(over[0])
        self.port = int(os.read(told[0], 10))
        os.close(told[0])

    def __enter__(self) -> Neighbour:
        return self

    def __exit__(self, *problem: object) -> None:
        os.close(self._over)
        assert os.waitpid(self._pid, 0)[1] == 0


ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def answer_and_close(server: socket.socket) -> None:
    server.accept()[0].sendall(ANSWER)
    server.close()


class ServingNeighbour:
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


@pytest.mark.parametrize("address", ["127.0.0.2", "::"])
def test_a_neighbours_port_on_another_address_stops_no_role(address: str) -> None:
    """It ended the job: a role that was ready counted as gone."""
    with listening("127.0.0.1") as own:
        port = own.getsockname()[1]
        rule = ReadyRule("port", "", check_interval_s=0.05)
        watching = ReadyWatch(rule, [("127.0.0.1", port)], 0.0, 1)
        assert watching.ready.wait(10)
        with Neighbour(address, port):
            assert listeners.find_listening_users("127.0.0.1", port) == {os.getuid()}
            for _ in range(MAX_FAILED_CHECKS + 2):
                own.accept()[0].close()  # one look each
        watching.close()
        assert not watching.unhealthy, watching.unhealthy


@pytest.mark.parametrize(("address", "dual"), [("127.0.0.1", False), ("0.0.0.0", False), ("::", True)])
def test_a_neighbour_who_would_be_asked_in_the_roles_place_is_found(address: str, dual: bool) -> None:
    with Neighbour(address, dual=dual) as neighbour:
        assert listeners.find_listening_users("127.0.0.1", neighbour.port) == {ATTACKER}
        assert listeners.find_listening_users("localhost", neighbour.port) == {ATTACKER}
        watching = ReadyWatch(ReadyRule("port", ""), [("127.0.0.1", neighbour.port)], 0.0, 1)
        wrong = wait_for(lambda: watching.problem or None, 10)
        watching.close()
        assert wrong is not None and "is in use by" in wrong and not watching.ready.is_set()


def test_an_answer_that_its_sender_no_longer_holds_is_nobodys() -> None:
    """The kernel shows it as root's."""
    neighbour = ServingNeighbour(answer_and_close)
    with socket.create_connection(("127.0.0.1", neighbour.port)) as connected:
        assert wait(neighbour.pid) == 0
        with pytest.raises(ConnectionResetError, match="closed the connection"):
            listeners.find_answering_users(connected)


def test_ones_own_server_is_known_before_and_after_it_accepts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as connected:
            assert listeners.find_answering_users(connected) == {os.getuid()}
            with server.accept()[0]:
                assert listeners.find_answering_users(connected) == {os.getuid()}
            assert listeners.find_answering_users(connected) == {os.getuid()}  # it listens on
