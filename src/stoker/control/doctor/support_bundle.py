"""Writes a tar.gz for a support ticket: examination, findings, nvidia-smi, kernel log and last run, without secrets."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
import time

from stoker.contract import layout
from stoker.contract.errors import EX_CANTCREAT, Refusal
from stoker.contract.evidence import Finding
from stoker.contract.frozen import as_json
from stoker.contract.masking import allowed_environment, mask_json, mask_text
from stoker.contract.process import process_owner
from stoker.contract.safe_io import AtomicFile, open_below
from stoker.contract.text import escape, parse_json
from stoker.control.machine import procfs
from stoker.control.machine.examination import Examination
from stoker.control.record import run_index

COMMANDS = {
    "nvidia-smi.txt": ["nvidia-smi", "-q"],
    "topology.txt": ["nvidia-smi", "topo", "-m"],
    "kernel-log.txt": ["dmesg", "--ctime"],
    "limits.txt": ["sh", "-c", "ulimit -a; df -h; free -m; uname -a"],
}
LIMIT_S = 5.0
# To keep the bundle small, it holds the last 1 Mi characters of a command's output and the last 4 MiB of a run's file.
_MAX_OUTPUT, _MAX_FILE = 1 << 20, 4 << 20


def write_bundle(path: str, examination: Examination, findings: list[Finding], runs_dir: str) -> None:
    """Write the bundle for its owner alone. Raises Refusal if it can't be written."""
    files = {
        "examination.json": json.dumps(examination.to_json()),
        "findings.json": json.dumps(as_json(findings)),
        "environment.json": json.dumps(allowed_environment(os.environ)),
    }
    for name, argv in COMMANDS.items():
        output = _run_command(argv)
        if len(output) > _MAX_OUTPUT:  # drop the cut line, because the masker doesn't recognize half a token
            output = output[-_MAX_OUTPUT:].partition("\n")[2]
        files[name] = output
    files["processes.txt"] = _list_processes()
    for name in (layout.RUN, layout.VERDICT, layout.EVENTS, layout.CONSOLE):
        try:
            fd = open_below(run_index.find_run(None, runs_dir).dir, name)
            files[f"latest-run/{name}"] = _read_end_of_file(fd)
        except (OSError, Refusal):
            continue  # there is no run of ours, or it has no such file
    try:
        with AtomicFile(path, mode=0o600) as out, tarfile.open(mode="w:gz", fileobj=out) as archive:
            for name, text in files.items():
                data = _mask_file(name, text).encode("utf-8", "backslashreplace")
                entry = tarfile.TarInfo(f"stoker-doctor/{name}")
                entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
                archive.addfile(entry, io.BytesIO(data))
    except OSError as problem:
        raise Refusal(f"the bundle {path} can't be written: {problem.strerror}", EX_CANTCREAT) from problem


def _read_end_of_file(fd: int) -> str:
    with os.fdopen(fd, "rb") as file:
        skipped = file.seek(max(0, os.fstat(fd).st_size - _MAX_FILE))
        text = file.read(_MAX_FILE).decode("utf-8", "replace")
    return f"(its last {_MAX_FILE >> 20} MB)\n{text.partition(chr(10))[2]}" if skipped else text


def _list_processes() -> str:
    """Return a line per process. Doesn't use `ps`, which joins the arguments of a command line."""
    lines = ["pid parent user state start memory command"]
    for process in procfs.list_processes():
        uid, resident = process_owner(process.pid), procfs.resident_bytes(process.pid)
        started = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(procfs.started_at(process.start)))
        user = procfs.user_name(uid) if uid is not None else "?"
        command = escape(procfs.read_command_line(process.pid) or f"[{process.name}]")
        lines.append(f"{process.pid} {process.parent} {user} {process.state} {started} {resident or 0} {command}")
    return "\n".join(lines) + "\n"


def _mask_file(name: str, text: str) -> str:
    """Return a file of the bundle without secrets. Masks JSON by its keys, and a damaged line of JSON as text."""
    if name.endswith(".json"):
        return _mask_json_text(text, 1)
    if name.endswith(".jsonl"):
        return "".join(_mask_json_text(line, None) for line in text.splitlines(keepends=True))
    return mask_text(text)


def _mask_json_text(text: str, indent: int | None) -> str:
    try:
        return json.dumps(mask_json(parse_json(text)), indent=indent, ensure_ascii=False) + "\n"
    except (ValueError, RecursionError):
        return mask_text(text)


def _run_command(argv: list[str]) -> str:
    """Return a command's output, or why it could not be run."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, check=False)
    except FileNotFoundError:
        return f"{argv[0]} is not installed\n"
    except OSError as problem:  # an unreadable folder in PATH, or a file that is not a program
        return f"{argv[0]} can't be started: {problem.strerror}\n"
    except subprocess.TimeoutExpired:
        return f"{argv[0]} did not finish within {LIMIT_S:.0f} s\n"
    return done.stdout + done.stderr
