"""A submitted Slurm job and the runs in it: follows the queue, then the run's output, and says how it ended."""

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
from stoker.control.record.ownership import own_folder
from stoker.control.verdict import launch_failures, slurm_ends

LOOK_S = 0.25  # at what the run printed
ASK_S = 2.0  # of Slurm: its controller serves everybody
FORGOTTEN_S = 60.0  # a job Slurm does not answer for that long is out of reach
SETTLE_S = 10.0  # how long a run's last words may take to come over a shared disk

Say = Callable[[str], None]
Put = Callable[[bytes], None]


class JobFollower:
    """One job, or the tasks of an array. `say`: a line of ours; `put`: what the run printed."""

    def __init__(self, root: str, number: str, say: Say, put: Put) -> None:
        self._root = root
        self.number = number
        self._note = read_job_note(root, number)
        seeds = self._note.get("seeds") or []
        self._tasks = [f"{number}_{seed}" for seed in seeds] or [number]
        self._say = say
        self._put = put
        self._said: dict[str, str] = {}
        self._known: dict[str, SlurmJob] = {}
        self._logs = {}
        for task in self._tasks:
            label = f"seed {task.rpartition('_')[2]}: " if seeds else ""
            self._logs[task] = LogTail(log_path(root, task)), LineCutter(label.encode())

    def follow(self) -> int:
        """Until it is over. The run's exit code; of several runs the first that is not 0."""
        asked, heard = -ASK_S, time.monotonic()
        while not all(task in self._known and self._known[task].over for task in self._tasks):
            now = time.monotonic()
            if now - asked >= ASK_S:
                asked = now
                if self._ask():
                    heard = now
                elif not self._known and now - heard > ASK_S:
                    return self._sum_up()  # never heard of, or forgotten: what was kept of it
            if now - heard > FORGOTTEN_S:
                again = f"`stoker submit --follow {self.number}` looks again"
                self._say(f"stoker: Slurm has not answered for {FORGOTTEN_S:.0f} s; {again}")
                break
            self._print()
            time.sleep(LOOK_S)
        self._settle()
        return self._sum_up()

    def _ask(self) -> bool:
        found = {one.id: one for one in query_tasks(self.number)}
        for task in self._tasks:
            if (
                task not in found
                and (len(self._tasks) == 1 or task in self._known)
                and not (task in self._known and self._known[task].over)
            ):
                one = query_job(task)
                if one is not None:
                    found[task] = one
        for name, one in found.items():
            if name in self._logs:
                self._known[name] = one
            self._tell(name, one)  # what waits of an array is one line, 12_[3-4]
        return bool(found)

    def _tell(self, task: str, one: SlurmJob) -> None:
        said = one.state
        if one.state == "PENDING" and one.reason:
            said += f" ({one.reason})"
        elif one.state == "RUNNING" and one.nodes:
            said += f" on {one.nodes}"
        if one.restarts and not one.over:
            said += f", restart {one.restarts}"
        if said != self._said.get(task):
            self._said[task] = said
            self._say(f"stoker: job {task}: {said}")

    def _print(self) -> None:
        for tail, cutter in self._logs.values():
            while data := tail.new():
                self._put(cutter.feed(data))

    def _settle(self) -> None:
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline and any(_unsettled(run_of(self._root, task)) for task in self._tasks):
            time.sleep(LOOK_S)
        self._print()
        for _, cutter in self._logs.values():
            self._put(cutter.flush())
        if self._note:  # Slurm forgets a job within minutes; `stoker why` may be asked next week
            kept = {**self._note, "ended": {task: as_json(one) for task, one in self._known.items()}}
            write_json(os.path.join(own_folder(self._root, jobs.FOLDER), f"{self.number}.json"), kept)

    def _sum_up(self) -> int:
        code = 0
        for task in self._tasks:
            verdict = verdict_of(self._root, task)
            if verdict.status != "completed":
                self._say(f"stoker: job {task}: {verdict.summary}; `stoker why slurm:{task}` says more")
            code = code or verdict.exit_code
        return code


def log_path(root: str, task: str) -> str:
    return os.path.join(own_folder(root, jobs.FOLDER), f"{task}.out")


def job_file(root: str, name: str) -> str | None:
    """A file of ours about jobs; None where others could exchange it: a run there is explained without."""
    try:
        return os.path.join(own_folder(root, jobs.FOLDER), name)
    except Refusal:
        return None


def read_job_note(root: str, task: str) -> dict[str, Any]:
    path = job_file(root, f"{task.partition('_')[0]}.json")
    found = run_record.read_json(path) if path else None
    return found if isinstance(found, dict) else {}


def job_of(run: run_record.RunRecord) -> str:
    """The Slurm job a run was started in; empty where there is none."""
    told = run.data.get("environment") or {}
    task = f"{told.get('SLURM_ARRAY_JOB_ID')}_{told.get('SLURM_ARRAY_TASK_ID')}"
    named = (task, str(told.get("SLURM_JOB_ID")))
    return next((job for job in named if re.fullmatch(r"\d+(_\d+)?", job, re.ASCII)), "")


def run_of(root: str, task: str) -> run_record.RunRecord | None:
    """The newest run of this job. Numbers come again when a cluster is set up anew: none from before the job."""
    submitted = read_job_note(root, task).get("submitted")
    since = submitted - 60.0 if isinstance(submitted, (int, float)) else 0.0
    found = [run for run in run_index.all_runs(root) if job_of(run) == task and run.started >= since]
    return found[-1] if found else None


def _unsettled(run: run_record.RunRecord | None) -> bool:
    """Its job is over, and its verdict may still be on its way."""
    return run is not None and run.verdict is None and run_record.is_alive(run) is not False


def job_state(root: str, task: str) -> SlurmJob | None:
    """From Slurm while it remembers the job, else what was kept when it ended."""
    found = query_job(task)
    kept = (read_job_note(root, task).get("ended") or {}).get(task)
    if found is None and isinstance(kept, dict):
        found = SlurmJob(**{key: value for key, value in kept.items() if key in fields_of(SlurmJob)})
    notice = job_file(root, task + jobs.NOTICE)
    return replace(found, noticed=notice is not None and os.path.exists(notice)) if found else None


def explained(root: str, run: run_record.RunRecord, verdict: Verdict | None) -> Verdict | None:
    """A run's verdict and Slurm's word. A run without a verdict whose job is over has lost its launcher."""
    task = job_of(run)
    word = job_state(root, task) if task else None
    if word is None:
        return verdict
    if verdict is None:
        return slurm_ends.refined(launch_failures.lost(run.id), word) if word.over else None
    return slurm_ends.refined(verdict, word)


def verdict_of(root: str, task: str) -> Verdict:
    """Of a job that is over, whether a run began in it or not."""
    run = run_of(root, task)
    if run is not None:
        found = explained(root, run, run.verdict)
        return found or replace(launch_failures.lost(run.id), summary=f"run {run.id} has no verdict yet")
    word = job_state(root, task)
    if word is None:
        raise Refusal(f"Slurm does not know job {task}, and no run in {root} was started in it", EX_NOINPUT)
    log = job_file(root, f"{task}.out")
    shown = (f"what it printed is in {log}", *_last_lines(log)) if log and os.path.exists(log) else ()
    return slurm_ends.without_run(word, shown)


def _last_lines(path: str) -> list[str]:
    with open(path, "rb") as file:
        skipped = file.seek(max(0, os.path.getsize(path) - 4096))
        text = file.read().decode("utf-8", "replace")
    if skipped:  # the first line is cut, and half a token has no known shape
        text = text.partition("\n")[2]
    return mask_lines(text)[-5:]


# ---- what became of a job: `scontrol` while the controller remembers it, else `sacct` ----

_UNTOLD = ("(null)", "None", "N/A", "Unknown", "")


def query_job(job: str) -> SlurmJob | None:
    """None where Slurm is not there or knows nothing of it."""
    return next(iter(query_tasks(job)), None) or _accounting(job)


def query_tasks(job: str) -> list[SlurmJob]:
    """A job by itself, or every task of an array; empty where the controller has forgotten it, or is not clear."""
    lines = _run("scontrol", "--oneliner", "show", "job", job).split("\n")
    jobs = [parse_scontrol(line) for line in lines if line.strip()]
    clear = [one for one in jobs if one is not None]
    return clear if len(clear) == len(jobs) else []


_WORDS = ("ArrayJobId", "ArrayTaskId", "JobState", "Reason", "ExitCode", "Restarts", "NodeList", "TimeLimit")


def parse_scontrol(line: str) -> SlurmJob | None:
    """One line of `scontrol --oneliner show job`. None where it is not clear: Slurm quotes nothing, and a job's name or
    comment may hold ` JobState=COMPLETED`. `sacct` prints neither.
    """
    number = re.match(r"JobId=(\S+)", line)
    values = {name: re.findall(rf"\s{name}=(\S*)", line) for name in _WORDS}
    if number is None or len(values["JobState"]) != 1 or any(len(value) > 1 for value in values.values()):
        return None
    word = {name: value[0] if value and value[0] not in _UNTOLD else "" for name, value in values.items()}
    array, task = word["ArrayJobId"], word["ArrayTaskId"]
    name = f"{array}_{task}" if array and task else number[1]
    code, signal = _codes(word["ExitCode"])
    restarts = int(word["Restarts"]) if is_digits(word["Restarts"]) else 0
    return SlurmJob(name, word["JobState"], word["Reason"], code, signal, restarts, word["NodeList"], word["TimeLimit"])


def _accounting(job: str) -> SlurmJob | None:
    columns = "--format=JobID,State,ExitCode,Reason,NodeList,Timelimit"
    lines = _run("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", columns).splitlines()
    return parse_sacct(lines[0]) if lines else None


def parse_sacct(line: str) -> SlurmJob | None:
    """One line of `sacct --parsable2`: 12|CANCELLED by 1000|0:15|None|node[1-2]|01:00:00"""
    words = line.split("|")
    if len(words) < 6:
        return None
    state, _, by = words[1].partition(" by ")
    reason, nodes, limit = ("" if word in _UNTOLD else word for word in words[3:6])
    return SlurmJob(words[0], state.strip(), reason, *_codes(words[2]), 0, nodes, limit, by.strip())


def _codes(text: str) -> tuple[int, int]:
    """The exit code and the signal of 1:15."""
    found = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _run(*argv: str) -> str:
    """Empty where the program is not there, does not answer or knows nothing: another source may."""
    if shutil.which(argv[0]) is None:
        return ""
    try:
        done = run_slurm(argv)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""
