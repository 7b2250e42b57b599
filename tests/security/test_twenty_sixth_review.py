"""What a stranger's request costs while its bytes come one by one, and another user who is where ours is
looked for: at a server's second address, behind runs/latest.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from localuser import ATTACKER, start_as
from stoker.control.show import serving


@pytest.mark.parametrize("backlog", [0, 8])
def test_who_listens_at_the_other_address_of_localhost_keeps_no_trainer_from_its_server(
    monkeypatch: pytest.MonkeyPatch, backlog: int
) -> None:
    from stoker.training.rl.asking import Asking, NoAnswer

    def answer(request: serving.Request) -> serving.Answer:
        return serving.Answer(200, b"ours" if request.headers.get("authorization") == "Bearer k" else b"")

    listening = serving.listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    resolve: Callable[..., list[Any]] = socket.getaddrinfo

    def both(host: str, *args: Any, **more: Any) -> list[Any]:
        """As where /etc/hosts has both, which is usual."""
        if host != "localhost":
            return resolve(host, *args, **more)
        return [found for one in ("::1", "127.0.0.1") for found in resolve(one, *args, **more)]

    def listen() -> None:
        with socket.socket(socket.AF_INET6) as own:
            try:
                own.bind(("::1", port))
            except OSError:
                os._exit(7)
            own.listen(backlog)
            held = [socket.create_connection(("::1", port)) for _ in range(backlog == 0)]  # the next one waits
            os.write(told, b"!")
            threading.Event().wait()
            del held

    monkeypatch.setattr(socket, "getaddrinfo", both)
    hears, told = os.pipe()
    attacker = start_as(ATTACKER, listen)
    os.close(told)
    over = threading.Event()
    thread = threading.Thread(target=serving.Server(listening, answer).serve, args=(over.is_set, 0.05))
    thread.start()
    try:
        if not os.read(hears, 1):
            pytest.skip("there is no ::1 here")
        asked = Asking().post(f"localhost:{port}", "/", None, {"Authorization": "Bearer k"}, seconds=20.0, most=100)
        assert asked == (200, b"ours")
        with pytest.raises(NoAnswer, match="in use by"):
            Asking().post(f"[::1]:{port}", "/", None, {}, seconds=20.0, most=100)
    finally:
        over.set()
        thread.join()
        os.kill(attacker, 9)
        os.waitpid(attacker, 0)
        os.close(hears)
