"""Chooses the GPUs of a run on one host. Pure: takes options, environment and machine; raises Refusal."""

from __future__ import annotations

from collections.abc import Mapping

from stoker.contract.errors import EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.frozen import frozen, replace
from stoker.contract.text import is_digits
from stoker.contract.units import format_bytes, plural
from stoker.control.machine.model import Gpu, Machine
from stoker.control.plan.options import RANK_VARIABLES, RunOptions, hides_all

# A bare CUDA context takes 0.5 to 0.7 GB, so a GPU with less free memory than this can't take another process.
CONTEXT_BYTES = 10**9


class GpusNotFree(Refusal):
    """The machine has enough GPUs, but they are busy. With --wait the launcher tries again."""


@frozen
class GpuChoice:
    """The ranks of one host and their GPUs (none for CPU ranks). `line` tells the user what was chosen."""

    gpus: tuple[Gpu, ...]
    ranks: int
    line: str


def choose_gpus(
    options: RunOptions, environment: Mapping[str, str], machine: Machine, locked: Mapping[str, str]
) -> GpuChoice:
    """Choose the GPUs for the ranks. `locked` maps the UUIDs of GPUs that other runs have locked to their holders."""
    count, count_source = _read_rank_count(options, environment)
    visible_devices = environment.get("CUDA_VISIBLE_DEVICES")
    all_hidden = hides_all(visible_devices)
    if count == "cpu":
        return _choose_cpus(machine.cores, machine, "as requested")
    if machine.gpu_error and not all_hidden:
        fix = "`stoker run --nproc-per-node cpu` trains on CPUs"
        line = f"the NVIDIA driver is not responding ({machine.gpu_error}); {fix}"
        raise Refusal(line, EX_UNAVAILABLE, cause="gpu.driver")
    if not machine.gpus or all_hidden:
        if options.gpus or options.gpu or count == "gpu":
            why = "CUDA_VISIBLE_DEVICES hides them all" if machine.gpus else "this machine has none"
            raise Refusal(f"GPUs were requested, but {why}", EX_UNAVAILABLE, cause="gpu.too-few")
        ranks = count if isinstance(count, int) else 1
        if count == "auto":
            ranks = machine.cores
        return _choose_cpus(ranks, machine, "CUDA_VISIBLE_DEVICES hides the GPUs" if machine.gpus else "no GPU found")
    visible = _find_visible_gpus(visible_devices, machine.gpus)
    listed = _find_listed_gpus(options, visible, visible_devices)
    any_count = _parse_any_count(options)
    pool = listed if listed is not None else visible
    reasons = {gpu.uuid: reason for gpu in pool if (reason := _explain_unusable(gpu, options, locked))}
    usable = [gpu for gpu in pool if gpu.uuid not in reasons]
    per_rank = options.gpus_per_rank
    need = count * per_rank if isinstance(count, int) else max(len(usable) // per_rank, 1) * per_rank
    unusable = [f"GPU {gpu.label[3:]} {reasons[gpu.uuid]}" for gpu in pool if gpu.uuid in reasons]
    if listed is not None and unusable:
        raise GpusNotFree(unusable[0], EX_UNAVAILABLE, cause="gpu.busy")
    if listed is None and any_count is not None:
        need = any_count // per_rank * per_rank
        usable.sort(key=_freedom_key, reverse=True)
    if isinstance(count, int) and any_count is not None and count * per_rank != any_count:
        raise Refusal(f"--gpus any:{any_count} and {count_source} {count} contradict each other", EX_USAGE)
    if any_count is not None and any_count < per_rank:
        raise Refusal(f"--gpus any:{any_count} and --gpus-per-rank {per_rank} contradict each other", EX_USAGE)
    if not usable or (need > len(usable) and not options.share_gpus):
        need = max(need, per_rank)
        each = f" with {per_rank} GPUs each" if per_rank > 1 else ""
        line = f"{plural(need // per_rank, 'rank')}{each} requested, but {plural(len(usable), 'GPU')} usable"
        line += f": {plural(len(machine.gpus), 'GPU')} here"
        if visible_devices is not None:
            line += f", {len(pool)} of them in CUDA_VISIBLE_DEVICES={visible_devices}"
        line = "; ".join([line, *unusable])
        if need <= len(pool):
            raise GpusNotFree(f"{line}; --wait 10m waits for them", EX_UNAVAILABLE, cause="gpu.busy")
        fix = "--nproc-per-node cpu runs without GPUs, --share-gpus lets ranks share one"
        raise Refusal(f"{line}; {fix}", EX_UNAVAILABLE, cause="gpu.too-few")
    chosen = [usable[n % len(usable)] for n in range(need)]
    if any_count is not None:
        chosen.sort(key=lambda gpu: (gpu.index, gpu.mig or 0))
    distinct = len({gpu.uuid for gpu in chosen})
    ranks = need // per_rank
    line = f"✓ Found {len(machine.gpus)} GPU(s), using {distinct} GPUs"
    if ranks != distinct:
        line += f" ({plural(ranks, 'rank')})"
    if count_source and count_source != "--nproc-per-node":
        line += f" ({count_source}={count})"
    if listed is not None or any_count is not None or distinct < len(machine.gpus):
        line += ": " + ", ".join(f"GPU {gpu.label[3:]}" for gpu in dict.fromkeys(chosen))
    if unusable:
        line += f"; left out: {'; '.join(unusable)}"
    return GpuChoice(tuple(chosen), ranks, line)


def with_gpu_errors(machine: Machine, bad: Mapping[str, str]) -> Machine:
    """Return the machine with the error of each bad GPU (UUID -> error) set, so that no plan uses it."""
    gpus = tuple(replace(gpu, error=bad[gpu.uuid]) if gpu.uuid in bad else gpu for gpu in machine.gpus)
    return replace(machine, gpus=gpus)


def _read_rank_count(options: RunOptions, environment: Mapping[str, str]) -> tuple[int | str | None, str]:
    """Return the number of ranks (or gpu, cpu, auto) and the flag or variable that sets it, or (None, "")."""
    if options.nproc_per_node is not None:
        return _parse_rank_count(options.nproc_per_node, "--nproc-per-node"), "--nproc-per-node"
    for name in RANK_VARIABLES:
        if environment.get(name):
            return _parse_rank_count(environment[name], name), name
    return None, ""


def _parse_rank_count(text: str, source: str) -> int | str:
    count = text.strip().lower()
    if count in ("gpu", "cpu", "auto"):
        return count
    if not is_digits(count) or int(count) < 1:
        raise Refusal(f"{source} must be a number of ranks from 1 up, gpu, cpu or auto, got {text}", EX_USAGE)
    return int(count)


def _choose_cpus(ranks: int, machine: Machine, why: str) -> GpuChoice:
    ranks = max(ranks, 1)  # a host may report 0 cores
    if machine.max_processes is not None and ranks >= machine.max_processes:
        line = f"can't start {plural(ranks, 'rank')}: this machine allows {machine.max_processes} processes"
        raise Refusal(line, EX_UNAVAILABLE, cause="host.processes")
    files = ranks * 4 + 64
    if machine.max_files is not None and files > machine.max_files:
        limit = f"the limit here is {machine.max_files} (ulimit -n)"
        line = f"can't start {plural(ranks, 'rank')}: that needs {files} open files, and {limit}"
        raise Refusal(line, EX_UNAVAILABLE, cause="host.files")
    return GpuChoice((), ranks, f"✓ {why[0].upper()}{why[1:]}: {plural(ranks, 'CPU rank')}, gloo")


def _find_visible_gpus(visible_devices: str | None, gpus: tuple[Gpu, ...]) -> list[Gpu]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES (`visible_devices`), or all if it is not set.

    Its entries are indices, UUIDs or the beginnings of UUIDs. Raises Refusal for an unknown entry: CUDA silently drops all entries after it.
    """
    if visible_devices is None:
        return list(gpus)
    visible: list[Gpu] = []
    for id in (part.strip() for part in visible_devices.split(",")):
        matches = _match_gpus(id, gpus)
        if not matches:
            line = f"CUDA_VISIBLE_DEVICES={visible_devices}: GPU {id!r} does not exist; the GPUs here are {_format_gpus(gpus)}"
            raise Refusal(line, EX_UNAVAILABLE, cause="gpu.ordinal")
        visible += [gpu for gpu in matches if gpu not in visible]
    return visible


def _match_gpus(id: str, gpus: tuple[Gpu, ...] | list[Gpu]) -> list[Gpu]:
    """Return the GPU, or all slices of the MIG GPU, with this index, label like 0.1, UUID or beginning of a UUID."""
    if is_digits(id):
        return [gpu for gpu in gpus if gpu.index == int(id)]
    if "." in id and id.replace(".", "").isdigit():
        return [gpu for gpu in gpus if gpu.label == f"GPU{id}"]
    if not id.upper().startswith(("GPU-", "MIG-")):
        return []
    id = id.lower()
    matches = [gpu for gpu in gpus if gpu.uuid.lower().startswith(id) or (gpu.mig_parent or "").lower() == id]
    # CUDA accepts the beginning of a UUID if it fits only one GPU.
    return matches if len({gpu.mig_parent or gpu.uuid for gpu in matches}) == 1 else []


def _parse_any_count(options: RunOptions) -> int | None:
    """Return the number in --gpus any:N (1 for any), or None if --gpus is not set or lists GPUs."""
    if not options.gpus or not options.gpus.startswith("any"):
        return None
    head, _, number = options.gpus.partition(":")
    if head != "any" or (number and not (is_digits(number) and int(number))):
        raise Refusal(f"--gpus {options.gpus}: N in any:N must be a number from 1 up", EX_USAGE)
    return int(number or 1)


def _find_listed_gpus(options: RunOptions, visible: list[Gpu], visible_devices: str | None) -> list[Gpu] | None:
    """Return the GPUs that --gpu or --gpus lists, or None if neither lists any."""
    if options.gpu and options.gpus:
        raise Refusal("--gpu and --gpus contradict each other; leave one out", EX_USAGE)
    text = options.gpu or options.gpus
    if not text or _parse_any_count(options) is not None:
        return None
    flag = "--gpu" if options.gpu else "--gpus"
    listed: list[Gpu] = []
    for id in (part.strip() for part in text.split(",")):
        matches = _match_gpus(id, visible)
        if not matches:
            within = f" in CUDA_VISIBLE_DEVICES={visible_devices}" if visible_devices is not None else ""
            line = f"{flag} {text}: GPU {id!r} does not exist{within}; the GPUs here are {_format_gpus(visible)}"
            raise Refusal(line, EX_UNAVAILABLE, cause="gpu.ordinal")
        if any(gpu in listed for gpu in matches):
            raise Refusal(f"{flag} {text}: GPU {id} is named twice", EX_USAGE)
        listed += matches
    return listed


def _explain_unusable(gpu: Gpu, options: RunOptions, locked: Mapping[str, str]) -> str:
    """Return why a GPU can't be used now, or "" if it can."""
    if gpu.error:
        return f"is not responding: {gpu.error}"
    if gpu.compute_mode == "prohibited":
        return "is in prohibited compute mode"
    if gpu.compute_mode == "exclusive_process" and gpu.holders:
        return f"is in exclusive mode and held{_describe_holder(gpu)}"
    if gpu.uuid in locked and not options.share_gpus:
        return f"is in use by {locked[gpu.uuid]}"
    needed = max(options.min_free_memory, CONTEXT_BYTES)
    if gpu.memory_free is not None and gpu.memory_free < needed:
        total = format_bytes(gpu.memory_total or 0)
        return (
            f"has {format_bytes(gpu.memory_free)} free of {total}, {format_bytes(needed)} needed{_describe_holder(gpu)}"
        )
    return ""


def _describe_holder(gpu: Gpu) -> str:
    """Return a clause about the process that holds most of a GPU's memory, or "" if no process is known."""
    if not gpu.holders:
        is_outside = gpu.holders is not None and (gpu.memory_used or 0) > 2 * CONTEXT_BYTES
        return "; held from outside this container" if is_outside else ""
    top = max(gpu.holders, key=lambda holder: holder.memory or 0)
    if top.command is None:
        return f", by pid {top.pid} outside this container"
    return f", by pid {top.pid} ({top.user}: {top.command[:60]})"


def _freedom_key(gpu: Gpu) -> tuple[int, int, int, int]:
    """Return a sort key for --gpus any: most free memory, then fewest processes, then least busy, then lowest index."""
    # Round to 100 MB, so that a few MB of driver bookkeeping make no difference.
    free = -1 if gpu.memory_free is None else gpu.memory_free // 10**8
    return free, -len(gpu.holders or ()), -(gpu.utilization or 0), -gpu.index


def _format_gpus(gpus: tuple[Gpu, ...] | list[Gpu]) -> str:
    return ", ".join(f"{gpu.label[3:]} ({gpu.name or gpu.uuid})" for gpu in gpus) or "none"
