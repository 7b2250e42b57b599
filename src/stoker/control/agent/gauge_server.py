"""Sends this host's and its GPUs' gauges to a viewer every few seconds, as long as the viewer is connected.

Started by the agent's bootstrap (control/cluster/agent_zip.py) with the seconds between two readings. It ends when its
standard input closes, or when the viewer, which writes a byte after every reading, has been silent for SILENCE_S.
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


def serve(source: int, sink: int, interval: float) -> int:
    gauges = Gauges(os.environ.get(MACHINE))
    os.set_blocking(sink, False)
    last_heard = time.monotonic()
    unsent = protocol.SENTINEL
    while True:
        due = time.monotonic() + interval
        host, gpus = gauges.read()
        payload = json.dumps({"host": as_json(host), "gpus": as_json(gpus)}, separators=(",", ":")).encode()
        unsent += protocol.encode_message({"is": "gauges"}, payload + b"\n")
        while unsent or time.monotonic() < due:
            until = last_heard + SILENCE_S if unsent else min(due, last_heard + SILENCE_S)
            wait = max(0.0, until - time.monotonic())
            readable, writable, _ = select.select([source], [sink] if unsent else [], [], wait)
            if readable:
                if not os.read(source, 4096):
                    return 0
                last_heard = time.monotonic()
            if writable:
                try:
                    unsent = unsent[os.write(sink, unsent) :]
                except BlockingIOError:
                    pass
                except BrokenPipeError:
                    return 0
            if time.monotonic() - last_heard > SILENCE_S:
                return 0


def boot(argv: list[str]) -> None:
    os._exit(serve(0, 1, float(argv[0])))
