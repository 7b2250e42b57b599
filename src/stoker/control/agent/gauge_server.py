"""The far end of a viewer: what this host and its GPUs are doing, every few seconds, for as long as somebody listens.

Started by the agent's own bootstrap (control/cluster/agent_zip.py) with the seconds between two readings. It ends when its
standard input closes, or when the viewer, which writes a byte for every reading, has been silent for too long.
"""

from __future__ import annotations

import json
import os
import select
import time

from stoker.contract import protocol
from stoker.contract.env_vars import MACHINE
from stoker.contract.frozen import as_json
from stoker.control.machine.gauges import Gauges

SILENCE_S = 20.0


def serve(orders: int, answers: int, interval: float) -> int:
    gauges = Gauges(os.environ.get(MACHINE))
    os.set_blocking(answers, False)
    heard = time.monotonic()
    data = protocol.SENTINEL
    while True:
        due = time.monotonic() + interval
        host, cards = gauges.read()
        payload = json.dumps({"host": as_json(host), "gpus": as_json(cards)}, separators=(",", ":")).encode()
        data += protocol.encode_message({"is": "gauges"}, payload + b"\n")
        while data or time.monotonic() < due:
            until = heard + SILENCE_S if data else min(due, heard + SILENCE_S)
            wait = max(0.0, until - time.monotonic())
            readable, writable, _ = select.select([orders], [answers] if data else [], [], wait)
            if readable:
                if not os.read(orders, 4096):
                    return 0
                heard = time.monotonic()
            if writable:
                try:
                    data = data[os.write(answers, data) :]
                except BlockingIOError:
                    pass
                except BrokenPipeError:
                    return 0
            if time.monotonic() - heard > SILENCE_S:
                return 0


def boot(argv: list[str]) -> None:
    os._exit(serve(0, 1, float(argv[0])))
