"""Files in torch's own form: error files for who reads TORCHELASTIC_ERROR_FILE, and torchrun's log folder."""

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


def torch_form(error: Mapping[str, Any]) -> dict[str, Any]:
    """The shim's report of an exception, as torch's @record would have written it."""
    text = f"{error.get('type', '')}: {error.get('message', '')}"
    return _message(text, error.get("traceback", ""), int(error.get("time_ns", 0)) // 10**9)


def _message(text: str, stack: str, when: int) -> dict[str, Any]:
    return {"message": {"message": text, "extraInfo": {"py_callstack": stack, "timestamp": str(when)}}}


def rank_report(kept: Any) -> dict[str, Any] | None:
    """From what the record keeps of a rank (layout.rank_error): torch's own file where the script wrote one."""
    if not isinstance(kept, dict):
        return None
    own = kept.get("torchelastic")
    if isinstance(own, dict):
        return own
    return torch_form(kept) if "type" in kept else None


def root_cause(verdict: Verdict, run_dir: str) -> dict[str, Any]:
    """The guilty rank's report with its exit code, or the verdict's own sentence. `run_dir`: empty where no run began."""
    known = bool(run_dir) and verdict.rank is not None
    kept = read_json(layout.rank_error(run_dir, verdict.attempt, verdict.rank or 0)) if known else None
    report = rank_report(kept) or _message(verdict.summary, "\n".join(verdict.evidence), int(time.time()))
    if isinstance(report.get("message"), dict):
        code = verdict.exit_code
        report["message"]["errorCode"] = 128 - code if code > 128 else code  # torch counts signals below zero
    return report


def write_launcher_error(verdict: Verdict, run_dir: str, say: Callable[[str], None]) -> None:
    """Writes the root cause where the launcher's own TORCHELASTIC_ERROR_FILE asks for it."""
    path = os.environ.get(VARIABLE)
    if not path or verdict.status == "completed":
        return
    try:
        # In place: Kubernetes mounts /dev/termination-log as a file. A pipe that nobody reads is not waited for.
        how = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        handle = os.open(path, how, 0o666)
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(mask_json(root_cause(verdict, run_dir)), file)
    except OSError as problem:
        say(f"stoker: {VARIABLE}={path} can't be written: {problem.strerror}")


# ---- LOG_DIR/ID_XXXXXXXX/attempt_N/LOCAL_RANK/ with stdout.log, stderr.log and error.json ----

_FILES = {1: "stdout.log", 2: "stderr.log"}


class TorchrunLogs:
    """`streams` per rank: 1 stdout, 2 stderr, 3 both. `folders`: each rank's; on one machine, its local rank."""

    def __init__(self, log_dir: str, run_id: str) -> None:
        self._log_dir = os.path.abspath(log_dir)
        self._run_id = run_id.replace(os.sep, "_")
        self._folder = ""
        self._restarts = -1
        self._ranks: dict[int, str] = {}
        self._streams: Mapping[int, int] = {}
        try:
            os.makedirs(self._log_dir, exist_ok=True)
        except OSError as problem:
            raise _cannot_write(log_dir, problem) from problem

    def begin(self, folders: Mapping[int, str], streams: Mapping[int, int]) -> None:
        """The next attempt's folders, and the files that will be written, empty."""
        self._restarts += 1
        self._streams = streams
        try:
            if not self._folder:
                import tempfile

                self._folder = tempfile.mkdtemp(prefix=f"{self._run_id}_", dir=self._log_dir)
            base = os.path.join(self._folder, f"attempt_{self._restarts}")
            self._ranks = {rank: os.path.join(base, name) for rank, name in folders.items()}
            for rank, folder in self._ranks.items():
                os.makedirs(folder, exist_ok=True)
                for path in self._paths(rank).values():
                    open(path, "ab").close()
        except OSError as problem:
            raise _cannot_write(self._log_dir, problem) from problem

    def _paths(self, rank: int) -> dict[int, str]:
        wanted = [stream for stream in _FILES if self._streams.get(rank, 0) & stream]
        return {stream: os.path.join(self._ranks[rank], _FILES[stream]) for stream in wanted}

    def write(self, record: RunWriter, rank: int, stream: int, data: bytes) -> None:
        path = self._paths(rank).get(stream)
        if path is not None:
            record.output(path, data)

    def error(self, record: RunWriter, rank: int, report: dict[str, Any]) -> None:
        """`report`: in torch's form."""
        record.save(os.path.join(self._ranks[rank], "error.json"), report)


def _cannot_write(folder: str, problem: OSError) -> Refusal:
    return Refusal(f"--log-dir {folder} can't be written: {problem.strerror}", EX_CANTCREAT)
