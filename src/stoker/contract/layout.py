"""Paths of a run directory and of the folders around it. control/record reads and writes the files."""

from __future__ import annotations

import os
from collections.abc import Mapping

from stoker.contract.errors import EX_CANTCREAT, Refusal
from stoker.contract.safe_io import why_shared

SCHEMA = 1
SYNCED = ".stoker-sync.json"  # in a working directory that --sync filled: the list of its files
RUN = "run.json"
EVENTS = "events.jsonl"
VERDICT = "verdict.json"
RESERVE = ".reserve"  # disk space for the verdict, allocated at the start; becomes verdict.json
METRICS = "metrics.jsonl"
ROLLOUTS = "rollouts.jsonl"
MEMORY = "memory.json"  # planned and measured memory of a training run
SERVING = "serving"  # statistics of a server, one file per rank
PROGRESS = "progress.json"  # progress of a long operation of rank 0, for the bar of `attach`
CHECKPOINTS = "checkpoints"
MODEL = "hf"  # the trained model in the format of transformers
ROLES = "roles"  # the run directories of a job's roles
CONSOLE = "stoker.log"  # Stoker's own lines; `attach` shows them again
LATEST = "latest"
CACHE_INSIDE = "stoker-cache"  # the cache inside a folder that also holds other things
# The cache directory tagging specification: backup programs leave such a folder out.
CACHE_TAG = "CACHEDIR.TAG"
CACHE_SIGNATURE = (
    "Signature: 8a477f597d28d172789f06886806bc55\n# A cache of Stoker's: prepared data, tokenizers and compiled code."
    " It may be removed.\n"
)
HISTORY = "history"  # the state of ranks, GPUs and hosts over time


def attempt_dir(run_dir: str, attempt: int) -> str:
    return os.path.join(run_dir, f"attempt-{attempt}")


def rank_log(run_dir: str, attempt: int, rank: int) -> str:
    return os.path.join(attempt_dir(run_dir, attempt), f"rank-{rank}.log")


def rank_error(run_dir: str, attempt: int, rank: int) -> str:
    return os.path.join(attempt_dir(run_dir, attempt), f"rank-{rank}.error.json")


def rank_stack(run_dir: str, attempt: int, rank: int) -> str:
    return os.path.join(attempt_dir(run_dir, attempt), f"rank-{rank}.stack.txt")


def all_stacks(run_dir: str, attempt: int) -> str:
    """Return the file with the stacks, workers and collectives of all ranks at the newest suspected hang."""
    return os.path.join(attempt_dir(run_dir, attempt), "stacks.txt")


def runs_root(runs_dir: str | None, environment: dict[str, str] | os._Environ[str], write: bool = False) -> str:
    """Return the folder of run directories: `runs_dir`, else $STOKER_RUNS, else ./runs, else this user's private one.

    The private one is used if ./runs can't be written. `write` says that a new run goes there; without it, a read-only
    ./runs is returned if the user has no private folder. Raises Refusal if others can replace what is in it.
    """
    chosen = runs_dir or environment.get("STOKER_RUNS")
    if chosen or _is_writable("runs"):
        root = chosen or "runs"
        why = why_unsafe_root(root) if write else ""
        if why:
            line = f"the runs folder {os.path.abspath(root)} can't be used: {why}, so others can replace your runs"
            raise Refusal(f"{line}; choose another folder with --runs-dir", EX_CANTCREAT, cause="launch.runs-dir")
        return root
    private = private_runs_root(environment)
    base = os.path.dirname(os.path.dirname(private))
    why = why_shared(base) if os.path.exists(base) else ""
    if why:
        line = f"{os.getcwd()} can't be written, and {base} can't be used: {why}; choose a folder with --runs-dir"
        raise Refusal(line, EX_CANTCREAT, cause="launch.runs-dir")
    return "runs" if not write and os.path.isdir("runs") and not os.path.isdir(private) else private


def why_unsafe_root(root: str) -> str:
    """Return why others could replace a run directory in this folder, or "" if they can't or it does not exist yet."""
    try:
        return why_shared(root, sticky=True)
    except OSError:
        return ""  # it will be created; any other problem shows up when it is written


def private_runs_root(environment: dict[str, str] | os._Environ[str]) -> str:
    """Return a folder in the user's state folder, else in TMPDIR: one per working directory, since names may clash."""
    home = environment.get("HOME") or os.path.expanduser("~")
    state = environment.get("XDG_STATE_HOME") or os.path.join(home, ".local", "state")
    base = os.path.join(state, "stoker") if os.path.isabs(state) else ""
    if not base or not _is_writable(base):
        base = os.path.join(environment.get("TMPDIR") or "/tmp", f"stoker-runs-{os.geteuid()}")
    return os.path.join(base, "runs", os.getcwd().strip(os.sep).replace(os.sep, "-") or "root")


def cache_home(environment: Mapping[str, str]) -> str:
    """Return this user's cache folder. Without HOME and a password entry it is a path that can't exist."""
    home = os.path.expanduser("~")
    base = os.path.join(home if os.path.isabs(home) else "/nonexistent", ".cache")
    return os.path.join(environment.get("XDG_CACHE_HOME") or base, "stoker")


def _is_writable(path: str) -> bool:
    """Return whether files can be created in this folder, or the folder itself if it doesn't exist."""
    path = os.path.abspath(path)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)


def scratch_files(base: str) -> dict[str, str]:
    """Return the files on a host's local disk through which a rank's shim and its agent talk."""
    return {
        "error": base + ".error.json",  # the shim's report of an exception
        "stack": base + ".stack",  # faulthandler's output on a fatal signal
        "asked": base + ".asked",  # faulthandler's output when the agent asks
        "elastic": base + ".elastic.json",  # torch's own error file
        "server": base + ".fr",  # the socket of torch's worker server; short: a socket's path has 107 bytes
    }
