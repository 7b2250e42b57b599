"""Whose a file or folder is, and whether another user of this machine can change what is in it."""

from __future__ import annotations

import os
import stat

_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv", "/var/run/secrets/kubernetes.io")
_own_uids: dict[str, int] = {}  # folder -> the uid that files get which we create there


def is_mine(uid: int, folder: str) -> bool:
    """Return whether files of this uid in `folder` are ours. A file system may map our uid: NFS makes nobody of root."""
    return uid == os.geteuid() or uid == _own_uid_in(folder or os.curdir)


def is_own(path: str) -> bool:
    """Return whether the entry itself is ours, not what it leads to as a link. False if it can't be looked at."""
    try:
        return is_mine(os.lstat(path).st_uid, os.path.dirname(path))
    except OSError:
        return False  # another user's FUSE mount is closed even to root


def is_trusted(uid: int, folder: str) -> bool:
    """Return whether a file of this uid is ours or root's.

    Root in a container also trusts the owner of the working folder: a bind mount shows files with their uid on the host.
    """
    if uid == 0 or is_mine(uid, folder):
        return True
    if os.geteuid() != 0 or not _owns_working_folder(uid):
        return False
    # A container without a mark: the host's user has no account in it.
    return any(map(os.path.exists, _CONTAINER_MARKS)) or not _account(uid)


def why_not_ours_alone(path: str, sticky: bool = False) -> str:
    """Return why another user can change what is at `path`: it is theirs, or they may write there. Empty if they can't.

    With `sticky`, a folder passes in which others may create files and remove only their own. Raises OSError if it is
    missing.
    """
    folder = os.path.dirname(os.path.abspath(path))
    link, about = os.lstat(path), os.stat(path)
    for uid in (link.st_uid, about.st_uid):  # the owner of a link decides where it leads
        if not is_trusted(uid, path if stat.S_ISDIR(about.st_mode) else folder):
            return f"it belongs to {user_name(uid)}"
    if sticky and about.st_mode & stat.S_ISVTX:
        return ""
    if about.st_mode & stat.S_IWOTH:
        return "all users can write there" if stat.S_ISDIR(about.st_mode) else "all users can write it"
    if about.st_mode & stat.S_IWGRP and not _is_own_group(about.st_gid):
        return f"its group ({_group_name(about.st_gid)}) can write it"
    return ""


def user_name(uid: int) -> str:
    return _account(uid) or f"uid {uid}"


def _account(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""


def _own_uid_in(folder: str) -> int:
    if folder not in _own_uids:
        import tempfile

        _own_uids[folder] = os.geteuid()
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                _own_uids[folder] = os.fstat(file.fileno()).st_uid
        except OSError:
            pass  # not ours to write in: nothing there is ours under another uid
    return _own_uids[folder]


def _owns_working_folder(uid: int) -> bool:
    try:
        about = os.stat(os.curdir)
    except OSError:
        return False
    return about.st_uid == uid and not about.st_mode & (stat.S_IWOTH | stat.S_IWGRP)


def _is_own_group(gid: int) -> bool:
    """Return whether this is root's group, or the one that many systems make for each user, with nobody else in it."""
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
