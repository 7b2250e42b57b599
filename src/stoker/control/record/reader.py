"""Reads run directories, while written or after a crash. They may be damaged or another's: nothing is trusted."""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from stoker.contract import layout, names, terminal, untrusted
from stoker.contract.effort import reading
from stoker.contract.process import owner, process
from stoker.contract.shape import replace, shape
from stoker.contract.shapes import Verdict
from stoker.contract.spelling import suggest
from stoker.contract.untrusted import printable
from stoker.control.record import ownership
from stoker.control.record.speedruns import speedrun_at, speedruns

_MOST = 16 << 20  # bytes of run.json: a run on 500 hosts has 2 MB
_MOST_OF_OTHERS = 2 << 20  # the same of another user's
_MOST_EVENTS = 256 << 20
_MOST_LISTED = 64 << 10  # the same where it is one of many: a run on one host has 6 KB
_EVENTS_OF_OTHERS = 1 << 20  # the last bytes of events.jsonl that are read of another user's run
_MOST_ENTRIES = 10_000  # of a run directory
_LONGEST_EVENT = 1 << 20


class Damaged(Exception):
    """A run's record that can't be read, and why: one line, printable."""


@shape
class Run:
    dir: str
    id: str
    data: dict[str, Any]  # run.json, checked (_check); of another user's run only what is checked
    verdict: Verdict | None
    uid: int
    mine: bool

    @property
    def name(self) -> str:
        return str(self.data.get("name") or "")

    @property
    def started(self) -> float:
        return float(self.data.get("started") or 0.0)

    @property
    def launcher(self) -> tuple[int, int, str]:
        """(pid, start ticks, host) of the process that runs it, as the record has it."""
        who = self.data.get("launcher") or {}
        return who.get("pid") or 0, who.get("start") or 0, who.get("host") or ""

    @property
    def ranks(self) -> int:
        return int((self.data.get("plan") or {}).get("world_size") or 0)

    @property
    def user(self) -> str:
        return ownership.user_name(self.uid)

    def events(self) -> Iterator[dict[str, Any]]:
        """Of another user's run the last only: `shows_last_events_only` says so."""
        return events(self.dir, tail=0 if self.mine else _EVENTS_OF_OTHERS)

    @property
    def shows_last_events_only(self) -> bool:
        return not self.mine and _size(os.path.join(self.dir, layout.EVENTS)) > _EVENTS_OF_OTHERS

    @property
    def attempts(self) -> list[int]:
        try:
            with os.scandir(self.dir) as entries:
                some = itertools.islice(entries, _MOST_ENTRIES)
                folders = [entry.name for entry in some if entry.is_dir(follow_symlinks=False)]
        except OSError:
            return []
        return sorted(int(match[1]) for name in folders if (match := re.fullmatch(r"attempt-(0|[1-9]\d{0,5})", name)))


@shape
class Listing:
    runs: tuple[Run, ...]  # oldest first
    damaged: tuple[tuple[str, str], ...]  # name of the folder, why
    others: int  # folders of other users that were not looked into

    @property
    def skipped(self) -> str:
        """One line; empty where nothing was skipped."""
        if not self.damaged:
            return ""
        told = "; ".join(f"{printable(name, 80)}: {why}" for name, why in self.damaged[:3])
        more = f"; and {len(self.damaged) - 3} more" if len(self.damaged) > 3 else ""
        return f"skipped {len(self.damaged)} damaged run record{'s' if len(self.damaged) > 1 else ''}: {told}{more}"


def read_json(path: str) -> Any:
    """None when it isn't there or isn't whole."""
    try:
        return untrusted.read_json(path)
    except (OSError, ValueError):
        return None


def load(run_dir: str) -> Run | None:
    """None where there is no record, or a damaged one."""
    try:
        return read(run_dir)
    except Damaged:
        return None


def read(run_dir: str, most_of_others: int = _MOST_OF_OTHERS) -> Run | None:
    """None where there is no record."""
    try:
        with reading("it", Damaged):
            return _read(run_dir, most_of_others)
    except names.Refusal as problem:
        raise Damaged(problem.line) from problem


def of_others(run: Run) -> AbstractContextManager[None]:
    """Within it, another user's record is made sense of: what nobody foresaw in it is one line. Our own is no stranger's."""
    return nullcontext() if run.mine else reading(f"run {run.id} of {run.user}")


def _read(run_dir: str, most_of_others: int) -> Run | None:
    try:
        about = os.stat(run_dir)
        mine = ownership.is_mine(about.st_uid, os.path.dirname(run_dir))
        most = _MOST if mine else most_of_others
        data = _part(run_dir, layout.RUN, about.st_uid, most)
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise Damaged(f"can't be read: {problem.strerror}") from problem
    _check(data)
    try:
        _part(run_dir, layout.EVENTS, about.st_uid, 0)
    except FileNotFoundError:
        pass  # the run has not begun, or somebody has tidied up
    verdict: Verdict | None
    try:
        verdict = Verdict.from_json(_part(run_dir, layout.VERDICT, about.st_uid, most))
    except (FileNotFoundError, TypeError, Damaged):
        verdict = _verdict_in_events(run_dir)  # none yet, of another version, or damaged: the run is listed without it
    return Run(run_dir, os.path.basename(run_dir), data if mine else _checked_part(data), verdict, about.st_uid, mine)


def _verdict_in_events(run_dir: str) -> Verdict | None:
    """Where verdict.json could not be written: the last event, unless a newer start or attempt follows it."""
    last: dict[str, Any] | None = None
    for event in events(run_dir, tail=1 << 16):
        if event["event"] in ("run", "attempt"):
            last = None
        elif event["event"] == "verdict":
            last = event
    if last is None:
        return None
    fields = ("status", "cause", "summary", "exit_code", "rank")
    try:
        told = Verdict.from_json({name: last[name] for name in fields if name in last})
    except TypeError:
        return None
    return replace(told, evidence=("from events.jsonl: there is no verdict.json",))


def open_in(run_dir: str, *names_: str) -> int:
    """A descriptor of a regular file in the run directory, by no symbolic link: a record opens no file elsewhere."""
    if len(names_) == 1:  # half the calls: a thousand runs are listed in a fraction of a second
        return untrusted.open_regular(os.path.join(run_dir, names_[0]), follow=False)
    handle = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in names_[:-1]:
            below = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=handle)
            os.close(handle)
            handle = below
        return untrusted.open_regular(names_[-1], dir_fd=handle, follow=False)
    finally:
        os.close(handle)


def _part(run_dir: str, name: str, uid: int, most: int) -> Any:
    """A JSON file of the record, of at most so many bytes; 0: it is not read. FileNotFoundError, or Damaged."""
    try:
        with os.fdopen(open_in(run_dir, name), "rb", buffering=0) as file:
            about = os.fstat(file.fileno())
            if about.st_uid != uid:
                theirs, folders = ownership.user_name(about.st_uid), ownership.user_name(uid)
                raise Damaged(f"{name} belongs to {theirs}, and its folder to {folders}")
            # Python makes room for all that is asked for: 16 MB for each of a thousand small files take 0.2 s.
            data = file.read(min(most, about.st_size) + 1) if most else b""
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name) from None
    except OSError as problem:
        why = "is a symbolic link" if problem.errno == errno.ELOOP else printable(problem.strerror or str(problem))
        raise Damaged(f"{name} {why}") from problem
    if not most:
        return None
    if len(data) > most:
        limit = f"{most >> 20} MiB" if most >> 20 else f"{most >> 10} KiB"
        raise Damaged(f"{name} is larger than {limit}")
    try:
        return untrusted.parse_json(data)
    except ValueError as problem:
        raise Damaged(f"{name} is not JSON: {printable(str(problem), 80)}") from problem


def _check(data: Any) -> None:
    """Of run.json: what Stoker reads again has its type, or is missing."""
    if not isinstance(data, dict):
        raise Damaged(f"{layout.RUN} is not a JSON object")
    for name in ("launcher", "plan", "environment", "hosts", "versions", "request"):
        if not isinstance(data.get(name), (dict, type(None))):
            raise Damaged(f"{layout.RUN}: {name} is not an object")
    launcher, plan = data.get("launcher") or {}, data.get("plan") or {}
    for where, name in ((data, "name"), (data, "config_hash"), (launcher, "host")):
        if not isinstance(where.get(name), (str, type(None))) or len(where.get(name) or "") > 255:
            raise Damaged(f"{layout.RUN}: {name} is not a short text")
    of_launcher = ((launcher, "pid", 1 << 22), (launcher, "start", 1 << 62))
    for where, name, most in ((data, "started", 1e11), (plan, "world_size", 1e7), *of_launcher):
        value = where.get(name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        fits = whole or (name == "started" and isinstance(value, float))
        if value is not None and not (fits and 0 <= value <= most):
            raise Damaged(f"{layout.RUN}: {name} is not a number from 0 to {most:g}")


def _checked_part(data: dict[str, Any]) -> dict[str, Any]:
    """What _check looked at: a listing of many users' runs keeps no more of each."""
    known = {"launcher": ("pid", "start", "host"), "plan": ("world_size",)}
    kept = {part: {name: (data.get(part) or {}).get(name) for name in fields} for part, fields in known.items()}
    return {**kept, **{name: data.get(name) for name in ("name", "config_hash", "started")}}


def events(run_dir: str, tail: int = 0) -> Iterator[dict[str, Any]]:
    """Whole lines only, each with a kind and a time: the last may be half written. `tail`: of so many bytes."""
    try:
        handle = open_in(run_dir, layout.EVENTS)
    except OSError:
        return  # none yet; or a damaged record, which read() reports
    with os.fdopen(handle, "rb") as file:
        if tail and os.fstat(handle).st_size > tail:
            file.seek(-tail, os.SEEK_END)
            file.readline(_LONGEST_EVENT)
        most = file.tell() + (tail or _MOST_EVENTS)  # it may grow faster than we read
        while file.tell() < most and (line := file.readline(_LONGEST_EVENT)):
            event = _event(line)
            if event is not None:
                yield event


def last_time(run_dir: str) -> float | None:
    """Of its newest event."""
    try:
        with os.fdopen(open_in(run_dir, layout.EVENTS), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 16)))
            lines = file.read(1 << 16).splitlines(keepends=True)
    except OSError:
        return None
    return next((float(event["time"]) for event in map(_event, reversed(lines)) if event is not None), None)


def _event(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        event = untrusted.parse_json(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    when = event.setdefault("time", 0.0)
    return event if isinstance(when, (int, float)) and not isinstance(when, bool) and 0 <= when <= 1e11 else None


class _Allowance:
    """How much of one other user's runs a listing reads, whatever they put there."""

    def __init__(self) -> None:
        self._folders, self._bytes = 100, 1 << 20

    def covers(self, run_dir: str) -> bool:
        sizes = {name: _size(os.path.join(run_dir, name)) for name in (layout.RUN, layout.VERDICT, layout.EVENTS)}
        if sizes[layout.RUN] > _MOST_LISTED:
            return False
        if sizes[layout.VERDICT]:
            del sizes[layout.EVENTS]  # read only where there is no verdict
        self._folders -= 1
        self._bytes -= sum(min(size, _MOST_LISTED) for size in sizes.values())
        return self._folders >= 0 and self._bytes >= 0


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def look(root: str, everybody: bool = False, read_run: Callable[[str, int], Run | None] = read) -> Listing:
    """One's own runs; with `everybody` other users' too, of each the last by name, and small records only.

    `read_run`: `read`, or one that remembers: a viewer lists a thousand runs every two seconds.
    """
    runs: list[Run] = []
    damaged: list[tuple[str, str]] = []
    others = 0
    try:
        entries = sorted(os.listdir(root), reverse=True)
    except FileNotFoundError:
        entries = []
    except OSError as problem:
        line = f"the runs folder {printable(root)} can't be read: {problem.strerror}; name another with --runs-dir"
        raise names.Refusal(line, names.EX_NOINPUT) from problem
    allowances: dict[int, _Allowance] = {}  # by uid
    for name in entries:
        run_dir = os.path.join(root, name)
        try:
            about = os.lstat(run_dir)
        except FileNotFoundError:
            continue  # removed meanwhile
        except OSError:
            others += 1  # a user's FUSE mount is closed to everybody else, even to root
            continue
        if not stat.S_ISDIR(about.st_mode):
            continue
        try:
            uid = about.st_uid
            mine = ownership.is_mine(uid, root)
            if not mine and not (everybody and allowances.setdefault(uid, _Allowance()).covers(run_dir)):
                others += 1
                continue
            if mine:  # another user's second name of our file takes nothing from us
                _refuse_same_file(run_dir)
            run = read_run(run_dir, _MOST_LISTED)
        except Damaged as problem:
            damaged.append((name, str(problem)))
        except OSError as problem:
            damaged.append((name, f"can't be read: {problem.strerror}"))
        else:
            if run is not None:
                runs.append(run if mine else _brief(run))
    runs.reverse()
    damaged.reverse()
    return Listing(tuple(sorted(runs, key=lambda run: run.started)), tuple(damaged), others)


# What is in memory of each run, in proportion to its size.
_KEPT = (layout.RUN, layout.VERDICT, layout.EVENTS, layout.METRICS)
_first_names: dict[tuple[int, int], str] = {}  # of files with several names -> the one that counts


def _refuse_same_file(run_dir: str) -> None:
    """A record that came with a folder may have any number of names, and each would be in memory: an archive of 4 KB made
    3.6 GB of forty. Of all folders that this process lists: a job's roles are in one of their own.
    """
    for name in _KEPT:
        path = os.path.join(run_dir, name)
        try:
            about = os.lstat(path)
        except OSError:
            continue  # none; or whoever reads it says why
        if about.st_nlink > 1 and stat.S_ISREG(about.st_mode):  # on some network mounts all files have the same number
            first = _first_names.setdefault((about.st_dev, about.st_ino), path)
            folder = os.path.dirname(first)
            if folder == run_dir:
                continue
            if _is_same(first, about) and not _is_same(folder, os.lstat(run_dir)):
                raise Damaged(f"{name} is the same file as that of {printable(os.path.basename(folder), 80)}")
            _first_names[about.st_dev, about.st_ino] = path  # that one is gone, or the same by another path


def _is_same(path: str, about: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.lstat(path), about)
    except OSError:
        return False


def _brief(run: Run) -> Run:
    """With no more of its verdict than a row of the listing shows."""
    if run.verdict is None:
        return run
    verdict = run.verdict
    return replace(run, verdict=Verdict(verdict.status[:80], verdict.cause[:80], "", verdict.exit_code, verdict.rank))


def all_runs(root: str) -> list[Run]:
    """One's own, oldest first."""
    return list(look(root).runs)


def is_only_one(root: str, name: str) -> bool:
    """Of one's own runs there, at most one has this name, as far as can be read."""
    try:
        return sum(run.name == name for run in look(root).runs) <= 1
    except names.Refusal:
        return False


def find(which: str | None, root: str, exact: bool = False, say: Callable[[str], None] = terminal.say) -> Run:
    """By path, id, name (the newest), a beginning that fits one run only, or the newest. Others' by path only."""
    run = _found(which, root, exact, say)
    if run.mine:  # or unpacked from somebody's archive; others' are read within limits
        layout.check_entries(run.dir, layout.HISTORY, ours_only=True)
    return run


def _found(which: str | None, root: str, exact: bool, say: Callable[[str], None]) -> Run:
    if which is None or which == layout.LATEST:
        return _newest(root, say)
    if os.path.basename(which) == layout.LATEST and os.path.islink(which):
        return _newest(os.path.dirname(which), say)
    by_path = os.sep in which
    for given in (which, os.path.join(root, which)):
        candidate = through_latest(given, say)
        folder = os.path.dirname(candidate) or "."
        link = os.path.islink(candidate) and not by_path
        if link and not ownership.is_mine(os.lstat(candidate).st_uid, folder):
            continue
        try:
            run = read(os.path.realpath(candidate))
        except Damaged as problem:
            if by_path:
                line = f"the record of run {printable(which)} is damaged: {problem}"
                raise names.Refusal(line, names.EX_DATAERR) from problem
            continue  # perhaps another run has this name
        if run is not None and (run.mine or by_path):
            return run
    if by_path and (role := _role(which, root, exact, say)) is not None:
        return role
    listing = look(root)
    if listing.skipped:
        say(listing.skipped)
    match = [run for run in listing.runs if run.name == which]
    if len(match) > 1:
        say(f"{printable(which, 100)} is the name of {len(match)} runs; the newest is taken: {match[-1].id}")
    if match:
        return match[-1]
    begins = [run for run in listing.runs if run.id.startswith(which) or run.name.startswith(which)]
    others = os.path.isdir(os.path.join(root, which))  # another user's, whatever of ours begins like it
    if len(begins) == 1 and not exact and not others:
        return begins[0]
    raise _no_run(which, root, listing)


def _role(which: str, root: str, exact: bool, say: Callable[[str], None]) -> Run | None:
    """JOB/ROLE: the run of one role of a job."""
    job, _, name = which.rpartition(os.sep)
    try:
        return role_of(find(job or None, root, exact, say), name)
    except names.Refusal:
        return None


def roles(run: Run) -> dict[str, Run]:
    """The runs of a job's roles that have been started; none of a plain run."""
    if not run.mine or not os.path.isdir(os.path.join(run.dir, layout.ROLES)):
        return {}
    found = {one.name: one for one in look(os.path.join(run.dir, layout.ROLES)).runs}
    return {name: found[name] for name in sorted(found)}


def role_of(run: Run, name: str) -> Run:
    found = roles(run)
    if name not in found:
        there = f"; it has {', '.join(found)}" if found else ", but is a plain run"
        raise names.Refusal(f"run {run.id} has no role {printable(name, 60)!r}{there}", names.EX_NOINPUT)
    return found[name]


def _newest(root: str, say: Callable[[str], None]) -> Run:
    """The link's where it is our own and leads to a run of ours in this folder; else the newest by its start."""
    link = os.path.join(root, layout.LATEST)
    try:
        target = os.readlink(link)
        if ownership.is_mine(os.lstat(link).st_uid, root) and os.path.basename(target) == target:
            run = load(os.path.realpath(link))
            if run is not None and run.mine:
                return run
    except OSError:
        pass  # there is none: a file system without links, or another user's
    listing = look(root)
    if listing.skipped:
        say(listing.skipped)
    if not listing.runs:
        others = f" of yours ({listing.others} of other users: `stoker runs --all`)" if listing.others else ""
        there = [f"{printable(one.dir)} is a speedrun: --runs-dir {printable(one.runs_dir)}" for one in speedruns(root)]
        hint = "; ".join(there[:3]) or "name another folder with --runs-dir"
        raise names.Refusal(f"no runs{others} in {printable(root)}; {hint}", names.EX_NOINPUT)
    return listing.runs[-1]


def through_latest(path: str, say: Callable[[str], None] = terminal.say) -> str:
    """`path`; where it leads through a `latest` that is not ours, through our newest run there: in a folder that several users
    share anybody may have made it, as a link or as a folder. Where we have no run there, it stays what was named.
    """
    parts = path.split("/")
    for at in (at for at, part in enumerate(parts) if part == layout.LATEST):
        latest, root = "/".join(parts[: at + 1]), "/".join(parts[:at]) or ("/" if at else ".")
        whose = _whose(latest, root)
        if not whose:
            continue
        try:
            runs = all_runs(root)
        except names.Refusal:  # not ours to list: no place of our runs
            continue
        if runs:
            say(f"{printable(latest)} {whose}: your newest run there is used, {printable(runs[-1].dir)}")
            return os.path.join(runs[-1].dir, *filter(None, parts[at + 1 :]))
    return path


def _whose(latest: str, root: str) -> str:
    """Who else has made it, or what it leads to. Empty: there is none, or all of it is ours."""
    try:
        link = os.lstat(latest)
    except OSError:
        return ""
    is_link = stat.S_ISLNK(link.st_mode)
    if not ownership.is_mine(link.st_uid, root):
        return f"is a {'link' if is_link else 'folder'} of {ownership.user_name(link.st_uid)}"
    try:
        target = os.stat(latest).st_uid
    except OSError:
        return "leads nowhere"
    return "" if ownership.is_mine(target, root) else f"leads to a folder of {ownership.user_name(target)}"


def _no_run(which: str, root: str, listing: Listing) -> names.Refusal:
    shown = printable(which, 100)
    path = os.path.join(root, which)
    broken = dict(listing.damaged).get(which)
    if broken:
        return names.Refusal(f"the record of run {shown} is damaged: {broken}", names.EX_DATAERR)
    if os.sep not in which and os.path.isdir(path):
        uid = os.lstat(path).st_uid
        if not ownership.is_mine(uid, root):
            user = ownership.user_name(uid)
            line = f"run {shown} in {printable(root)} belongs to {user}: to read it give its path, {printable(path)}"
            return names.Refusal(line, names.EX_NOPERM)
    for place in (which, path):
        if (speedrun := speedrun_at(place.rstrip(os.sep))) is not None:
            line = f"{shown} is a speedrun: name a run of its stages, with --runs-dir {printable(speedrun.runs_dir)}"
            return names.Refusal(line, names.EX_NOINPUT)
    hint = suggest(which, [*(run.name for run in listing.runs), *(run.id for run in listing.runs)])
    if not hint and listing.runs:
        hint = f"; `stoker runs` lists the {len(listing.runs)} there"
    return names.Refusal(f"no run {shown!r} in {printable(root)}{printable(hint)}", names.EX_NOINPUT)


def alive(run: Run) -> bool | None:
    """Is its launcher there: the process in the record, if ours and writing that record. None: can't be told."""
    pid, start, host = run.launcher
    if not run.mine or (host and host != os.uname().nodename):
        return None
    now = process(pid) if pid > 0 else None
    if now is None or now.start != start or now.state == "Z" or owner(pid) != os.getuid():
        return False
    return ownership.writes_to(pid, os.path.join(run.dir, layout.EVENTS))


def over(run: Run) -> bool:
    """Nothing more will come of it. Of one on another host nobody here knows: it is over with its verdict."""
    said = status(run)
    if said == "unknown":
        said = status(load(run.dir) or run)
    return said not in ("running", "unknown")


def status(run: Run) -> str:
    living = alive(run)
    if run.verdict is not None and not living:
        return run.verdict.status
    return {True: "running", None: "unknown", False: "lost"}[living]
