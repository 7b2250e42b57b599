"""What a speedrun directory knows: which run belongs to a stage's key, whether it is done, how it is
getting on or failed, and chain.json, the record of all.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import stat
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.contract import layout, safe_io
from stoker.contract.errors import EX_CANTCREAT, EX_TEMPFAIL, Refusal
from stoker.contract.frozen import as_json, frozen, replace
from stoker.contract.masking import mask_json, mask_lines
from stoker.contract.safe_io import open_lock_file, write_json
from stoker.contract.text import parse_json
from stoker.contract.typed_values import read_frozen
from stoker.contract.units import finite_number
from stoker.control.record import resume_command, run_record
from stoker.control.record.speedrun_index import CHAIN, LOCK, STAGES
from stoker.speedrun.keys import run_name
from stoker.speedrun.stages import REPORT, WORLD, Stage

SCHEMA = 1
RESULT, LOGS, COPIES, PLOTS = "result.json", "logs", "data", "plots"
WAITING, RUNNING, DONE, FAILED, STOPPED, PARTIAL = "waiting", "running", "done", "failed", "stopped", "partial"
_TAIL = 4096  # bytes that are read of the end of a log
_OURS = "stoker: "  # how our own lines begin


@frozen
class Entry:
    """One stage in chain.json."""

    name: str
    stage: str
    key: str
    run: str = ""  # relative to the speedrun directory
    status: str = WAITING
    seconds: float = 0.0  # of all its starts together
    attempts: int = 0
    energy_wh: float | None = None
    cost: float | None = None
    restarts: tuple[dict[str, Any], ...] = ()
    began: float | None = None  # while it runs: when this start of it did
    trouble: str = ""  # how it failed, in one line

    @property
    def done(self) -> bool:
        return self.status == DONE


def runs_root(folder: str) -> str:
    return os.path.join(folder, STAGES)


def run_of(folder: str, stage: Stage, keys: Mapping[str, str]) -> str | None:
    """The newest run directory of this stage with this key; one with a result before one without. The report has
    none.
    """
    name, root = run_name(stage.name, keys), runs_root(folder)
    if stage.stage == REPORT:
        return None
    if stage.stage == WORLD:
        return os.path.join(root, name)
    pattern = re.compile(rf"(\d{{8}}-\d{{6}})-{re.escape(name)}(?:-(\d+))?")
    try:
        found = [(match[1], int(match[2] or 1), one) for one in os.listdir(root) if (match := pattern.fullmatch(one))]
    except FileNotFoundError:
        return None
    paths = [os.path.join(root, one) for _, _, one in sorted(found)]
    return next((path for path in reversed(paths) if result_of(path) is not None), paths[-1] if paths else None)


def result_of(run: str) -> dict[str, Any] | None:
    """result.json is written last: with it a stage is done. One that the circuit breaker stopped is not."""
    found = run_record.read_json(os.path.join(run, RESULT))
    if not isinstance(found, dict):
        return None
    metrics = found.get("metrics")
    return None if isinstance(metrics, dict) and metrics.get("stopped") else found


def entries(folder: str, stages: Sequence[Stage], keys: Mapping[str, str]) -> dict[str, Entry]:
    """As the files have it now. chain.json only adds what files do not tell: time, energy, how it failed."""
    before = {entry.name: entry for entry in _recorded(folder)}
    found: dict[str, Entry] = {}
    for stage in stages:
        key = keys[stage.name]
        entry = before.get(stage.name)
        if entry is None or (entry.key, entry.stage) != (key, stage.stage):
            entry = Entry(stage.name, stage.stage, key)
        run = run_of(folder, stage, keys)
        if stage.stage == REPORT:
            whole = all(os.path.exists(os.path.join(folder, name)) for name in stage.outputs) and all(
                one.done for one in found.values()
            )
            found[stage.name] = entry if not entry.done or whole else replace(entry, status=WAITING)
            continue
        done = run is not None and result_of(run) is not None
        if entry.status == RUNNING and run is not None:  # the speedrun was killed meanwhile
            entry = replace(
                entry, seconds=round(entry.seconds + _lost_seconds(run, entry.began), 2), began=None, status=STOPPED
            )
        status = WAITING if entry.status == DONE else entry.status
        if done:
            status = DONE
        noted = entry.status == status
        entry = replace(entry, status=status, run=relative(run, folder))
        found[stage.name] = entry if noted else seen(folder, entry)
    return found


def relative(run: str | None, folder: str) -> str:
    return os.path.relpath(run, folder) if run is not None and os.path.isdir(run) else ""


def recorded_otherwise(folder: str, keys: Mapping[str, str]) -> bool:
    """chain.json is of stages with other keys than these: of other settings, or of other code."""
    return any(entry.key != keys.get(entry.name) for entry in _recorded(folder))


def note_price(folder: str, price: float) -> None:
    """All else in chain.json stays as it is."""
    path = os.path.join(folder, CHAIN)
    told = run_record.read_json(path)
    assert isinstance(told, dict)
    write_json(path, {**told, "price_per_hour": price}, durable=False)


def _recorded(folder: str) -> list[Entry]:
    """The rows of chain.json; one that is damaged, or of another schema, counts as none."""
    told = run_record.read_json(os.path.join(folder, CHAIN))
    rows = told.get("stages") if isinstance(told, dict) and told.get("schema") == SCHEMA else None
    found = []
    for row in rows if isinstance(rows, list) else ():
        try:
            found.append(read_frozen(Entry, row))
        except ValueError:
            continue  # it only adds what the run directories don't tell
    return found


def _lost_seconds(run: str, began: float | None) -> float:
    """How long a start lived that nobody saw the end of: until the last thing it wrote."""
    paths = [os.path.join(run, name) for name in (layout.EVENTS, layout.METRICS, RESULT, layout.VERDICT)]
    last = max((os.path.getmtime(path) for path in paths if os.path.exists(path)), default=0.0)
    return max(0.0, last - began) if began is not None else 0.0


def seen(folder: str, entry: Entry) -> Entry:
    """With what the run directory tells of attempts and restarts, and of time where nobody measured it."""
    run = os.path.join(folder, entry.run)
    loaded = run_record.load_run(run) if entry.run else None
    if loaded is None:
        return entry
    restarts = tuple(
        {name: event.get(name) for name in ("time", "attempt", "cause", "rank")}
        for event in run_record.read_events(run)
        if event.get("event") == "restart"
    )
    result = os.path.join(run, RESULT)
    seconds = entry.seconds or (
        max(0.0, os.path.getmtime(result) - loaded.started) if loaded.started and os.path.exists(result) else 0.0
    )
    return replace(entry, attempts=len(loaded.attempts), restarts=restarts, seconds=round(seconds, 2))


def write_chain(folder: str, about: Mapping[str, Any], found: Mapping[str, Entry]) -> None:
    """Not durable: what a power cut takes of it, the run directories still tell."""
    write_json(
        os.path.join(folder, CHAIN),
        {"schema": SCHEMA, **mask_json(about), "stages": [as_json(entry) for entry in found.values()]},
        durable=False,
    )


def check_own(folder: str) -> None:
    """Refuse a speedrun folder of another user: in a shared runs folder it may have the name of ours."""
    try:
        own = stat.S_ISDIR(os.lstat(folder).st_mode) and safe_io.is_own(folder)
    except FileNotFoundError:
        return
    except OSError:  # another user's mount
        own = False
    if not own:
        raise Refusal(
            f"the speedrun folder {folder} is not a folder of yours: give yours a --name of its own", EX_CANTCREAT
        )


def hold(folder: str) -> int:
    """Makes the folder, for its owner alone, and locks it for this process's life: two chains in one would run each
    stage twice.

    The file stays: unlinking it would race.
    """
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        check_own(folder)
        os.makedirs(runs_root(folder), exist_ok=True)
        os.makedirs(os.path.join(folder, LOGS), exist_ok=True)
        handle = open_lock_file(os.path.join(folder, LOCK))
    except OSError as problem:
        raise Refusal(
            f"the speedrun folder {folder} can't be written: {problem.strerror}; choose another with --runs-dir",
            EX_CANTCREAT,
        ) from problem
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as problem:
        holder = os.pread(handle, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(handle)
        raise Refusal(
            f"another speedrun (pid {holder}) works in {folder}: wait for it, or give this one a --name of its own",
            EX_TEMPFAIL,
        ) from problem
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    return handle


def progress(run: str | None, steps: int) -> str:
    """The newest line of a run's metrics; empty before there is one."""
    if run is None:
        return ""
    try:
        with open(os.path.join(run, layout.METRICS), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            lines = [line for line in file.read().split(b"\n")[:-1] if line.strip()]
    except OSError:
        return ""  # none yet
    if not lines:
        return ""
    try:
        row = parse_json(lines[-1])
    except ValueError:
        return ""  # longer than the tail
    done = finite_number(row, "step")
    parts = [f"step {done + 1:.0f}{f' of {steps}' if steps else ''}"] if done is not None else []
    parts += [f"{name} {value:.3f}" for name in ("loss", "reward") if (value := finite_number(row, name)) is not None]
    return ", ".join(parts)


def trouble(run: str | None, code: int, log: str, log_from: int) -> tuple[str, str]:
    """(how it failed, what to do), from its verdict, or its rank's own refusal; from the last line it said where there
    is none, as before the start.
    """
    said = run_record.read_json(os.path.join(run, layout.VERDICT)) if run else None
    if isinstance(said, dict) and said.get("status") not in (None, "completed"):
        evidence = said.get("evidence")
        refusals = (
            [line for line in evidence if isinstance(line, str) and line.startswith(_OURS)]
            if isinstance(evidence, list)
            else []
        )
        if refusals:
            return refusals[-1].removeprefix(_OURS).strip(), ""
        told = said.get("fix")
        fix = [str(step) for step in told] if isinstance(told, list) else []
        first = next((step for step in fix if not resume_command.starts_again(step)), "")  # the speedrun's own command does that
        return str(said.get("summary", "")), first
    if code > 128:
        return f"its launcher was ended by {_signal(code - 128)}, and no verdict was written", ""
    lines = mask_lines(_tail(log, log_from))
    named = [line for line in lines if line.startswith(_OURS)]
    return (named or lines or ["it ended without an error message"])[-1].removeprefix(_OURS).strip(), ""


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(path: str, begin: int) -> str:
    try:
        with open(path, "rb") as file:
            cut = file.seek(max(begin, os.fstat(file.fileno()).st_size - _TAIL)) > begin
            text = file.read().decode("utf-8", "replace")
            return text.partition("\n")[2] if cut else text  # half a token has no known shape
    except FileNotFoundError:
        return ""
