"""Which Python and torch the ranks would get here: by torch's version file, 0.1 s; an import takes seconds."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

from stoker.contract.untrusted import NOT_FROM_HERE

_LOOK = """
import importlib.util, json, os, sys
found = {"python": sys.version.split()[0]}
spec = importlib.util.find_spec("torch")
if spec is None:
    found["error"] = "No module named 'torch'"
else:
    try:
        said = {}
        with open(os.path.join(os.path.dirname(spec.origin or "."), "version.py")) as file: exec(file.read(), said)
        found.update(version=said.get("__version__"), cuda=said.get("cuda"))
    except OSError:
        from importlib.metadata import version
        found["version"] = version("torch")
print(json.dumps(found, default=str))
"""


def builds(python: str = "") -> Any:
    name = socket.gethostname()
    found: dict[str, Any] = {"hostname": name, "resolves": {name: resolve(name)}}
    program = os.path.expanduser(python) or sys.executable
    done = subprocess.run(
        [program, "-c", NOT_FROM_HERE + _LOOK], capture_output=True, timeout=15, check=False, stdin=subprocess.DEVNULL
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(b"{")]
    if not lines:
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        return {**found, "torch": {"error": f"{program} ended with {done.returncode}" + (f": {last}" if last else "")}}
    return {**found, "torch": json.loads(lines[-1])}


def names(of: list[str], interfaces: list[str]) -> Any:
    """`of`: hosts' names -> the addresses they have, seen from here; [] where one does not resolve."""
    return {"resolves": {name: resolve(name) for name in of}, "links": {name: link(name) for name in interfaces}}


def clock() -> Any:
    return {"time": time.time()}


def resolve(name: str) -> list[str]:
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except (OSError, UnicodeError):  # a name that is none: too long, or an empty label
        return []


def link(interface: str) -> dict[str, Any]:
    """Megabits a second as the driver states them; a virtual interface's figure means nothing."""
    folder = os.path.join("/sys/class/net", interface)
    stated = None
    try:
        with open(os.path.join(folder, "speed"), encoding="ascii") as file:
            stated = int(file.read())
    except (OSError, ValueError):
        stated = None  # wireless, tunnels and interfaces that are down have none
    return {
        "speed": stated if stated is not None and stated > 0 else None,
        "physical": os.path.exists(os.path.join(folder, "device")),
    }
