"""What belongs to a working directory: what git knows of it in a checkout, else all but what is made anew."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Iterable, Iterator

from stoker.contract import layout
from stoker.contract.errors import EX_NOINPUT, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.safe_io import hub_blobs
from stoker.contract.text import escape

GIT_S = 120.0  # a large checkout on a slow network disk
LEFT_OUT = ("runs", "cache", ".venv", "__pycache__", ".git")  # not copied, unless git tracks it
# Variables that would lead git to another repository than the folder's own, as in a git hook.
_OF_A_REPOSITORY = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX")


@frozen
class FileEntry:
    path: str  # relative, with '/'
    kind: str  # "file" or "link"
    mode: int
    size: int
    target: str = ""  # of a link


@frozen
class FileList:
    root: str
    entries: tuple[FileEntry, ...]
    skipped: tuple[tuple[str, str], ...] = ()  # (path, why it is not copied)
    by_git: bool = False


def working_directory(root: str) -> FileList:
    """List what --sync copies. Links are copied as links, and nothing behind them."""
    root = os.path.abspath(root)
    if not os.path.isdir(root):
        raise Refusal(f"no folder {root} to copy", EX_NOINPUT)
    known = _git(root)
    return _list(root, _walk(root) if known is None else known, by_git=known is not None)


def tree(path: str) -> FileList:
    """List what --stage copies: a file, or a whole folder of prepared data or weights. It may be a link itself.

    Links in it are followed where they stay in it, or lead to the blobs of its entry in the hub's cache. Others are
    refused: in a downloaded folder they may lead to anything of ours.
    """
    path = os.path.abspath(path)
    if os.path.isfile(path):
        return _list(os.path.dirname(path), [os.path.basename(path)], followed=True)
    if not os.path.isdir(path):
        raise Refusal(f"nothing to stage at {path}", EX_NOINPUT)
    return _list(path, _follow(path), followed=True)


def _follow(root: str) -> Iterator[str]:
    """Yield the files of a staged folder. A link back to a folder that it is in would have no end."""
    real_root = os.path.realpath(root)
    allowed = (real_root, *hub_blobs(real_root))
    above = {root: frozenset([real_root])}  # folder -> where it and those it is in really are

    def unreadable(problem: OSError) -> None:
        raise Refusal(f"--stage {root}: {problem.filename} can't be read: {problem.strerror}", EX_NOINPUT) from problem

    def check_link(place: str) -> None:
        if not os.path.islink(place):
            return
        real = os.path.realpath(place)
        if not any(os.path.commonpath([real, folder]) == folder for folder in allowed):
            line = f"--stage {root}: the link {escape(place)} leads out of it, to {escape(real)}"
            raise Refusal(f"{line}; stage that by itself, or remove the link", EX_NOINPUT)

    for folder, folders, names in os.walk(root, followlinks=True, onerror=unreadable):
        mine = above.pop(folder)
        for name in folders:
            place = os.path.join(folder, name)
            real = os.path.realpath(place)
            if real in mine:
                line = f"--stage {root}: the link {place} leads back to {real}, which it is in"
                raise Refusal(f"{line}; remove it, or stage what is beside it", EX_NOINPUT)
            check_link(place)
            above[place] = mine | {real}
        for name in names:
            check_link(os.path.join(folder, name))
            yield os.path.relpath(os.path.join(folder, name), root)


def _list(root: str, paths: Iterable[str], followed: bool = False, by_git: bool = False) -> FileList:
    """Look at each path. `followed`: a link stands for the file it leads to."""
    entries: dict[str, FileEntry] = {}
    skipped = []
    for path in paths:
        if path == layout.SYNCED or os.path.basename(path).startswith(".stoker-part-"):
            continue
        place = os.path.join(root, path)
        try:
            about = os.stat(place) if followed else os.lstat(place)
        except (
            FileNotFoundError,
            NotADirectoryError,
        ):  # git knows it still, or it went meanwhile, or a link to nowhere
            continue
        except OSError as problem:
            if problem.errno != errno.ELOOP:
                raise
            raise Refusal(f"--stage {root}: the link {place} leads to itself; remove it", EX_NOINPUT) from problem
        mode = stat.S_IMODE(about.st_mode) & 0o777
        link = _link_above(root, path) if by_git else ""
        if link:
            skipped.append((path, f"git names it, but {escape(link)} is a symbolic link"))
        elif stat.S_ISLNK(about.st_mode):
            entries[path] = FileEntry(path, "link", mode, 0, os.readlink(place))
        elif stat.S_ISREG(about.st_mode):
            entries[path] = FileEntry(path, "file", mode, about.st_size)
        else:
            skipped.append((path, "it is neither a file nor a link"))
    return FileList(root, tuple(entries[path] for path in sorted(entries)), tuple(skipped), by_git)


def _link_above(root: str, path: str) -> str:
    """Return the first folder of the path that is a link: one that took the place of a folder git knows."""
    end = path.find("/")
    while end >= 0:
        if os.path.islink(os.path.join(root, path[:end])):
            return path[:end]
        end = path.find("/", end + 1)
    return ""


def _git(root: str) -> Iterator[str] | None:
    """Return what git knows of a folder, or None if it is no checkout or there is no git to ask."""
    try:
        inside = _ask_git(root, "rev-parse", "--is-inside-work-tree")
    except FileNotFoundError:
        return None
    complaint = inside.stderr.decode("utf-8", "replace").strip()
    if inside.returncode or inside.stdout.strip() != b"true":
        if "dubious ownership" in complaint:
            line = f"git does not trust {root} ({escape(complaint.splitlines()[0])})"
            raise Refusal(f"{line}, so what it ignores is not known", EX_NOINPUT)
        return None
    if _ask_git(root, "check-ignore", "-q", root).returncode == 0:
        return None  # a folder that the checkout around it ignores as a whole: its own master
    return _git_files(root)


def _ask_git(root: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    env = {name: value for name, value in os.environ.items() if name not in _OF_A_REPOSITORY}
    env |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}  # its complaints are looked at
    argv = ["git", "-C", root, *words]
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, env=env, timeout=GIT_S, check=False)
    except subprocess.TimeoutExpired as problem:
        raise Refusal(f"git in {root} did not answer within {GIT_S:.0f} s", EX_NOINPUT) from problem


def _git_files(root: str) -> Iterator[str]:
    """A folder in git's list is a submodule, or somebody's checkout, whose git is not asked. One without a .git has not been
    fetched.
    """
    for path in _git_list(root, "--cached"):
        place = os.path.join(root, path)
        if not _is_folder(place):
            yield path
        elif os.path.lexists(os.path.join(place, ".git")):
            for inner in _git(place) or _walk(place):
                yield os.path.join(path, inner)
    for path in _git_list(root, "--others", "--exclude-standard"):
        if any(part in LEFT_OUT for part in path.split("/")):
            continue
        place = os.path.join(root, path)
        if _is_folder(place):
            for inner in _walk(place):
                yield os.path.join(path, inner)
        else:
            yield path


def _is_folder(place: str) -> bool:
    return os.path.isdir(place) and not os.path.islink(place)


def _git_list(root: str, *which: str) -> list[str]:
    done = _ask_git(root, "ls-files", "-z", *which)
    if done.returncode:
        complaint = escape(done.stderr.decode("utf-8", "replace").strip())
        raise Refusal(f"git can't list {root}: {complaint}", EX_NOINPUT)
    return [os.fsdecode(path) for path in done.stdout.split(b"\0") if path]


def _walk(root: str) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        folders[:] = [name for name in folders if name not in LEFT_OUT and name not in links]
        for name in [*names, *(link for link in links if link not in LEFT_OUT)]:
            yield os.path.relpath(os.path.join(folder, name), root)
