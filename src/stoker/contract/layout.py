"""Where things lie in a run directory. Paths only; `record` reads and writes them."""

from __future__ import annotations

import os
from collections.abc import Mapping

from stoker.contract.errors import EX_CANTCREAT, Refusal
from stoker.contract.safe_io import why_shared

SCHEMA = 1
SYNCED = ".stoker-sync.json"  # in a working directory that --sync filled: what it brought
RUN = "run.json"
EVENTS = "events.jsonl"
VERDICT = "verdict.json"
RESERVE = ".reserve"  # disk space for the verdict, allocated at the start; becomes verdict.json
METRICS = "metrics.jsonl"
ROLLOUTS = "rollouts.jsonl"
MEMORY = "memory.json"  # planned and measured, of a run that trains
SERVING = "serving"  # what a server has done, a file for each of its ranks
PROGRESS = "progress.json"  # where rank 0 is in what takes it long: the bar that `attach` draws
CHECKPOINTS = "checkpoints"
MODEL = "hf"  # what a run that trains has made, as transformers writes it
ROLES = "roles"  # the runs of a job's roles
CONSOLE = "stoker.log"  # Stoker's own lines, so that `attach` can show them again
LATEST = "latest"
CACHE_INSIDE = "stoker-cache"  # of a folder that holds other things, too
# Of the cache directory tagging specification: backups leave such a folder out, too.
CACHE_TAG = "CACHEDIR.TAG"
CACHE_SIGNATURE = (
    "Signature: 8a477f597d28d172789f06886806bc55\n# A cache of Stoker's: prepared data, tokenizers and compiled code."
    " It may be removed.\n"
)
HISTORY = "history"  # how ranks, cards and hosts stood, moment by moment


def attempt_dir(run_dir: str, attempt: int) -> str:
    return os.path.join(run_dir, f"attempt-{attempt}")


def rank_log(run_dir: str, attempt: int, rank: int) -> str:
    return os.path.join(attempt_dir(run_dir, attempt), f"rank-{rank}.log")


def rank_error(run_dir: str, attempt: int, rank: int) -> str:
    return os.path.join(attempt_dir(run_dir, attempt), f"rank-{rank}.error.json")


def rank_stack(run_dir: str, attempt: int, rank: int) -> str:
    return os.path.join(attempt_dir(run_dir, attempt), f"rank-{rank}.stack.txt")


def all_stacks(run_dir: str, attempt: int) -> str:
    """All ranks' stacks, workers and collectives, from the newest suspicion."""
    return os.path.join(attempt_dir(run_dir, attempt), "stacks.txt")


def runs_root(given: str | None, environment: dict[str, str] | os._Environ[str], write: bool = False) -> str:
    """The folder of the runs: as named, else ./runs, else (if that can't be written) a private one of this user's.

    `write`: a new run goes there. Without, ./runs that can be read only is looked at where the user has no private one.
    """
    named = given or environment.get("STOKER_RUNS")
    if named or _writable("runs"):
        root = named or "runs"
        why = why_unsafe_root(root) if write else ""
        if why:
            line = f"the runs folder {os.path.abspath(root)} can't be used: {why}, so others can replace your runs"
            raise Refusal(f"{line}; choose a folder of your own with --runs-dir", EX_CANTCREAT, cause="launch.runs-dir")
        return root
    private = private_runs_root(environment)
    base = os.path.dirname(os.path.dirname(private))
    problem = why_shared(base) if os.path.exists(base) else ""
    if problem:
        line = f"{os.getcwd()} can't be written, and {base} can't be used ({problem}): name a folder with --runs-dir"
        raise Refusal(line, EX_CANTCREAT, cause="launch.runs-dir")
    return "runs" if not write and os.path.isdir("runs") and not os.path.isdir(private) else private


def why_unsafe_root(root: str) -> str:
    """Why others could put another run directory in the place of ours. Empty: nobody can, or it is not there yet."""
    try:
        return why_shared(root, sticky=True)
    except OSError:
        return ""  # to be made; or the reason shows when it is written


def private_runs_root(environment: dict[str, str] | os._Environ[str]) -> str:
    """Below the user's state folder, else TMPDIR. One per working directory: names of runs must not clash."""
    home = environment.get("HOME") or os.path.expanduser("~")
    state = environment.get("XDG_STATE_HOME") or os.path.join(home, ".local", "state")
    base = os.path.join(state, "stoker") if os.path.isabs(state) else ""
    if not base or not _writable(base):
        base = os.path.join(environment.get("TMPDIR") or "/tmp", f"stoker-runs-{os.geteuid()}")
    return os.path.join(base, "runs", os.getcwd().strip(os.sep).replace(os.sep, "-") or "root")


def cache_home(environment: Mapping[str, str]) -> str:
    """This user's own folder for what may be made again. Without HOME and password entry one that can't exist."""
    home = os.path.expanduser("~")
    base = os.path.join(home if os.path.isabs(home) else "/nonexistent", ".cache")
    return os.path.join(environment.get("XDG_CACHE_HOME") or base, "stoker")


def _writable(folder: str) -> bool:
    """Whether files can be made there, where it isn't there yet: whether it can be made."""
    folder = os.path.abspath(folder)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)


def scratch_files(base: str) -> dict[str, str]:
    """A rank's files on its host's local disk, for its agent and its shim."""
    return {
        "error": base + ".error.json",  # the shim's report of an exception
        "stack": base + ".stack",  # faulthandler's, on a fatal signal
        "asked": base + ".asked",  # faulthandler's, when the agent asks
        "elastic": base + ".elastic.json",  # torch's own error file
        "server": base + ".fr",  # the socket of torch's worker server; short: a socket's path has 107 bytes
    }
