"""The machine as a command that has no run yet sees it, and whether there are GPUs to train on."""

from __future__ import annotations

import os

from stoker.contract import env_vars
from stoker.control.machine.model import Machine
from stoker.control.plan.options import hides_all


def look() -> Machine:
    """As `stoker train` will see it; a driver that hangs costs three seconds, not the launch."""
    recorded = os.environ.get(env_vars.MACHINE)
    if recorded:
        from stoker.control.machine.observe import read_recorded

        return read_recorded(recorded)
    from stoker.control.machine.examine import examine

    return examine("", 0, frozenset()).machine


def gpus_to_use(machine: Machine, asked: str | None) -> bool:
    """`asked`: --nproc-per-node, perhaps cpu. A driver that does not answer counts: a run says what is wrong."""
    hidden = hides_all(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return bool(machine.gpus or machine.gpu_error) and not hidden and (asked or "").strip().lower() != "cpu"
