"""Lists the files to copy: for --sync those of a working directory that git does not ignore, for --stage all of a path."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Iterable, Iterator

from stoker.contract import layout
from stoker.contract.errors import EX_NOINPUT, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.safe_io import find_hub_blobs
from stoker.contract.text import escape

GIT_S = 120.0  # limit for git, which may read a large checkout from a slow network disk
EXCLUDED = ("runs", "cache", ".venv", "__pycache__", ".git")  # --sync skips these folders, except files that git tracks
# A git hook sets these variables, and they would make git use another repository.
_GIT_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX")


@frozen
class FileEntry:
    """A file or symbolic link to copy."""

    path: str  # relative to the root, with '/'
    kind: str  # "file" or "link"
    mode: int
    size: int
    target: str = ""  # for a link, where it points


@frozen
class FileList:
    """The files below one folder that are copied, sorted by path."""

    root: str
    entries: tuple[FileEntry, ...]
    skipped: tuple[tuple[str, str], ...] = ()  # (path, why it is not copied)


def list_working_directory(root: str) -> FileList:
    """List the files that --sync copies: in a git checkout those not ignored, else all outside the EXCLUDED folders.

    Links are copied as links.
    """
    root = os.path.abspath(root)
    if not os.path.isdir(root):
        raise Refusal(f"--sync: the folder {root} does not exist", EX_NOINPUT)
    tracked = _git_files(root)
    return _make_list(root, _walk(root) if tracked is None else tracked, by_git=tracked is not None)


def list_staged(path: str) -> FileList:
    """List the files that --stage copies: a file, or all files of a folder. The path itself may be a link.

    Links below it are followed if they lead to the folder itself or to the blobs of its entry in the hub's cache. Other
    links raise Refusal, because in a downloaded folder they may lead to any file of the user.
    """
    path = os.path.abspath(path)
    if os.path.isfile(path):
        return _make_list(os.path.dirname(path), [os.path.basename(path)], follow=True)
    if not os.path.isdir(path):
        raise Refusal(f"--stage: {path} is neither a file nor a folder", EX_NOINPUT)
    return _make_list(path, _walk_following_links(path), follow=True)


def _walk_following_links(root: str) -> Iterator[str]:
    """Yield the files of a staged folder. Raises Refusal for a link out of the folder or to a folder above the link."""
    real_root = os.path.realpath(root)
    allowed = (real_root, *find_hub_blobs(real_root))
    ancestors = {root: frozenset([real_root])}  # folder -> the real paths of it and of all folders above it

    def unreadable(problem: OSError) -> None:
        raise Refusal(f"--stage {root}: {problem.filename} can't be read: {problem.strerror}", EX_NOINPUT) from problem

    def check_link(path: str) -> None:
        if not os.path.islink(path):
            return
        target = os.path.realpath(path)
        if not any(os.path.commonpath([target, folder]) == folder for folder in allowed):
            line = f"--stage {root}: the link {escape(path)} leads out of the folder, to {escape(target)}"
            raise Refusal(f"{line}; stage that path separately, or remove the link", EX_NOINPUT)

    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=unreadable):
        real_parents = ancestors.pop(folder)
        for name in subfolders:
            path = os.path.join(folder, name)
            target = os.path.realpath(path)
            if target in real_parents:  # following it would never end
                line = f"--stage {root}: the link {path} leads back to {target}, which contains it"
                raise Refusal(f"{line}; remove the link, or stage the other files separately", EX_NOINPUT)
            check_link(path)
            ancestors[path] = real_parents | {target}
        for name in names:
            check_link(os.path.join(folder, name))
            yield os.path.relpath(os.path.join(folder, name), root)


def _make_list(root: str, paths: Iterable[str], follow: bool = False, by_git: bool = False) -> FileList:
    """Return the list of these paths with sizes and modes. With `follow`, a link is replaced by the file it leads to."""
    entries: dict[str, FileEntry] = {}
    skipped = []
    for path in paths:
        if path == layout.SYNCED or os.path.basename(path).startswith(".stoker-part-"):
            continue
        full_path = os.path.join(root, path)
        try:
            status = os.stat(full_path) if follow else os.lstat(full_path)
        except (FileNotFoundError, NotADirectoryError):  # deleted but still in git's index, or a broken link
            continue
        except OSError as problem:
            if problem.errno != errno.ELOOP:
                raise
            raise Refusal(f"--stage {root}: the link {full_path} leads to itself; remove it", EX_NOINPUT) from problem
        mode = stat.S_IMODE(status.st_mode) & 0o777
        link = _first_link_above(root, path) if by_git else ""
        if link:  # the link has replaced a folder that git tracks
            skipped.append((path, f"git tracks it, but {escape(link)} is a symbolic link"))
        elif stat.S_ISLNK(status.st_mode):
            entries[path] = FileEntry(path, "link", mode, 0, os.readlink(full_path))
        elif stat.S_ISREG(status.st_mode):
            entries[path] = FileEntry(path, "file", mode, status.st_size)
        else:
            skipped.append((path, "it is neither a file nor a link"))
    return FileList(root, tuple(entries[path] for path in sorted(entries)), tuple(skipped))


def _first_link_above(root: str, path: str) -> str:
    """Return the outermost folder of the path that is a link, or ""."""
    parts = path.split("/")[:-1]
    folders = ("/".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next((folder for folder in folders if os.path.islink(os.path.join(root, folder))), "")


def _git_files(root: str) -> Iterator[str] | None:
    """Return the files of a folder that git does not ignore, or None if it is not a checkout or git is not installed."""
    try:
        inside = _run_git(root, "rev-parse", "--is-inside-work-tree")
    except FileNotFoundError:
        return None
    if inside.returncode or inside.stdout.strip() != b"true":
        error = inside.stderr.decode("utf-8", "replace").strip()
        if "dubious ownership" in error:
            line = f"git does not trust {root} ({escape(error.splitlines()[0])})"
            raise Refusal(f"{line}, so --sync can't find out which files it ignores", EX_NOINPUT)
        return None
    if _run_git(root, "check-ignore", "-q", root).returncode == 0:
        return None  # an outer checkout ignores the whole folder, so git can't list its files
    return _tracked_and_untracked(root)


def _run_git(root: str, *args: str) -> subprocess.CompletedProcess[bytes]:
    """Run git in a folder. Raises Refusal if it does not finish in time, FileNotFoundError if it is not installed."""
    env = {name: value for name, value in os.environ.items() if name not in _GIT_VARIABLES}
    env |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}  # its messages are parsed
    argv = ["git", "-C", root, *args]
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, env=env, timeout=GIT_S, check=False)
    except subprocess.TimeoutExpired as problem:
        raise Refusal(f"git in {root} did not finish within {GIT_S:.0f} s", EX_NOINPUT) from problem


def _list_git(root: str, *options: str) -> Iterator[tuple[str, bool]]:
    """Yield (path, is_folder) from `git ls-files`. Such a folder is another checkout, whose files git does not list."""
    listing = _run_git(root, "ls-files", "-z", *options)
    if listing.returncode:
        raise Refusal(f"git can't list {root}: {escape(listing.stderr.decode('utf-8', 'replace').strip())}", EX_NOINPUT)
    for path in filter(None, listing.stdout.split(b"\0")):
        full_path = os.path.join(root, os.fsdecode(path))
        yield os.fsdecode(path), os.path.isdir(full_path) and not os.path.islink(full_path)


def _tracked_and_untracked(root: str) -> Iterator[str]:
    """Yield the files that git tracks, including submodules, and the untracked files that it does not ignore."""
    for path, is_folder in _list_git(root, "--cached"):
        full_path = os.path.join(root, path)
        if not is_folder:
            yield path
        elif os.path.lexists(os.path.join(full_path, ".git")):  # a submodule; without .git it was never fetched
            for inner in _git_files(full_path) or _walk(full_path):
                yield os.path.join(path, inner)
    for path, is_folder in _list_git(root, "--others", "--exclude-standard"):
        if any(part in EXCLUDED for part in path.split("/")):
            continue
        if is_folder:
            for inner in _walk(os.path.join(root, path)):
                yield os.path.join(path, inner)
        else:
            yield path


def _walk(root: str) -> Iterator[str]:
    """Yield all files and links below a folder, except those in EXCLUDED folders."""
    for folder, subfolders, names in os.walk(root):
        links = [name for name in subfolders if os.path.islink(os.path.join(folder, name))]
        subfolders[:] = [name for name in subfolders if name not in EXCLUDED and name not in links]
        for name in [*names, *(link for link in links if link not in EXCLUDED)]:
            yield os.path.relpath(os.path.join(folder, name), root)
