"""Selects the machines and GPUs to plan for: this machine, a recorded one, other hosts, or GPUs described in words."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from stoker.contract import env_vars
from stoker.contract.errors import EX_DATAERR, EX_NOINPUT, EX_UNAVAILABLE, EX_USAGE, Refusal, parsing
from stoker.contract.frozen import frozen
from stoker.contract.units import format_bytes
from stoker.control.machine.model import Gpu, Machine, machine_from_json
from stoker.control.plan.gpu_choice import CONTEXT_BYTES as MIN_FREE
from stoker.control.plan.options import hides_all
from stoker.training.fit.cards import CONTEXT, Card, written

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.cluster.hosts import Hosts

_MAX_COMMAND = 40  # characters shown of the command of a process that holds GPU memory


def observe_machine() -> Machine:
    """Return this machine as `stoker train` sees it, or the recorded one of the environment.

    If the driver hangs, this takes three seconds and reports the problem in `gpu_error`.
    """
    recorded = os.environ.get(env_vars.MACHINE)
    if recorded:
        from stoker.control.machine.observe import read_recorded

        return read_recorded(recorded)
    from stoker.control.machine.examine import examine

    return examine("", 0, frozenset()).machine


def has_usable_gpus(machine: Machine, nproc_per_node: str | None) -> bool:
    """Return whether training would use GPUs. True also if the driver is not responding, since a run then reports why."""
    hidden = hides_all(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return bool(machine.gpus or machine.gpu_error) and not hidden and (nproc_per_node or "").strip().lower() != "cpu"


@frozen
class GpuFlags:
    """The flags of `stoker fit` that select the GPUs to plan for."""

    gpus: str = ""
    hosts: str = ""
    machine: str = ""


def select_machine(flags: GpuFlags) -> Machine | None:
    """Return this machine, the recorded one of --machine, or None if --gpus describes the GPUs or they are on --hosts."""
    if flags.hosts or (flags.gpus and written(flags.gpus) is not None):
        return None
    if not flags.machine:
        return observe_machine()
    with parsing(f"--machine {flags.machine}"):
        return _read_machine(flags.machine)


def _read_machine(path: str) -> Machine:
    from stoker.contract.safe_io import read_json

    try:
        data = read_json(path)
        return machine_from_json(data["machine"] if isinstance(data, dict) and "machine" in data else data)
    except FileNotFoundError as problem:
        raise Refusal(f"--machine {path} does not exist", EX_NOINPUT) from problem
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as problem:
        raise Refusal(f"--machine {path} is not a recorded machine: {problem}", EX_DATAERR) from problem


def select_cards(
    flags: GpuFlags, machine: Machine | None, contexts: Mapping[str, int], say: Callable[[str], None]
) -> list[Card]:
    """Return the GPUs to plan for. Raises Refusal if there are none.

    `machine` comes from `select_machine`. `contexts` holds the measured bytes outside of tensors, by the GPU's name.
    """
    described = written(flags.gpus) if flags.gpus else None
    if described is not None:
        if flags.hosts or flags.machine:
            other = "--hosts" if flags.hosts else "--machine"
            raise Refusal(f"--gpus {flags.gpus} can't be combined with {other}, since both describe GPUs", EX_USAGE)
        return described
    if flags.hosts:
        from stoker.control.cluster.hosts import read_hosts_file

        machines = observe_hosts(read_hosts_file(flags.hosts))
        cards = [
            make_card(gpu, name, contexts, host_machine.memory_available)
            for name, host_machine in machines.items()
            for gpu in host_machine.gpus
            if not gpu.error
        ]
        if not cards:
            raise Refusal(f"--hosts {flags.hosts}: these hosts have no usable GPU", EX_UNAVAILABLE)
        return cards
    assert machine is not None
    if machine.gpu_error:
        line = f"the NVIDIA driver is not responding: {machine.gpu_error}; use --gpus 24GB to plan without it"
        raise Refusal(line, EX_UNAVAILABLE)
    gpus = _find_named_gpus(flags.gpus, machine.gpus) if flags.gpus else _select_free_gpus(machine.gpus, say)
    if not gpus:
        raise Refusal(
            "this machine has no usable GPU; name the GPUs to plan for, e.g. --gpus 24GB or --gpus 2xH100",
            EX_UNAVAILABLE,
        )
    return [make_card(gpu, "", contexts, machine.memory_available) for gpu in gpus]


def _select_free_gpus(gpus: tuple[Gpu, ...], say: Callable[[str], None]) -> list[Gpu]:
    """Return the GPUs that a run would choose: those with free memory, or all working ones if all are full."""
    working = [gpu for gpu in gpus if not gpu.error]
    free = [gpu for gpu in working if gpu.memory_free is None or gpu.memory_free >= MIN_FREE]
    for gpu in working if free else ():
        if gpu not in free:
            memory = f"{format_bytes(gpu.memory_free or 0)} free of {format_bytes(gpu.memory_total or 0)}"
            say(f"skipping GPU {gpu.label[3:]}: {memory}")
    return free or working


def _find_named_gpus(text: str, gpus: tuple[Gpu, ...]) -> list[Gpu]:
    by_label = {gpu.label.removeprefix("GPU"): gpu for gpu in gpus}
    labels = [part.strip() for part in text.split(",")]
    for label in labels:
        if label not in by_label:
            available = ", ".join(by_label) or "none"
            raise Refusal(f"--gpus {text}: this machine has no GPU {label!r}; its GPUs are {available}", EX_UNAVAILABLE)
    if len(set(labels)) < len(labels):
        raise Refusal(f"--gpus {text}: a GPU is listed twice", EX_USAGE)
    return [by_label[label] for label in labels]


def observe_hosts(hosts: Hosts, report_skipped: Callable[[str], None] | None = None) -> dict[str, Machine]:
    """Examine every host and return its machine by host name.

    A host that can't be examined is reported to `report_skipped`, or raises Refusal if that is None.
    """
    from stoker.control.cluster.hosts_writer import CONNECT_TIMEOUT_S
    from stoker.control.cluster.probes import open_probe_batch
    from stoker.control.machine.examination import examination_from_json

    machines = dict[str, Machine]()
    with open_probe_batch(hosts) as batch:
        questions = {name: {"runs_dir": "", "port": 0, "parts": []} for name in hosts.names}
        answers = batch.answers(batch.ask("examine", questions, CONNECT_TIMEOUT_S), CONNECT_TIMEOUT_S)
    for name, answer in answers.items():
        if "error" in answer:
            why = answer["error"]
            line = why if why.startswith(f"host {name}: ") else f"host {name}: {why}"
            if report_skipped is None:
                raise Refusal(line, EX_UNAVAILABLE, cause="host.agent")
            report_skipped(line)
            continue
        machines[name] = examination_from_json(answer).machine
    return machines


def make_card(gpu: Gpu, host: str, contexts: Mapping[str, int], host_free: int | None = None) -> Card:
    """Describe a GPU for the memory planner: its memory, and the processes that hold some of it."""
    total, name = gpu.memory_total, gpu.name or "unknown GPU"
    if total is None:
        line = f"GPU {gpu.label[3:]} does not report its memory size; give the size to plan for, e.g. --gpus 24GB"
        raise Refusal(line, EX_UNAVAILABLE)
    free = gpu.memory_free if gpu.memory_free is not None else total
    held_by, accounted = list[str](), 0
    for holder in sorted(gpu.holders or (), key=lambda holder: -(holder.memory or 0)):
        accounted += holder.memory or 0
        owner = f"({holder.user}: {holder.command[:_MAX_COMMAND]})" if holder.command else "outside this container"
        run = f", run {holder.run}" if holder.run else ""
        held_by.append(f"{format_bytes(holder.memory or 0)} by pid {holder.pid} {owner}{run}")
    unaccounted = total - free - accounted
    if unaccounted > 2 * CONTEXT:
        held_by.append(f"{format_bytes(unaccounted)} by the driver, or outside this container")
    # A context of 0 was not measured: the planner then uses its estimate, as for a GPU described by --gpus 24GB.
    context = contexts.get(name, 0)
    return Card(name, total, free, f"GPU {gpu.label[3:]}", host, tuple(held_by), total - free, context, host_free)
