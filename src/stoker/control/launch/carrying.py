"""Copies to the hosts before the start (--sync, --stage), with signals that end it at once: it may take minutes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from stoker.contract.shape import replace
from stoker.control.cluster import copying
from stoker.control.launch.muster import Interrupted, Muster
from stoker.control.launch.unusable import Unusable


def carry(muster: Muster, say: Callable[[str], None]) -> None:
    """Hosts that can't take it are Unusable: with --min-hosts the run may begin without them."""
    assert muster.hosts is not None
    there = {member.host for member in muster.members.all if not member.gone}
    hosts = replace(muster.hosts, hosts=tuple(host for host in muster.hosts.hosts if host.name in there))
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {signum: signal.getsignal(signum) for signum in stops}
    for signum, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(signum, _interrupt)
    try:
        if muster.options.sync:
            copying.sync(hosts, os.getcwd(), say)
        if muster.options.stage:
            copying.stage(hosts, muster.options.stage, say)
    except copying.NotCopied as failed:
        if not muster.options.min_hosts:
            raise
        raise Unusable(failed.hosts, len(muster.by_name)) from failed
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _interrupt(signum: int, _frame: object) -> None:
    raise Interrupted(signum)
