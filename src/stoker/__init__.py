"""Stoker trains LLMs on whatever GPUs there are.

A training script may call four functions; outside a run they do nothing:
    stoker.beat(step=..., loss=..., tokens=...)   stoker.mark("POST-MODEL")   stoker.phase("eval")   stoker.resume()

From Python, instead of `stoker run`:
    results = stoker.launch(train, config, nproc=4)     # {rank: return value of train(config)}
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__version__ = "0.2.0"
__all__ = ["LaunchFailed", "__version__", "beat", "launch", "mark", "phase", "resume"]


def _find_shim() -> "Any":
    """Return the shim that Stoker installed in this rank, or None outside a run and in a rank's helper processes."""
    shim = sys.modules.get("stoker.control.rank.shim")
    return shim if shim is not None and shim.is_rank_process() else None


def beat(step: "int | None" = None, loss: "float | None" = None, tokens: "int | None" = None) -> None:
    """Report one step of progress. Pass `loss` as a float you already have: reading a tensor may wait for the GPU."""
    if shim := _find_shim():
        shim.script_beat(step, loss)


def mark(name: str) -> None:
    """Report a point in the script's life, e.g. "POST-MODEL" once the model is loaded."""
    if shim := _find_shim():
        shim.send("mark", str(name)[:64])


def phase(name: str) -> None:
    """Report what the script does from now on: "train", "eval", "save" ... A long phase is then not taken for a hang."""
    if shim := _find_shim():
        shim.send("phase", str(name)[:32])


def resume() -> "str | None":
    """Return the path of the newest complete checkpoint under this run's checkpoints/, or None.

    A checkpoint folder is complete if it has a manifest.json, which is written last, and every file listed there has
    its listed size. A checkpoint file always counts as complete, so write it to NAME.tmp first, then rename it.
    """
    run_dir = os.environ.get("STOKER_RUN_DIR")
    if not run_dir:
        return None
    from importlib import import_module  # `import stoker` loads no other module of the package

    def print_once(line: str) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # once per host
            print(f"stoker: {line}", file=sys.stderr, flush=True)

    checkpoint = import_module("stoker.contract.checkpoints").find_newest_checkpoint(run_dir, print_once)
    return checkpoint.path if checkpoint else None


class LaunchFailed(RuntimeError):
    """Raised when a run of stoker.launch fails. `verdict` explains why (`stoker docs verdicts`); the other attributes
    are shortcuts to its fields.
    """

    def __init__(self, verdict: "Any", run_dir: str, traceback: str) -> None:
        record = f"; record: {run_dir}" if run_dir else ""
        super().__init__(verdict.summary + record + (f"\n\n{traceback}" if traceback else ""))
        self.verdict = verdict
        self.cause: str = verdict.cause
        self.rank: int | None = verdict.rank  # the guilty rank
        self.exit_code: int = verdict.exit_code
        self.run_dir = run_dir  # "" if the run was refused
        self.traceback = traceback  # text of the guilty rank's exception, or ""


def launch(
    function: "Callable[..., Any]",
    /,
    *args: "Any",
    nproc: "int | str | None" = None,
    env: "dict[str, str] | None" = None,
    **options: "Any",
) -> "dict[int, Any]":
    """Call function(*args) in every rank of a run on this machine. Return {rank: its result}; raise LaunchFailed.

    nproc: number of ranks, or gpu, cpu, auto (default: one per usable GPU). env: variables for the ranks. options: those
    of `stoker run` with underscores, e.g. gpus="0,1", max_restarts=2, grace="60s", quiet=True, show="none",
    runs_dir="...". Ctrl-C stops the run. `stoker docs torchrun` has examples.
    """
    from importlib import import_module  # the launcher's modules are loaded only here

    results: dict[int, Any] = import_module("stoker.calling").launch(function, args, nproc, env, options)
    return results
