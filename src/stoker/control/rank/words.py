"""The four words a script can say. Outside a run, and in a rank's helper processes, they do nothing."""

from __future__ import annotations

import os
import sys


def _shim() -> object | None:
    shim = sys.modules.get("stoker.control.rank.shim")
    return shim if shim is not None and shim.inside() else None


def beat(step: int | None = None, loss: float | None = None, tokens: int | None = None) -> None:
    """One step of progress. `loss` may be a tensor only if reading it is free: pass a float you already have."""
    shim = _shim()
    if shim is not None:
        shim.script_beat(step, loss, tokens)  # type: ignore[attr-defined]


def mark(name: str) -> None:
    """A point in the script's life, e.g. "POST-MODEL" once the model is loaded."""
    shim = _shim()
    if shim is not None:
        shim.tell("mark", str(name)[:64])  # type: ignore[attr-defined]


def phase(name: str) -> None:
    """What the script does from here on: "train", "eval", "save" ... Long phases that say so are not taken for a hang."""
    shim = _shim()
    if shim is not None:
        shim.script_phase(str(name))  # type: ignore[attr-defined]


def resume() -> str | None:
    """The path of the newest complete checkpoint under this run's checkpoints/, or None.

    A folder is complete when it holds manifest.json, written last, and every file the manifest names is there with its
    size; a file is complete when it is in place under its own name (write to NAME.tmp, then rename).
    """
    run_dir = os.environ.get("STOKER_RUN_DIR")
    if not run_dir:
        return None
    from stoker.contract.checkpoints import newest

    saved = newest(run_dir, lambda line: print(f"stoker: {line}", file=sys.stderr, flush=True))
    return saved.path if saved else None
