"""Whose a run is, and which process launched it. Users may share a runs folder: each sees their own runs."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

from stoker.contract.layout import cache_home
from stoker.contract.names import EX_NOPERM, Refusal
from stoker.contract.owners import is_mine, is_own, user_name, why_a_folder_above_is_not_safe, why_not_ours_alone
from stoker.contract.process import kernel_lines

__all__ = ["cache_home", "is_mine", "own_folder", "private_cache", "user_name", "writes_to"]


def own_folder(root: str, name: str) -> str:
    """Return the path of `name` in a folder that several users may share, or of one with our uid if another user has it."""
    path = os.path.join(root, name)
    problem = why_not_ours_alone(root, sticky=True) if os.path.lexists(root) else ""
    if problem:
        raise Refusal(f"{root}: {problem}, and could replace your folders there; choose another folder", EX_NOPERM)
    for candidate in (path, f"{path}-{os.geteuid()}"):
        try:
            about = os.lstat(candidate)
        except FileNotFoundError:
            return candidate
        except OSError:
            continue  # another user's mount
        if _is_ours_alone(candidate, about):
            return candidate
    return _own_folder_with_suffix(root, f"{name}-{os.geteuid()}-")


def _is_ours_alone(folder: str, about: os.stat_result) -> bool:
    mine = stat.S_ISDIR(about.st_mode) and is_mine(about.st_uid, os.path.dirname(folder))
    return mine and not why_not_ours_alone(folder)


def _own_folder_with_suffix(root: str, prefix: str) -> str:
    """Return our folder whose name begins with `prefix`; make one with a random suffix if there is none."""
    import tempfile

    for entry in sorted(os.scandir(root), key=lambda entry: entry.name):
        named = entry.name.startswith(prefix) and is_own(entry.path)
        if named and _is_ours_alone(entry.path, entry.stat(follow_symlinks=False)):
            return entry.path
    try:
        return tempfile.mkdtemp(prefix=prefix, dir=root)
    except OSError as problem:
        line = f"{root}/{prefix}… can't be made: {problem.strerror}; choose another place"
        raise Refusal(line, EX_NOPERM) from problem


def private_cache(name: str, say: Callable[[str], None]) -> str:
    """A folder in this user's own cache, closed to everybody else: for code that will be executed (compiled kernels),
    which never lies in a project's folder, and for data where the folder asked for is not safe. Where there is no such
    place, a new one for this process alone.
    """
    path = os.path.join(cache_home(os.environ), name)
    try:
        for folder in (os.path.dirname(path), path):
            os.makedirs(folder, 0o700, exist_ok=True)
        problem = why_a_folder_above_is_not_safe(path) or why_not_ours_alone(path)
        if not problem:
            return path
    except OSError as error:
        problem = error.strerror or str(error)
    import tempfile

    fresh = tempfile.mkdtemp(prefix=f"stoker-{name}-")
    say(f"{path} can't be used ({problem}): {name} is kept in {fresh}, for this start only")
    return fresh


def writes_to(pid: int, path: str) -> bool | None:
    """Is that file open for writing in this process? No record can fake that. None: we may not look."""
    folder, name = os.path.split(path)
    folder = os.path.realpath(folder)
    try:
        handles = os.listdir(f"/proc/{pid}/fd")
    except PermissionError:
        return None
    except OSError:
        return False
    return any(
        _writes_to(f"/proc/{pid}/fd/{handle}", f"/proc/{pid}/fdinfo/{handle}", folder, name) for handle in handles
    )


def _writes_to(link: str, info: str, folder: str, name: str) -> bool:
    try:
        target = os.readlink(link).removesuffix(" (deleted)")
        if os.path.basename(target) != name:
            return False
        flags = next((int(line.split()[1], 8) for line in kernel_lines(info) if line.startswith("flags:")), 0)
        if flags & os.O_ACCMODE == os.O_RDONLY:
            return False
        # By name, so that one who removes the file of a living run does not make it a dead one; else by inode: a mount
        # may show it under two names.
        return os.path.dirname(target) == folder or os.path.samestat(os.stat(link), os.stat(os.path.join(folder, name)))
    except (OSError, ValueError):
        return False  # closed meanwhile
