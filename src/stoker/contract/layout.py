"""Where things lie in a run directory. Paths only; `record` reads and writes them."""

from __future__ import annotations

import os

SCHEMA = 1
SYNCED = ".stoker-sync.json"  # in a working directory that --sync filled: what it brought
RUN = "run.json"
EVENTS = "events.jsonl"
VERDICT = "verdict.json"
RESERVE = ".reserve"  # disk space for the verdict, allocated at the start; becomes verdict.json
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
CONSOLE = "stoker.log"  # Stoker's own lines, so that `attach` can show them again
LATEST = "latest"


def attempt_dir(run_dir: str, attempt: int) -> str:
    return os.path.join(run_dir, f"attempt-{attempt}")


def rank_log(run_dir: str, attempt: int, rank: int) -> str:
    return os.path.join(attempt_dir(run_dir, attempt), f"rank-{rank}.log")


def rank_error(run_dir: str, attempt: int, rank: int) -> str:
    return os.path.join(attempt_dir(run_dir, attempt), f"rank-{rank}.error.json")


def rank_stack(run_dir: str, attempt: int, rank: int) -> str:
    return os.path.join(attempt_dir(run_dir, attempt), f"rank-{rank}.stack.txt")


def stacks(run_dir: str, attempt: int) -> str:
    """All ranks' stacks, workers and collectives, from the newest suspicion."""
    return os.path.join(attempt_dir(run_dir, attempt), "stacks.txt")


def runs_root(given: str | None, environment: dict[str, str] | os._Environ[str]) -> str:
    return given or environment.get("STOKER_RUNS") or "runs"


def scratch_files(base: str) -> dict[str, str]:
    """A rank's files on its host's local disk, for its agent and its shim."""
    return {
        "error": base + ".error.json",  # the shim's report of an exception
        "stack": base + ".stack",  # faulthandler's, on a fatal signal
        "asked": base + ".asked",  # faulthandler's, when the agent asks
        "elastic": base + ".elastic.json",  # torch's own error file
        "server": base + ".fr",  # the socket of torch's worker server; short: a socket's path has 107 bytes
    }
