"""Whose a file or folder is, and whether somebody else can change what is in it."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

_CONTAINER = ("/.dockerenv", "/run/.containerenv", "/var/run/secrets/kubernetes.io")
_given: dict[str, int] = {}  # folder -> the uid of what we make there


def is_mine(uid: int, folder: str) -> bool:
    """Is this uid ours in `folder`? A file system may give us another (NFS: nobody for root): a file shows it."""
    return uid == os.geteuid() or uid == _uid_given_in(folder)


def is_own(path: str) -> bool:
    """Is the entry itself ours, not what it leads to as a link? One that can't be looked at is somebody else's: a user's
    FUSE mount is closed even to root.
    """
    try:
        return is_mine(os.lstat(path).st_uid, os.path.dirname(path))
    except OSError:
        return False


def is_trusted(uid: int, folder: str) -> bool:
    """Ours or root's. For a container's root also the owner's of the working folder, which is its host's."""
    if uid == 0 or is_mine(uid, folder):
        return True
    return os.geteuid() == 0 and uid == _owner_of_working_folder() and (in_container() or not _is_user(uid))


def in_container() -> bool:
    """One of a single application, whose users are root's own affair. The marks are root's to make."""
    return any(map(os.path.exists, _CONTAINER))


def _is_user(uid: int) -> bool:
    """One of this machine's, who may be at work here."""
    import pwd

    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _uid_given_in(folder: str) -> int:
    folder = folder or "."
    if folder not in _given:
        import tempfile

        _given[folder] = os.geteuid()
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                _given[folder] = os.fstat(file.fileno()).st_uid
        except OSError:
            pass  # not ours to write in: nothing there is ours under another number
    return _given[folder]


def user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def why_not_ours_alone(path: str, sticky: bool = False) -> str:
    """Why another user can change what is at `path`: it belongs to them, or they may write there. Empty where only we
    and root can. OSError: it is not there.

    `sticky`: a folder in which others may make files of their own, and rename and remove only those, will do.
    """
    folder = os.path.dirname(os.path.abspath(path))
    link, about = os.lstat(path), os.stat(path)
    for uid in (link.st_uid, about.st_uid):  # a link that somebody else made leads where they like
        if not is_trusted(uid, path if stat.S_ISDIR(about.st_mode) else folder):
            return f"it belongs to {user_name(uid)}"
    if sticky and about.st_mode & stat.S_ISVTX:
        return ""
    if about.st_mode & stat.S_IWOTH:
        return "all users can write there" if stat.S_ISDIR(about.st_mode) else "all users can write it"
    if about.st_mode & stat.S_IWGRP and not _is_own_group(about.st_gid):
        return f"its group ({_group_name(about.st_gid)}) can write it"
    return ""


def held_open(path: str) -> int:
    """A descriptor of a folder that we made just now: where others may write to the one above, they can put one with links
    under its name. OSError: they have.
    """
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    if is_mine(os.fstat(handle).st_uid, os.path.dirname(path)) and not os.listdir(handle):
        return handle
    os.close(handle)
    raise OSError(errno.ESTALE, "the folder that was made in it was replaced", path)


def why_a_folder_above_is_not_safe(path: str, roots_may_be_open: bool = False) -> str:
    """Why somebody else could put another folder in the place of `path`: a folder above it, or a link on the way to it,
    is theirs or open to them. Those that are not there yet do not count.

    `roots_may_be_open`: for root, a folder of root's own will do even if all may write there. Pods mount their volumes
    so (mode 777), and have no other user.
    """
    for place in _way_to(path):
        with contextlib.suppress(FileNotFoundError):
            if roots_may_be_open and os.geteuid() == os.lstat(place).st_uid == os.stat(place).st_uid == 0:
                continue
            problem = why_not_ours_alone(place, sticky=True)
            if problem:
                return f"{place}: {problem}"
    return ""


def _way_to(path: str) -> Iterator[str]:
    """The folders above `path`, and above what its links lead to. A link stands for itself and its target."""
    path = os.path.abspath(path)
    starts, seen = [path, os.path.realpath(path)], {path, os.path.realpath(path), os.sep}
    while starts:
        place = starts.pop()
        while place != os.path.dirname(place):
            if place not in seen:
                seen.add(place)
                yield place
            folder = os.path.dirname(place)
            if os.path.islink(place):
                target = os.path.normpath(os.path.join(os.path.realpath(folder), os.readlink(place)))
                if target not in seen:
                    starts.append(target)
            place = folder


def _owner_of_working_folder() -> int:
    try:
        about = os.stat(".")
    except OSError:
        return 0
    return 0 if about.st_mode & (stat.S_IWOTH | stat.S_IWGRP) else about.st_uid


def _is_own_group(gid: int) -> bool:
    """The group of root, or the one that many systems make for each user, with nobody else in it."""
    import grp
    import pwd

    if gid == 0:
        return True
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and gid == user.pw_gid and not set(group.gr_mem) - {user.pw_name}


def _group_name(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"gid {gid}"
