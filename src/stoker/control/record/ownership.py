"""Whose a run is, and which process launched it. Users may share a runs folder: each sees their own runs."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

from stoker.contract.errors import EX_NOPERM, Refusal
from stoker.contract.layout import cache_home
from stoker.contract.process import kernel_lines
from stoker.contract.safe_io import is_own_uid, why_shared


def own_folder(root: str, name: str) -> str:
    """Return the path of `name` in a folder that several users may share; with our uid if another user has that name.

    It exists and is ours alone, or it is missing. Raises Refusal if there is no such path.
    """
    problem = why_shared(root, sticky=True) if os.path.lexists(root) else ""
    if problem:
        raise Refusal(f"{root}: {problem}, and could replace your folders there; choose another folder", EX_NOPERM)
    path = os.path.join(root, name)
    for candidate in (path, f"{path}-{os.geteuid()}"):
        try:
            about = os.lstat(candidate)
        except FileNotFoundError:
            return candidate
        except OSError:
            continue  # another user's mount
        mine = stat.S_ISDIR(about.st_mode) and is_own_uid(about.st_uid, root)
        if mine and not why_shared(candidate):
            return candidate
    raise Refusal(f"other users have {path} and {path}-{os.geteuid()}; choose another folder", EX_NOPERM)


def private_cache(name: str, say: Callable[[str], None]) -> str:
    """Return a folder in this user's cache that nobody else can write to. Where that fails, a new one for this process.

    It is for code that will be executed (compiled kernels), and for data whose own folder is open to others.
    """
    path = os.path.join(cache_home(os.environ), name)
    problem = ""
    try:
        for folder in (os.path.dirname(path), path):
            os.makedirs(folder, 0o700, exist_ok=True)
            problem = problem or why_shared(folder)
        above = os.path.dirname(os.path.realpath(os.path.dirname(path)))
        while not problem and above != os.path.dirname(above):  # who may rename a folder above could exchange the code
            problem = why_shared(above, sticky=True)
            above = os.path.dirname(above)
    except OSError as error:
        problem = error.strerror or str(error)
    if not problem:
        return path
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
