"""Which GPUs a run gets. Pure: options, environment and machine in, GPUs or a refusal out."""

from __future__ import annotations

from collections.abc import Mapping

from stoker.contract.errors import EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.frozen import frozen, replace
from stoker.contract.text import is_digits
from stoker.contract.units import format_bytes, plural
from stoker.control.machine.model import Gpu, Machine
from stoker.control.plan.options import RANK_VARIABLES, RunOptions, hides_all

CONTEXT = 10**9  # a bare context takes 0.5-0.7 GB: a card with less than this free can't take another process


class GpusNotFree(Refusal):
    """The GPUs are there but busy: with --wait it is worth asking again."""


@frozen
class GpuChoice:
    """The ranks' devices on one host: GPUs, or none and a number of CPU ranks. `line` says so in the notes' words."""

    gpus: tuple[Gpu, ...]
    ranks: int
    line: str


def choose_gpus(options: RunOptions, environment: Mapping[str, str], machine: Machine, held: Mapping[str, str]) -> GpuChoice:
    """`held`: GPUs that other runs have locked, uuid -> who."""
    count, source = _count(options, environment)
    hidden = environment.get("CUDA_VISIBLE_DEVICES")
    all_hidden = hides_all(hidden)
    if count == "cpu":
        return _cpu(machine.cores, machine, "as requested")
    if machine.gpu_error and not all_hidden:
        without = "`stoker run --nproc-per-node cpu` trains without it"
        line = f"the NVIDIA driver does not answer: {machine.gpu_error}; {without}"
        raise Refusal(line, EX_UNAVAILABLE, cause="gpu.driver")
    if not machine.gpus or all_hidden:
        if options.gpus or options.gpu or count == "gpu":
            why = "CUDA_VISIBLE_DEVICES hides them all" if machine.gpus else "this machine has none"
            raise Refusal(f"GPUs were requested, but {why}", EX_UNAVAILABLE, cause="gpu.too-few")
        ranks = count if isinstance(count, int) else 1
        if count == "auto":
            ranks = machine.cores
        return _cpu(ranks, machine, "CUDA_VISIBLE_DEVICES hides the GPUs" if machine.gpus else "no GPU found")
    visible = _visible(hidden, machine.gpus)
    wanted = _asked(options, visible, hidden)
    any_of = _any(options)
    pool = wanted if wanted is not None else visible
    reasons = {gpu.uuid: why for gpu in pool if (why := _unusable(gpu, options, held))}
    usable = [gpu for gpu in pool if gpu.uuid not in reasons]
    found, each = len(machine.gpus), options.gpus_per_rank
    need = count * each if isinstance(count, int) else max(len(usable) // each, 1) * each
    if wanted is not None and reasons:
        unusable = next(gpu for gpu in wanted if gpu.uuid in reasons)
        raise GpusNotFree(_sentence(unusable, reasons), EX_UNAVAILABLE, cause="gpu.busy")
    if wanted is None and any_of is not None:
        need = any_of // each * each
        usable.sort(key=_room, reverse=True)
    if isinstance(count, int) and any_of is not None and count * each != any_of:
        raise Refusal(f"--gpus any:{any_of} and {source} {count} contradict each other", EX_USAGE)
    if not usable or (need > len(usable) and not options.share_gpus):
        raise _too_few(max(need, each), each, usable, pool, reasons, found, hidden)
    chosen = [usable[n % len(usable)] for n in range(need)]
    if any_of is not None:
        chosen.sort(key=lambda gpu: (gpu.index, gpu.mig or 0))
    left_out = "; ".join(_sentence(gpu, reasons) for gpu in pool if gpu.uuid in reasons)
    using = len({gpu.uuid for gpu in chosen})
    ranks = need // each
    line = f"✓ Found {found} GPU(s), using {using} GPUs" + (f" ({plural(ranks, 'rank')})" if ranks != using else "")
    if source and source != "--nproc-per-node":
        line += f" ({source}={count})"
    if wanted is not None or any_of is not None or using < found:
        line += ": " + ", ".join(f"GPU {gpu.label[3:]}" for gpu in dict.fromkeys(chosen))
    return GpuChoice(tuple(chosen), ranks, line + (f"; left out: {left_out}" if left_out else ""))


def marked(machine: Machine, bad: Mapping[str, str]) -> Machine:
    """With these GPUs, uuid -> why, as ones that do not answer."""
    gpus = tuple(replace(gpu, error=bad[gpu.uuid]) if gpu.uuid in bad else gpu for gpu in machine.gpus)
    return replace(machine, gpus=gpus)


def _count(options: RunOptions, environment: Mapping[str, str]) -> tuple[int | str | None, str]:
    """(number, gpu, cpu, auto or None for 'find out'; where it was said). Flag before environment before detection."""
    if options.nproc_per_node is not None:
        return _number(options.nproc_per_node, "--nproc-per-node"), "--nproc-per-node"
    for name in RANK_VARIABLES:
        if environment.get(name):
            return _number(environment[name], name), name
    return None, ""


def _number(text: str, where: str) -> int | str:
    word = text.strip().lower()
    if word in ("gpu", "cpu", "auto"):
        return word
    if not is_digits(word) or int(word) < 1:
        raise Refusal(f"{where} {text}: give a whole number of ranks from 1 up, or gpu, cpu, auto", EX_USAGE)
    return int(word)


def _cpu(ranks: int, machine: Machine, why: str) -> GpuChoice:
    ranks = max(ranks, 1)  # a host may say that it has no core
    most = machine.max_processes
    if most is not None and ranks >= most:
        raise Refusal(
            f"{plural(ranks, 'rank')}: this machine allows {most} processes", EX_UNAVAILABLE, cause="host.processes"
        )
    if machine.max_files is not None and ranks * 4 + 64 > machine.max_files:
        line = f"{ranks * 4 + 64} open files are needed for {plural(ranks, 'rank')}; the limit here is {machine.max_files} (ulimit -n)"
        raise Refusal(line, EX_UNAVAILABLE, cause="host.files")
    return GpuChoice((), ranks, f"✓ {why[0].upper()}{why[1:]}: {plural(ranks, 'CPU rank')}, gloo")


def _visible(hidden: str | None, gpus: tuple[Gpu, ...]) -> list[Gpu]:
    """CUDA_VISIBLE_DEVICES in its three spellings. CUDA silently drops all after a bad entry; we refuse it."""
    if hidden is None:
        return list(gpus)
    found: list[Gpu] = []
    for word in (part.strip() for part in hidden.split(",")):
        match = _by_id(word, gpus)
        if not match:
            line = f"CUDA_VISIBLE_DEVICES={hidden}: no GPU {word!r} here; there are {_list(gpus)}"
            raise Refusal(line, EX_UNAVAILABLE, cause="gpu.ordinal")
        found += [gpu for gpu in match if gpu not in found]
    return found


def _by_id(word: str, gpus: tuple[Gpu, ...] | list[Gpu]) -> list[Gpu]:
    if is_digits(word):
        return [gpu for gpu in gpus if gpu.index == int(word)]
    if "." in word and word.replace(".", "").isdigit():
        return [gpu for gpu in gpus if gpu.label == f"GPU{word}"]
    if not word.upper().startswith(("GPU-", "MIG-")):
        return []
    word = word.lower()
    match = [gpu for gpu in gpus if gpu.uuid.lower().startswith(word) or (gpu.mig_parent or "").lower() == word]
    # CUDA takes a prefix if it fits one card.
    return match if len({gpu.mig_parent or gpu.uuid for gpu in match}) == 1 else []


def _any(options: RunOptions) -> int | None:
    if not options.gpus or not options.gpus.startswith("any"):
        return None
    head, _, number = options.gpus.partition(":")
    if head != "any" or (number and not (is_digits(number) and int(number))):
        raise Refusal(f"--gpus {options.gpus}: write any:2 for the two with the most free memory", EX_USAGE)
    return int(number or 1)


def _asked(options: RunOptions, visible: list[Gpu], hidden: str | None) -> list[Gpu] | None:
    if options.gpu and options.gpus:
        raise Refusal("--gpu and --gpus: give one of them", EX_USAGE)
    text = options.gpu or options.gpus
    if not text or _any(options) is not None:
        return None
    flag = "--gpu" if options.gpu else "--gpus"
    found: list[Gpu] = []
    for word in (part.strip() for part in text.split(",")):
        match = _by_id(word, visible)
        if not match:
            behind = f" behind CUDA_VISIBLE_DEVICES={hidden}" if hidden is not None else ""
            line = f"{flag} {text}: no GPU {word!r}{behind}; there are {_list(visible)}"
            raise Refusal(line, EX_UNAVAILABLE, cause="gpu.ordinal")
        if any(gpu in found for gpu in match):
            raise Refusal(f"{flag} {text}: GPU {word} is named twice", EX_USAGE)
        found += match
    return found


def _unusable(gpu: Gpu, options: RunOptions, held: Mapping[str, str]) -> str:
    """Why this card can't be used now; empty if it can."""
    if gpu.error:
        return f"does not answer: {gpu.error}"
    if gpu.compute_mode == "prohibited":
        return "is in prohibited compute mode"
    if gpu.compute_mode == "exclusive_process" and gpu.holders:
        return f"is in exclusive mode and held{_by(gpu)}"
    if gpu.uuid in held and not options.share_gpus:
        return f"is in use by {held[gpu.uuid]}"
    floor = max(options.min_free_memory, CONTEXT)
    if gpu.memory_free is not None and gpu.memory_free < floor:
        return f"has {format_bytes(gpu.memory_free)} free of {format_bytes(gpu.memory_total or 0)}, {format_bytes(floor)} needed{_by(gpu)}"
    return ""


def _by(gpu: Gpu) -> str:
    if not gpu.holders:
        hidden = gpu.holders is not None and (gpu.memory_used or 0) > 2 * CONTEXT
        return "; held from outside this container" if hidden else ""
    top = max(gpu.holders, key=lambda holder: holder.memory or 0)
    if top.command is None:
        return f", by pid {top.pid} outside this container"
    return f", by pid {top.pid} ({top.user}: {top.command[:60]})"


def _sentence(gpu: Gpu, reasons: Mapping[str, str]) -> str:
    return f"GPU {gpu.label[3:]} {reasons[gpu.uuid]}"


def _room(gpu: Gpu) -> tuple[int, int, int, int]:
    """Most free memory, then fewest holders, then least busy, then the lower number."""
    # A few MB of driver bookkeeping are no difference.
    free = -1 if gpu.memory_free is None else gpu.memory_free // 10**8
    return free, -len(gpu.holders or ()), -(gpu.utilization or 0), -gpu.index


def _list(gpus: tuple[Gpu, ...] | list[Gpu]) -> str:
    return ", ".join(f"{gpu.label[3:]} ({gpu.name or gpu.uuid})" for gpu in gpus) or "none"


def _too_few(
    need: int, each: int, usable: list[Gpu], pool: list[Gpu], reasons: Mapping[str, str], found: int, hidden: str | None
) -> Refusal:
    there = f"{plural(found, 'GPU')} here"
    if hidden is not None:
        there += f", {len(pool)} of them in CUDA_VISIBLE_DEVICES={hidden}"
    busy = "; ".join(_sentence(gpu, reasons) for gpu in pool if gpu.uuid in reasons)
    of_each = f" with {each} GPUs each" if each > 1 else ""
    text = f"{plural(need // each, 'rank')}{of_each} asked for and {plural(len(usable), 'GPU')} usable: {there}"
    text += f"; {busy}" if busy else ""
    if need <= len(pool):
        return GpusNotFree(f"{text}; --wait 10m waits for them", EX_UNAVAILABLE, cause="gpu.busy")
    advice = "--nproc-per-node cpu runs without GPUs, --share-gpus lets ranks share one"
    return Refusal(f"{text}; {advice}", EX_UNAVAILABLE, cause="gpu.too-few")
