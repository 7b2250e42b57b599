"""The fast checks again and again, while a machine is watched: how many findings each has."""

from __future__ import annotations

import os
from collections import Counter

from stoker.contract.env_vars import MACHINE
from stoker.contract.errors import Refusal
from stoker.control.doctor import check
from stoker.control.machine.examination import KNOWN, Examination
from stoker.control.machine.examine import look_aside
from stoker.control.machine.host_limits import quick_host
from stoker.control.machine.observe import read_recorded

_LOOK_S = 3.0  # that the driver has to answer
LEVELS = ("fail", "warn", "unknown")


def glance(runs_dir: str) -> tuple[str, dict[tuple[str, str], int]]:
    """(host, findings by check and level, 0 where there are none). The driver is asked by a child: one that hangs costs
    3 s, and all checks are unknown.
    """
    recorded = os.environ.get(MACHINE)
    try:
        machine = read_recorded(recorded) if recorded else look_aside(_LOOK_S)
    except Refusal as problem:
        machine = problem.line
    fast = [one for one in check.load_checks().values() if one.fast]
    counts = Counter({(one.id, level): 0 for one in fast for level in LEVELS})
    if isinstance(machine, str):
        counts.update((one.id, "unknown") for one in fast)
        return os.uname().nodename, dict(counts)
    environment = {name: os.environ[name] for name in KNOWN if name in os.environ}
    found = Examination(machine, host=quick_host(runs_dir), environment=environment)
    counts.update((finding.id, finding.level) for finding in check.run_checks(fast, found))
    return machine.hostname, dict(counts)
