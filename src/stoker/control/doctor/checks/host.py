"""host.*: memory, disk, limits, stuck processes."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.contract.evidence import Finding
from stoker.contract.units import format_bytes, plural
from stoker.control.doctor.check import check, fail, warn
from stoker.control.machine.examination import Host
from stoker.control.machine.model import Machine

RANK_RAM = 2 * 10**9  # torch with a CUDA context, before any model
SHM_PER_RANK = 256 << 20  # data-loader workers hand batches over there; Docker's default of 64 MB is the classic trap
DISK = 5 * 10**9


def _ranks(machine: Machine, ranks: int) -> int:
    return ranks or max(1, len(machine.gpus))


@check("host.memory", fast=True)
def memory(machine: Machine, ranks: int) -> Iterator[Finding]:
    """Memory for all ranks to start at once (std::bad_alloc, the OOM killer)."""
    ranks, available = _ranks(machine, ranks), machine.memory_available
    need = ranks * (RANK_RAM if machine.gpus else RANK_RAM // 4)
    if available < need:
        text = f"{format_bytes(available)} of memory is free; starting {plural(ranks, 'rank')} at once takes about {format_bytes(need)}"
        yield warn(text, "--init-slots 1 starts them one after the other")


@check("host.cgroup", fast=True)
def cgroup(machine: Machine) -> Iterator[Finding]:
    """The container may use much less memory than the machine shows."""
    limit = machine.cgroup_limit
    if limit is not None and limit < 4 * 10**9:
        text = f"this container may use {format_bytes(limit)} of memory"
        yield warn(text, "ask for a larger container; --ram-limit gives a verdict before the kernel kills")


@check("host.shm", fast=True)
def shm(host: Host, machine: Machine, ranks: int) -> Iterator[Finding]:
    """/dev/shm is where data-loader workers and NCCL pass data; a bus error or "unable to open shared memory" is its
    being full.
    """
    need = _ranks(machine, ranks) * SHM_PER_RANK
    if host.shm_free is None:
        yield warn("there is no /dev/shm", "data loaders with workers will fail: mount one, or num_workers=0")
    elif host.shm_free < need:
        text = f"/dev/shm has {format_bytes(host.shm_free)} free of {format_bytes(host.shm_total or 0)}"
        yield warn(text, "docker run --shm-size 16g (or --ipc=host); else num_workers=0")


@check("host.disk", fast=True)
def disk(host: Host) -> Iterator[Finding]:
    """Room for logs and checkpoints where the runs go."""
    if host.disk_free is not None and host.disk_free < DISK:
        level = fail if host.disk_free < 10**8 else warn
        text = f"{format_bytes(host.disk_free)} free on the disk of {host.disk_path}"
        yield level(text, "--runs-dir on another disk; stoker clean --cache")


@check("host.files", fast=True)
def files(host: Host) -> Iterator[Finding]:
    """The open-file limit: "too many open files" comes from data loaders with many workers."""
    if host.files_soft is not None and host.files_soft < 1024:
        yield warn(f"a process may open {host.files_soft} files", f"ulimit -n {min(65536, host.files_hard or 65536)}")


@check("host.cores", fast=True)
def cores(machine: Machine, ranks: int) -> Iterator[Finding]:
    """At least one core per rank, or they wait for each other."""
    ranks = _ranks(machine, ranks)
    if machine.cores < ranks:
        text = f"{plural(ranks, 'rank')} on {plural(machine.cores, 'core')}"
        yield warn(text, f"stoker run --nproc-per-node {machine.cores} ...")


@check("host.stuck")
def stuck(host: Host) -> Iterator[Finding]:
    """Processes in D state can't be killed; what they hold stays held."""
    if host.stuck:
        text = f"stuck in the kernel (state D): {', '.join(host.stuck[:5])}"
        yield warn(text, "wait for the disk or driver they wait for; only a reboot ends them otherwise")


@check("host.zombies")
def zombies(host: Host) -> Iterator[Finding]:
    """Many zombies: something that should collect its children does not (a container without an init)."""
    if host.zombies > 100:
        yield warn(f"{host.zombies} zombie processes", "docker run --init, or restart the container")


@check("host.address-space", fast=True)
def address_space(host: Host, machine: Machine) -> Iterator[Finding]:
    """RLIMIT_AS limits address space, not memory: a bare CUDA context reserves tens of gigabytes of it and gets
    std::bad_alloc.

    A batch system's generous one harms nobody: it fails below 128 GB, and is warned of below 256 GB.
    """
    if host.address_space is not None and host.address_space < 256 * 10**9:
        level = fail if machine.gpus and host.address_space < 128 * 10**9 else warn
        text = f"RLIMIT_AS is {format_bytes(host.address_space)}: it causes std::bad_alloc, it saves no memory"
        yield level(text, "ulimit -v unlimited; use --ram-limit instead")


@check("host.swap")
def swap(host: Host, machine: Machine) -> Iterator[Finding]:
    """A machine that swaps trains at the speed of its disk."""
    if host.swap_used is not None and host.swap_used > 4 * 10**9 and machine.memory_available < 4 * 10**9:
        text = f"{format_bytes(host.swap_used)} are swapped out and {format_bytes(machine.memory_available)} of memory is free"
        yield warn(text, "free memory before starting")


@check("host.clock")
def clock(host: Host) -> Iterator[Finding]:
    """A clock before this software was made: certificates and checkpoints by time go wrong."""
    if host.clock is not None and host.clock < 1_760_000_000:
        yield warn("the clock is set to a time in the past", "timedatectl set-ntp true")
