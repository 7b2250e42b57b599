"""stoker why [RUN | SCHEDULER:JOB] [--json]"""

from __future__ import annotations

import os
import shlex
import time
from typing import Any

from stoker.contract import layout, schedulers
from stoker.contract.errors import parsing
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import replace
from stoker.contract.options import OptionParser
from stoker.contract.terminal import ERROR, SUCCESS, WARNING, print_coloured, print_json, print_text
from stoker.contract.text import escape, escape_lines
from stoker.contract.units import format_duration
from stoker.control.record import resume_command, run_index, run_record
from stoker.control.scheduler import runs
from stoker.control.verdict.launch_failures import lost

_JOBS = " or ".join(f"{scheduler.name}:JOB" for scheduler in schedulers.SCHEDULERS)

_MOST_CAUSES = 20  # of restarts, shown
_UNCOUNTED = ("host.lost", "launch.regroup")  # restarts for them cost none of --max-restarts

_MAYBE_DETERMINISTIC = ("rank.exception", "rank.exit", "rank.early-exit", "rank.crash")


def parser() -> OptionParser:
    made = OptionParser("stoker why", "How a run ended, and why: the verdict, its evidence, and what to do.")
    made.run_argument(f"id, name or path of a run, or {_JOBS}")
    made.runs_dir()
    made.switch("--json", "the verdict as JSON")
    return made


def main(argv: list[str]) -> int:
    told = parser().parse_args(argv)
    root = layout.runs_root(told.runs_dir, os.environ)
    name, colon, job = (told.run or "").partition(":")
    if colon and (scheduler := schedulers.scheduler_named(name)) is not None:
        jobs = runs(scheduler)
        found = jobs.run_of(root, job)
        if found is None:
            return _show(jobs.verdict_of(root, job), told.run, None, told.json)
        run = found
    else:
        run = run_index.find_run(told.run, root)
    with parsing(f"run {run.id}"):
        return _explain(run, told.json)


def _explain(run: run_record.RunRecord, as_json: bool) -> int:
    verdict = verdict_of(run)
    if verdict is not None:
        return _show(verdict, f"run {run.id}{_whose(run)}", run, as_json)
    status = run_record.run_status(run)
    if as_json:
        known = {"schema": 1, "run": run.id, "status": status, "cause": None, "rank": None}
        _dump({**known, "suspicions": _suspicions(run)})
        return 0
    where = f" (on host {run.launcher[2]})" if status == "unknown" else ""
    _print(f"run {run.id}{_whose(run)}: {status}, no verdict yet{where}")
    for event in _suspicions(run):
        _print(f"  {format_duration(max(0.0, time.time() - event['time']))} ago: {event['summary']}")
        evidence = event.get("evidence")
        for line in evidence if isinstance(evidence, list) else ():
            _print(f"    {line}")
    return 0


def verdict_of(run: run_record.RunRecord) -> Verdict | None:
    """None while it keeps running."""
    status = run_record.run_status(run)
    verdict = run.verdict if status not in ("running", "unknown") else None
    if verdict is None and status == "lost":
        saved = resume_command.saved_state(run) if run.mine else ()
        verdict = lost(run.id, saved[0].path if saved else "", saved[0].host if saved else "")
        if run.mine:  # "the same command" alone would start a run without a name from its beginning
            verdict = replace(verdict, fix=(f"{resume_command.resume_command(run)}   # {resume_command.describe_resume(run)}", *verdict.fix))
    scheduler = schedulers.find_scheduler(run.data.get("environment") or {}) if run.mine else None
    if scheduler is not None and status not in ("running", "completed"):
        verdict = runs(scheduler).explained(os.path.dirname(run.dir), run, verdict)
    if verdict is not None and run.mine:
        verdict = replace(verdict, fix=tuple(resume_command.by_id(step, run, os.path.dirname(run.dir)) for step in verdict.fix))
    return verdict


def _whose(run: run_record.RunRecord) -> str:
    return "" if run.mine else f" (of {run.user})"


def _print(line: str) -> None:
    print_text(escape(line))


def _dump(data: dict[str, Any]) -> None:
    print_json(data)


def _show(verdict: Verdict, title: str, run: run_record.RunRecord | None, as_json: bool) -> int:
    """`run`: None for a job in which no run began."""
    if as_json:
        _dump(verdict.to_json())
        return 0
    colour = {"completed": SUCCESS, "stopped": WARNING}.get(verdict.status, ERROR)
    print_coloured([(f"{title}: ", ""), (f"{verdict.status}, exit code {verdict.exit_code}", colour)])
    rank = f", rank {verdict.rank}" if verdict.rank is not None else ""
    _print(f"cause: {verdict.cause}{rank}" + (f" on host {verdict.host}" if verdict.host else ""))
    _print_lines(verdict.summary)
    fix = verdict.fix if run is None else tuple(_of_this_run(line, verdict, run) for line in verdict.fix)
    for heading, lines in (("evidence", verdict.evidence), ("what to do", fix)):
        if lines:
            _print(f"{heading}:")
            for line in lines:
                _print_lines(line)
    if run is not None:
        _print_restarts(run)
    if verdict.detected_s is not None:
        when = f"detected {format_duration(verdict.detected_s)} after it happened"
        if verdict.stalled:
            when = f"first noticed after {format_duration(verdict.detected_s)} without progress"
        _print(f"{when}{_another_attempt(verdict)}")
    if run is not None:
        _print(f"record: {os.path.abspath(run.dir)}")
    return 0


def _of_this_run(step: str, verdict: Verdict, run: run_record.RunRecord) -> str:
    """A verdict is written while its run is the newest one. Read later, its commands must still mean this run."""
    known = os.path.realpath(os.path.dirname(run.dir)) == os.path.realpath(layout.runs_root(None, os.environ))
    step = step.replace("stoker logs --rank", f"stoker logs {shlex.quote(run.id if known else run.dir)} --rank")
    stacks = os.path.join(run.dir, f"attempt-{verdict.attempt}", "stacks.txt")
    return step.replace("attempt-N/stacks.txt in the run directory", stacks)


def _print_restarts(run: run_record.RunRecord) -> None:
    count, causes = 0, []
    for event in run.events():
        if event["event"] == "restart":
            count += 1
            if count <= _MOST_CAUSES:
                cause = escape(str(event.get("cause")), 80)
                causes.append(f"{cause}, which --max-restarts does not count" if cause in _UNCOUNTED else cause)
    if count > _MOST_CAUSES:
        causes.append(f"and {count - _MOST_CAUSES} more")
    if count:
        _print(f"restarts: {count}" + (f" (causes: {', '.join(causes)})" if causes else ""))


def _print_lines(text: str) -> None:
    """Evidence may have several lines: those stay."""
    print_text("\n".join(f"  {line}" for line in escape_lines(text).split("\n")))


def _another_attempt(verdict: Verdict) -> str:
    """Whether an error of the script's own comes again nobody knows before it does: nothing is promised then."""
    if not verdict.retryable:
        return "; another attempt would not help"
    return "" if verdict.cause in _MAYBE_DETERMINISTIC else "; another attempt could help"


def _suspicions(run: run_record.RunRecord) -> list[dict[str, Any]]:
    """What is suspected of a run that goes on: the newest of each kind, less what is over."""
    found: dict[str, dict[str, Any]] = {}
    for event in run.events():
        kind = event["event"]
        if kind in ("attempt", "relief", "busy"):
            found.pop("suspicion", None)
        elif kind == "straggler-over" and found.get("straggler", {}).get("rank") == event.get("rank"):
            del found["straggler"]
        elif kind in ("suspicion", "straggler", "numbers") and event.get("summary"):
            found[kind] = event
    return list(found.values())
