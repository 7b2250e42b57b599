"""`stoker why [RUN | SCHEDULER:JOB]`: explains how a run ended, and why."""

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
from stoker.control.scheduler import load_runs
from stoker.control.verdict.launch_failures import make_lost_verdict

_JOBS = " or ".join(f"{scheduler.name}:JOB" for scheduler in schedulers.SCHEDULERS)
_MAX_CAUSES = 20  # listed causes of restarts
_UNCOUNTED = ("host.lost", "launch.regroup")  # restarts for these causes don't count for --max-restarts
_MAYBE_DETERMINISTIC = ("rank.exception", "rank.exit", "rank.early-exit", "rank.crash")


def build_parser() -> OptionParser:
    description = "Shows how a run ended, and why: the verdict, its evidence, and what to do."
    parser = OptionParser("stoker why", description)
    parser.run_argument(f"id, name or path of a run, or {_JOBS}")
    parser.runs_dir()
    parser.switch("--json", "print the verdict as JSON")
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    root = layout.runs_root(args.runs_dir, os.environ)
    name, colon, job = (args.run or "").partition(":")
    if colon and (scheduler := schedulers.find_scheduler_by_name(name)) is not None:
        jobs = load_runs(scheduler)
        job_run = jobs.run_of(root, job)
        if job_run is None:
            return _print_verdict(jobs.verdict_of(root, job), args.run, None, args.json)
        run = job_run
    else:
        run = run_index.find_run(args.run, root)
    with parsing(f"run {run.id}"):
        return _print_run(run, args.json)


def _print_run(run: run_record.RunRecord, as_json: bool) -> int:
    owner = "" if run.mine else f" (of {run.user})"
    verdict = explain_run(run)
    if verdict is not None:
        return _print_verdict(verdict, f"run {run.id}{owner}", run, as_json)
    status, suspicions = run_record.run_status(run), _read_suspicions(run)
    if as_json:
        fields = {"schema": 1, "run": run.id, "status": status, "cause": None, "rank": None}
        print_json({**fields, "suspicions": suspicions})
        return 0
    host = f" (on host {run.launcher[2]})" if status == "unknown" else ""
    _print_line(f"run {run.id}{owner}: {status}, no verdict yet{host}")
    for event in suspicions:
        _print_line(f"  {format_duration(max(0.0, time.time() - event['time']))} ago: {event['summary']}")
        evidence = event.get("evidence")
        for line in evidence if isinstance(evidence, list) else ():
            _print_line(f"    {line}")
    return 0


def explain_run(run: run_record.RunRecord) -> Verdict | None:
    """Return the verdict of a run with fixes that name this run, or None while it is running."""
    status = run_record.run_status(run)
    verdict = run.verdict if status not in ("running", "unknown") else None
    if verdict is None and status == "lost":
        saved = resume_command.saved_state(run) if run.mine else ()
        verdict = make_lost_verdict(run.id, saved[0].path if saved else "", saved[0].host if saved else "")
        if run.mine:  # a run without a name would start again from step 0 with "the same command"
            resume = f"{resume_command.resume_command(run)}   # {resume_command.describe_resume(run)}"
            verdict = replace(verdict, fix=(resume, *verdict.fix))
    scheduler = schedulers.find_scheduler(run.data.get("environment") or {}) if run.mine else None
    if scheduler is not None and status not in ("running", "completed"):
        verdict = load_runs(scheduler).explain_end(os.path.dirname(run.dir), run, verdict)
    if verdict is not None and run.mine:
        root = os.path.dirname(run.dir)
        verdict = replace(verdict, fix=tuple(resume_command.replace_name_by_id(fix, run, root) for fix in verdict.fix))
    return verdict


def _print_verdict(verdict: Verdict, title: str, run: run_record.RunRecord | None, as_json: bool) -> int:
    """Print a verdict. `run` is None for a scheduler's job in which no run started."""
    if as_json:
        print_json(verdict.to_json())
        return 0
    colour = {"completed": SUCCESS, "stopped": WARNING}.get(verdict.status, ERROR)
    print_coloured([(f"{title}: ", ""), (f"{verdict.status}, exit code {verdict.exit_code}", colour)])
    rank = f", rank {verdict.rank}" if verdict.rank is not None else ""
    _print_line(f"cause: {verdict.cause}{rank}" + (f" on host {verdict.host}" if verdict.host else ""))
    _print_indented(verdict.summary)
    fixes = verdict.fix if run is None else tuple(_with_run_named(fix, verdict, run) for fix in verdict.fix)
    for heading, lines in (("evidence", verdict.evidence), ("what to do", fixes)):
        if lines:
            _print_line(f"{heading}:")
            for line in lines:
                _print_indented(line)
    if run is not None:
        _print_restarts(run)
    if verdict.detected_s is not None:
        when = f"detected {format_duration(verdict.detected_s)} after it happened"
        if verdict.stalled:
            when = f"first noticed after {format_duration(verdict.detected_s)} without progress"
        prospect = ""
        if not verdict.retryable:
            prospect = "; another attempt would not help"
        elif verdict.cause not in _MAYBE_DETERMINISTIC:  # an error of the script may or may not recur
            prospect = "; another attempt could help"
        _print_line(f"{when}{prospect}")
    if run is not None:
        _print_line(f"record: {os.path.abspath(run.dir)}")
    return 0


def _with_run_named(fix: str, verdict: Verdict, run: run_record.RunRecord) -> str:
    """Name the run in a fix. A verdict is written while its run is the newest one, and may be read later."""
    in_default_root = os.path.realpath(os.path.dirname(run.dir)) == os.path.realpath(layout.runs_root(None, os.environ))
    name = shlex.quote(run.id if in_default_root else run.dir)
    fix = fix.replace("stoker logs --rank", f"stoker logs {name} --rank")
    stacks = os.path.join(run.dir, f"attempt-{verdict.attempt}", "stacks.txt")
    return fix.replace("attempt-N/stacks.txt in the run directory", stacks)


def _print_restarts(run: run_record.RunRecord) -> None:
    count, causes = 0, []
    for event in run.events():
        if event["event"] == "restart":
            count += 1
            if count <= _MAX_CAUSES:
                cause = escape(str(event.get("cause")), 80)
                causes.append(f"{cause}, not counted by --max-restarts" if cause in _UNCOUNTED else cause)
    if count > _MAX_CAUSES:
        causes.append(f"and {count - _MAX_CAUSES} more")
    if count:
        _print_line(f"restarts: {count}" + (f" (causes: {', '.join(causes)})" if causes else ""))


def _print_line(line: str) -> None:
    print_text(escape(line))


def _print_indented(text: str) -> None:
    """Print a text that may have several lines, such as evidence."""
    print_text("\n".join(f"  {line}" for line in escape_lines(text).split("\n")))


def _read_suspicions(run: run_record.RunRecord) -> list[dict[str, Any]]:
    """Return the events that report a current problem of a running run, the newest of each kind."""
    suspicions: dict[str, dict[str, Any]] = {}
    for event in run.events():
        kind = event["event"]
        if kind in ("attempt", "relief", "busy"):
            suspicions.pop("suspicion", None)
        elif kind == "straggler-over" and suspicions.get("straggler", {}).get("rank") == event.get("rank"):
            del suspicions["straggler"]
        elif kind in ("suspicion", "straggler", "numbers") and event.get("summary"):
            suspicions[kind] = event
    return list(suspicions.values())
