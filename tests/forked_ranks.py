"""Ranks as torchrun would start them, forked from one process that has torch already: a start costs tenths of a second."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PATIENCE_S = 200.0  # less than a test's

_SERVER = """
gc.freeze()  # what was imported is no garbage: ranks that looked through it would copy all of its pages
gc.enable()
for line in sys.stdin:
    job = json.loads(line)
    pids = []
    for rank in range(job["ranks"]):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.chdir(job["folder"])
                log = os.open(f"rank-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["ranks"]), LOCAL_WORLD_SIZE=str(job["ranks"]))
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]))
                code = work(job, rank)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    print(json.dumps(pids), flush=True)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
"""


def program(before: str) -> str:
    """For `server`. `before` imports what ranks share and defines work(job, rank), which returns a rank's exit code."""
    return "import gc, json, os, sys, traceback\ngc.disable()\n" + before + _SERVER


class Server:
    """One job at a time: `begin`, then `codes`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def begin(self, ranks: int, folder: Path, **job: Any) -> list[int]:
        """The ranks' pids."""
        assert self._process.stdin is not None
        folder.mkdir(parents=True, exist_ok=True)
        self._process.stdin.write(
            json.dumps({"ranks": ranks, "folder": str(folder), "port": free_port(), **job}) + "\n"
        )
        self._process.stdin.flush()
        self._pids: list[int] = self._read()
        return self._pids

    def codes(self) -> list[int]:
        """How they ended. Ranks that don't end are killed: the next job would wait for them."""
        watch = threading.Timer(PATIENCE_S, self._kill)
        watch.start()
        try:
            return self._read()
        finally:
            watch.cancel()

    def _kill(self) -> None:
        print(f"ranks {self._pids} did not end within {PATIENCE_S:.0f} s: killed")
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


@contextmanager
def server(text: str) -> Iterator[Server]:
    """`text`: a `program`."""
    env = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("STOKER_", "RANK", "WORLD_SIZE", "MASTER_", "CUDA_"))
    }
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    yield Server(process)
    assert process.stdin is not None
    process.stdin.close()
    process.wait(30)


def free_port() -> int:
    """Below those that the kernel gives to connections (from 32768): one of these could take it before it is used."""
    draw = random.SystemRandom()  # tests seed the shared one: two workers would draw the same
    while True:
        port = draw.randrange(10_000, 29_000)
        with socket.socket() as held:
            try:
                held.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
