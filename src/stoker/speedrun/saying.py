"""What the console is told: a stage's headline number, its progress, how it failed. Pure but for reading a run's files."""

from __future__ import annotations

import os
import signal

from stoker.contract import layout, redact
from stoker.contract.quantities import number_at, span
from stoker.contract.untrusted import parse_json
from stoker.control.record import reader

_TAIL = 4096
_OURS = "stoker: "


def progress(run: str | None, steps: int) -> str:
    """The newest line of a run's metrics; empty before there is one."""
    if run is None:
        return ""
    try:
        with open(os.path.join(run, layout.METRICS), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            lines = [line for line in file.read().split(b"\n")[:-1] if line.strip()]
    except FileNotFoundError:
        return ""
    if not lines:
        return ""
    try:
        row = parse_json(lines[-1])
    except ValueError:
        return ""  # longer than the tail
    done = number_at(row, "step")
    parts = [f"step {done + 1:.0f}{f' of {steps}' if steps else ''}"] if done is not None else []
    parts += [f"{name} {value:.3f}" for name in ("loss", "reward") if (value := number_at(row, name)) is not None]
    return ", ".join(parts)


def trouble(run: str | None, code: int, log: str, log_from: int) -> tuple[str, str]:
    """(how it failed, what to do), from its verdict, or its rank's own refusal; from the last line it said where there
    is none, as before the start.
    """
    said = reader.read_json(os.path.join(run, layout.VERDICT)) if run else None
    if isinstance(said, dict) and said.get("status") not in (None, "completed"):
        evidence = said.get("evidence")
        refusals = (
            [line for line in evidence if isinstance(line, str) and line.startswith(_OURS)]
            if isinstance(evidence, list)
            else []
        )
        if refusals:
            return refusals[-1].removeprefix(_OURS).strip(), ""
        fix = said.get("fix")
        return str(said.get("summary", "")), str(fix[0]) if isinstance(fix, list) and fix else ""
    if code > 128:
        return f"its launcher was ended by {_signal(code - 128)}, and no verdict was written", ""
    lines = [line for line in redact.whole(_tail(log, log_from)).splitlines() if line.strip()]
    named = [line for line in lines if line.startswith(_OURS)]
    return (named or lines or ["it ended without a word"])[-1].removeprefix(_OURS).strip(), ""


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(path: str, begin: int) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(begin, os.fstat(file.fileno()).st_size - _TAIL))
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def rest(seconds: float) -> str:
    return f"the rest takes about {span(seconds)}" if seconds >= 1 else ""
