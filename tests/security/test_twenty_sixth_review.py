"""What a stranger's request costs while its bytes come one by one, and another user who is where ours is
looked for: at a server's second address, behind runs/latest.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path

import pytest

from localuser import ATTACKER, do_as
from stoker.control.show import serving

BODY = 1 << 17


def test_a_body_that_comes_in_small_pieces_is_looked_at_when_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []
    parse = serving.parse

    def watched(data: bytes) -> object:
        looked_at.append(len(data))
        return parse(data)

    monkeypatch.setattr(serving, "parse", watched)
    monkeypatch.setattr(serving, "LONGEST_BODY", BODY)
    monkeypatch.setattr(serving, "READ", 64)  # as if each of these pieces came alone
    listening = serving.listen("127.0.0.1", 0)
    server = serving.Server(listening, lambda request: serving.Answer(200, str(len(request.body)).encode()))
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


@pytest.mark.parametrize("asked", ["latest", "latest/", "latest/hf"])
def test_latest_of_another_user_is_not_taken_for_our_newest_run(public: Path, asked: str) -> None:
    from stoker.training.generate.finding import find

    def make(name: str) -> None:
        (public / name / "hf").mkdir(parents=True)
        (public / name / "run.json").write_text(json.dumps({"schema": 1, "id": name, "name": name, "started": 1.0}))
        (public / name / "hf" / "config.json").write_text("{}")

    def theirs() -> None:
        make("theirs")
        (public / "latest").symlink_to("theirs")

    do_as(ATTACKER, theirs)
    said: list[str] = []
    find(f"{public}/{asked}", None, str(public), said.append)
    assert not said, "nobody's run but theirs is there: whoever names it means it"
    make("ours")
    found = find(f"{public}/{asked}", None, str(public), said.append)
    assert os.path.samefile(found.folder, public / "ours" / "hf")
    assert len(said) == 1 and f"{public}/ours" in said[0]
