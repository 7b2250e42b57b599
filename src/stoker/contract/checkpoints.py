"""The newest complete checkpoint of a run: what `stoker.resume()` gives, and what a stop reports as saved."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from stoker.contract import layout, safe_io
from stoker.contract.frozen import frozen
from stoker.contract.text import escape

_FOLDER, _MANIFEST = re.compile(r"step-([0-9]{8,18})"), "manifest.json"


@frozen
class SavedCheckpoint:
    path: str
    time: float  # of its last change


def find_newest_checkpoint(run_dir: str, say: Callable[[str], None] | None = None) -> SavedCheckpoint | None:
    """A folder is complete when it holds manifest.json, written last, and every file the manifest names is there with
    its size; a file is complete when it is in place under its own name (write to NAME.tmp, then rename).

    What another user (but root) put there is left out, and `say` gets a line about it. It gets one, too, where newer
    folders are incomplete: a script that writes no manifest would start from scratch each time, and not know why.
    """
    folder = os.path.join(run_dir, layout.CHECKPOINTS)
    try:
        if not _trusted(folder, run_dir, say):
            return None
        named = (entry for entry in os.scandir(folder) if not entry.name.startswith("."))
        whole = (entry for entry in named if not entry.name.endswith((".tmp", ".part")))
        entries = [entry for entry in whole if _trusted(entry.path, folder, say)]
        entries.sort(key=lambda entry: (_step_in(entry.name), entry.stat().st_mtime), reverse=True)
    except OSError:
        return None
    incomplete: list[tuple[str, str]] = []  # path, and why
    saved = None
    for entry in entries:
        lacks = _missing_part(entry.path) if entry.is_dir() else ""
        if not lacks:
            # A folder's own time changes when its last file is put in place, and a rename of the folder leaves it.
            saved = SavedCheckpoint(entry.path, entry.stat().st_mtime)
            break
        incomplete.append((entry.path, lacks))
    if incomplete and say is not None:
        say(_skipping(incomplete, saved))
    return saved


def find_newest_step(run_dir: str) -> int | None:
    """Of `stoker train`'s own: the number in the name of the newest folder with a manifest. Nothing of it is read."""
    folder = os.path.join(run_dir, layout.CHECKPOINTS)
    try:
        steps = sorted(int(match[1]) for name in os.listdir(folder) if (match := _FOLDER.fullmatch(name)))
    except OSError:
        return None
    there = (step for step in reversed(steps) if os.path.exists(os.path.join(folder, f"step-{step:08d}", _MANIFEST)))
    return next(there, None)


def _skipping(incomplete: list[tuple[str, str]], saved: SavedCheckpoint | None) -> str:
    path, lacks = incomplete[0]
    others = f" ({len(incomplete) - 1} more like it)" if len(incomplete) > 1 else ""
    instead = f"using {escape(os.path.basename(saved.path))}" if saved else "there is no other"
    return (
        f"{escape(path)} does not count as a complete checkpoint: {lacks}{others}; {instead}"
        " (`stoker docs python`: what makes one complete)"
    )


def _trusted(path: str, folder: str, say: Callable[[str], None] | None) -> bool:
    """Not another user's, neither by itself nor where it leads as a link. A script may unpickle it."""
    try:
        uids = (os.lstat(path).st_uid, os.stat(path).st_uid)
    except OSError:
        return False  # gone meanwhile, a link to nowhere, or another user's mount
    theirs = [uid for uid in uids if not safe_io.is_trusted(uid, folder)]
    if theirs and say is not None:
        say(f"{escape(path)} belongs to {safe_io.user_name(theirs[0])}: it is not taken for a checkpoint of this run")
    return not theirs


def _step_in(name: str) -> int:
    numbers = re.findall("[0-9]+", os.path.splitext(name)[0])
    return int(numbers[-1]) if numbers else -1


def _missing_part(folder: str) -> str:
    """What a folder lacks to be complete; empty: nothing."""
    from stoker.contract.safe_io import read_json

    manifest = os.path.join(folder, _MANIFEST)
    if not os.path.exists(manifest):
        return "it has no manifest.json"
    try:
        files = read_json(manifest).get("files", {})
        whole = all(os.path.getsize(os.path.join(folder, name)) == _size(want) for name, want in files.items())
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        whole = False
    return "" if whole else "not every file that its manifest.json lists is there with its size"


def _size(want: object) -> int:
    return int(want["size"]) if isinstance(want, dict) else int(want)  # type: ignore[call-overload]
