"""One thorough examination: all gatherers side by side, each in a child with a deadline.

A child that does not answer is killed and, if it can't be (a driver call in D state), left behind: nobody waits for it.
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
from stoker.control.machine import examination, examine_child, host_limits
from stoker.control.machine.examination import KNOWN, Examination, Health, Host, Net, Probe, Torch
from stoker.control.machine.model import Gpu, Machine, machine_from_json
from stoker.control.machine.observe import packages_dir

LIMIT_S = 3.0
NET_S = 6.0  # its own limits are lookups.SLOW_S and ANSWER_S; a busy machine starts it late
PROBE_S = 10.0  # a context alone takes seconds on a box of eight without a persistence daemon
TORCH_S = 120.0  # a cold disk on a rented pod
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


class Child:
    """A gatherer under way."""

    def __init__(self, name: str, argv: list[str], env: Mapping[str, str], limit: float) -> None:
        self.name, self.limit = name, limit
        self.began = time.monotonic()
        self.output = b""
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(
            argv, env=dict(env), stdin=nothing, stdout=pipe, stderr=pipe, start_new_session=True
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self.stdout, self._stderr = self._process.stdout, self._process.stderr

    def give_up(self) -> None:
        self._process.kill()  # in D state it stays until the driver lets it go; we don't wait

    def result(self) -> tuple[Any, str]:
        """(what it found, or None; why not)."""
        try:
            code = self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            return None, "its process does not end"
        if code:
            said = self._stderr.read().decode("utf-8", "replace").strip()
            return None, f"ended with {code}" + (f": {said.splitlines()[-1]}" if said else "")
        try:
            return json.loads(self.output), ""
        except ValueError:
            return None, "said nothing that can be read"


def _run(children: list[Child]) -> dict[str, tuple[Any, str]]:
    """All of them side by side; each gets its own limit."""
    results: dict[str, tuple[Any, str]] = {}
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.stdout, selectors.EVENT_READ, child)
        while selector.get_map():
            now = time.monotonic()
            for key in list(selector.get_map().values()):
                late: Child = key.data
                if now - late.began > late.limit:
                    selector.unregister(late.stdout)
                    late.give_up()
                    results[late.name] = None, f"no answer within {late.limit:.0f} s"
            for key, _ in selector.select(0.05):
                child = key.data
                data = os.read(child.stdout.fileno(), 1 << 20)
                if data:
                    child.output += data
                else:
                    selector.unregister(child.stdout)
                    results[child.name] = child.result()
    return results


def _gatherer(
    kind: str, *more: str, env: Mapping[str, str] | None = None, limit: float = LIMIT_S, name: str = ""
) -> Child:
    argv = [sys.executable, "-I", "-S", "-c", examine_child.BOOT, ROOT, packages_dir() or ROOT, kind, *more]
    return Child(name or kind, argv, env or os.environ, limit)


PARTS = frozenset(("health", "probes", "torch", "host", "net"))
NOT_ASKED = "not asked"


def examine(runs_dir: str, port: int, parts: frozenset[str] = PARTS, python: str | None = None) -> Examination:
    """Asks for these parts, in two rounds: what needs nothing, then what needs the cards. torch runs beside both."""
    argv = [python or sys.executable, "-c", NOT_FROM_HERE + examine_child.TORCH]
    torch = [Child("torch", argv, {**os.environ, "CUDA_VISIBLE_DEVICES": ""}, TORCH_S)] if "torch" in parts else []
    first = _run(
        [_gatherer("machine")]
        + ([_gatherer("host", runs_dir)] if "host" in parts else [])
        + ([_gatherer("net", str(port), limit=NET_S)] if "net" in parts else [])
    )
    missing = {name: why for name, (found, why) in first.items() if found is None}
    machine = machine_from_json(first["machine"][0]) if first["machine"][0] is not None else _blind(first["machine"][1])
    cards = [gpu for gpu in machine.gpus if not gpu.error]
    second = [_gatherer("health")] if cards and "health" in parts else []
    found = _run(second + (_probers(cards) if "probes" in parts else []))
    health, why = found.pop("health", ({}, ""))
    if health is None:
        missing["health"] = why
    probes = {gpu.uuid: _probed(gpu, found.get(gpu.uuid)) for gpu in cards} if "probes" in parts else None
    if probes:
        probes = _after(probes, machine)
    torch_found, torch_why = _run(torch)["torch"] if torch else (None, NOT_ASKED)
    if torch_found is None:
        missing["torch"] = torch_why
    if "machine" in missing:
        health, probes = None, None  # nothing is known of the cards, not even that there are none
    known = health is not None and "health" in parts
    return Examination(
        machine,
        {uuid: examination.read_examination(Health, one) for uuid, one in health.items()} if known else None,
        probes,
        examination.read_examination(Torch, torch_found),
        examination.read_examination(Host, first.get("host", (None, ""))[0]),
        examination.read_examination(Net, first.get("net", (None, ""))[0]),
        {name: os.environ[name] for name in KNOWN if name in os.environ},
        missing,
    )


def look_aside(limit: float) -> Machine | str:
    """One look, in a child; or why there is none."""
    found, why = _run([_gatherer("machine", limit=limit)])["machine"]
    if found is None:
        return f"NVML has not answered within {limit:.0f} s" if why.startswith("no answer") else why
    return machine_from_json(found)


def probe_cards(cards: list[Gpu]) -> dict[str, Probe]:
    """The context probe alone, side by side on these cards."""
    found = _run(_probers(cards))
    return {gpu.uuid: _probed(gpu, found.get(gpu.uuid)) for gpu in cards}


def _probers(cards: list[Gpu]) -> list[Child]:
    return [
        _gatherer("probe", env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu.uuid}, limit=PROBE_S, name=gpu.uuid)
        for gpu in cards
        if _room(gpu)
    ]


def _room(gpu: Gpu) -> bool:
    return gpu.memory_free is None or gpu.memory_free > 10**9


def _probed(gpu: Gpu, answer: tuple[Any, str] | None) -> Probe:
    if answer is None:
        return Probe("full", "less than 1 GB is free: no context was tried")
    data, why = answer
    if data is not None:
        found: Probe = examination.read_examination(Probe, data)
        return found
    return Probe("hung", why) if why.startswith("no answer") else Probe("dead", f"the probe {why}")


def _after(probes: dict[str, Probe], before: Machine) -> dict[str, Probe]:
    """What the cards still hold once the probes are gone: a context dies with its process, in 0.15 s on an H200."""
    deadline = time.monotonic() + 1.0
    while True:
        again, _ = _run([_gatherer("machine")])["machine"]
        if again is None:
            return probes
        used = {gpu.uuid: gpu.memory_used for gpu in machine_from_json(again).gpus}
        left = {gpu.uuid: max(0, (used.get(gpu.uuid) or 0) - (gpu.memory_used or 0)) for gpu in before.gpus}
        if time.monotonic() > deadline or all(count < 10**8 for count in left.values()):
            return {uuid: replace(one, left=left.get(uuid)) for uuid, one in probes.items()}
        time.sleep(0.05)


def _blind(why: str) -> Machine:
    """The look itself hung: what can be said without the driver."""
    total, available, limit = host_memory.read_memory()
    return Machine(
        os.uname().nodename, host_limits.cores(), total, available, gpu_error=f"NVML gives {why}", cgroup_limit=limit
    )
