"""The plan of a run: each rank's host, GPU and number. Pure: raises Refusal where the request can't be met."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from stoker.contract import errors
from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.frozen import as_json, frozen, replace
from stoker.contract.text import is_digits
from stoker.control.machine.model import Gpu, Machine
from stoker.control.plan import gpu_choice
from stoker.control.plan.options import RunOptions
from stoker.control.plan.request import Request, list_notices

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.cluster.hosts import Host
    from stoker.control.plan.targets import NodeGroup

# Host memory per rank above which all ranks may start up at the same time: torch and a CPU model stay below the first
# number, a CUDA context and a model load usually below the second. With less, the first rank starts alone and is measured.
AMPLE_CPU_BYTES = 10**9
AMPLE_GPU_BYTES = 16 * 10**9


# The names of the fields below are keys of `stoker run --dry-run --json`.
@frozen
class RolePlan:
    """Ranks that run one command and form one process group. A plain job is one role."""

    name: str
    argv: tuple[str, ...]
    world: int  # ranks, on all machines
    shim: bool
    max_restarts: int  # how often a failure of one of its ranks restarts the job
    env: Mapping[str, str] = {}  # set by the user; overrides what every rank gets


@frozen
class RankPlan:
    """Where one rank runs, and with which GPUs."""

    rank: int  # unique in the job: names its log, and the rank in messages
    local_rank: int
    local_world: int
    group_rank: int
    host: str  # "" for this machine
    gpu: Gpu | None
    label: str  # GPU0, CPU0, host/GPU0
    role: str
    role_rank: int  # its number within the role: the RANK that the script sees
    more: tuple[Gpu, ...] = ()  # its GPUs after the first (--gpus-per-rank)

    @property
    def all_gpus(self) -> tuple[Gpu, ...]:
        return (self.gpu, *self.more) if self.gpu else ()


@frozen
class RunPlan:
    places: tuple[RankPlan, ...]
    roles: tuple[RolePlan, ...]  # `places` is sorted in their order
    hosts: tuple[str, ...]
    isolate: bool
    split: bool  # stdout and stderr have a pipe each
    init_slots: Mapping[str, int]  # ranks of a host that may start up at a time; 0: measure the first rank
    lines: tuple[str, ...]  # printed before the start
    visible: Mapping[str, str | None]  # CUDA_VISIBLE_DEVICES of each host; None: leave it unchanged
    pythons: Mapping[str, str] = {}  # Python of each host where it is not argv[0]
    port_base: int | None = None
    nodes: NodeGroup | None = None  # set if the run was also started by hand on other machines

    @property
    def world_size(self) -> int:
        """The number of ranks of all roles on all machines."""
        return sum(role.world for role in self.roles)

    @property
    def ranks(self) -> range:
        """The ranks that this launcher starts."""
        first = self.nodes.first_rank if self.nodes else 0
        return range(first, first + len(self.places))

    def place(self, rank: int) -> RankPlan:
        return self.places[rank - self.ranks.start]

    def role_of(self, rank: int | None) -> RolePlan:
        """Return the role of a rank, or the first role for None."""
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
    locked: Mapping[str, Mapping[str, str]],
    split: bool,
    hosts: Mapping[str, Host] | None = None,
) -> RunPlan:
    """Choose the GPUs of each host and number the ranks.

    `machines` and `locked` (locked GPUs: UUID -> holder) are per host in rank order, with "" for this machine. `hosts` are
    those of the hosts file, including lost ones.
    """
    options = request.options
    lines = list_notices(request)
    host_specs = {name: hosts[name] if hosts else None for name in machines}
    choices = {
        name: choose_gpus_on(options, environment, machine, locked[name], host_specs[name])
        for name, machine in machines.items()
    }
    isolate = options.isolate or options.virtual_local_rank
    if any(gpu.mig is not None for choice in choices.values() for gpu in choice.gpus) and not isolate:
        isolate = True
        lines.append("CUDA shows a process only one MIG slice, so each rank sees its slice as device 0 (--isolate)")
    if any(len(choice.gpus) > len(set(choice.gpus)) for choice in choices.values()) and not isolate:
        isolate = True
        nccl = "NCCL refuses two ranks on one GPU, gloo works"
        lines.append(f"several ranks share a GPU, so each sees its GPU as device 0 (--isolate); {nccl}")
    per_rank = options.gpus_per_rank
    isolate = isolate or per_rank > 1
    if len({bool(choice.gpus) for choice in choices.values()}) > 1:
        line = "some hosts have GPUs and some have none; use --nproc-per-node cpu to run on CPUs everywhere"
        raise Refusal(line, errors.EX_UNAVAILABLE, cause="gpu.too-few")
    ranks: list[RankPlan] = []
    init_slots: dict[str, int] = {}
    visible: dict[str, str | None] = {}
    for group_rank, (name, choice) in enumerate(choices.items()):
        prefix = f"{name}/" if hosts and len(hosts) > 1 else ""
        check_mark, _, summary = choice.line.partition(" ")
        lines.append(f"{check_mark} {name}: {summary}" if prefix else choice.line)
        for local in range(choice.ranks):
            gpus = choice.gpus[local * per_rank : (local + 1) * per_rank]
            gpu = gpus[0] if gpus else None
            label = prefix + (gpu.label if gpu else f"CPU{local}")
            rank = len(ranks)
            ranks.append(
                RankPlan(rank, local, choice.ranks, group_rank, name, gpu, label, options.role, rank, gpus[1:])
            )
        init_slots[name] = _count_init_slots(options.init_slots, choice, machines[name])
        visible[name] = _select_visible_devices(
            choice, machines[name], _make_host_environment(environment, host_specs[name])
        )
    show = options.local_ranks_filter if options.show == "all" and options.local_ranks_filter else options.show
    if show not in ("all", "none", "errors"):
        for number in show.split(","):
            if not is_digits(number.strip()) or int(number) >= len(ranks):
                line = f"--show must be all, none, errors or ranks from 0 to {len(ranks) - 1}, got {show}"
                raise Refusal(line, EX_USAGE)
    env = read_added_environment(options, environment)
    role = RolePlan(options.role, tuple(argv), len(ranks), not options.no_python, options.max_restarts, env)
    pythons = {}
    if hosts and not options.no_python:
        pythons = {name: host.python or argv[0] for name, host in hosts.items()}
    return RunPlan(
        tuple(ranks),
        (role,),
        tuple(machines),
        isolate,
        split,
        init_slots,
        tuple(lines),
        visible,
        pythons=pythons,
        port_base=options.port_base,
    )


def choose_gpus_on(
    options: RunOptions, environment: Mapping[str, str], machine: Machine, locked: Mapping[str, str], host: Host | None
) -> gpu_choice.GpuChoice:
    """Choose the GPUs of a host. `host` is its entry in the hosts file, or None for this machine without such a file."""
    if host is None:
        return gpu_choice.choose_gpus(options, environment, machine, locked)
    if host.slots is not None:
        options = replace(options, nproc_per_node=str(host.slots))
    if host.gpus is not None:
        options = replace(options, gpus=None if host.no_gpus else host.gpus, gpu=None)
    try:
        return gpu_choice.choose_gpus(options, _make_host_environment(environment, host), machine, locked)
    except Refusal as refusal:
        line = f"host {host.name}: {refusal.line}"
        raise type(refusal)(line, refusal.code, cause=refusal.cause, fix=refusal.fix) from refusal


def _make_host_environment(environment: Mapping[str, str], host: Host | None) -> Mapping[str, str]:
    """Return the variables that apply on a host. This machine's CUDA_VISIBLE_DEVICES does not apply on other hosts."""
    if host is not None and host.no_gpus:
        return {**environment, "CUDA_VISIBLE_DEVICES": ""}
    if host is None or host.here:
        return environment
    return {name: value for name, value in environment.items() if name != "CUDA_VISIBLE_DEVICES"}


def _count_init_slots(option: str | None, choice: gpu_choice.GpuChoice, machine: Machine) -> int:
    """Return how many ranks of a host may start up at the same time, or 0 to measure the first rank first."""
    if option is not None and option != "auto":
        if not is_digits(option) or int(option) < 1:
            raise Refusal(f"--init-slots must be a number from 1 up or auto, got {option}", EX_USAGE)
        return min(int(option), choice.ranks)
    if choice.ranks == 1:
        return 1
    memory_per_rank = machine.memory_available / choice.ranks
    return choice.ranks if memory_per_rank >= (AMPLE_GPU_BYTES if choice.gpus else AMPLE_CPU_BYTES) else 0


def _select_visible_devices(
    choice: gpu_choice.GpuChoice, machine: Machine, environment: Mapping[str, str]
) -> str | None:
    """Return CUDA_VISIBLE_DEVICES for the ranks of a host, or None to leave it unchanged because they get all GPUs.

    GPUs are named by UUID: an index means another GPU under CUDA's own ordering.
    """
    if not choice.gpus:
        return "" if machine.gpus else None
    if "CUDA_VISIBLE_DEVICES" not in environment and choice.gpus == machine.gpus:
        return None
    return ",".join(gpu.uuid for gpu in dict.fromkeys(choice.gpus))


def read_added_environment(options: RunOptions, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that --env adds for the ranks."""
    variables: dict[str, str] = {}
    for setting in options.env:
        name, equals, value = setting.partition("=")
        if not name or not (name.replace("_", "a").isalnum() and not name[0].isdigit()):
            raise Refusal(f"--env must be NAME=VALUE or NAME, got {setting}", EX_USAGE)
        if equals:
            variables[name] = value
        elif name in environment:
            variables[name] = environment[name]
        else:
            raise Refusal(f"--env {name}: the variable is not set here; write {name}=VALUE", EX_USAGE)
    return variables


def default_name(request: Request) -> str:
    """Return the name of its script or module as the name of a run without --name."""
    name = request.script.rstrip("/")
    name = name.rsplit(".", 1)[-1] if request.options.module else os.path.splitext(os.path.basename(name))[0]
    return "".join(char if char.isalnum() or char in "-_" else "-" for char in name)[:40] or "run"
