"""This host: names, clock, links, examination, Pythons and torch, which is not imported: its version file takes 0.1 s."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from typing import Any

from stoker.contract.env_vars import MACHINE
from stoker.contract.frozen import replace
from stoker.contract.process import NOT_FROM_HERE, read_kernel_file
from stoker.contract.text import is_digits
from stoker.control.machine.observe import Observer, read_recorded

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
        from importlib import metadata
        try: found["version"] = metadata.version("torch")
        except metadata.PackageNotFoundError: found["version"] = "of unknown version"
print(json.dumps(found, default=str))
"""


def builds(python: str = "") -> Any:
    name = socket.gethostname()
    found: dict[str, Any] = {"hostname": name, "resolves": {name: resolve(name)}}
    return {**found, "torch": _look_at(os.path.expanduser(python) or sys.executable)}


def _look_at(program: str) -> dict[str, Any]:
    argv = [program, "-c", NOT_FROM_HERE + _LOOK]
    done = subprocess.run(argv, capture_output=True, timeout=15, check=False, stdin=subprocess.DEVNULL)
    lines = [line for line in done.stdout.splitlines() if line.startswith(b"{")]
    if not lines:
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        return {"error": f"{program} ended with {done.returncode}" + (f": {last}" if last else "")}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def setup(pythons: list[str]) -> Any:
    """For a hosts file: cards, and which Pythons have torch. `pythons`: the best first; a leading ~ is the home here."""
    machine = Observer(os.environ.get(MACHINE)).look()
    return {
        "gpus": [gpu.name for gpu in machine.gpus if gpu.error is None],
        "gpu_error": machine.gpu_error,
        "pythons": [found for found in map(_python, pythons) if found is not None],
    }


def _python(word: str) -> dict[str, Any] | None:
    program = shutil.which(os.path.expanduser(word))
    try:
        found = _look_at(program) if program is not None else {}
    except (OSError, subprocess.SubprocessError, ValueError):
        found = {}  # it is there and is no Python that works
    if "python" not in found:
        return None
    return {"python": word, "version": found["python"], "torch": found.get("version")}


def examine(runs_dir: str, port: int, parts: list[str]) -> Any:
    """For the doctor, whose checks run on the coordinator's side; without parts, the machine as a run on it is planned for."""
    from stoker.control.machine.examine import examine as look

    found, recorded = look(runs_dir, port, frozenset(parts)), os.environ.get(MACHINE)
    if recorded and not parts:
        found = replace(found, machine=read_recorded(recorded))
    return found.to_json()


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
    # Wireless, tunnels and interfaces that are down have none.
    stated = read_kernel_file(os.path.join(folder, "speed")).strip()
    speed = int(stated) if is_digits(stated) else 0
    return {"speed": speed or None, "physical": os.path.exists(os.path.join(folder, "device"))}
