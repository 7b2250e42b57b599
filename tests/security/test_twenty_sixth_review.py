"""What a stranger's request costs while its bytes come one by one."""

from __future__ import annotations

import socket
import threading

import pytest

from stoker.control.show import serving

BODY = 1 << 17


def test_a_body_that_comes_in_small_pieces_is_looked_at_when_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []
    parse = serving.parse

    def watched(data: bytes, longest_body: int) -> object:
        looked_at.append(len(data))
        return parse(data, longest_body)

    monkeypatch.setattr(serving, "parse", watched)
    monkeypatch.setattr(serving, "READ", 64)  # as if each of these pieces came alone
    listening = serving.listen("127.0.0.1", 0)
    limits = serving.Limits(body=BODY)
    server = serving.Server(
        listening, lambda request: serving.Answer(200, str(len(request.body)).encode()), limits=limits
    )
    over = threading.Event()
    thread = threading.Thread(target=server.serve, args=(over.is_set, 0.05))
    thread.start()
    try:
        with socket.create_connection(listening.getsockname()) as client:
            client.sendall(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % BODY + b"a" * BODY)
            said = b"".join(iter(lambda: client.recv(4096), b""))
    finally:
        over.set()
        thread.join()
    assert said.endswith(b"\r\n\r\n%d" % BODY)
    assert sum(looked_at) < 3 * BODY, f"{len(looked_at)} looks at {sum(looked_at):,} bytes in all"
