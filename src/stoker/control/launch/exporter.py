"""Implements --metrics-port: runs `stoker metrics` for one run in a child that ends with the run.

The launcher listens before anything starts, so that a port in use is a refusal, and passes the socket to the child. The
metrics cost the launcher neither imports nor memory.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

from stoker.contract.errors import EX_USAGE, Refusal
from stoker.control.launch.children import stoker_command
from stoker.control.show import http_server

END_S = 2.0


class Exporter:
    """The metrics server of one run."""

    def __init__(self, port: int, log: Callable[[str], None]) -> None:
        if not 0 <= port <= 65535:
            raise Refusal(f"--metrics-port must be from 0 to 65535, got {port}", EX_USAGE, cause="launch.port")
        self._log = log
        self._socket = http_server.listen("127.0.0.1", port, "--metrics-port")
        self._child: subprocess.Popen[bytes] | None = None
        self._errors = -1

    def start(self, run_dir: str) -> None:
        """Start the server. A failure is only reported: the run continues without metrics."""
        fd = self._socket.fileno()
        words = ["metrics", "--run", run_dir, "--listening", str(fd), "--parent", str(os.getpid())]
        self._errors = os.memfd_create("metrics")
        try:
            self._child = subprocess.Popen(
                stoker_command(words),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=(fd,),
                start_new_session=True,  # Ctrl-C reaches only the launcher, which then ends the server
            )
        except OSError as problem:
            self._log(f"stoker: --metrics-port: the metrics server could not be started: {problem}")
            return
        self._log(f"stoker: metrics at {http_server.server_url(self._socket, '/metrics')}")
        self._socket.close()

    def close(self) -> None:
        """End the server, and report its last error or an early end."""
        self._socket.close()
        child = self._child
        if child is None:
            return
        early_code = child.poll()
        if early_code is None:
            child.terminate()
            try:
                child.wait(END_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        errors = os.pread(self._errors, 4096, 0).decode("utf-8", "replace")
        os.close(self._errors)
        lines = [line for line in errors.split("\n") if line.strip()]
        if lines or early_code is not None:
            what = "had a problem" if early_code is None else f"ended with {early_code} before the run"
            self._log(f"stoker: the exporter of --metrics-port {what}{': ' + lines[-1] if lines else ''}")
