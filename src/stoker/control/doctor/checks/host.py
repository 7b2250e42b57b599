"""host.*: memory, disk, limits and stuck processes."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.contract.evidence import Finding
from stoker.contract.units import format_bytes, plural
from stoker.control.doctor.check import check, fail, warn
from stoker.control.machine.examination import HostState
from stoker.control.machine.model import Machine

RANK_RAM = 2 * 10**9  # torch with a CUDA context, before any model
SHM_PER_RANK = 256 << 20  # data-loader workers pass batches there; Docker's default of 64 MB is too small
DISK = 5 * 10**9


def _ranks(machine: Machine, ranks: int) -> int:
    return ranks or max(1, len(machine.gpus))


@check("host.memory", fast=True)
def memory(machine: Machine, ranks: int) -> Iterator[Finding]:
    """Warns if the memory is too small for all ranks to start at the same time (std::bad_alloc, the OOM killer)."""
    ranks, available = _ranks(machine, ranks), machine.memory_available
    need = ranks * (RANK_RAM if machine.gpus else RANK_RAM // 4)
    if available < need:
        text = f"{format_bytes(available)} of memory is free"
        text += f"; starting {plural(ranks, 'rank')} together takes about {format_bytes(need)}"
        yield warn(text, "use --init-slots 1 to start them one after the other")


@check("host.cgroup", fast=True)
def cgroup(machine: Machine) -> Iterator[Finding]:
    """Warns if the container may use less than 4 GB of memory, however much the machine shows."""
    limit = machine.cgroup_limit
    if limit is not None and limit < 4 * 10**9:
        text = f"this container may use only {format_bytes(limit)} of memory"
        yield warn(text, "use a larger container, or --ram-limit to get a verdict before the kernel kills a rank")


@check("host.shm", fast=True)
def shm(host: HostState, machine: Machine, ranks: int) -> Iterator[Finding]:
    """Warns if /dev/shm is too small: data-loader workers and NCCL pass data there. A full one causes a bus error or
    "unable to open shared memory".
    """
    need = _ranks(machine, ranks) * SHM_PER_RANK
    if host.shm_free is None:
        yield warn("there is no /dev/shm", "data loaders with workers will fail: mount one, or set num_workers=0")
    elif host.shm_free < need:
        text = f"/dev/shm has {format_bytes(host.shm_free)} free of {format_bytes(host.shm_total or 0)}"
        yield warn(text, "docker run --shm-size 16g (or --ipc=host); otherwise set num_workers=0")


@check("host.disk", fast=True)
def disk(host: HostState) -> Iterator[Finding]:
    """Warns if the disk of the runs has less than 5 GB free for logs and checkpoints. Fails below 100 MB."""
    if host.disk_free is not None and host.disk_free < DISK:
        level = fail if host.disk_free < 10**8 else warn
        text = f"the disk of {host.disk_path} has {format_bytes(host.disk_free)} free"
        yield level(text, "choose another disk with --runs-dir, or free space with `stoker clean --cache`")


@check("host.files", fast=True)
def files(host: HostState) -> Iterator[Finding]:
    """Warns if a process may open fewer than 1024 files: data loaders with many workers fail with "too many open files"."""
    if host.files_soft is not None and host.files_soft < 1024:
        yield warn(
            f"a process may open only {host.files_soft} files", f"ulimit -n {min(65536, host.files_hard or 65536)}"
        )


@check("host.cores", fast=True)
def cores(machine: Machine, ranks: int) -> Iterator[Finding]:
    """Warns if there are fewer cores than ranks, which then wait for each other."""
    ranks = _ranks(machine, ranks)
    if machine.cores < ranks:
        text = f"{plural(ranks, 'rank')} would share {plural(machine.cores, 'core')}"
        yield warn(text, f"stoker run --nproc-per-node {machine.cores} ...")


@check("host.stuck")
def stuck(host: HostState) -> Iterator[Finding]:
    """Warns if processes are in state D, where they can't be killed and keep what they hold."""
    if host.stuck:
        text = f"some processes are stuck in the kernel (state D): {', '.join(host.stuck[:5])}"
        yield warn(text, "wait until the disk or driver responds; otherwise only a reboot ends them")


@check("host.zombies")
def zombies(host: HostState) -> Iterator[Finding]:
    """Warns if there are over 100 zombies: some process does not collect its children (a container without an init)."""
    if host.zombies > 100:
        yield warn(f"there are {host.zombies} zombie processes", "docker run --init, or restart the container")


@check("host.address-space", fast=True)
def address_space(host: HostState, machine: Machine) -> Iterator[Finding]:
    """Warns if RLIMIT_AS is below 256 GB. Fails if it is below 128 GB and there are GPUs: it limits address space, not memory. A bare
    CUDA context reserves tens of gigabytes of it and gets std::bad_alloc.
    """
    if host.address_space is not None and host.address_space < 256 * 10**9:
        level = fail if machine.gpus and host.address_space < 128 * 10**9 else warn
        text = f"RLIMIT_AS is {format_bytes(host.address_space)}, which causes std::bad_alloc and saves no memory"
        yield level(text, "ulimit -v unlimited; use --ram-limit instead")


@check("host.swap")
def swap(host: HostState, machine: Machine) -> Iterator[Finding]:
    """Warns if more than 4 GB are swapped out and less than 4 GB is free: training slows to the speed of the disk."""
    if host.swap_used is not None and host.swap_used > 4 * 10**9 and machine.memory_available < 4 * 10**9:
        free = format_bytes(machine.memory_available)
        text = f"{format_bytes(host.swap_used)} are swapped out and {free} of memory is free"
        yield warn(text, "free memory before starting")


@check("host.clock")
def clock(host: HostState) -> Iterator[Finding]:
    """Warns if the clock shows a time before this software existed: certificates and checkpoints go wrong."""
    if host.clock is not None and host.clock < 1_760_000_000:
        yield warn("the clock is set to a time in the past", "timedatectl set-ntp true")
