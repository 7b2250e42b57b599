"""What belongs to a working directory: what git knows of it in a checkout, else all but what is made anew."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
import subprocess
import time
from collections import Counter
from collections.abc import Iterator

from stoker.contract import layout
from stoker.contract.names import EX_NOINPUT, Refusal
from stoker.contract.safe_io import hub_blobs, open_below
from stoker.contract.shape import shape
from stoker.contract.text import printable

# Not copied, unless git tracks it.
GIT_S = 120.0  # a large checkout on a slow network disk
SLOW_S = 10.0  # after it, a look at what git may be waiting for
_GIT_ROOM = 1 << 30  # bytes that git may take: the index of millions of files. A link to /dev/zero in .git has no end
LEFT_OUT = ("runs", "cache", ".venv", "__pycache__", ".git")
_MOST_WAYS = 64  # links that lead to one folder: links to folders with links multiply
# The user's own settings, such as safe.directory in a container. Options on the command line win over them.
_GIT_KEPT = ("GIT_CONFIG", "GIT_CEILING_DIRECTORIES", "GIT_DISCOVERY_ACROSS_FILESYSTEM")


@shape
class Entry:
    path: str  # relative, with '/'
    kind: str  # "file" or "link"
    mode: int
    size: int
    target: str = ""  # of a link


@shape
class Listing:
    root: str
    entries: tuple[Entry, ...]
    skipped: tuple[str, ...] = ()  # sockets, pipes, devices: not for copying
    by_git: bool = False
    behind_links: tuple[tuple[str, str], ...] = ()  # (path, the folder on its way that is a link): not copied
    within: tuple[str, ...] = ()  # real folders that links may lead into; none: no link is followed

    def opened(self, path: str) -> int:
        """A descriptor of one of its files. What links allow is checked again: one may have come meanwhile."""
        if not self.within:
            return open_below(self.root, path)
        place = os.path.join(self.root, path)
        real = os.path.realpath(place)
        folder = _holder(real, self.within)
        if not folder:
            raise OSError(errno.ELOOP, f"it leads out of {self.root} now, to {real}", place)
        return open_below(folder, os.path.relpath(real, folder))


def working_directory(root: str) -> Listing:
    root = os.path.abspath(root)
    if not os.path.isdir(root):
        raise Refusal(f"no folder {root} to copy", EX_NOINPUT)
    known = _git(root, {os.path.realpath(root)})
    paths = _walk(root) if known is None else known
    return _looked_at(root, paths, by_git=known is not None)


def tree(path: str) -> Listing:
    """Prepared data or weights: a file or a whole folder. It may be a link itself. Links in it are followed where they
    stay in it, or lead to the blobs of its entry in the hub's cache: who packed the folder may have made them.
    """
    path = os.path.abspath(path)
    real = os.path.realpath(path)
    if os.path.isfile(path):
        return _looked_at(os.path.dirname(path), iter([os.path.basename(path)]), (os.path.dirname(real),))
    if not os.path.isdir(path):
        raise Refusal(f"nothing to stage at {path}", EX_NOINPUT)
    within = (real, *hub_blobs(real))
    return _looked_at(path, _followed(path, within), within)


def _holder(real: str, folders: tuple[str, ...]) -> str:
    """Which of the folders it is in, or is."""
    return next((folder for folder in folders if os.path.commonpath([real, folder]) == folder), "")


def _refuse_if_it_leads_out(root: str, place: str, within: tuple[str, ...]) -> None:
    if os.path.islink(place):
        real = os.path.realpath(place)
        if not _holder(real, within):
            line = f"--stage {root}: the link {printable(place)} leads out of it, to {printable(real)}"
            raise Refusal(f"{line}; stage that by itself, or remove the link", EX_NOINPUT)


def _followed(root: str, within: tuple[str, ...]) -> Iterator[str]:
    """A link back to a folder that it is in would have no end."""
    above = {root: frozenset([os.path.realpath(root)])}  # folder -> where it and those it is in really are
    ways: Counter[str] = Counter()  # to a real folder

    def unreadable(problem: OSError) -> None:
        raise Refusal(f"--stage {root}: {problem.filename} can't be read: {problem.strerror}", EX_NOINPUT) from problem

    for folder, folders, names in os.walk(root, followlinks=True, onerror=unreadable):
        mine = above.pop(folder)
        for name in folders:
            place = os.path.join(folder, name)
            real = os.path.realpath(place)
            if real in mine:
                line = f"--stage {root}: the link {place} leads back to {real}, which it is in"
                raise Refusal(f"{line}; remove it, or stage what is beside it", EX_NOINPUT)
            _refuse_if_it_leads_out(root, place, within)
            ways[real] += 1
            if ways[real] > _MOST_WAYS:
                line = f"--stage {root}: links lead to {printable(real)} in more than {_MOST_WAYS} ways"
                raise Refusal(f"{line}, and each is a copy; remove some", EX_NOINPUT)
            above[place] = mine | {real}
        for name in names:
            yield os.path.relpath(os.path.join(folder, name), root)


def _looked_at(root: str, paths: Iterator[str], within: tuple[str, ...] = (), by_git: bool = False) -> Listing:
    """`within`: where links that are followed may lead; none: they are not followed."""
    entries: dict[str, Entry] = {}
    skipped, behind_links = [], []
    links: dict[str, bool] = {}
    for path in paths:
        if path == layout.SYNCED or os.path.basename(path).startswith(".stoker-part-"):
            continue
        place = os.path.join(root, path)
        link = "" if within else _link_above(root, path, links)
        if link:
            behind_links.append((path, link))
            continue
        try:
            seen = os.stat(place) if within else os.lstat(place)
        except (
            FileNotFoundError,
            NotADirectoryError,
        ):  # git knows it still, or it went meanwhile, or it is a link to nowhere
            continue
        except OSError as problem:
            if problem.errno != errno.ELOOP:
                raise
            raise Refusal(f"--stage {root}: the link {place} leads to itself; remove it", EX_NOINPUT) from problem
        if within:
            _refuse_if_it_leads_out(root, place, within)
        mode = stat.S_IMODE(seen.st_mode) & 0o777
        if stat.S_ISLNK(seen.st_mode):
            entries[path] = Entry(path, "link", mode, 0, os.readlink(place))
        elif stat.S_ISREG(seen.st_mode):
            entries[path] = Entry(path, "file", mode, seen.st_size)
        else:
            skipped.append(path)
    found = tuple(entries[path] for path in sorted(entries))
    return Listing(root, found, tuple(skipped), by_git, tuple(behind_links), within)


def _link_above(root: str, path: str, known: dict[str, bool]) -> str:
    """The first folder of the path that is a link: an index may name files behind it. `known`: folders looked at."""
    end = path.find("/")
    while end >= 0:
        folder = os.path.join(root, path[:end])
        if folder not in known:
            known[folder] = os.path.islink(folder)
        if known[folder]:
            return path[:end]
        end = path.find("/", end + 1)
    return ""


def _git(root: str, asked: set[str]) -> Iterator[str] | None:
    """None: not a checkout, or no git to ask."""
    try:
        inside = _ask_git(root, "rev-parse", "--is-inside-work-tree")
    except FileNotFoundError:
        return None
    complaint = inside.stderr.decode("utf-8", "replace").strip()
    if inside.returncode or inside.stdout.strip() != b"true":
        if "dubious ownership" in complaint:
            line = f"git does not trust {root} ({printable(complaint.splitlines()[0])})"
            raise Refusal(f"{line}, so what it ignores is not known", EX_NOINPUT)
        return None
    if _ask_git(root, "check-ignore", "-q", root).returncode == 0:
        return None  # a folder that the checkout around it ignores as a whole: its own master
    return _git_files(root, asked)


def _ask_git(root: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    """The one place that starts git. .git/config may come from anybody: no program that it or a variable names is run."""
    env = {
        name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name.startswith(_GIT_KEPT)
    }
    env.update(GIT_OPTIONAL_LOCKS="0", GIT_TERMINAL_PROMPT="0", GIT_ALLOW_PROTOCOL="none")  # none: it fetches nothing
    env["LC_ALL"] = "C"  # its complaints are looked at
    safe = ("--no-pager", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", "-C", root)
    argv = ["git", *safe, *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=env) as git:
        try:
            _limit_memory(git.pid)
            out, err = _output(git, root)
        except BaseException:
            git.kill()
            raise
    if git.returncode and any(words in err.lower() for words in (b"out of memory", b"cannot allocate memory")):
        line = f"git in {root} needs more than {_GIT_ROOM >> 30} GB of memory: what is in its .git may be an attack"
        raise Refusal(line, EX_NOINPUT)
    return subprocess.CompletedProcess(argv, git.returncode, out, err)


def _limit_memory(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        _, hard = resource.prlimit(pid, resource.RLIMIT_DATA)
        most = _GIT_ROOM if hard == resource.RLIM_INFINITY else min(_GIT_ROOM, hard)
        resource.prlimit(pid, resource.RLIMIT_DATA, (most, hard))


def _output(git: subprocess.Popen[bytes], root: str) -> tuple[bytes, bytes]:
    try:
        return git.communicate(timeout=SLOW_S)
    except subprocess.TimeoutExpired:
        pipe = _pipe_that_git_reads(root)
        if pipe:
            raise Refusal(f"git in {root} waits for {printable(pipe)}, a named pipe: remove it", EX_NOINPUT) from None
    try:
        return git.communicate(timeout=GIT_S - SLOW_S)
    except subprocess.TimeoutExpired as problem:
        raise Refusal(f"git in {root} did not answer within {GIT_S:.0f} s", EX_NOINPUT) from problem


def _pipe_that_git_reads(root: str) -> str:
    """git opens it and waits for a writer. In the checkout around `root`, too, and only for as long as git was given."""
    deadline = time.monotonic() + SLOW_S
    top = root
    while not os.path.lexists(os.path.join(top, ".git")):
        if top == os.path.dirname(top):
            return ""
        top = os.path.dirname(top)
    for folder, folders, names in os.walk(top):
        folders.sort(key=lambda name: name != ".git")  # first: it is small, and in every checkout
        inside = ".git" in os.path.relpath(folder, top).split(os.sep)
        for place in (os.path.join(folder, name) for name in names if inside or name.startswith(".git")):
            if _is_pipe(place):
                return place
        if time.monotonic() > deadline:
            break
    return ""


def _is_pipe(place: str) -> bool:
    try:
        return stat.S_ISFIFO(os.stat(place).st_mode)
    except OSError:
        return False  # removed meanwhile, or a link to nowhere


def _git_files(root: str, asked: set[str]) -> Iterator[str]:
    """A folder in git's list is a submodule, or somebody's checkout, whose git is not asked. One without a .git has not been
    fetched. `asked`: folders whose git was asked before; an index may name them in many ways.
    """
    links: dict[str, bool] = {}
    for path in _git_list(root, "--cached"):
        place = os.path.join(root, path)
        if not _is_folder(root, path) or _link_above(root, path, links):
            yield path
        elif os.path.lexists(os.path.join(place, ".git")) and os.path.realpath(place) not in asked:
            asked.add(os.path.realpath(place))
            for inner in _git(place, asked) or _walk(place):
                yield os.path.join(path, inner)
    for path in _git_list(root, "--others", "--exclude-standard"):
        if any(part in LEFT_OUT for part in path.split("/")):
            continue
        if _is_folder(root, path):
            for inner in _walk(os.path.join(root, path)):
                yield os.path.join(path, inner)
        else:
            yield path


def _is_folder(root: str, path: str) -> bool:
    place = os.path.join(root, path)
    return os.path.isdir(place) and not os.path.islink(place)


def _git_list(root: str, *which: str) -> list[str]:
    done = _ask_git(root, "ls-files", "-z", *which)
    if done.returncode:
        complaint = printable(done.stderr.decode("utf-8", "replace").strip())
        raise Refusal(f"git can't list {root}: {complaint}", EX_NOINPUT)
    paths = [os.fsdecode(path) for path in done.stdout.split(b"\0") if path]
    # An index may name anything.
    return [path for path in paths if not path.startswith("/") and ".." not in path.split("/")]


def _walk(root: str) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        folders[:] = [name for name in folders if name not in LEFT_OUT and name not in links]
        for name in [*names, *(link for link in links if link not in LEFT_OUT)]:
            yield os.path.relpath(os.path.join(folder, name), root)
