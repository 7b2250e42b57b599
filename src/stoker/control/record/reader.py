"""Reads run directories back, while they are written or after a crash."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from stoker.contract import layout, names
from stoker.contract.shape import shape
from stoker.contract.shapes import Verdict
from stoker.contract.spelling import suggest


@shape
class Run:
    dir: str
    id: str
    data: dict[str, Any]  # run.json
    verdict: Verdict | None

    @property
    def name(self) -> str:
        return str(self.data.get("name", ""))

    @property
    def started(self) -> float:
        return float(self.data.get("started", 0.0))

    @property
    def launcher(self) -> tuple[int, int, str]:
        """(pid, start ticks, host) of the process that runs it."""
        who = self.data.get("launcher") or {}
        return int(who.get("pid", 0)), int(who.get("start", 0)), str(who.get("host", ""))

    @property
    def attempts(self) -> list[int]:
        found = [name[8:] for name in os.listdir(self.dir) if name.startswith("attempt-")]
        return sorted(int(number) for number in found if number.isdigit())


def read_json(path: str) -> Any:
    """None when it isn't there or isn't whole."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def load(run_dir: str) -> Run | None:
    data = read_json(os.path.join(run_dir, layout.RUN))
    if not isinstance(data, dict):
        return None
    said = read_json(os.path.join(run_dir, layout.VERDICT))
    verdict = None
    if isinstance(said, dict):
        try:
            verdict = Verdict.from_json(said)
        except TypeError:
            verdict = None  # of another version, or damaged: the run is listed without it
    return Run(run_dir, os.path.basename(run_dir), data, verdict)


def all_runs(root: str) -> list[Run]:
    """Oldest first."""
    try:
        names_ = sorted(entry.name for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []
    found = (load(os.path.join(root, name)) for name in names_)
    return sorted((run for run in found if run is not None), key=lambda run: run.started)


def find(which: str | None, root: str, exact: bool = False) -> Run:
    """By path, by id, by name (the newest of that name), by a beginning that fits one run only, or the newest of all."""
    for candidate in (which, os.path.join(root, which)) if which else (os.path.join(root, layout.LATEST),):
        if os.path.exists(os.path.join(candidate, layout.RUN)):
            run = load(os.path.realpath(candidate))
            if run is not None:
                return run
    runs = all_runs(root)
    if which is None:
        if runs:
            return runs[-1]
        raise names.Refusal(f"no runs in {root}; name another folder with --runs-dir", names.EX_NOINPUT)
    match = [run for run in runs if run.name == which]
    if match:
        return match[-1]
    begins = [run for run in runs if run.id.startswith(which) or run.name.startswith(which)]
    if len(begins) == 1 and not exact:
        return begins[0]
    hint = suggest(which, [*(run.name for run in runs), *(run.id for run in runs)])
    if not hint and runs:
        hint = f"; `stoker runs` lists the {len(runs)} there"
    raise names.Refusal(f"no run {which!r} in {root}{hint}", names.EX_NOINPUT)


def events(run_dir: str) -> Iterator[dict[str, Any]]:
    """Whole lines only: the last one may still be being written."""
    try:
        with open(os.path.join(run_dir, layout.EVENTS), "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    try:
                        event = json.loads(line)
                    except ValueError:
                        continue
                    if isinstance(event, dict):
                        yield event
    except FileNotFoundError:
        return


def alive(run: Run) -> bool | None:
    """Is its launcher still there? None when it runs on another host and can't be told from here."""
    pid, start, host = run.launcher
    if host and host != os.uname().nodename:
        return None
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return False
    fields = text[text.rindex(b")") + 2 :].split()
    return int(fields[19]) == start and fields[0] != b"Z"


def over(run: Run) -> bool:
    """Whether nothing more will come of it. Whether a launcher on another host lives nobody here knows: such a run is over when it has a verdict."""
    said = status(run)
    if said == "unknown":
        said = status(load(run.dir) or run)
    return said not in ("running", "unknown")


def status(run: Run) -> str:
    living = alive(run)
    if run.verdict is not None and not living:
        return run.verdict.status
    return "running" if living else "unknown" if living is None else "lost"
