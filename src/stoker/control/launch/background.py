"""Implements --detach: the run continues in the background, and the shell waits until it has started."""

from __future__ import annotations

import os
import sys

from stoker.contract.errors import EX_SOFTWARE, Refusal
from stoker.contract.terminal import print_text

_STARTED = b"\0started "
_ENDED = b"\0ended "


def has_usable_stdin() -> bool:
    try:
        os.fstat(0)
    except OSError:
        return False
    return True


class StartReport:
    """Reports to the waiting shell that the run has started, was refused or has ended."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def started(self, run_dir: str) -> None:
        import json

        self._send(_STARTED + json.dumps(run_dir).encode() + b"\n")

    def refused(self, refusal: Refusal) -> None:
        """Do nothing: the refusal is printed to stderr, which the shell reads."""

    def ended(self, code: int) -> None:
        self._send(_ENDED + str(code).encode() + b"\n")

    def _send(self, data: bytes) -> None:
        if self._pipe < 0:
            return
        try:
            os.write(self._pipe, data)
        except OSError:
            pass  # the shell has been closed
        os.close(self._pipe)
        self._pipe = -1
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        os.close(null)


def start_detached() -> StartReport:
    """Fork and return in the background process. The foreground one prints its messages until it has started, and exits."""
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork() > 0:
        os.close(write)
        os._exit(_print_until_started(read))
    os.close(read)
    os.setsid()
    if os.fork() > 0:  # the grandchild is no session leader, so a terminal that it opens can't become its own
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    os.dup2(write, 2)
    return StartReport(write)


def _print_until_started(pipe: int) -> int:
    """Print the background process's messages until it reports its start or end, and return the exit code."""
    buffer = b""
    while True:
        data = os.read(pipe, 65536)
        buffer += data
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            if line.startswith(_STARTED):
                import json
                import shlex

                name = os.path.basename(json.loads(line[len(_STARTED) :]))
                run = shlex.quote(name)
                print(
                    f"run {name} is in the background\n  stoker attach {run}   follow it (Ctrl-C leaves it running)\n"
                    f"  stoker logs {run} --rank 0\n  stoker stop {run}\n  stoker why {run}     how it ended",
                    flush=True,
                )
                return 0
            if line.startswith(_ENDED):
                return int(line[len(_ENDED) :])
            print_text(line.decode("utf-8", "replace"), sys.stderr)
        if not data:
            os.write(2, b"stoker: the background process ended without an error message\n")
            return EX_SOFTWARE
