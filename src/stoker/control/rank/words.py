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

    A folder is complete when it holds manifest.json, written last, and every file the manifest names is there with its size;
    a file is complete when it is in place under its own name (write to NAME.tmp, then rename).
    """
    run_dir = os.environ.get("STOKER_RUN_DIR")
    if not run_dir:
        return None
    folder = os.path.join(run_dir, "checkpoints")
    try:
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".") and not entry.name.endswith((".tmp", ".part"))]
    except FileNotFoundError:
        return None
    entries.sort(key=lambda entry: (_step_in(entry.name), entry.stat().st_mtime), reverse=True)
    for entry in entries:
        if not entry.is_dir() or _complete(entry.path):
            return entry.path
    return None


def _step_in(name: str) -> int:
    digits = ""
    for char in reversed(os.path.splitext(name)[0]):
        if char in "0123456789":
            digits = char + digits
        elif digits:
            break
    return int(digits) if digits else -1


def _complete(folder: str) -> bool:
    from stoker.contract.untrusted import read_json

    try:
        files = read_json(os.path.join(folder, "manifest.json"), 1 << 30).get("files", {})
        return all(os.path.getsize(os.path.join(folder, name)) == _size(want) for name, want in files.items())
    except (OSError, ValueError, AttributeError):
        return False


def _size(want: object) -> int:
    return int(want["size"]) if isinstance(want, dict) else int(want)  # type: ignore[call-overload]
