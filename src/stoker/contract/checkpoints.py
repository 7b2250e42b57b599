"""Finds the newest complete checkpoint of a run, for `stoker.resume()`, for restarts and for the report of a stop."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from stoker.contract import layout, safe_io
from stoker.contract.frozen import frozen
from stoker.contract.text import escape

_STEP_DIR, _MANIFEST = re.compile(r"step-([0-9]{8,18})"), "manifest.json"


@frozen
class SavedCheckpoint:
    path: str
    time: float  # of its last change


def find_newest_checkpoint(run_dir: str, warn: Callable[[str], None] | None = None) -> SavedCheckpoint | None:
    """Return the newest complete checkpoint of a run, or None.

    A folder is complete if it holds manifest.json, which is written last, and every file that the manifest names has
    its size. A file is complete once it has its own name (write to NAME.tmp, then rename). Checkpoints of
    other users are left out, except root's. `warn` gets a line about those, and one about newer folders that are
    incomplete: a script that writes no manifest would start from scratch each time without a hint why.
    """
    checkpoints_dir = os.path.join(run_dir, layout.CHECKPOINTS)
    try:
        if not _is_trusted(checkpoints_dir, run_dir, warn):
            return None
        entries = [
            entry
            for entry in os.scandir(checkpoints_dir)
            if not entry.name.startswith(".")
            and not entry.name.endswith((".tmp", ".part"))
            and _is_trusted(entry.path, checkpoints_dir, warn)
        ]
        entries.sort(key=lambda entry: (_step_in_name(entry.name), entry.stat().st_mtime), reverse=True)
    except OSError:
        return None
    incomplete: list[tuple[str, str]] = []  # (path, what is missing)
    newest = None
    for entry in entries:
        missing = _find_missing_part(entry.path) if entry.is_dir() else ""
        if not missing:
            # Putting the last file in place changes the folder's own time; renaming the folder doesn't.
            newest = SavedCheckpoint(entry.path, entry.stat().st_mtime)
            break
        incomplete.append((entry.path, missing))
    if incomplete and warn is not None:
        path, missing = incomplete[0]
        others = f" ({len(incomplete) - 1} more like it)" if len(incomplete) > 1 else ""
        instead = f"using {escape(os.path.basename(newest.path))}" if newest else "there is no other checkpoint"
        warn(
            f"{escape(path)} is not a complete checkpoint: {missing}{others}; {instead}"
            " (`stoker docs python` explains what makes one complete)"
        )
    return newest


def find_newest_step(run_dir: str) -> int | None:
    """Return the step of the newest folder with a manifest that `stoker train` has saved, or None. Reads names only."""
    checkpoints_dir = os.path.join(run_dir, layout.CHECKPOINTS)
    try:
        steps = [int(match[1]) for name in os.listdir(checkpoints_dir) if (match := _STEP_DIR.fullmatch(name))]
    except OSError:
        return None
    for step in sorted(steps, reverse=True):
        if os.path.exists(os.path.join(checkpoints_dir, f"step-{step:08d}", _MANIFEST)):
            return step
    return None


def _is_trusted(path: str, parent: str, warn: Callable[[str], None] | None) -> bool:
    """Return whether neither the entry nor what it links to belongs to another user: a script may unpickle it."""
    try:
        uids = (os.lstat(path).st_uid, os.stat(path).st_uid)
    except OSError:
        return False  # removed meanwhile, a dangling link, or another user's mount
    other_uids = [uid for uid in uids if not safe_io.is_trusted(uid, parent)]
    if other_uids and warn is not None:
        warn(
            f"{escape(path)} belongs to {safe_io.user_name(other_uids[0])}, so it is not used as a checkpoint of this run"
        )
    return not other_uids


def _step_in_name(name: str) -> int:
    numbers = re.findall("[0-9]+", os.path.splitext(name)[0])
    return int(numbers[-1]) if numbers else -1


def _find_missing_part(checkpoint_dir: str) -> str:
    """Return what a checkpoint lacks to be complete, or "" if it is complete."""
    manifest = os.path.join(checkpoint_dir, _MANIFEST)
    if not os.path.exists(manifest):
        return "it has no manifest.json"
    try:
        files = safe_io.read_json(manifest).get("files", {})
        is_complete = all(
            os.path.getsize(os.path.join(checkpoint_dir, name)) == _listed_size(entry) for name, entry in files.items()
        )
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        is_complete = False
    return "" if is_complete else "a file that its manifest.json lists is missing or has another size"


def _listed_size(entry: object) -> int:
    return int(entry["size"]) if isinstance(entry, dict) else int(entry)  # type: ignore[call-overload]
