"""--metrics-port: `stoker metrics` for one run, in a child that ends with the run.

The launcher listens before anything starts, so that a port in use is a refusal, and hands the socket to the child: the
metrics cost the launcher neither imports nor memory.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

from stoker.contract.errors import EX_USAGE, Refusal
from stoker.control.launch.children import stoker_command
from stoker.control.show import http_server

_END_S = 2.0


class Exporter:
    """`say`: the launcher's."""

    def __init__(self, port: int, say: Callable[[str], None]) -> None:
        if not 0 <= port <= 65535:
            raise Refusal(f"--metrics-port {port}: a port is a number from 0 to 65535", EX_USAGE, cause="launch.port")
        self._say = say
        self._socket = http_server.listen("127.0.0.1", port, "--metrics-port")
        self._child: subprocess.Popen[bytes] | None = None
        self._errors = -1

    def start(self, run_dir: str) -> None:
        """A failure costs the metrics, not the run."""
        handle = self._socket.fileno()
        words = ["metrics", "--run", run_dir, "--listening", str(handle), "--parent", str(os.getpid())]
        self._errors = os.memfd_create("metrics")
        nothing = subprocess.DEVNULL
        try:
            # A session of its own: Ctrl-C is for the launcher, which ends it.
            self._child = subprocess.Popen(
                stoker_command(words),
                stdin=nothing,
                stdout=nothing,
                stderr=self._errors,
                pass_fds=(handle,),
                start_new_session=True,
            )
        except OSError as problem:
            self._say(f"stoker: --metrics-port: no metrics: {problem}")
            return
        self._say(f"stoker: metrics at {http_server.url(self._socket, '/metrics')}")
        self._socket.close()

    def close(self) -> None:
        self._socket.close()
        child = self._child
        if child is None:
            return
        early = child.poll()
        if early is None:
            child.terminate()
            try:
                child.wait(_END_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        lines = os.pread(self._errors, 4096, 0).decode("utf-8", "replace").split("\n")
        os.close(self._errors)
        told = [line for line in lines if line.strip()]
        if told or early is not None:
            ended = f"ended with {early} before the run" if early is not None else "had a problem"
            self._say(f"stoker: the exporter of --metrics-port {ended}{': ' + told[-1] if told else ''}")
