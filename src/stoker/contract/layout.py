"""Where things lie in a run directory. Paths only; `record` reads and writes them."""

from __future__ import annotations

import os

SCHEMA = 1
RUN = "run.json"
EVENTS = "events.jsonl"
VERDICT = "verdict.json"
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


def runs_root(given: str | None, environment: dict[str, str] | os._Environ[str]) -> str:
    return given or environment.get("STOKER_RUNS") or "runs"
