"""Copies to the hosts (--sync, --stage): to all before the start, with signals that end it at once, and to each that
comes later.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from stoker.contract.shape import replace
from stoker.control.cluster import copying
from stoker.control.launch.agents import Agents
from stoker.control.launch.members import Unusable
from stoker.control.launch.options import RunOptions
from stoker.control.launch.signals import STOPS, Interrupted


class Copies:
    def __init__(self, agents: Agents, options: RunOptions, say: Callable[[str], None]) -> None:
        self._agents = agents
        self._options = options
        self._say = say
        self._loads: list[copying.Load] = []

    def to_all(self) -> None:
        """Hosts that can't take it are Unusable: with --min-hosts the run may begin without them."""
        agents = self._agents
        assert agents.hosts is not None
        there = {member.host for member in agents.members.all if not member.gone}
        hosts = replace(agents.hosts, hosts=tuple(host for host in agents.hosts.hosts if host.name in there))
        before = {signum: signal.getsignal(signum) for signum in STOPS}
        for signum, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(signum, _interrupt)
        try:
            self._loads = self._loads or self._read()
            for load in self._loads:
                copying.copy(hosts, load, self._say)
        except copying.NotCopied as failed:
            if not self._options.min_hosts:
                raise
            raise Unusable(failed.hosts, len(agents.by_name)) from failed
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _read(self) -> list[copying.Load]:
        """For all hosts of the file, those that are not there included."""
        hosts, options = self._agents.hosts, self._options
        assert hosts is not None
        working = [copying.sync_load(hosts, os.getcwd(), self._say)] if options.sync else []
        return working + [copying.stage_load(hosts, told, self._say) for told in options.stage]

    def to_late(self, host: str) -> copying.Late:
        return copying.Late(self._agents.by_name[host], self._agents.afresh, self._loads)


def _interrupt(signum: int, _frame: object) -> None:
    raise Interrupted(signum)
