"""What each host's agent starts: commands, and environment in the order in which it overrides. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.contract.shape import shape
from stoker.control.launch.options import RunOptions
from stoker.control.launch.plan import GATE_TOTAL_S, RunPlan, rank_argv, rank_environment

_TRAVEL = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "HF_", "OMP_")
_STAY = ("CUDA_VISIBLE_DEVICES",)  # says which of this machine's GPUs are meant


@shape
class Towards:
    """What one host is given because of where it stands."""

    name: str = ""
    local: bool = True  # its agent has our environment already
    workdir: str = ""
    interface: str = ""  # towards its peers
    env: Mapping[str, str] = {}  # what the hosts file gives all ranks


def travelling(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_TRAVEL) and name not in _STAY}


def start(
    plan: RunPlan,
    options: RunOptions,
    attempt: int,
    to: Towards,
    environment: Mapping[str, str],
    common: Mapping[str, Mapping[str, str]],
    more: Mapping[str, str],
) -> dict[str, Any]:
    """`common`: per role, of that host; `more`: of this attempt. What the user set wins over what was found."""
    only = plan.roles[0] if len(plan.roles) == 1 else None
    found = {name: to.interface for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if to.interface}
    ours = {**found, **to.env}
    told = travelling(environment)
    env = {
        **{name: value for name, value in ours.items() if name not in told},
        **({} if to.local else told),
        **(common[only.name] if only else {}),
        **more,
    }
    return {
        "do": "start",
        "common": {
            "attempt": attempt,
            "env": env,
            "unset": [] if to.local else ["PYTHONHOME"],
            "shim": plan.roles[0].shim,
            "split": plan.split,
            "cwd": to.workdir,
            "numa": options.numa_binding,
        },
        "ranks": [
            {
                "rank": one.rank,
                "role": one.role,
                "role_rank": one.role_rank,
                "argv": rank_argv(one, plan),
                "env": {**({} if only else common[one.role]), **rank_environment(one, plan)},
                "shim": plan.role_of(one.rank).shim,
                "gpu": one.gpu.uuid if one.gpu else None,
                "pci": one.gpu.pci if one.gpu else None,
            }
            for one in plan.places
            if one.host == to.name
        ],
        "gate": {"slots": plan.init_slots[to.name], "slot_s": options.init_timeout, "total_s": GATE_TOTAL_S},
        "ram_limit": options.ram_limit,
    }
