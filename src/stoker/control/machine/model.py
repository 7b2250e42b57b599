"""A machine, as observed at one moment. A field the hardware doesn't have is None."""

from __future__ import annotations

from typing import Any

from stoker.contract.shape import as_json, shape
from stoker.contract.typed import read_recorded

SCHEMA = 1


@shape
class Holder:
    """A process with a context on a GPU. In a container its pid may be the host's: no command and user then."""

    pid: int
    memory: int | None = None
    command: str | None = None
    user: str | None = None
    run: str | None = None  # Stoker's run tag, if it has one
    age: float | None = None  # seconds


@shape
class Gpu:
    index: int  # as nvidia-smi shows it
    uuid: str
    name: str | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    utilization: int | None = None  # percent
    compute_mode: str | None = None
    pci: str | None = None
    holders: tuple[Holder, ...] | None = None
    mig: int | None = None  # instance number on its parent card; None for a whole card
    mig_parent: str | None = None
    error: str | None = None  # NVML refused to talk about this card at all

    @property
    def memory_free(self) -> int | None:
        if self.memory_total is None or self.memory_used is None:
            return None
        return self.memory_total - self.memory_used

    @property
    def label(self) -> str:
        return f"GPU{self.index}" if self.mig is None else f"GPU{self.index}.{self.mig}"


@shape
class Machine:
    hostname: str
    cores: int
    memory_total: int
    memory_available: int
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    gpu_error: str | None = None  # a driver is there but does not answer
    cgroup_limit: int | None = None
    max_processes: int | None = None
    max_files: int | None = None
    python: str | None = None
    platform: str | None = None
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        return dict(as_json(self))


LONGEST_NAME = 200  # of a GPU: NVML gives 96 at most
MOST_GPUS = 1024  # of a machine: checks compare each with each


def machine_from_json(data: Any) -> Machine:
    """ValueError: it is none."""
    machine = read_recorded(Machine, data, SCHEMA)
    if len(machine.gpus) > MOST_GPUS:
        raise ValueError(f"{len(machine.gpus)} GPUs; no machine has more than {MOST_GPUS}")
    longest = max((len(gpu.name or "") for gpu in machine.gpus), default=0)
    if longest > LONGEST_NAME:
        raise ValueError(f"a GPU's name has {longest:,} characters; none has more than {LONGEST_NAME}")
    return machine
