"""`stoker submit`: defines its options, writes the job script, and submits it with sbatch."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

from stoker.contract import slurm_job as job
from stoker.contract.env_vars import RANK_VARIABLES
from stoker.contract.errors import EX_CANTCREAT, EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.frozen import frozen, option, section
from stoker.contract.masking import MASK, mask_argv
from stoker.contract.safe_io import write_json
from stoker.contract.text import is_digits
from stoker.contract.units import parse_duration
from stoker.control.record.private_folders import own_folder
from stoker.control.record.run_writer import cannot_write

_SBATCH_S = 60.0
SECRET = "STOKER_SUBMIT_SECRET_"
_GPUS = r"([A-Za-z][\w.-]*:)?[1-9]\d*"
_SEEDS = r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%[1-9]\d*)?"


@frozen
class SubmitOptions:
    """The options of `stoker submit`."""

    _job = section("resources of the job")
    nodes: int = option("nodes (default: 1)", "N", default=1, flags=("-N",))
    gpus_per_node: str | None = option(
        "GPUs on each node, one rank each: 4, or with their type a100:4", "[KIND:]N", default=None
    )
    cpus_per_task: int | None = option(
        "CPUs on each node, where Slurm starts one task and Stoker starts the ranks", "N", default=None, flags=("-c",)
    )
    mem: str | None = option("host memory on each node, such as 64G; 0 for all of it", "SIZE", default=None)
    time: str | None = option(
        "time limit: 30m, 12h, 2d, or in Slurm's format (a bare number is minutes)", default=None, flags=("-t",)
    )
    partition: str | None = option("partition", "NAME", default=None, flags=("-p",))
    account: str | None = option("account", "NAME", default=None, flags=("-A",))
    sbatch_option: tuple[str, ...] = option(
        "another option for sbatch, such as --sbatch-option=--exclude=node7", "OPT", default=(), many=True
    )

    _life = section("runs of the job")
    array_seeds: str | None = option(
        "one run per seed, as a job array: 0-4, 1,2,7 or 0-9%%2 (two at a time); each run has SEED in its environment",
        "SEEDS",
        default=None,
    )
    requeue: bool = option("before the time limit, save, return to the queue, and resume the same run", default=False)
    signal_before: float = option(
        "time before the time limit or a preemption when the ranks get SIGTERM, and --grace to save (default: 60s)",
        "TIME",
        default=60.0,
        parse=parse_duration,
    )
    name: str | None = option(
        "name of the run and of the job; a second job of that name resumes the run if it is unfinished", default=None
    )

    _more = section("this command")
    runs_dir: str | None = option(
        "folder of the run directories, which all nodes must share (default: $STOKER_RUNS, else ./runs)",
        "DIR",
        default=None,
    )
    no_follow: bool = option("submit the job and return", default=False)
    follow: str | None = option("follow a job that was submitted before", "JOB", default=None)
    dry_run: bool = option("print the job script and submit nothing", default=False)


@frozen
class JobScript:
    """The text of a job script, and what is needed to submit it."""

    text: str
    name: str  # name of the run; {job} stands for the job's number, {seed} for the seed
    secrets: dict[
        str, str
    ]  # variables that the script reads from its environment, so that their values are not in its text


def make_script(
    options: SubmitOptions,
    command: Sequence[str],
    words: Sequence[str],
    base: str,
    root: str,
    cwd: str,
    shrinks: bool = False,
) -> JobScript:
    """Return the job script. `command` starts Stoker's `run` or `train` and `words` are its arguments.

    `base` names the job and `root` is the runs folder. With `shrinks` the run continues without a lost node.
    """
    check_options(options)
    folder = own_folder(root, job.FOLDER)
    flags = {
        "job-name": base,
        "nodes": options.nodes,
        "ntasks-per-node": 1,
        "chdir": cwd,
        "output": os.path.join(folder, "%A_%a.out" if options.array_seeds else "%j.out"),
        "open-mode": "append",
        "export": "ALL",
        "gpus-per-node": options.gpus_per_node,
        "cpus-per-task": options.cpus_per_task,
        "mem": options.mem,
        "time": slurm_time(options.time),
        "partition": options.partition,
        "account": options.account,
        "array": options.array_seeds,
    }
    lines = [f"--{flag}={value}" for flag, value in flags.items() if value is not None]
    lines += ["--requeue" if options.requeue else "--no-requeue"]
    lines += [f"--signal=B:USR1@{math.ceil(options.signal_before)}", *options.sbatch_option]
    lines += ["--no-kill"] if shrinks else []  # without it Slurm ends the whole job when a node fails
    for line in lines:
        if re.search(r"[\n\r]", line):
            raise Refusal(
                f"{line.splitlines()[0]}: an option of sbatch must not contain a line break; remove it", EX_USAGE
            )
    is_train = command[-1] == "train"
    args, secrets = _hide_secrets(words)
    stage, args = (args[:1], args[1:]) if is_train else ([], args)  # the stage must stay the first argument of train
    name = options.name or base + "-{job}"
    seed = []
    if options.array_seeds:
        name += "-seed{seed}"
        seed = ["--train.seed", '"$SLURM_ARRAY_TASK_ID"'] if is_train else ["--env", '"SEED=$SLURM_ARRAY_TASK_ID"']
    args = [*stage, "--name", '"$name"', "--runs-dir", shlex.quote(root), *seed, *args]
    task = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if options.array_seeds else "$SLURM_JOB_ID"
    required = "is not set here, but was in the environment that submitted this job"
    text = _TEMPLATE.format(
        notice=shlex.quote(os.path.join(folder, "")) + task + job.NOTICE,
        options="\n".join("#SBATCH " + _quote_option(line) for line in lines),
        name=_quote_name(name),
        command=" ".join([*map(shlex.quote, command), *args]),
        required="".join(f': "${{{variable}:?{required}}}"\n' for variable in secrets),
        unset=" ".join(RANK_VARIABLES),
        seconds=math.ceil(options.signal_before),
        requeue=_REQUEUE if options.requeue else "",
    )
    return JobScript(text, name, secrets)


_TEMPLATE = """#!/bin/bash
# Written by `stoker submit`. The options of sbatch:
{options}

# The job gets the environment of the shell that submitted it, without a rank's variables. Secrets are passed in it, not in this script.
unset {unset}
{required}name={name}
notice={notice}
rm -f -- "$notice"

# Slurm starts this script once, on the first node; Stoker starts the ranks on all of them.
{command} &
run=$!

# {seconds} s before the time limit (and before a preemption, if the site sends it) Slurm sends USR1 to this shell. The ranks then get SIGTERM, and save.
# The notice file is for `stoker why`. A cancelled job needs no such step, because Slurm signals all its processes.
again=1
trap 'again=1; : > "$notice"; kill -TERM "$run"' USR1
trap 'again=1' TERM
while [ "$again" ]; do
    again=
    wait "$run"
    ended=$?
    [ "$ended" -eq 127 ] || code=$ended
done
{requeue}exit "$code"
"""

_REQUEUE = """
# Exit code 143 means that our SIGTERM stopped the run. The next start resumes the run of this name from its last checkpoint.
if [ -e "$notice" ] && [ "$code" -eq 143 ]; then
    echo "stoker: the job's time limit is near; requeueing it, to resume run $name"
    scontrol requeue "$SLURM_JOB_ID" && exit 0
    echo "stoker: scontrol requeue failed; submit the job again to resume the run" >&2
fi
"""


def _quote_option(line: str) -> str:
    """Quote an option's value, because sbatch parses its lines like a shell, where # begins a comment."""
    flag, equals, value = line.partition("=")
    return f"{flag}={shlex.quote(value)}" if equals else line


def _quote_name(name: str) -> str:
    """Return the run's name as a word of bash, with variables for {job} and {seed}."""
    parts = re.split(r"(\{job\}|\{seed\})", name)
    variables = {"{job}": '"${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}"', "{seed}": '"$SLURM_ARRAY_TASK_ID"'}
    return "".join(variables.get(part) or shlex.quote(part) for part in parts if part)


def _hide_secrets(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the arguments quoted for a shell, with variables in place of secrets, and the values of those variables."""
    quoted: list[str] = []
    secrets: dict[str, str] = {}
    for before, word, masked in zip(["", *words], words, mask_argv(words), strict=False):
        variable = None
        if before == "--env" or word.startswith("--env="):
            variable = re.fullmatch(r"(--env=)?([A-Za-z_]\w*)=(.*)", word, re.DOTALL)
        if MASK not in masked or MASK in word:
            quoted.append(shlex.quote(word))
        elif (
            variable
        ):  # --env NAME takes the value from the environment, so not even the run's command line contains it
            secrets[variable[2]] = variable[3]
            quoted.append((variable[1] or "") + variable[2])
        else:
            name = f"{SECRET}{len(secrets) + 1}"
            secrets[name] = word
            quoted.append(f'"${name}"')
    return quoted, secrets


def slurm_time(text: str | None) -> str | None:
    """Return a time limit in Slurm's format: 90m, 12h or 2d become minutes, rounded up. Others stay unchanged."""
    if text is None or re.fullmatch(r"\d+(:\d\d?){0,2}|\d+-\d+(:\d\d?){0,2}|UNLIMITED|INFINITE", text, re.IGNORECASE):
        return text
    try:
        return str(max(1, math.ceil(parse_duration(text) / 60)))
    except ValueError as problem:
        line = f"--time {text} is not a time; write it like 30m, 12h or 2d, or in Slurm's format, 1-12:00:00"
        raise Refusal(line, EX_USAGE) from problem


def parse_time_limit(text: str) -> float | None:
    """Return the seconds of a time limit in Slurm's format (M, M:S, H:M:S, D-H, D-H:M or D-H:M:S), or None if unlimited."""
    days, dash, clock = text.rpartition("-")
    if not all(is_digits(part) for part in (*clock.split(":"), days or "0")):
        return None
    parts = [int(part) for part in clock.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))


def check_options(options: SubmitOptions) -> None:
    """Raise Refusal for the first option that Slurm would not accept."""
    for problem in _find_problems(options):
        raise Refusal(problem, EX_USAGE)


def _find_problems(options: SubmitOptions) -> Iterator[str]:
    for flag, count in (("nodes", options.nodes), ("cpus-per-task", options.cpus_per_task)):
        if count is not None and count < 1:
            yield f"--{flag} must be 1 or more, got {count}"
    for flag, text, pattern, expected in (
        ("gpus-per-node", options.gpus_per_node, _GPUS, "a number from 1 up, or a type and a number, like a100:4"),
        ("mem", options.mem, r"\d+[KMGTkmgt]?", "a size like 64G, or 0 for all memory of the node"),
        ("array-seeds", options.array_seeds, _SEEDS, "seeds like 0-4, 1,2,7 or 0-9%2"),
    ):
        if text is not None and not re.fullmatch(pattern, text):
            yield f"--{flag} must be {expected}, got {text}"
    if not 1 <= options.signal_before <= 65535:
        yield f"--signal-before must be between 1 s and 65535 s, got {options.signal_before:g} s"
    for flag, value in (("--partition", options.partition), ("--account", options.account)):
        if value is not None and not re.fullmatch(r"[\w.,@+-]+", value):
            yield f"{flag} {value!r} is not a valid name in Slurm; use letters, digits, and . _ - + @ ,"
    for word in options.sbatch_option:
        if not word.startswith("-"):
            yield f"--sbatch-option must begin with -, got {word}; write it like --sbatch-option=--exclude=node7"
    if options.name is not None and not re.fullmatch(r"[\w.+@=-]{1,80}", options.name):
        yield f"--name {options.name!r} is not a valid name; use up to 80 letters, digits, and . _ - + @ ="
    if options.array_seeds is not None and not all(
        low <= high and step for low, high, step in _parse_ranges(options.array_seeds)
    ):
        yield f"--array-seeds: a range must go from the lower to the higher seed with a step from 1 up, got {options.array_seeds}"
    limit = parse_time_limit(slurm_time(options.time) or "UNLIMITED")
    if limit and limit <= options.signal_before:  # 0 means no limit to Slurm
        line = f"--signal-before {options.signal_before:g}s must be shorter than --time {options.time}"
        yield f"{line}; otherwise Slurm sends the signal at the start"


def write_script(script: JobScript, root: str, base: str) -> str:
    """Write the script to the runs folder and return its path. Raises Refusal."""
    folder = own_folder(root, job.FOLDER)
    try:
        os.makedirs(root, 0o700, exist_ok=True)
        os.makedirs(folder, 0o700, exist_ok=True)
        if own_folder(root, job.FOLDER) != folder:  # another user created it in the meantime
            raise Refusal(f"{folder} no longer belongs to you; choose another folder with --runs-dir", EX_CANTCREAT)
        for n in range(1, 1000):
            path = os.path.join(folder, f"{time.strftime('%Y%m%d-%H%M%S')}-{base}" + (f"-{n}" if n > 1 else "") + ".sh")
            try:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o755)
            except FileExistsError:
                continue
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(script.text)
            return path
    except OSError as problem:
        raise cannot_write(root, problem) from problem
    raise Refusal(f"{folder} already has 999 job scripts of this second; try again", EX_CANTCREAT)


def submit(path: str, script: JobScript, environ: Mapping[str, str]) -> str:
    """Submit the script, which is also at `path`. Return the number of the job. Raises Refusal with sbatch's messages."""
    # Inside a job or a rank, leave out their variables: sbatch and the new run must not use them as defaults.
    env = {
        name: value
        for name, value in environ.items()
        if name in ("SLURM_CONF", "SLURM_CLUSTERS")
        or (not name.startswith(("SLURM_", "SLURMD_")) and name not in RANK_VARIABLES)
    }
    try:
        process = subprocess.run(
            ["sbatch", "--parsable"],  # it reads the script from stdin, since the file could have been replaced
            input=script.text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SBATCH_S,
            check=False,
            env={**env, **script.secrets},
        )
    except subprocess.TimeoutExpired as problem:
        line = f"sbatch did not finish within {_SBATCH_S:.0f} s; the job script is {path}"
        raise Refusal(line, EX_UNAVAILABLE, cause="slurm.unreachable") from problem
    if process.returncode:
        lines = [line for line in process.stderr.splitlines() if line.strip()]
        errors = "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in lines)
        os.unlink(path)
        line = f"sbatch refused the job: {errors or f'exit code {process.returncode}'}"
        raise Refusal(line, EX_UNAVAILABLE, cause="slurm.refused")
    return process.stdout.strip().splitlines()[-1].partition(";")[0]


def write_job_note(root: str, number: str, script: JobScript, path: str, seeds: list[int]) -> None:
    """Write the note about the job that `stoker why slurm:JOB` reads. `seeds` are those of an array."""
    note = {"schema": 1, "job": number, "name": script.name, "seeds": seeds, "script": path, "submitted": time.time()}
    write_json(os.path.join(own_folder(root, job.FOLDER), f"{number}.json"), note)


def parse_seeds(text: str) -> list[int]:
    """Return all seeds in 0-4, 1,2,7 or 0-8:2%3."""
    return [seed for low, high, step in _parse_ranges(text) for seed in range(low, high + 1, step)]


def _parse_ranges(text: str) -> list[tuple[int, int, int]]:
    """Return (low, high, step) of each comma-separated part."""
    ranges = []
    for part in text.partition("%")[0].split(","):
        low, _, high_and_step = part.partition("-")
        high, _, step = high_and_step.partition(":")
        ranges.append((int(low), int(high or low), int(step or 1)))
    return ranges
