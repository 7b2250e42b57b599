"""Folders that Stoker made: what stands in them is nobody's data, though `--data .` finds it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator

from stoker.contract import layout
from stoker.contract.names import EX_CANTCREAT, Refusal
from stoker.contract.owners import why_not_ours_alone
from stoker.contract.wholefile import write_whole
from stoker.control.record import ownership

TAG = layout.CACHE_TAG
_MARKS = (TAG, layout.RUN, "chain.json")


def tag(cache: str) -> None:
    """Marks the cache as one."""
    os.makedirs(cache, exist_ok=True)
    path = os.path.join(cache, TAG)
    if not os.path.lexists(path):
        write_whole(path, layout.CACHE_SIGNATURE, durable=False)


def own_cache(cache: str, say: Callable[[str], None]) -> str:
    """The cache where only we can write to it, else a folder of our own in it: nothing of others is used."""
    try:
        problem = why_not_ours_alone(cache)
    except FileNotFoundError:
        if os.path.islink(cache):  # whoever made the link could put a folder there at any time
            line = (
                f"data.cache {cache} is a link to {os.readlink(cache)}, which is not there: make it, or remove the link"
            )
            raise Refusal(line, EX_CANTCREAT) from None
        return _made(cache, say)
    if not problem:
        return cache
    if why_not_ours_alone(cache, sticky=True):  # who owns the folder can exchange everything in it
        own = ownership.private_cache("data", say)
    else:
        own = ownership.own_folder(cache, f"user-{os.geteuid()}")
        os.makedirs(own, 0o700, exist_ok=True)
        if ownership.own_folder(cache, f"user-{os.geteuid()}") != own:  # somebody was quicker
            return own_cache(cache, say)
    say(f"data.cache {cache}: {problem}; yours is {own}")
    return own


def _made(cache: str, say: Callable[[str], None]) -> str:
    """Made before anything is read from it, and then checked as any other: somebody may have been quicker."""
    parent = os.path.dirname(os.path.abspath(cache))
    try:
        os.makedirs(parent, exist_ok=True)
        os.mkdir(cache, 0o700 if why_not_ours_alone(parent) else 0o755)
    except FileExistsError:
        pass
    except OSError as problem:
        if problem.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        own = ownership.private_cache("data", say)
        say(f"data.cache {cache} can't be made ({problem.strerror}); yours is {own}")
        return own
    return own_cache(cache, say)


def files_below(folder: str, say: Callable[[str], None]) -> Iterator[str]:
    """Sorted by folder; without hidden ones and Stoker's own, runs and caches, unless `folder` itself is one."""
    ours = []
    for place, folders, names in os.walk(folder):
        if place != folder and any(mark in names for mark in _MARKS):
            ours.append(place)
            folders[:] = []
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (os.path.join(place, name) for name in sorted(names) if not name.startswith("."))
    if ours:
        say(
            "left out, being Stoker's own:"
            f" {', '.join(ours[:3])}{f' and {len(ours) - 3} more' if len(ours) > 3 else ''}"
        )
