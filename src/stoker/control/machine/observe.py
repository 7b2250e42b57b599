"""Observes this machine and its GPUs, or reads a recorded machine from a file (STOKER_MACHINE)."""

from __future__ import annotations

import os
import sys

from stoker.contract import env_vars, errors, host_memory
from stoker.contract.text import parse_json
from stoker.control.machine import host_limits
from stoker.control.machine.model import Gpu, Machine, machine_from_json
from stoker.control.machine.nvml import DriverError, NoDriver, Nvml


class Observer:
    """Observes the machine repeatedly. NVML stays open in between."""

    def __init__(self, recorded: str | None = None) -> None:
        self.recorded = recorded  # path of a recorded machine
        self.nvml: Nvml | None = None
        self.gpu_error: str | None = None
        if recorded:
            return
        try:
            self.nvml = Nvml()
        except NoDriver:
            return
        except DriverError as problem:
            self.gpu_error = str(problem)

    def observe(self) -> Machine:
        """Return the machine as it is now."""
        if self.recorded:
            return read_recorded(self.recorded)
        total, available, limit = host_memory.read_memory()
        system = os.uname()
        gpus: tuple[Gpu, ...] = ()
        driver, error = None, self.gpu_error
        if self.nvml is not None:
            try:
                gpus, driver = self.nvml.read_gpus(), self.nvml.read_driver()
            except Exception as problem:  # NVML makes its error classes at run time
                error = f"NVML stopped responding: {problem}"
        return Machine(
            hostname=system.nodename,
            cores=host_limits.count_cores(),
            memory_total=total,
            memory_available=available,
            gpus=gpus,
            driver=driver,
            gpu_error=error,
            cgroup_limit=limit,
            max_processes=host_limits.read_max_processes(),
            max_files=host_limits.read_max_files(),
            python=sys.version.split()[0],
            platform=f"{system.sysname} {system.release} {system.machine}",
        )


def read_recorded(path: str) -> Machine:
    """Return a recorded machine. The file holds a machine, or a whole examination. Raises Refusal."""
    try:
        # Any kind of file: in tests, a named pipe stands in for a machine that is slow to observe.
        with open(path, encoding="utf-8") as file:
            data = parse_json(file.read())
        return machine_from_json(data["machine"] if isinstance(data, dict) and "machine" in data else data)
    except FileNotFoundError as problem:
        raise errors.Refusal(
            f"the recorded machine {env_vars.MACHINE}={path} does not exist", errors.EX_NOINPUT
        ) from problem
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as problem:
        line = f"{env_vars.MACHINE}={path} is not a recorded machine: {problem}"
        raise errors.Refusal(line, errors.EX_DATAERR) from problem


def find_packages_dir() -> str | None:
    """Return the folder of nvidia-ml-py, for agents and children that run without site-packages."""
    for entry in sys.path:
        if entry and os.path.exists(os.path.join(entry, "pynvml.py")):
            return entry
    return None
