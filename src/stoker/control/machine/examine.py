"""Examines a host thoroughly: each part of the examination runs in a child process with a time limit.

A child that exceeds its limit is killed. If it can't be killed (a driver call in state D), it is left behind and nothing
waits for it.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from stoker.contract import host_memory
from stoker.contract.frozen import replace
from stoker.contract.process import NOT_FROM_HERE
from stoker.control.machine import examine_child, host_limits
from stoker.control.machine.examination import (
    KNOWN_VARIABLES,
    Examination,
    GpuHealth,
    GpuProbe,
    HostState,
    NetworkState,
    TorchBuild,
    read_part,
)
from stoker.control.machine.model import Gpu, Machine, machine_from_json
from stoker.control.machine.observe import find_packages_dir

LIMIT_S = 3.0
NET_S = 6.0  # the child limits itself to 2.5 s (examine_child.SLOW_S, SERVER_S), but a busy machine starts it late
PROBE_S = 10.0  # a context alone takes seconds on a host with 8 GPUs and no persistence daemon
TORCH_S = 120.0  # importing torch from a cold disk of a rented pod is slow
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

PARTS = frozenset(("health", "probes", "torch", "host", "net"))
NOT_ASKED = "not asked"


class Child:
    """A running child that examines one part."""

    def __init__(self, name: str, argv: list[str], env: Mapping[str, str], limit_s: float) -> None:
        self.name, self.limit_s = name, limit_s
        self.started_at = time.monotonic()
        self.output = b""
        self._process = subprocess.Popen(
            argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self.stdout, self._stderr = self._process.stdout, self._process.stderr

    def kill(self) -> None:
        self._process.kill()  # in state D it stays until the driver call returns; don't wait for that

    def read_result(self) -> tuple[Any, str]:
        """Return the child's JSON value and "", or None and why there is none."""
        try:
            code = self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            return None, "did not end"
        if code:
            stderr = self._stderr.read().decode("utf-8", "replace").strip()
            return None, f"ended with exit code {code}" + (f": {stderr.splitlines()[-1]}" if stderr else "")
        try:
            return json.loads(self.output), ""
        except ValueError:
            return None, "gave no readable answer"


def _start_child(
    part: str, *arguments: str, env: Mapping[str, str] | None = None, limit_s: float = LIMIT_S, name: str = ""
) -> Child:
    argv = [sys.executable, "-I", "-S", "-c", examine_child.BOOT, ROOT, find_packages_dir() or ROOT, part, *arguments]
    return Child(name or part, argv, env or os.environ, limit_s)


def _wait_for_children(children: list[Child]) -> dict[str, tuple[Any, str]]:
    """Wait for all children, each up to its own limit. Return their results by name."""
    results: dict[str, tuple[Any, str]] = {}
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.stdout, selectors.EVENT_READ, child)
        while selector.get_map():
            now = time.monotonic()
            for key in list(selector.get_map().values()):
                late: Child = key.data
                if now - late.started_at > late.limit_s:
                    selector.unregister(late.stdout)
                    late.kill()
                    results[late.name] = None, f"no answer within {late.limit_s:.0f} s"
            for key, _ in selector.select(0.05):
                child = key.data
                data = os.read(child.stdout.fileno(), 1 << 20)
                if data:
                    child.output += data
                else:
                    selector.unregister(child.stdout)
                    results[child.name] = child.read_result()
    return results


def examine(runs_dir: str, port: int, parts: frozenset[str] = PARTS, python: str | None = None) -> Examination:
    """Examine these parts of the host, in two rounds: first the parts that need no GPU, then the others.

    The import of torch runs at the same time. `python` is the ranks' interpreter.
    """
    torch_children = []
    if "torch" in parts:
        argv = [python or sys.executable, "-c", NOT_FROM_HERE + examine_child.TORCH]
        torch_children.append(Child("torch", argv, {**os.environ, "CUDA_VISIBLE_DEVICES": ""}, TORCH_S))
    children = [_start_child("machine")]
    if "host" in parts:
        children.append(_start_child("host", runs_dir))
    if "net" in parts:
        children.append(_start_child("net", str(port), limit_s=NET_S))
    results = _wait_for_children(children)
    missing = {name: why for name, (answer, why) in results.items() if answer is None}
    machine_answer, machine_problem = results["machine"]
    machine = (
        machine_from_json(machine_answer) if machine_answer is not None else _read_machine_without_gpus(machine_problem)
    )
    gpus = [gpu for gpu in machine.gpus if not gpu.error]
    children = [_start_child("health")] if gpus and "health" in parts else []
    gpu_results = _wait_for_children(children + (_start_probes(gpus) if "probes" in parts else []))
    health, why = gpu_results.pop("health", ({}, ""))
    if health is None:
        missing["health"] = why
    probes = None
    if "probes" in parts:
        probes = {gpu.uuid: _read_probe(gpu_results.get(gpu.uuid)) for gpu in gpus}
        if probes:
            probes = _add_memory_left(probes, machine)
    torch, torch_problem = _wait_for_children(torch_children)["torch"] if torch_children else (None, NOT_ASKED)
    if torch is None:
        missing["torch"] = torch_problem
    if "machine" in missing:
        health, probes = None, None  # nothing is known about the GPUs, not even that there are none
    if health is not None and "health" in parts:
        health = {uuid: read_part(GpuHealth, gpu_health) for uuid, gpu_health in health.items()}
    else:
        health = None
    return Examination(
        machine,
        health,
        probes,
        read_part(TorchBuild, torch),
        read_part(HostState, results.get("host", (None, ""))[0]),
        read_part(NetworkState, results.get("net", (None, ""))[0]),
        {name: os.environ[name] for name in KNOWN_VARIABLES if name in os.environ},
        missing,
    )


def observe_in_child(limit: float) -> Machine | str:
    """Observe the machine in a child. Return the machine, or why it is unknown."""
    machine, why = _wait_for_children([_start_child("machine", limit_s=limit)])["machine"]
    if machine is None:
        return f"NVML did not respond within {limit:.0f} s" if why.startswith("no answer") else why
    return machine_from_json(machine)


def probe_gpus(gpus: list[Gpu]) -> dict[str, GpuProbe]:
    """Run only the context probe, on these GPUs at the same time."""
    results = _wait_for_children(_start_probes(gpus))
    return {gpu.uuid: _read_probe(results.get(gpu.uuid)) for gpu in gpus}


def _start_probes(gpus: list[Gpu]) -> list[Child]:
    """Start a probe for each GPU that has 1 GB of free memory, or whose free memory is unknown."""
    return [
        _start_child("probe", env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu.uuid}, limit_s=PROBE_S, name=gpu.uuid)
        for gpu in gpus
        if gpu.memory_free is None or gpu.memory_free > 10**9
    ]


def _read_probe(result: tuple[Any, str] | None) -> GpuProbe:
    if result is None:
        return GpuProbe("full", "not tried, because less than 1 GB is free")
    answer, why = result
    if answer is not None:
        probe: GpuProbe = read_part(GpuProbe, answer)
        return probe
    return GpuProbe("hung", why) if why.startswith("no answer") else GpuProbe("dead", f"the probe {why}")


def _add_memory_left(probes: dict[str, GpuProbe], before: Machine) -> dict[str, GpuProbe]:
    """Add the memory that is still in use after the probes. An H200 frees a context 0.15 s after its process ended."""
    deadline = time.monotonic() + 1.0
    while True:
        answer, _ = _wait_for_children([_start_child("machine")])["machine"]
        if answer is None:
            return probes
        used = {gpu.uuid: gpu.memory_used for gpu in machine_from_json(answer).gpus}
        still_used = {gpu.uuid: max(0, (used.get(gpu.uuid) or 0) - (gpu.memory_used or 0)) for gpu in before.gpus}
        if time.monotonic() > deadline or all(count < 10**8 for count in still_used.values()):
            return {uuid: replace(probe, left=still_used.get(uuid)) for uuid, probe in probes.items()}
        time.sleep(0.05)


def _read_machine_without_gpus(why: str) -> Machine:
    """Return the machine without its GPUs, because NVML did not respond."""
    total, available, limit = host_memory.read_memory()
    return Machine(
        os.uname().nodename, host_limits.count_cores(), total, available, gpu_error=f"NVML: {why}", cgroup_limit=limit
    )
