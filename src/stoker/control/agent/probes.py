"""The probes an agent answers. Adding one is a file with a function of the probe's name, and its line here."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

# name -> the file of this folder it is in; imported when asked for, in the forked child (probing.py)
PROBES = {
    "builds": "probe_builds",
    "clock": "probe_names",
    "examine": "probe_examine",
    "files": "probe_files",
    "names": "probe_names",
    "net": "probe_net",
    "ready": "probe_ready",
    "route": "probe_route",
    "setup": "probe_setup",
    "torch": "probe_torch",
}


def find(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(import_module(f"stoker.control.agent.{PROBES[name]}"), name)
    return found
