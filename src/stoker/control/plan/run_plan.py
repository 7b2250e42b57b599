"""The plan of a run: every rank's place, device, command and environment. Pure; refuses the impossible."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from stoker.contract import env_vars, errors
from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.frozen import as_json, frozen, replace
from stoker.contract.text import is_digits
from stoker.control.machine.model import Gpu, Machine
from stoker.control.plan import gpu_choice
from stoker.control.plan.options import RunOptions
from stoker.control.plan.request import Request, notices

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.cluster.hosts import Host
    from stoker.control.plan.run_dir import RunDir
    from stoker.control.plan.targets import NodeGroup

# Start-up memory nobody needs to worry about: torch and a CPU model stay below the first, a context and a model load
# in host memory usually below the second. With less than that per rank the first rank goes alone and is measured.
AMPLE_CPU = 10**9
AMPLE_GPU = 16 * 10**9
GATE_TOTAL_S = 480.0  # the store's own patience is 600 s with NCCL: everybody must be through before


@frozen
class RolePlan:
    """Ranks that run one command and form one world. A plain job is one role."""

    name: str
    argv: tuple[str, ...]
    world: int  # ranks, on all machines
    shim: bool
    max_restarts: int  # how often a failure of one of its ranks starts the job again
    env: Mapping[str, str] = {}  # asked for; over what every rank gets


@frozen
class RankPlan:
    """One rank's place in the job."""

    rank: int  # unique in the job: names its log, and messages about it
    local_rank: int
    local_world: int
    group_rank: int
    host: str  # "" for this machine
    gpu: Gpu | None
    label: str  # GPU0, CPU0, host/GPU0
    role: str
    role_rank: int  # its number in the role's world: what the script sees as RANK
    more: tuple[Gpu, ...] = ()  # GPUs it has besides (--gpus-per-rank)

    @property
    def cards(self) -> tuple[Gpu, ...]:
        return (self.gpu, *self.more) if self.gpu else ()


@frozen
class RunPlan:
    places: tuple[RankPlan, ...]
    roles: tuple[RolePlan, ...]  # one; the places of each follow those of the one before
    hosts: tuple[str, ...]
    isolate: bool
    split: bool  # stdout and stderr in pipes of their own
    init_slots: Mapping[str, int]  # per host; 0: measure the first rank
    lines: tuple[str, ...]  # what to tell the user before the start
    visible: Mapping[str, str | None]  # CUDA_VISIBLE_DEVICES per host; None: leave it alone
    pythons: Mapping[str, str] = {}  # per host, where it is not the first word of argv
    port_base: int | None = None
    nodes: NodeGroup | None = None  # other machines have ranks of this job too, started by hand there

    @property
    def world_size(self) -> int:
        """Of the whole job."""
        return sum(role.world for role in self.roles)

    @property
    def ranks(self) -> range:
        """Those started from here."""
        first = self.nodes.first if self.nodes else 0
        return range(first, first + len(self.places))

    def place(self, rank: int) -> RankPlan:
        return self.places[rank - self.ranks.start]

    def role_of(self, rank: int | None) -> RolePlan:
        """The first where it is nobody's."""
        if rank is None or len(self.roles) == 1:
            return self.roles[0]
        name = self.place(rank).role
        return next(role for role in self.roles if role.name == name)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON; `argv` and `shim` are the first role's."""
        plan: dict[str, Any] = as_json(self)
        return {**plan, "argv": plan["roles"][0]["argv"], "shim": plan["roles"][0]["shim"]}


def make_plan(
    request: Request,
    argv: list[str],
    environment: Mapping[str, str],
    machines: Mapping[str, Machine],
    held: Mapping[str, Mapping[str, str]],
    split: bool,
    hosts: Mapping[str, Host] | None = None,
) -> RunPlan:
    """`machines` and `held` are per host, in rank order ("": this machine); `hosts`: the hosts file's, lost ones too."""
    options = request.options
    lines = notices(request)
    isolate = options.isolate or options.virtual_local_rank
    about = {host: hosts[host] if hosts else None for host in machines}
    choices = {host: choose_gpus_on(options, environment, machines[host], held[host], about[host]) for host in machines}
    if any(gpu.mig is not None for choice in choices.values() for gpu in choice.gpus) and not isolate:
        isolate = True
        why = "CUDA shows a process one slice only"
        lines.append(f"MIG slices: {why}, so each rank sees its own as device 0 (--isolate)")
    if any(len(choice.gpus) > len(set(choice.gpus)) for choice in choices.values()) and not isolate:
        isolate = True
        nccl = "NCCL refuses two ranks on one GPU, gloo works"
        lines.append(f"several ranks share a GPU: each sees its own as device 0 (--isolate); {nccl}")
    each = options.gpus_per_rank
    isolate = isolate or each > 1
    if len({bool(choice.gpus) for choice in choices.values()}) > 1:
        line = "some hosts have GPUs and some have none: --nproc-per-node cpu uses none anywhere"
        raise Refusal(line, errors.EX_UNAVAILABLE, cause="gpu.too-few")
    places: list[RankPlan] = []
    slots: dict[str, int] = {}
    visible: dict[str, str | None] = {}
    for group, (host, choice) in enumerate(choices.items()):
        prefix = f"{host}/" if hosts and len(hosts) > 1 else ""
        mark, _, found = choice.line.partition(" ")
        lines.append(f"{mark} {host}: {found}" if prefix else choice.line)
        for local in range(choice.ranks):
            gpu, *more = choice.gpus[local * each : (local + 1) * each] or (None,)
            label = prefix + (gpu.label if gpu else f"CPU{local}")
            rank = len(places)
            besides = tuple(one for one in more if one is not None)
            places.append(RankPlan(rank, local, choice.ranks, group, host, gpu, label, options.role, rank, besides))
        slots[host] = _slots(options.init_slots, choice, machines[host])
        visible[host] = _visible(choice, machines[host], _seen_there(environment, about[host]))
    show = options.local_ranks_filter if options.show == "all" and options.local_ranks_filter else options.show
    if show not in ("all", "none", "errors"):
        _check_ranks(show, len(places))
    asked = added_environment(options, environment)
    role = RolePlan(options.role, tuple(argv), len(places), not options.no_python, options.max_restarts, asked)
    pythons = _pythons(options, argv, hosts)
    return RunPlan(
        tuple(places), (role,), tuple(machines), isolate, split, slots, tuple(lines), visible, pythons=pythons,
        port_base=options.port_base,
    )  # fmt: skip


def choose_gpus_on(
    options: RunOptions, environment: Mapping[str, str], machine: Machine, held: Mapping[str, str], host: Host | None
) -> gpu_choice.GpuChoice:
    """The GPUs of a host of the hosts file; None: of this machine."""
    if host is None:
        return gpu_choice.choose_gpus(options, environment, machine, held)
    if host.slots is not None:
        options = replace(options, nproc_per_node=str(host.slots))
    if host.gpus is not None:
        options = replace(options, gpus=None if host.no_gpus else host.gpus, gpu=None)
    try:
        return gpu_choice.choose_gpus(options, _seen_there(environment, host), machine, held)
    except Refusal as refusal:
        line = f"host {host.name}: {refusal.line}"
        raise type(refusal)(line, refusal.code, cause=refusal.cause, fix=refusal.fix) from refusal


def _seen_there(environment: Mapping[str, str], host: Host | None) -> Mapping[str, str]:
    """Which of this machine's GPUs are hidden says nothing of another's."""
    if host is not None and host.no_gpus:
        return {**environment, "CUDA_VISIBLE_DEVICES": ""}
    if host is None or host.here:
        return environment
    return {name: value for name, value in environment.items() if name != "CUDA_VISIBLE_DEVICES"}


def _pythons(options: RunOptions, argv: list[str], hosts: Mapping[str, Host] | None) -> dict[str, str]:
    if not hosts or options.no_python:
        return {}
    return {name: host.python or argv[0] for name, host in hosts.items()}


def _slots(asked: str | None, choice: gpu_choice.GpuChoice, machine: Machine) -> int:
    if asked is not None and asked != "auto":
        if not is_digits(asked) or int(asked) < 1:
            raise Refusal(f"--init-slots {asked}: give a number from 1 up, or auto", EX_USAGE)
        return min(int(asked), choice.ranks)
    if choice.ranks == 1:
        return 1
    share = machine.memory_available / choice.ranks
    return choice.ranks if share >= (AMPLE_GPU if choice.gpus else AMPLE_CPU) else 0


def _visible(choice: gpu_choice.GpuChoice, machine: Machine, environment: Mapping[str, str]) -> str | None:
    """By UUID: an index means another card under CUDA's own ordering. Left alone where nothing is left out."""
    if not choice.gpus:
        return "" if machine.gpus else None
    if "CUDA_VISIBLE_DEVICES" not in environment and choice.gpus == machine.gpus:
        return None
    return ",".join(gpu.uuid for gpu in dict.fromkeys(choice.gpus))


def _check_ranks(text: str, world: int) -> None:
    for word in text.split(","):
        if not is_digits(word.strip()) or int(word) >= world:
            raise Refusal(f"--show {text}: give all, none, errors or ranks from 0 to {world - 1}", EX_USAGE)


def added_environment(options: RunOptions, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that --env adds for the ranks."""
    made: dict[str, str] = {}
    for word in options.env:
        name, equals, value = word.partition("=")
        if not name or not (name.replace("_", "a").isalnum() and not name[0].isdigit()):
            raise Refusal(f"--env {word}: write NAME=VALUE or NAME", EX_USAGE)
        if equals:
            made[name] = value
        elif name in environment:
            made[name] = environment[name]
        else:
            raise Refusal(f"--env {name}: it is not set here; write {name}=VALUE", EX_USAGE)
    return made


# How often a thread of a CPU rank looks for the others before it sleeps. libgomp's 300,000 are milliseconds, in which the
# thread that is waited for may have no core: on a busy machine two threads had a seventh of one thread's speed.
# Sleeping sooner costs a tiny model on a quiet machine about a tenth (docs/benchmarks.md#threads-of-a-cpu-rank).
SPINS = "1000"


def common_environment(
    plan: RunPlan,
    role: RolePlan,
    options: RunOptions,
    environment: Mapping[str, str],
    run: RunDir,
    cores: int,
    host: str = "",
) -> dict[str, str]:
    """What every rank of a role is given on a host, and the same on each attempt."""
    mine = [place for place in plan.places if place.host == host]
    found = {
        "WORLD_SIZE": str(role.world),
        "GROUP_WORLD_SIZE": str(plan.nodes.count if plan.nodes else len(plan.hosts)),
        "ROLE_WORLD_SIZE": str(role.world),
        "ROLE_NAME": role.name,
        "TORCHELASTIC_MAX_RESTARTS": str(role.max_restarts),
        "TORCHELASTIC_RUN_ID": options.rdzv_id or run.id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": options.signals_to_handle,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        env_vars.RUN_ID: run.id,
        env_vars.RUN_DIR: run.dir,
    }
    if host:
        found[env_vars.HOST] = host
    if any(place.gpu for place in mine):
        found["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    cards = [(place.host, place.gpu.uuid) for place in plan.places if place.gpu]
    if len(set(cards)) < len(cards):
        found[env_vars.SHARED_GPU] = "1"
    if "OMP_NUM_THREADS" not in environment:
        found["OMP_NUM_THREADS"] = str(max(1, cores // max(1, len(mine))))
    if not any(place.gpu for place in mine) and "OMP_WAIT_POLICY" not in {**environment, **role.env}:
        found["GOMP_SPINCOUNT"] = environment.get("GOMP_SPINCOUNT", SPINS)
    found.update(role.env)
    return found


def rank_environment(place: RankPlan, plan: RunPlan) -> dict[str, str]:
    local = 0 if plan.isolate else place.local_rank
    found = {
        "RANK": str(place.role_rank),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(place.local_world),
        "GROUP_RANK": str(place.group_rank),
        "ROLE_RANK": str(place.role_rank),
        env_vars.GPU_RANK: str(place.gpu.index if place.gpu else place.local_rank),
    }
    if plan.port_base is not None:
        found[env_vars.PORT] = str(plan.port_base + place.local_rank)
    visible = plan.visible[place.host]
    if plan.isolate and place.gpu:
        visible = ",".join(gpu.uuid for gpu in place.cards)
    if visible is not None:
        found["CUDA_VISIBLE_DEVICES"] = visible
    return found


def rank_argv(place: RankPlan, plan: RunPlan) -> list[str]:
    """torchrun's one macro, and the host's own Python."""
    words = [word.replace("${local_rank}", str(place.local_rank)) for word in plan.role_of(place.rank).argv]
    if plan.port_base is not None:
        words = [word.replace("${port}", str(plan.port_base + place.local_rank)) for word in words]
    return [plan.pythons.get(place.host, words[0]), *words[1:]]


# Beginnings of variables that ranks on other hosts are given, too.
_TRAVEL = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "HF_", "OMP_", "STOKER_ROLE_", env_vars.MEMORY_PLAN)
_STAY = ("CUDA_VISIBLE_DEVICES",)  # says which of this machine's GPUs are meant


@frozen
class HostTarget:
    """What one host is given because of where it stands."""

    name: str = ""
    local: bool = True  # its agent has our environment already
    workdir: str = ""
    interface: str = ""  # towards its peers
    env: Mapping[str, str] = {}  # what the hosts file gives all ranks


def travelling(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_TRAVEL) and name not in _STAY}


def start_order(
    plan: RunPlan,
    options: RunOptions,
    attempt: int,
    to: HostTarget,
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


def default_name(request: Request) -> str:
    base = request.script.rstrip("/")
    base = base.rsplit(".", 1)[-1] if request.options.module else os.path.splitext(os.path.basename(base))[0]
    return "".join(char if char.isalnum() or char in "-_" else "-" for char in base)[:40] or "run"
