"""Asks Slurm what became of a job: `scontrol` while the controller remembers it, else `sacct` where there is
accounting.
"""

from __future__ import annotations

import re
import shutil
import subprocess

from stoker.contract.slurmjob import Job

_ASK_S = 20.0
_UNTOLD = ("(null)", "None", "N/A", "Unknown", "")
_BATCH = re.compile(r"(\d+):(\d+)")


def look(job: str) -> Job | None:
    """None where Slurm is not there or knows nothing of it."""
    return _controller(job) or _accounting(job)


def tasks_of(job: str) -> list[Job]:
    """A job by itself, or every task of an array; empty where the controller has forgotten it."""
    return [
        one
        for one in map(read_controller, _run("scontrol", "--oneliner", "show", "job", job).splitlines())
        if one is not None
    ]


def _controller(job: str) -> Job | None:
    found = tasks_of(job)
    return found[0] if found else None


def read_controller(line: str) -> Job | None:
    """One line of `scontrol --oneliner show job`."""
    if not line.startswith("JobId="):
        return None

    def word(name: str) -> str:
        match = re.search(rf"(?:^| ){name}=(\S*)", line)
        return "" if match is None or match[1] in _UNTOLD else match[1]

    code = _BATCH.fullmatch(word("ExitCode"))
    array, task = word("ArrayJobId"), word("ArrayTaskId")
    return Job(
        f"{array}_{task}" if array and task else word("JobId"),
        word("JobState"),
        word("Reason"),
        int(code[1]) if code else 0,
        int(code[2]) if code else 0,
        int(word("Restarts") or 0),
        word("NodeList"),
        word("TimeLimit"),
    )


def _accounting(job: str) -> Job | None:
    text = _run(
        "sacct",
        "--noheader",
        "--parsable2",
        "--allocations",
        f"--jobs={job}",
        "--format=JobID,State,ExitCode,Reason,NodeList,Timelimit",
    )
    lines = text.splitlines()
    return read_accounting(lines[0]) if lines else None


def read_accounting(line: str) -> Job | None:
    """One line of `sacct --parsable2`: 12|CANCELLED by 1000|0:15|None|node[1-2]|01:00:00"""
    words = line.split("|")
    if len(words) < 6:
        return None
    state, _, by = words[1].partition(" by ")
    code = _BATCH.fullmatch(words[2])
    clean = ["" if word in _UNTOLD else word for word in words]
    return Job(
        words[0],
        state.strip(),
        clean[3],
        int(code[1]) if code else 0,
        int(code[2]) if code else 0,
        0,
        clean[4],
        clean[5],
        by.strip(),
    )


def _run(*argv: str) -> str:
    """Empty where the program is not there, does not answer or knows nothing: another source may."""
    if shutil.which(argv[0]) is None:
        return ""
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASK_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""
