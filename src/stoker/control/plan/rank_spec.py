"""Makes the command and environment of each rank, and the message that starts the ranks of a host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.contract import env_vars
from stoker.contract.frozen import frozen
from stoker.control.plan.options import RunOptions
from stoker.control.plan.run_plan import RankPlan, RolePlan, RunPlan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.plan.run_dir import RunDir

# All ranks must have passed the start-up gate within this time: with NCCL, torch's store gives up after 600 s.
GATE_TOTAL_S = 480.0

# GOMP_SPINCOUNT of CPU ranks: how often a waiting thread polls before it sleeps. libgomp's default of 300,000 polls takes
# milliseconds of a core that the awaited thread may need: on a busy machine two threads reached a seventh of one thread's
# speed. Sleeping sooner costs a tiny model on a quiet machine about a tenth
# (docs/benchmarks.md#threads-of-a-cpu-rank).
SPINS = "1000"

# Ranks on other hosts also get the launcher's variables with these prefixes, except the one that selects this machine's GPUs.
_FORWARDED_PREFIXES = (
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "PYTORCH_",
    "CUDA_",
    "HF_",
    "OMP_",
    "STOKER_ROLE_",
    env_vars.MEMORY_PLAN,
)
_NOT_FORWARDED = ("CUDA_VISIBLE_DEVICES",)


def make_common_environment(
    plan: RunPlan,
    role: RolePlan,
    options: RunOptions,
    environment: Mapping[str, str],
    run_dir: RunDir,
    cores: int,
    host: str = "",
) -> dict[str, str]:
    """Return the variables that all ranks of a role on a host share. They are the same in every attempt."""
    host_ranks = [rank for rank in plan.places if rank.host == host]
    has_gpus = any(rank.gpu for rank in host_ranks)
    variables = {
        "WORLD_SIZE": str(role.world),
        "GROUP_WORLD_SIZE": str(plan.nodes.count if plan.nodes else len(plan.hosts)),
        "ROLE_WORLD_SIZE": str(role.world),
        "ROLE_NAME": role.name,
        "TORCHELASTIC_MAX_RESTARTS": str(role.max_restarts),
        "TORCHELASTIC_RUN_ID": options.rdzv_id or run_dir.id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": options.signals_to_handle,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        env_vars.RUN_ID: run_dir.id,
        env_vars.RUN_DIR: run_dir.dir,
    }
    if host:
        variables[env_vars.HOST] = host
    if has_gpus:
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    gpus = [(rank.host, rank.gpu.uuid) for rank in plan.places if rank.gpu]
    if len(set(gpus)) < len(gpus):
        variables[env_vars.SHARED_GPU] = "1"
    if "OMP_NUM_THREADS" not in environment:
        variables["OMP_NUM_THREADS"] = str(max(1, cores // max(1, len(host_ranks))))
    if not has_gpus and "OMP_WAIT_POLICY" not in {**environment, **role.env}:
        variables["GOMP_SPINCOUNT"] = environment.get("GOMP_SPINCOUNT", SPINS)
    variables.update(role.env)
    return variables


def make_rank_environment(rank: RankPlan, plan: RunPlan) -> dict[str, str]:
    """Return the variables that only this rank gets."""
    variables = {
        "RANK": str(rank.role_rank),
        "LOCAL_RANK": str(0 if plan.isolate else rank.local_rank),
        "LOCAL_WORLD_SIZE": str(rank.local_world),
        "GROUP_RANK": str(rank.group_rank),
        "ROLE_RANK": str(rank.role_rank),
        env_vars.GPU_RANK: str(rank.gpu.index if rank.gpu else rank.local_rank),
    }
    if plan.port_base is not None:
        variables[env_vars.PORT] = str(plan.port_base + rank.local_rank)
    visible = plan.visible[rank.host]
    if plan.isolate and rank.gpu:
        visible = ",".join(gpu.uuid for gpu in rank.all_gpus)
    if visible is not None:
        variables["CUDA_VISIBLE_DEVICES"] = visible
    return variables


def make_rank_argv(rank: RankPlan, plan: RunPlan) -> list[str]:
    """Return a rank's command with its host's Python, and ${local_rank} (torchrun's macro) and ${port} filled in."""
    argv = [arg.replace("${local_rank}", str(rank.local_rank)) for arg in plan.role_of(rank.rank).argv]
    if plan.port_base is not None:
        argv = [arg.replace("${port}", str(plan.port_base + rank.local_rank)) for arg in argv]
    return [plan.pythons.get(rank.host, argv[0]), *argv[1:]]


@frozen
class HostTarget:
    """A host that ranks are started on, and what all its ranks need to know about it."""

    name: str = ""
    local: bool = True  # its agent already has the launcher's environment
    workdir: str = ""
    interface: str = ""  # network interface towards its peers
    env: Mapping[str, str] = {}  # variables that the hosts file sets for all ranks


def select_forwarded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the launcher's variables that ranks on other hosts also get."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_FORWARDED_PREFIXES) and name not in _NOT_FORWARDED
    }


def make_start_message(
    plan: RunPlan,
    options: RunOptions,
    attempt: int,
    target: HostTarget,
    environment: Mapping[str, str],
    common: Mapping[str, Mapping[str, str]],
    attempt_env: Mapping[str, str],
) -> dict[str, Any]:
    """Return the message that makes a host's agent start its ranks.

    `common` holds the host's shared variables per role, `attempt_env` those of this attempt. A variable that the user
    set in `environment` wins over the detected network interface and over the hosts file.
    """
    forwarded = select_forwarded_variables(environment)
    interface = {name: target.interface for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if target.interface}
    host_env = {**interface, **target.env}
    is_single_role = len(plan.roles) == 1
    env = {
        **{name: value for name, value in host_env.items() if name not in forwarded},
        **({} if target.local else forwarded),
        **(common[plan.roles[0].name] if is_single_role else {}),
        **attempt_env,
    }
    return {
        "do": "start",
        "common": {
            "attempt": attempt,
            "env": env,
            "unset": [] if target.local else ["PYTHONHOME"],
            "shim": plan.roles[0].shim,
            "split": plan.split,
            "cwd": target.workdir,
            "numa": options.numa_binding,
        },
        "ranks": [
            {
                "rank": rank.rank,
                "role": rank.role,
                "role_rank": rank.role_rank,
                "argv": make_rank_argv(rank, plan),
                "env": {**({} if is_single_role else common[rank.role]), **make_rank_environment(rank, plan)},
                "shim": plan.role_of(rank.rank).shim,
                "gpu": rank.gpu.uuid if rank.gpu else None,
                "pci": rank.gpu.pci if rank.gpu else None,
            }
            for rank in plan.places
            if rank.host == target.name
        ],
        "gate": {"slots": plan.init_slots[target.name], "slot_s": options.init_timeout, "total_s": GATE_TOTAL_S},
        "ram_limit": options.ram_limit,
    }
