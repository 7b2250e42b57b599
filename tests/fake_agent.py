"""Stands in for `ssh HOST`: an agent that keeps to the protocol until the order $FAKE_AT, then says the bytes of $FAKE_FILE."""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
import time
from typing import Any

MACHINE = {
    "hostname": "fake",
    "cores": 2,
    "memory_total": 10**10,
    "memory_available": 9 * 10**9,
    "gpus": [],
    "schema": 1,
}


def say(message: dict[str, Any], payload: bytes = b"") -> None:
    raw({**message, **({"size": len(payload)} if payload else {})}, payload)


def raw(message: dict[str, Any], payload: bytes = b"") -> None:
    write(json.dumps(message).encode() + b"\n" + payload)


LOCK = threading.Lock()


def write(data: bytes) -> None:
    with LOCK:
        while data:
            data = data[os.write(1, data) :]


def ping() -> None:
    while True:
        time.sleep(0.5)
        say({"is": "ping"})


def exact(count: int) -> None:
    while count:
        data = os.read(0, count)
        if not data:
            sys.exit(1)
        count -= len(data)


def answer(order: dict[str, Any]) -> None:
    do = order["do"]
    if do in ("open", "look"):
        say({"is": "host", "machine": MACHINE, "held": {}, "selves": [[1, 2]], "found": [], "visible": None})
    elif do == "probe" and order["what"] == "ready":
        say(
            {"is": "probe", "ask": order["ask"], "what": "ready"},
            json.dumps({"problems": [], "shared": True, "unwritable": ""}).encode(),
        )
    elif do == "probe":
        say({"is": "probe", "ask": order["ask"], "what": order["what"]}, b'{"error": "not here"}')
    elif do == "lock":
        say({"is": "locked", "refused": {}, "notices": []})
    elif do == "reserve":
        say({"is": "port", "port": 29999})
    elif do == "start":
        for spec in order["ranks"]:
            say({"is": "up", "rank": spec["rank"], "pid": 4, "time": time.time()})
    elif do == "stop":
        say({"is": "stopping"})
    elif do == "finish":
        say({"is": "finished", "stopped": [], "gpus_held": [], "stuck": []})


def main() -> None:
    if "-G" in sys.argv:  # ssh's own settings are asked for
        sys.exit(1)
    exact(int(shlex.split(sys.argv[-1])[-2].partition(":")[0]))
    write(f"Welcome\nSTOKER-AGENT {os.environ.get('FAKE_VERSION', '1')}\n".encode())
    threading.Thread(target=ping, daemon=True).start()
    words = b""
    while data := os.read(0, 1 << 16):
        *lines, words = (words + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if order["do"] == "close":
                return
            at = f"{order['do']}-{order.get('what', '')}".rstrip("-")
            if at == os.environ["FAKE_AT"]:
                if at == "start":
                    answer(order)
                with open(os.environ["FAKE_FILE"], "rb") as file:
                    content = file.read().replace(b"%ASK%", str(order.get("ask", "")).encode())
                write(content)
                if os.environ.get("FAKE_ENDS"):
                    os._exit(1)
            else:
                answer(order)


main()
