"""Failures in the form of torch's error files, for who reads TORCHELASTIC_ERROR_FILE: schedulers, and torch itself."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from stoker.contract import layout, redact
from stoker.contract.shapes import Verdict
from stoker.control.record.reader import read_json

VARIABLE = "TORCHELASTIC_ERROR_FILE"


def torch_form(error: Mapping[str, Any]) -> dict[str, Any]:
    """The shim's report of an exception, as torch's @record would have written it."""
    extra = {"py_callstack": error.get("traceback", ""), "timestamp": str(int(error.get("time_ns", 0)) // 10**9)}
    return {"message": {"message": f"{error.get('type', '')}: {error.get('message', '')}", "extraInfo": extra}}


def rank_report(kept: Any) -> dict[str, Any] | None:
    """From what the record keeps of a rank (layout.rank_error): torch's own file where the script wrote one."""
    if not isinstance(kept, dict):
        return None
    own = kept.get("torchelastic")
    return own if isinstance(own, dict) else torch_form(kept) if "type" in kept else None


def root_cause(verdict: Verdict, run_dir: str) -> dict[str, Any]:
    """The guilty rank's report with its exit code, or the verdict's own sentence. `run_dir`: empty where no run began."""
    kept = (
        read_json(layout.rank_error(run_dir, verdict.attempt, verdict.rank))
        if run_dir and verdict.rank is not None
        else None
    )
    report = rank_report(kept) or {
        "message": {
            "message": verdict.summary,
            "extraInfo": {"py_callstack": "\n".join(verdict.evidence), "timestamp": str(int(time.time()))},
        }
    }
    if isinstance(report.get("message"), dict):
        code = verdict.exit_code
        report["message"]["errorCode"] = 128 - code if code > 128 else code  # torch counts signals below zero
    return report


def tell_launcher(verdict: Verdict, run_dir: str, say: Callable[[str], None]) -> None:
    """Writes the root cause where the launcher's own TORCHELASTIC_ERROR_FILE asks for it."""
    path = os.environ.get(VARIABLE)
    if not path or verdict.status == "completed":
        return
    try:
        # In place: Kubernetes mounts /dev/termination-log as a file. A pipe that nobody reads is not waited for.
        handle = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666
        )
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(redact.data(root_cause(verdict, run_dir)), file)
    except OSError as problem:
        say(f"stoker: {VARIABLE}={path} can't be written: {problem.strerror}")
