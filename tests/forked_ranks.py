"""Ranks as torchrun would start them, forked from one process that has torch already: a start costs tenths of a second."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

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

    def __init__(self, stdin: IO[str], stdout: IO[str]) -> None:
        self._stdin, self._stdout = stdin, stdout

    def begin(self, ranks: int, folder: Path, **job: Any) -> list[int]:
        """The ranks' pids."""
        folder.mkdir(parents=True, exist_ok=True)
        self._stdin.write(json.dumps({"ranks": ranks, "folder": str(folder), "port": free_port(), **job}) + "\n")
        self._stdin.flush()
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
        return json.loads(self._stdout.readline())


@contextmanager
def server(text: str) -> Iterator[Server]:
    """`text`: a `program`."""
    env = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("STOKER_", "RANK", "WORLD_SIZE", "MASTER_", "CUDA_"))
    }
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if _template is not None:
        with _template.forked(text, env) as (stdin, stdout):
            yield Server(stdin, stdout)
        return
    process = subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    assert process.stdin is not None and process.stdout is not None
    yield Server(process.stdin, process.stdout)
    process.stdin.close()
    process.wait(30)


class _Template:
    """A fork of this process as it is now: programs begin as forks of that, with all that is imported here already."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._ours.close()
            _begin_programs(theirs)
        theirs.close()

    @contextmanager
    def forked(self, text: str, env: dict[str, str]) -> Iterator[tuple[IO[str], IO[str]]]:
        (its_stdin, stdin), (stdout, its_stdout) = os.pipe(), os.pipe()
        with tempfile.TemporaryFile() as job:  # an environment may be too large for a message
            job.write(json.dumps({"text": text, "env": env}).encode())
            job.flush()
            socket.send_fds(self._ours, [b"begin"], [job.fileno(), its_stdin, its_stdout])
        os.close(its_stdin)
        os.close(its_stdout)
        with open(stdout) as answers:
            with open(stdin, "w") as orders:
                yield orders, answers
            answers.read()  # until it has ended


_template: _Template | None = None


def warm() -> None:
    """From here on, what `server` starts is forked. To be called before anything that a program must not inherit."""
    global _template
    _template = _Template()


def _begin_programs(line: socket.socket) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        _, handles, _, _ = socket.recv_fds(line, 16, 3)
        if not handles:
            os._exit(0)
        if os.fork() == 0:
            line.close()
            _become_program(*handles)
        for handle in handles:
            os.close(handle)


def _become_program(job: int, stdin: int, stdout: int) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout, sys.stderr = (os.fdopen(handle, "w", closefd=False) for handle in (1, 2))
        with open(job) as file:
            file.seek(0)
            told = json.load(file)
        os.environ.clear()
        os.environ.update(told["env"])
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        sys.argv = ["-c"]
        exec(compile(told["text"], "<string>", "exec"), {"__name__": "__main__"})
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


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
