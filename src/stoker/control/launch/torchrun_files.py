"""Writes files in torch's format: error files for readers of TORCHELASTIC_ERROR_FILE, and torchrun's log folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from stoker.contract import layout
from stoker.contract.errors import EX_CANTCREAT, Refusal
from stoker.contract.evidence import Verdict
from stoker.contract.masking import mask_json
from stoker.control.record.run_record import read_json
from stoker.control.record.run_writer import RunWriter

VARIABLE = "TORCHELASTIC_ERROR_FILE"

# ---- error files ----


def make_torch_report(rank_error: Any) -> dict[str, Any] | None:
    """Return a rank's recorded exception (layout.rank_error) in torch's format, or None if there is none.

    A report that torch's @record wrote in the script is returned unchanged.
    """
    if not isinstance(rank_error, dict):
        return None
    if isinstance(rank_error.get("torchelastic"), dict):
        return dict(rank_error["torchelastic"])
    if "type" not in rank_error:
        return None
    message = f"{rank_error['type']}: {rank_error.get('message', '')}"
    return _make_report(message, rank_error.get("traceback", ""), int(rank_error.get("time_ns", 0)) // 10**9)


def _make_report(message: str, stack: str, timestamp: int) -> dict[str, Any]:
    return {"message": {"message": message, "extraInfo": {"py_callstack": stack, "timestamp": str(timestamp)}}}


def make_launcher_report(verdict: Verdict, run_dir: str) -> dict[str, Any]:
    """Return the guilty rank's report with its exit code, or one of the verdict if there is none.

    `run_dir` is empty if no run was started.
    """
    report = None
    if run_dir and verdict.rank is not None:
        report = make_torch_report(read_json(layout.rank_error(run_dir, verdict.attempt, verdict.rank)))
    report = report or _make_report(verdict.summary, "\n".join(verdict.evidence), int(time.time()))
    if isinstance(report.get("message"), dict):
        code = verdict.exit_code
        report["message"]["errorCode"] = 128 - code if code > 128 else code  # torch counts signals below zero
    return report


def write_launcher_error(verdict: Verdict, run_dir: str, log: Callable[[str], None]) -> None:
    """Write the root cause to the launcher's own TORCHELASTIC_ERROR_FILE."""
    path = os.environ.get(VARIABLE)
    if not path or verdict.status == "completed":
        return
    try:
        # Written in place, because Kubernetes mounts /dev/termination-log as a file. O_NONBLOCK: a pipe may have no reader.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        fd = os.open(path, flags, 0o666)
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(mask_json(make_launcher_report(verdict, run_dir)), file)
    except OSError as problem:
        log(f"stoker: {VARIABLE}={path} can't be written: {problem.strerror}")


# ---- LOG_DIR/ID_XXXXXXXX/attempt_N/LOCAL_RANK/ with stdout.log, stderr.log and error.json ----

_FILES = {1: "stdout.log", 2: "stderr.log"}


class TorchrunLogs:
    """Writes torchrun's log folder (--log-dir)."""

    def __init__(self, log_dir: str, run_id: str) -> None:
        self._log_dir = os.path.abspath(log_dir)
        self._run_id = run_id.replace(os.sep, "_")
        self._run_dir = ""  # created with the first attempt
        self._attempts = 0
        self._rank_dirs: dict[int, str] = {}
        self._streams: Mapping[int, int] = {}
        try:
            os.makedirs(self._log_dir, exist_ok=True)
        except OSError as problem:
            raise _cannot_write(log_dir, problem) from problem

    def begin(self, dir_names: Mapping[int, str], streams: Mapping[int, int]) -> None:
        """Create the next attempt's folders with empty files.

        `dir_names` has each rank's folder: on one machine its local rank. `streams`: 1 stdout, 2 stderr, 3 both.
        """
        self._streams = streams
        try:
            if not self._run_dir:
                import tempfile

                self._run_dir = tempfile.mkdtemp(prefix=f"{self._run_id}_", dir=self._log_dir)
            attempt_dir = os.path.join(self._run_dir, f"attempt_{self._attempts}")
            self._rank_dirs = {rank: os.path.join(attempt_dir, name) for rank, name in dir_names.items()}
            for rank, rank_dir in self._rank_dirs.items():
                os.makedirs(rank_dir, exist_ok=True)
                for path in self._paths(rank).values():
                    open(path, "ab").close()
        except OSError as problem:
            raise _cannot_write(self._log_dir, problem) from problem
        self._attempts += 1

    def _paths(self, rank: int) -> dict[int, str]:
        streams = self._streams.get(rank, 0)
        return {
            stream: os.path.join(self._rank_dirs[rank], name) for stream, name in _FILES.items() if streams & stream
        }

    def write(self, record: RunWriter, rank: int, stream: int, data: bytes) -> None:
        path = self._paths(rank).get(stream)
        if path is not None:
            record.append_output(path, data)

    def write_error(self, record: RunWriter, rank: int, report: dict[str, Any]) -> None:
        record.save(os.path.join(self._rank_dirs[rank], "error.json"), report)


def _cannot_write(log_dir: str, problem: OSError) -> Refusal:
    return Refusal(f"--log-dir {log_dir} can't be written: {problem.strerror}", EX_CANTCREAT)
