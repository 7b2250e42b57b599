"""Whose a run is, and which process is its launcher. Several users may share a runs folder: each sees and stops the
runs of their own.
"""

from __future__ import annotations

import os
import stat

from stoker.contract.names import EX_NOPERM, Refusal
from stoker.contract.owners import is_mine, user_name

__all__ = ["is_mine", "own_folder", "user_name", "writes_to"]


def own_folder(root: str, name: str) -> str:
    """`name` in a folder that several may share; where that is another user's already, one with our number beside it.
    Closed to others' writing.
    """
    path = os.path.join(root, name)
    for candidate in (path, *(f"{path}-{os.geteuid()}" + (f"-{n}" if n > 1 else "") for n in range(1, 100))):
        try:
            about = os.lstat(candidate)
        except FileNotFoundError:
            return candidate
        if stat.S_ISDIR(about.st_mode) and is_mine(about.st_uid, root) and not about.st_mode & 0o022:
            return candidate
    raise Refusal(f"{path} and its like belong to other users; choose another folder with --runs-dir", EX_NOPERM)


def writes_to(pid: int, path: str) -> bool | None:
    """Has this process that file open for writing? A record can name any process, but can't make this true. None: we
    may not look.
    """
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
        with open(info, encoding="ascii", errors="replace") as file:
            flags = next((int(line.split()[1], 8) for line in file if line.startswith("flags:")), 0)
        if flags & os.O_ACCMODE == os.O_RDONLY:
            return False
        # By name, so that one who removes the file of a living run does not make it a dead one; else by inode: a mount
        # may show it under two names.
        return os.path.dirname(target) == folder or os.path.samestat(os.stat(link), os.stat(os.path.join(folder, name)))
    except (OSError, ValueError):
        return False  # closed meanwhile
