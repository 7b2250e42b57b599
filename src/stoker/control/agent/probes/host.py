"""Probes of the host itself: GPUs, Pythons and their torch, clock, names, links, and whether it is ready for its ranks."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from typing import Any

from stoker.contract import layout, safe_io
from stoker.contract.env_vars import MACHINE
from stoker.contract.frozen import replace
from stoker.contract.process import NOT_FROM_HERE, read_kernel_file
from stoker.contract.text import is_digits
from stoker.control.machine.observe import Observer, read_recorded

# Runs in another Python. torch is not imported, which takes seconds; reading its version file takes 0.1 s.
_PRINT_TORCH_VERSION = """
import importlib.util, json, os, sys
build = {"python": sys.version.split()[0]}
spec = importlib.util.find_spec("torch")
if spec is None:
    build["error"] = "No module named 'torch'"
else:
    try:
        version = {}
        with open(os.path.join(os.path.dirname(spec.origin or "."), "version.py")) as file: exec(file.read(), version)
        build.update(version=version.get("__version__"), cuda=version.get("cuda"))
    except OSError:
        from importlib import metadata
        try: build["version"] = metadata.version("torch")
        except metadata.PackageNotFoundError: build["version"] = "of unknown version"
print(json.dumps(build, default=str))
"""


def builds(python: str = "") -> Any:
    """Return the host's name, the addresses it resolves to, and the torch build of the ranks' Python."""
    name = socket.gethostname()
    torch = _torch_version(os.path.expanduser(python) or sys.executable)
    return {"hostname": name, "resolves": {name: resolve(name)}, "torch": torch}


def _torch_version(python: str) -> dict[str, Any]:
    argv = [python, "-c", NOT_FROM_HERE + _PRINT_TORCH_VERSION]
    done = subprocess.run(argv, capture_output=True, timeout=15, check=False, stdin=subprocess.DEVNULL)
    lines = [line for line in done.stdout.splitlines() if line.startswith(b"{")]
    if not lines:
        last_line = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        return {"error": f"{python} ended with exit code {done.returncode}" + (f": {last_line}" if last_line else "")}
    version: dict[str, Any] = json.loads(lines[-1])
    return version


def setup(pythons: list[str]) -> Any:
    """Return what a new hosts file needs: the GPUs, and those of `pythons` that work, with their torch versions.

    `pythons` lists the preferred one first; a leading ~ is the home folder on this host.
    """
    machine = Observer(os.environ.get(MACHINE)).observe()
    return {
        "gpus": [gpu.name for gpu in machine.gpus if gpu.error is None],
        "gpu_error": machine.gpu_error,
        "pythons": [version for version in map(_python_version, pythons) if version is not None],
    }


def _python_version(python: str) -> dict[str, Any] | None:
    """Return the versions of a Python and its torch, or None if there is no such Python or it doesn't work."""
    program = shutil.which(os.path.expanduser(python))
    if program is None:
        return None
    try:
        version = _torch_version(program)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    if "python" not in version:
        return None
    return {"python": python, "version": version["python"], "torch": version.get("version")}


def examine(runs_dir: str, port: int, parts: list[str]) -> Any:
    """Examine this host for `stoker doctor`, whose checks run on the coordinator's side.

    Without `parts`, the machine is the recorded one if there is one, as it is when a run is planned.
    """
    from stoker.control.machine import examine as thorough

    examination = thorough.examine(runs_dir, port, frozenset(parts))
    recorded = os.environ.get(MACHINE)
    if recorded and not parts:
        examination = replace(examination, machine=read_recorded(recorded))
    return examination.to_json()


def clock() -> Any:
    return {"time": time.time()}


def names(of: list[str], interfaces: list[str]) -> Any:
    """Return the addresses that the host names `of` have from here, and the speed of each interface."""
    return {"resolves": {name: resolve(name) for name in of}, "links": {name: read_link(name) for name in interfaces}}


def resolve(name: str) -> list[str]:
    """Return the addresses of a host name, or [] if it does not resolve."""
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except (OSError, UnicodeError):  # UnicodeError: too long, or with an empty label
        return []


def read_link(interface: str) -> dict[str, Any]:
    """Return an interface's speed in Mbit/s as its driver states it, and whether it is a physical one.

    Wireless interfaces, tunnels and interfaces that are down state no speed; a virtual one's speed means nothing.
    """
    folder = os.path.join("/sys/class/net", interface)
    speed = read_kernel_file(os.path.join(folder, "speed")).strip()
    megabits = int(speed) if is_digits(speed) else 0
    return {"speed": megabits or None, "physical": os.path.exists(os.path.join(folder, "device"))}


def ready(workdir: str, program: str, run_dir: str, token: str) -> Any:
    """Check the working directory, the interpreter and the run directory that the ranks will use.

    `token` is a randomly named file that the coordinator made in its run directory: a host that sees it shares the disk.
    """
    problems = []
    folder = os.path.expanduser(workdir)
    if not os.path.isdir(folder):
        problems.append(
            f"the ranks' folder {workdir} does not exist; copy this folder there with --sync, or set workdir: in the hosts file"
        )
    elif not os.access(folder, os.R_OK | os.X_OK):
        problems.append(
            f"the ranks' folder {workdir} can't be entered: permission denied; change its mode or its owner"
        )
    on_path = shutil.which(os.path.expanduser(program), path=os.environ.get("PATH", os.defpath))
    if on_path is None and not os.access(os.path.join(folder, program), os.X_OK):
        problems.append(
            f"the program {program} is missing or not executable; set python: in the hosts file, or --python"
        )
    shared = os.path.exists(os.path.join(run_dir, token))
    unwritable = ""
    try:
        if not shared:
            problem = _make_run_dir(run_dir)
            if problem:
                problems.append(problem)
        if not os.access(run_dir, os.W_OK):
            unwritable = "not writable"
    except OSError as error:
        unwritable = error.strerror or str(error)
    return {"problems": problems, "shared": shared, "unwritable": unwritable}


def _make_run_dir(run_dir: str) -> str:
    """Make the run directory. Return why it can't be used, or "".

    Another user may have made it first, and the ranks would resume from that user's files.
    """
    root = os.path.dirname(run_dir)
    try:
        os.makedirs(root, 0o700, exist_ok=True)
    except FileExistsError as error:  # a file where a folder should be
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), root) from error
    why = layout.why_unsafe_root(root)
    if why:
        return f"the runs folder {root} can't be used: {why}; choose another with --runs-dir"
    try:
        os.mkdir(run_dir, 0o700)
    except FileExistsError:
        status = os.lstat(run_dir)
        if not stat.S_ISDIR(status.st_mode):
            kind = safe_io.file_kind(status.st_mode)
            return f"the run directory {run_dir} is {kind} there; choose another name with --name"
        if not safe_io.is_own_uid(status.st_uid, root):
            owner = safe_io.user_name(status.st_uid)
            return f"the run directory {run_dir} belongs to {owner} there; choose another name with --name"
    return ""
