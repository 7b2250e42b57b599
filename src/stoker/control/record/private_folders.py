"""Folders that only this user can write to, also where several users share their parent."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

from stoker.contract.errors import EX_NOPERM, Refusal
from stoker.contract.layout import cache_home
from stoker.contract.safe_io import is_own_uid, why_shared


def own_folder(root: str, name: str) -> str:
    """Return the path of this user's folder `name` in a shared folder, with the uid added if another user has that name.

    The folder is private to this user, or does not exist yet. Raises Refusal if other users have both names.
    """
    problem = why_shared(root, sticky=True) if os.path.lexists(root) else ""
    if problem:
        line = f"the folder {root} can't be used: {problem}, so others could replace your folders there; choose another"
        raise Refusal(line, EX_NOPERM)
    path = os.path.join(root, name)
    with_uid = f"{path}-{os.geteuid()}"
    for candidate in (path, with_uid):
        try:
            status = os.lstat(candidate)
        except FileNotFoundError:
            return candidate
        except OSError:
            continue  # another user's mount
        if stat.S_ISDIR(status.st_mode) and is_own_uid(status.st_uid, root) and not why_shared(candidate):
            return candidate
    raise Refusal(f"{path} and {with_uid} belong to other users; choose another folder", EX_NOPERM)


def private_cache(name: str, say: Callable[[str], None]) -> str:
    """Return a folder in this user's cache that nobody else can write to, or a temporary one if there can be none.

    It is for code that will be executed (compiled kernels), and for files of data sets in folders that others can write to.
    """
    path = os.path.join(cache_home(os.environ), name)
    problem = ""
    try:
        for folder in (os.path.dirname(path), path):
            os.makedirs(folder, 0o700, exist_ok=True)
            problem = problem or why_shared(folder)
        # A user who can rename a parent folder could replace the code below it.
        parent = os.path.dirname(os.path.realpath(os.path.dirname(path)))
        while not problem and parent != os.path.dirname(parent):
            problem = why_shared(parent, sticky=True)
            parent = os.path.dirname(parent)
    except OSError as error:
        problem = error.strerror or str(error)
    if not problem:
        return path
    import tempfile

    temporary = tempfile.mkdtemp(prefix=f"stoker-{name}-")
    say(f"{path} can't be used ({problem}); using {temporary} instead, for this start only")
    return temporary
