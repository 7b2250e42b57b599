"""Copies to the hosts before the start (--sync, --stage), with signals that end it at once: it may take minutes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from stoker.control.cluster import copying
from stoker.control.launch.muster import Interrupted, Muster


def carry(muster: Muster, say: Callable[[str], None]) -> None:
    assert muster.hosts is not None
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {signum: signal.getsignal(signum) for signum in stops}
    for signum, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(signum, _interrupt)
    try:
        if muster.options.sync:
            copying.sync(muster.hosts, os.getcwd(), say)
        if muster.options.stage:
            copying.stage(muster.hosts, muster.options.stage, say)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _interrupt(signum: int, _frame: object) -> None:
    raise Interrupted(signum)
