"""The GPUs that a plan is for: written down, on this machine, on a recorded one, or on other hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stoker.contract.errors import EX_DATAERR, EX_NOINPUT, EX_UNAVAILABLE, EX_USAGE, Refusal, parsing
from stoker.contract.frozen import frozen
from stoker.contract.units import format_bytes
from stoker.control.machine.model import Gpu, Machine, machine_from_json
from stoker.control.plan.gpu_choice import CONTEXT as LEAST
from stoker.training.fit.cards import CONTEXT, Card, written

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.cluster.hosts import Hosts

_LONGEST = 40  # of a holder's command


@frozen
class Asked:
    """What the flags say."""

    gpus: str = ""
    hosts: str = ""
    machine: str = ""


def machine_of(asked: Asked) -> Machine | None:
    """Return this machine or the recorded one; None where the GPUs are only described, or those of other hosts."""
    if asked.hosts or (asked.gpus and written(asked.gpus) is not None):
        return None
    if not asked.machine:
        return _machine("")
    with parsing(f"--machine {asked.machine}"):
        return _machine(asked.machine)


def cards_of(
    asked: Asked, machine: Machine | None, contexts: Mapping[str, int], say: Callable[[str], None]
) -> list[Card]:
    """`machine`: of `machine_of`. `contexts`: what was measured beside tensors, by card."""
    cards = written(asked.gpus) if asked.gpus else None
    if cards is not None:
        if asked.hosts or asked.machine:
            other = "--hosts" if asked.hosts else "--machine"
            raise Refusal(f"--gpus {asked.gpus} describes GPUs, and so does {other}: give one of them", EX_USAGE)
        return cards
    if asked.hosts:
        return _of_hosts(asked.hosts, contexts)
    assert machine is not None
    return _of_machine(asked, machine, contexts, say)


def _of_machine(asked: Asked, machine: Machine, contexts: Mapping[str, int], say: Callable[[str], None]) -> list[Card]:
    if machine.gpu_error:
        line = f"the NVIDIA driver does not answer: {machine.gpu_error}; --gpus 24GB plans without it"
        raise Refusal(line, EX_UNAVAILABLE)
    gpus = _chosen(asked.gpus, machine.gpus) if asked.gpus else _usable(machine.gpus, say)
    if not gpus:
        raise Refusal("no GPU here: name those to plan for, e.g. --gpus 24GB or --gpus 2xH100", EX_UNAVAILABLE)
    return [card_of(gpu, "", contexts, machine.memory_available) for gpu in gpus]


def _usable(gpus: tuple[Gpu, ...], say: Callable[[str], None]) -> list[Gpu]:
    """As a run chooses them: a full card is left out, unless all are."""
    working = [gpu for gpu in gpus if not gpu.error]
    found = [gpu for gpu in working if gpu.memory_free is None or gpu.memory_free >= LEAST]
    for gpu in working if found else ():
        if gpu not in found:
            say(
                f"left out: GPU {gpu.label[3:]}, {format_bytes(gpu.memory_free or 0)} free of {format_bytes(gpu.memory_total or 0)}"
            )
    return found or working


def _chosen(text: str, gpus: tuple[Gpu, ...]) -> list[Gpu]:
    by_label = {gpu.label.removeprefix("GPU"): gpu for gpu in gpus}
    words = [part.strip() for part in text.split(",")]
    for word in words:
        if word not in by_label:
            there = ", ".join(by_label) or "none"
            raise Refusal(f"--gpus {text}: no GPU {word!r} here; there are {there}", EX_UNAVAILABLE)
    if len(set(words)) < len(words):
        raise Refusal(f"--gpus {text}: a GPU is named twice", EX_USAGE)
    return [by_label[word] for word in words]


def _machine(path: str) -> Machine:
    if not path:
        from stoker.cli.sight import look

        return look()
    from stoker.contract.safe_io import read_json

    try:
        data = read_json(path)
        return machine_from_json(data["machine"] if isinstance(data, dict) and "machine" in data else data)
    except FileNotFoundError as problem:
        raise Refusal(f"--machine {path}: no such file", EX_NOINPUT) from problem
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as problem:
        raise Refusal(f"--machine {path} is not a recorded machine: {problem}", EX_DATAERR) from problem


def _of_hosts(told: str, contexts: Mapping[str, int]) -> list[Card]:
    from stoker.control.cluster.hosts import read_hosts_file

    cards = [
        card_of(gpu, name, contexts, machine.memory_available)
        for name, machine in machines_of(read_hosts_file(told)).items()
        for gpu in machine.gpus
        if not gpu.error
    ]
    if not cards:
        raise Refusal(f"--hosts {told}: no GPU on these hosts", EX_UNAVAILABLE)
    return cards


def machines_of(hosts: Hosts, without: Callable[[str], None] | None = None) -> dict[str, Machine]:
    """Each host's, as it says itself. One that does not answer is refused, or left out where `without` is told why."""
    from stoker.control.cluster.hosts_writer import MEET_S
    from stoker.control.cluster.probes import open_probe_batch
    from stoker.control.machine.examination import examination_from_json

    found = dict[str, Machine]()
    with open_probe_batch(hosts) as asking:
        parts = {name: {"runs_dir": "", "port": 0, "parts": []} for name in hosts.names}
        answers = asking.answers(asking.ask("examine", parts, MEET_S), MEET_S)
    for name, answer in answers.items():
        if "error" in answer:
            why = answer["error"]
            line = why if why.startswith(f"host {name}: ") else f"host {name}: {why}"
            if without is None:
                raise Refusal(line, EX_UNAVAILABLE, cause="host.agent")
            without(line)
            continue
        found[name] = examination_from_json(answer).machine
    return found


def card_of(gpu: Gpu, host: str, contexts: Mapping[str, int], host_free: int | None = None) -> Card:
    total, name = gpu.memory_total, gpu.name or "unknown GPU"
    if total is None:
        line = f"GPU {gpu.label[3:]} does not say how much memory it has: --gpus 24GB plans for such a card"
        raise Refusal(line, EX_UNAVAILABLE)
    free = gpu.memory_free if gpu.memory_free is not None else total
    held, known = list[str](), 0
    for holder in sorted(gpu.holders or (), key=lambda one: -(one.memory or 0)):
        known += holder.memory or 0
        who = "outside this container"
        if holder.command:
            who = f"({holder.user}: {holder.command[:_LONGEST]})"
        run = f", run {holder.run}" if holder.run else ""
        held.append(f"{format_bytes(holder.memory or 0)} by pid {holder.pid} {who}{run}")
    rest = total - free - known
    if rest > 2 * CONTEXT:
        held.append(f"{format_bytes(rest)} by the driver, or outside this container")
    # Without a measurement (0) the card's own estimate counts, as for a card that is only described (--gpus 24GB).
    return Card(
        name, total, free, f"GPU {gpu.label[3:]}", host, tuple(held), total - free, contexts.get(name, 0), host_free
    )
