"""One child at a time: it gets the signals that we get, it ends when we are killed, and we end after it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
LOOK_S = 0.5


class Children:
    """While it is entered, signals to stop reach the child; `stopped` says which came."""

    def __init__(self, handles: Sequence[int] = ()) -> None:
        """`handles`: open files that each child is given."""
        self.stopped = 0
        self._handles = handles
        self._child: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Children:
        for number in PASSED_ON:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup's ignored SIGHUP stays ignored
                self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self.stopped = self.stopped or number
        if self._child is not None and self._child.returncode is None:
            self._child.send_signal(number)

    def run(
        self, argv: Sequence[str], environment: Mapping[str, str], log: str | None, look: Callable[[], None]
    ) -> int:
        """Its exit code, 128+n for a signal. `log`: where it writes; None: here. `look` is called while it runs."""
        parent = os.getpid()

        def bound() -> None:
            # SIGTERM, not SIGKILL: the launcher still lets its ranks save. In the child, after fork: no threads here
            # that could hold a lock.
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

        where = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644) if log is not None else None
        try:
            # A group of its own: Ctrl-C reaches us alone, and the child once, through us.
            self._child = subprocess.Popen(
                argv,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=where,
                stderr=where,
                process_group=0,
                pass_fds=self._handles,
                preexec_fn=bound,  # noqa: PLW1509
            )
        finally:
            if where is not None:
                os.close(where)
        if self.stopped:  # it came before there was a child to tell
            self._child.send_signal(self.stopped)
        while True:
            try:
                code = self._child.wait(LOOK_S)
                break
            except subprocess.TimeoutExpired:
                look()
        self._child = None
        return code if code >= 0 else 128 - code
