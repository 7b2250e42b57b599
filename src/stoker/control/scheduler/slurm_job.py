"""Slurm jobs and the runs in them: follows a job's state and output, finds its runs, and explains how it ended."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

from stoker.contract import slurm_job as jobs
from stoker.contract.errors import EX_NOINPUT, Refusal
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import as_json, fields_of, replace
from stoker.contract.masking import mask_lines
from stoker.contract.safe_io import write_json
from stoker.contract.slurm_job import SlurmJob, run_slurm
from stoker.contract.text import is_digits
from stoker.control.launch.console import LineCutter
from stoker.control.record import run_index, run_record
from stoker.control.record.log_tail import LogTail
from stoker.control.record.private_folders import own_folder
from stoker.control.verdict import launch_failures, slurm_ends

OUTPUT_INTERVAL_S = 0.25  # time between two reads of the run's output
QUERY_INTERVAL_S = 2.0  # time between two queries, which go to the controller that all users share
UNREACHABLE_S = 60.0  # after this long without an answer we stop following
SETTLE_S = 10.0  # limit for a run's verdict and last output to arrive over a shared disk

Say = Callable[[str], None]
Put = Callable[[bytes], None]


class JobFollower:
    """Follows a job, or the tasks of an array. `say` prints one of our lines, `put` prints output of the run."""

    def __init__(self, root: str, number: str, say: Say, put: Put) -> None:
        self._root = root
        self.number = number
        self._note = read_job_note(root, number)
        seeds = self._note.get("seeds") or []
        self._tasks = [f"{number}_{seed}" for seed in seeds] or [number]
        self._say = say
        self._put = put
        self._printed: dict[str, str] = {}  # task -> the state that was printed last
        self._jobs: dict[str, SlurmJob] = {}  # task -> Slurm's newest description
        self._logs = {}
        for task in self._tasks:
            label = f"seed {task.rpartition('_')[2]}: " if seeds else ""
            self._logs[task] = LogTail(log_path(root, task)), LineCutter(label.encode())

    def follow(self) -> int:
        """Follow the job until it ends. Return the exit code of its run, or the first that is not 0 of an array's runs."""
        queried_at, answered_at = -QUERY_INTERVAL_S, time.monotonic()
        while not all(self._is_over(task) for task in self._tasks):
            now = time.monotonic()
            if now - queried_at >= QUERY_INTERVAL_S:
                queried_at = now
                if self._query():
                    answered_at = now
                elif not self._jobs and now - answered_at > QUERY_INTERVAL_S:
                    return self._summarize()  # Slurm does not know the job (any more), but our note may
            if now - answered_at > UNREACHABLE_S:
                retry = f"run `stoker submit --follow {self.number}` to try again"
                self._say(f"stoker: Slurm has not responded for {UNREACHABLE_S:.0f} s; {retry}")
                break
            self._print_output()
            time.sleep(OUTPUT_INTERVAL_S)
        self._settle()
        return self._summarize()

    def _is_over(self, task: str) -> bool:
        return task in self._jobs and self._jobs[task].is_over

    def _query(self) -> bool:
        """Query the state of all tasks and print changes. Return whether Slurm answered."""
        current = {job.id: job for job in query_tasks(self.number)}
        for task in self._tasks:
            # Slurm lists all waiting tasks as one, such as 12_[3-4]. A task that is no longer listed has ended; sacct may
            # still know it.
            if task not in current and (len(self._tasks) == 1 or task in self._jobs) and not self._is_over(task):
                job = query_job(task)
                if job is not None:
                    current[task] = job
        for name, job in current.items():
            if name in self._logs:
                self._jobs[name] = job
            state = job.state
            if job.state == "PENDING" and job.reason:
                state += f" ({job.reason})"
            elif job.state == "RUNNING" and job.nodes:
                state += f" on {job.nodes}"
            if job.restarts and not job.is_over:
                state += f", restart {job.restarts}"
            if state != self._printed.get(name):
                self._printed[name] = state
                self._say(f"stoker: job {name}: {state}")
        return bool(current)

    def _print_output(self) -> None:
        for tail, cutter in self._logs.values():
            while data := tail.read_new():
                self._put(cutter.feed(data))

    def _settle(self) -> None:
        """Wait for verdicts that are not written yet, print the remaining output, and store Slurm's description of the job."""
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline and any(_may_get_verdict(run_of(self._root, task)) for task in self._tasks):
            time.sleep(OUTPUT_INTERVAL_S)
        self._print_output()
        for _, cutter in self._logs.values():
            self._put(cutter.flush())
        if self._note:  # for `stoker why`: Slurm forgets a job within minutes
            note = {**self._note, "ended": {task: as_json(job) for task, job in self._jobs.items()}}
            write_json(os.path.join(own_folder(self._root, jobs.FOLDER), f"{self.number}.json"), note)

    def _summarize(self) -> int:
        """Print the verdict of each task that failed. Return the first exit code that is not 0."""
        code = 0
        for task in self._tasks:
            verdict = verdict_of(self._root, task)
            if verdict.status != "completed":
                self._say(f"stoker: job {task}: {verdict.summary}; for details, run `stoker why slurm:{task}`")
            code = code or verdict.exit_code
        return code


def log_path(root: str, task: str) -> str:
    return os.path.join(own_folder(root, jobs.FOLDER), f"{task}.out")


def job_file(root: str, name: str) -> str | None:
    """Return the path of one of our files about jobs, or None if other users could replace it."""
    try:
        return os.path.join(own_folder(root, jobs.FOLDER), name)
    except Refusal:
        return None


def read_job_note(root: str, task: str) -> dict[str, Any]:
    """Return the note that `stoker submit` wrote about a job, or {}."""
    path = job_file(root, f"{task.partition('_')[0]}.json")
    note = run_record.read_json(path) if path else None
    return note if isinstance(note, dict) else {}


def job_of(run: run_record.RunRecord) -> str:
    """Return the Slurm job a run was started in, or ""."""
    environment = run.data.get("environment") or {}
    task = f"{environment.get('SLURM_ARRAY_JOB_ID')}_{environment.get('SLURM_ARRAY_TASK_ID')}"
    candidates = (task, str(environment.get("SLURM_JOB_ID")))
    return next((job for job in candidates if re.fullmatch(r"\d+(_\d+)?", job, re.ASCII)), "")


def run_of(root: str, task: str) -> run_record.RunRecord | None:
    """Return the newest run of a job, or None. Runs older than the job are ignored: a new cluster reuses job numbers."""
    submitted = read_job_note(root, task).get("submitted")
    since = submitted - 60.0 if isinstance(submitted, (int, float)) else 0.0
    runs = [run for run in run_index.own_runs(root) if job_of(run) == task and run.started >= since]
    return runs[-1] if runs else None


def _may_get_verdict(run: run_record.RunRecord | None) -> bool:
    return run is not None and run.verdict is None and run_record.is_alive(run) is not False


def find_job_state(root: str, task: str) -> SlurmJob | None:
    """Return Slurm's description of a job, or the one stored when it ended if Slurm has forgotten it, or None."""
    job = query_job(task)
    stored = (read_job_note(root, task).get("ended") or {}).get(task)
    if job is None and isinstance(stored, dict):
        job = SlurmJob(**{key: value for key, value in stored.items() if key in fields_of(SlurmJob)})
    notice = job_file(root, task + jobs.NOTICE)
    return replace(job, noticed=notice is not None and os.path.exists(notice)) if job else None


def explain_end(root: str, run: run_record.RunRecord, verdict: Verdict | None) -> Verdict | None:
    """Return a run's verdict, refined by the state of its job. A run without a verdict in an ended job counts as lost."""
    task = job_of(run)
    job = find_job_state(root, task) if task else None
    if job is None:
        return verdict
    if verdict is None:
        return slurm_ends.refine_verdict(launch_failures.make_lost_verdict(run.id), job) if job.is_over else None
    return slurm_ends.refine_verdict(verdict, job)


def verdict_of(root: str, task: str) -> Verdict:
    """Return the verdict of a job that is over, even if no run began in it. Raises Refusal for an unknown job."""
    run = run_of(root, task)
    if run is not None:
        verdict = explain_end(root, run, run.verdict)
        return verdict or replace(launch_failures.make_lost_verdict(run.id), summary=f"run {run.id} has no verdict yet")
    job = find_job_state(root, task)
    if job is None:
        raise Refusal(f"Slurm does not know job {task}, and no run in {root} was started in it", EX_NOINPUT)
    log = job_file(root, f"{task}.out")
    output = (f"its output is in {log}", *_last_lines(log)) if log and os.path.exists(log) else ()
    return slurm_ends.make_verdict_without_run(job, output)


def _last_lines(path: str) -> list[str]:
    """Return the last five lines of a file, with secrets masked."""
    with open(path, "rb") as file:
        skipped = file.seek(max(0, os.path.getsize(path) - 4096))
        text = file.read().decode("utf-8", "replace")
    if skipped:  # drop the first line, which is cut: half a token would not be recognized and masked
        text = text.partition("\n")[2]
    return mask_lines(text)[-5:]


# ---- querying the state of a job: from `scontrol` while the controller remembers it, then from `sacct` ----

_EMPTY = ("(null)", "None", "N/A", "Unknown", "")


def query_job(job: str) -> SlurmJob | None:
    """Return a job as Slurm describes it, or None if Slurm is missing or does not know it."""
    return next(iter(query_tasks(job)), None) or _query_accounting(job)


def query_tasks(job: str) -> list[SlurmJob]:
    """Return a job, or every task of an array, or [] if the controller has forgotten it or a line is ambiguous."""
    lines = _run("scontrol", "--oneliner", "show", "job", job).split("\n")
    parsed = [parse_scontrol(line) for line in lines if line.strip()]
    tasks = [task for task in parsed if task is not None]
    return tasks if len(tasks) == len(parsed) else []


_SCONTROL_KEYS = ("ArrayJobId", "ArrayTaskId", "JobState", "Reason", "ExitCode", "Restarts", "NodeList", "TimeLimit")


def parse_scontrol(line: str) -> SlurmJob | None:
    """Parse one line of `scontrol --oneliner show job`. Return None if it is ambiguous.

    Slurm does not quote values, so a job's name or comment may contain ` JobState=COMPLETED`. `sacct` prints neither.
    """
    number = re.match(r"JobId=(\S+)", line)
    matches = {key: re.findall(rf"\s{key}=(\S*)", line) for key in _SCONTROL_KEYS}
    if number is None or len(matches["JobState"]) != 1 or any(len(values) > 1 for values in matches.values()):
        return None
    value = {key: values[0] if values and values[0] not in _EMPTY else "" for key, values in matches.items()}
    array, task = value["ArrayJobId"], value["ArrayTaskId"]
    return SlurmJob(
        f"{array}_{task}" if array and task else number[1],
        value["JobState"],
        value["Reason"],
        *_parse_exit_code(value["ExitCode"]),
        int(value["Restarts"]) if is_digits(value["Restarts"]) else 0,
        value["NodeList"],
        value["TimeLimit"],
    )


def _query_accounting(job: str) -> SlurmJob | None:
    """Return a job as `sacct` describes it, or None."""
    columns = "--format=JobID,State,ExitCode,Reason,NodeList,Timelimit"
    lines = _run("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", columns).splitlines()
    return parse_sacct(lines[0]) if lines else None


def parse_sacct(line: str) -> SlurmJob | None:
    """Parse a line of `sacct --parsable2`, such as 12|CANCELLED by 1000|0:15|None|node[1-2]|01:00:00."""
    columns = line.split("|")
    if len(columns) < 6:
        return None
    state, _, canceller = columns[1].partition(" by ")
    reason, nodes, limit = ("" if column in _EMPTY else column for column in columns[3:6])
    return SlurmJob(
        columns[0], state.strip(), reason, *_parse_exit_code(columns[2]), 0, nodes, limit, canceller.strip()
    )


def _parse_exit_code(text: str) -> tuple[int, int]:
    """Return (exit code, signal) for a text such as 1:15."""
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _run(*argv: str) -> str:
    """Return a program's output, or "" if it is missing, fails or times out, since another source may have the answer."""
    if shutil.which(argv[0]) is None:
        return ""
    try:
        process = run_slurm(argv)
    except subprocess.TimeoutExpired:
        return ""
    return process.stdout if process.returncode == 0 else ""
