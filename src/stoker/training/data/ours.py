"""Folders that Stoker made: what stands in them is nobody's data, though `--data .` finds it."""

from __future__ import annotations

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
    """The cache itself where only we can write to it, else a folder of our own in it: prepared data and tokenizers that
    another user left there are not used.
    """
    try:
        problem = why_not_ours_alone(cache)
    except FileNotFoundError:
        if os.path.islink(cache):  # whoever made the link could put a folder there at any time
            line = (
                f"data.cache {cache} is a link to {os.readlink(cache)}, which is not there: make it, or remove the link"
            )
            raise Refusal(line, EX_CANTCREAT) from None
        return cache
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


def files_below(folder: str, say: Callable[[str], None]) -> Iterator[str]:
    """Sorted folder by folder; hidden ones and Stoker's own, runs and caches, left out. `folder` itself may be one: it
    was named.
    """
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
