"""The folder of checkpoints: names, atomic steps between them, what stays and what goes, who may write."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator

from stoker.contract import safe_io
from stoker.contract.errors import EX_CANTCREAT, EX_TEMPFAIL, Refusal
from stoker.contract.safe_io import open_lock_file, sync_folder
from stoker.training.checkpoint.manifest import NAME as MANIFEST

_STEP = re.compile(r"step-(\d{8,})")
_TOKEN = re.compile(r"[A-Za-z0-9_]+")
_UNFINISHED = re.compile(r"step-\d{8,}\.([A-Za-z0-9_]+)-(\d+)\.tmp")
_BEING_DELETED = re.compile(r"\.gone-(\.replaced-)?step-\d{8,}[^/]*-\d+")
_GONE, _REPLACED, LOCK = ".gone-", ".replaced-", ".writer"


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def unfinished_name(step: int, token: str, serial: int) -> str:
    """Ends in .tmp, so that nobody takes it for a checkpoint. The serial tells a second try of a step from the first."""
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"token {token!r}: letters, digits and _ only")
    return f"{name_of(step)}.{token}-{serial}.tmp"


def steps_in(folder: str) -> dict[int, str]:
    """Return step -> path of everything that has a checkpoint's name, newest first."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    numbers = {name: int(match[1]) for name in names if (match := _STEP.fullmatch(name))}
    found = {step: os.path.join(folder, name) for name, step in numbers.items() if name == name_of(step)}
    return dict(sorted(found.items(), reverse=True))


def is_trusted(path: str) -> bool:
    """Ours or root's: another user's checkpoint is not resumed from, not counted and not removed."""
    try:
        return safe_io.is_trusted(os.lstat(path).st_uid, os.path.dirname(path))
    except OSError:  # removed meanwhile, or not for us to look at
        return False


def make_unfinished(path: str) -> None:
    """Create the folder of a checkpoint, whichever rank comes first. Raises OSError if another user's is in its place."""
    os.makedirs(path, exist_ok=True)
    if not is_own_folder(path):
        raise OSError(errno.EEXIST, "another user has put something in its place", path)


def is_own_folder(path: str) -> bool:
    """Return whether this is a folder of ours and no link: in a folder that several users share, others may make one."""
    return os.path.isdir(path) and not os.path.islink(path) and safe_io.is_own(path)


def remove(path: str) -> None:
    """Under a hidden name first: a half-deleted checkpoint is never taken for one."""
    parent, name = os.path.split(path)
    gone = os.path.join(parent, f"{_GONE}{name}-{os.getpid()}")
    try:
        os.rename(path, gone)
    except FileNotFoundError:
        return
    shutil.rmtree(gone)


def put_in_place(fresh: str, final: str) -> None:
    """Rename `fresh` to `final`, which it replaces if it exists; `repair` undoes a crash between the two renames."""
    parent, name = os.path.split(final)
    old = os.path.join(parent, _REPLACED + name)
    replaces = os.path.isdir(final)
    if replaces:
        if os.path.isdir(old):
            remove(old)
        os.rename(final, old)
    os.rename(fresh, final)
    sync_folder(parent)
    if replaces:
        remove(old)


def repair(folder: str, only: str = "") -> None:
    """A checkpoint (or the folder `only`) that was being replaced when the writer died comes back."""
    if not os.path.isdir(folder):
        return
    for name in _own_names(folder):
        if name == _REPLACED + only if only else name.startswith(_REPLACED):
            final = os.path.join(folder, name.removeprefix(_REPLACED))
            if os.path.isdir(final):
                remove(os.path.join(folder, name))
            else:
                os.rename(os.path.join(folder, name), final)


def _own_names(folder: str) -> Iterator[str]:
    """What we made: in a folder that several users share, the others look after theirs."""
    for name in os.listdir(folder):
        if safe_io.is_own(os.path.join(folder, name)):
            yield name


def sweep(folder: str, dead: Callable[[str, int], bool]) -> None:
    """Removes the unfinished checkpoints whose (token, serial) is dead, and what was being deleted when somebody died."""
    for name in _own_names(folder):
        match = _UNFINISHED.fullmatch(name)
        if match and dead(match[1], int(match[2])):
            remove(os.path.join(folder, name))
        elif _BEING_DELETED.fullmatch(name):
            shutil.rmtree(os.path.join(folder, name))


def is_checkpoint(path: str) -> bool:
    """It has a manifest: nothing else is ours, whatever its name."""
    return os.path.isfile(os.path.join(path, MANIFEST))


def retire(folder: str, step: int, keep: int, scores: dict[int, float | None], keep_best: bool) -> None:
    """Keeps the newest `keep` complete ones (`scores` has those), the best, what is later than `step`, and what is not in
    `scores`: it is damaged, another run's, or no checkpoint at all.
    """
    complete = sorted((one for one in scores if one <= step), reverse=True)
    staying = {step, *complete[: max(keep, 1)]}
    scored = {one: score for one, score in scores.items() if score is not None}
    if keep_best and scored:
        staying.add(min(scored, key=lambda one: (scored[one], -one)))
    for one, path in steps_in(folder).items():
        if one < step and one in scores and one not in staying and is_trusted(path):
            remove(path)


def hold(folder: str, say: Callable[[str], None]) -> int | None:
    """Makes the folder and locks it for this process's life: two jobs in one folder would delete each other's files.

    A POSIX lock: unlike flock it is not inherited by forked data workers, so it goes with the process that took it.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        fd = open_lock_file(os.path.join(folder, LOCK))
    except OSError as problem:
        raise Refusal(
            f"checkpoints can't be written in {folder}: {problem.strerror}; give another place with"
            " --checkpoint.folder",
            EX_CANTCREAT,
        ) from problem
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as problem:
        holder = os.read(fd, 200).decode("utf-8", "replace").strip() or "another process"
        os.close(fd)
        raise Refusal(
            f"{holder} is writing checkpoints in {folder}; stop it or give another place with --checkpoint.folder",
            EX_TEMPFAIL,
        ) from problem
    except OSError as problem:
        say(
            f"{folder}: this file system can't lock ({problem.strerror}); make sure that only one job writes its"
            " checkpoints there"
        )
        os.close(fd)
        return None
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except OSError as problem:
        say(f"{folder}: {problem.strerror}; checkpoints will fail until that is fixed")
    return fd
