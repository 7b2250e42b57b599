"""stoker clean [--yes] [--pid N] [--cache]"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from typing import Any

from stoker.contract import env_vars, errors
from stoker.contract.frozen import as_json, pick_fields
from stoker.contract.options import OptionParser
from stoker.contract.terminal import print_json, print_text
from stoker.contract.text import escape
from stoker.contract.units import format_bytes, format_duration, parse_bytes, parse_duration, plural
from stoker.control.doctor import cleanup, leftovers, stale_caches, stale_files
from stoker.control.doctor.cleanup import Stopped
from stoker.control.doctor.leftovers import Leftover, OnGpu
from stoker.control.doctor.stale_caches import Cache
from stoker.control.doctor.stale_files import Debris, Lock
from stoker.control.machine.model import Machine

_ABOUT = "Shows what dead runs left behind: processes, shared memory, folders. Frees it with --yes. Other users' processes are not touched."
_CODES = (
    "Exit codes: 0 nothing to do, or all done; 1 found something, and --yes was not given; 2 something survived; 3 could"
    " not check."
)
CLEAN, FOUND, SURVIVED, UNSURE = 0, 1, 2, 3
_LINES = 10  # of a kind of file; dead agents' folders come by the hundred


def parser() -> OptionParser:
    made = OptionParser("stoker clean", _ABOUT, _CODES)
    made.switch("--yes", "stop and remove what is shown")
    made.option("--grace", "TIME", "between SIGTERM and SIGKILL (default: 5s)", parse_duration, default=5.0)
    only = "leftovers of the runs in this folder only (default: of all your runs, and files that no process uses)"
    made.option("--runs-dir", "DIR", only)
    made.option("--pid", "N", "stop this process of yours, whatever started it; asks first", int, action="append")
    made.switch("--cache", "show data and compile caches instead; with limits and --yes, prune them")
    made.option(
        "--older-than", "TIME", "with --cache: what has not been used for this long, such as 30d", parse_duration
    )
    made.option("--max-size", "SIZE", "with --cache: the longest unused, until all together fit, as 20GB", parse_bytes)
    made.switch("--json", "one JSON object")
    return made


def main(argv: list[str]) -> int:
    told = parser().parse_args(argv)
    limits = told.older_than is not None or told.max_size is not None
    if limits and not told.cache:
        raise errors.Refusal("--older-than and --max-size need --cache", errors.EX_USAGE)
    if told.cache and (told.pid or told.runs_dir):
        raise errors.Refusal("--cache can't be combined with --pid or --runs-dir", errors.EX_USAGE)
    if told.cache and told.yes and not limits:
        line = "--cache --yes: say how much; `--older-than 30d`, `--max-size 20GB` or both"
        raise errors.Refusal(line, errors.EX_USAGE)
    if told.pid and told.runs_dir:
        raise errors.Refusal("--pid names a process, --runs-dir a folder of runs: one of them", errors.EX_USAGE)
    if told.cache:
        return _caches(told)
    return _named(told) if told.pid else _leftovers(told)


def _leftovers(told: argparse.Namespace) -> int:
    machine, held = _look()
    left, alone = leftovers.find_leftovers(held, told.runs_dir)
    ours = {one.process.pid for one in left}
    others = leftovers.find_others(machine, ours, _recorded() is not None)
    locks, strange = stale_files.find_locks()
    files = [] if told.runs_dir else stale_files.find_debris()
    if not told.json:
        _show_processes("left behind by dead runs", left)
        _show_debris(files)
        _show_processes("of runs that may be over, left alone", alone)
        _show_locks(locks, strange)
        _show_others(others)
        if machine.gpu_error:
            _line(f"GPUs could not be checked: {machine.gpu_error}")
    stopped: Stopped | None = None
    back: list[cleanup.Back] = []
    kept: list[tuple[Debris, str]] = []
    if told.yes and left:
        stopped, back = _stop(left, told.grace, machine, lambda: leftovers.find_leftovers({}, told.runs_dir)[0])
    if told.yes:
        # What the dead had open is free now.
        files = files if stopped is None or told.runs_dir else stale_files.find_debris()
        kept = cleanup.remove_debris(files)
    if told.json:
        _print_json(
            dry_run=not told.yes,
            leftovers=_processes(left),
            left_alone=_processes(alone),
            files=as_json(files),
            locks=as_json(locks),
            not_locks=strange,
            others=as_json(others),
            gpu_error=machine.gpu_error,
            **_outcome(stopped, back),
            files_kept=[{"path": one.path, "why": why} for one, why in kept],
        )
    else:
        _tell(stopped, back)
        _tell_removed("file or folder", "files and folders", [one for one in files if told.yes], kept)
        if not left and not files:
            print("nothing to clean")
        elif not told.yes:
            print_text("nothing was touched: `stoker clean --yes` stops and removes what is left behind")
    if (stopped and stopped.survivors) or kept:
        return SURVIVED
    if (left or files) and not told.yes:
        return FOUND
    return UNSURE if alone or machine.gpu_error else CLEAN


def _named(told: argparse.Namespace) -> int:
    machine, held = _look()
    found = leftovers.find_named(told.pid, held)
    if not told.json:
        _show_processes("to be stopped", found)
    agreed = told.yes
    if not agreed and not told.json:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            line = "--pid asks before it stops anything, and there is no terminal to ask at: add --yes"
            raise errors.Refusal(line, errors.EX_USAGE)
        agreed = input("stop them? [y/N] " if len(found) > 1 else "stop it? [y/N] ").strip().lower() in ("y", "yes")
    stopped, back = _stop(found, told.grace, machine) if agreed else (None, [])
    if told.json:
        _print_json(dry_run=not agreed, named=_processes(found), gpu_error=machine.gpu_error, **_outcome(stopped, back))
    elif stopped is None:
        print("nothing was touched")
    else:
        _tell(stopped, back)
    if stopped is None:
        return FOUND
    return SURVIVED if stopped.survivors else CLEAN


def _recorded() -> str | None:
    return os.environ.get(env_vars.MACHINE) or None


def _look() -> tuple[Machine, dict[int, int]]:
    """The machine, and what each process here holds of its GPUs. The pids of a recorded machine are nobody's here."""
    seen = leftovers.look_at_gpus(_recorded())
    if isinstance(seen, str):
        return Machine(os.uname().nodename, 0, 0, 0, gpu_error=seen), {}
    return seen, {} if _recorded() else leftovers.gpu_memory(seen)


def _stop(found: list[Leftover], grace: float, before: Machine, more: Any = list) -> tuple[Stopped, list[cleanup.Back]]:
    stopped = cleanup.stop_ladder([one.process for one in found], grace, lambda: [one.process for one in more()])
    if _recorded():
        return stopped, []
    gone = {one.process.pid for one in found if one.gpu_memory is not None} - {one.pid for one in stopped.survivors}
    return stopped, cleanup.wait_for_memory(before, gone, lambda: leftovers.look_at_gpus(None))


def _caches(told: argparse.Namespace) -> int:
    found = stale_caches.find_caches(stale_caches.cache_roots(os.environ, os.getcwd()))
    chosen = stale_caches.choose_to_prune(found, told.older_than, told.max_size)
    kept = cleanup.prune(chosen) if told.yes else []
    if told.json:
        _print_json(
            dry_run=not told.yes,
            caches=as_json(found),
            total=sum(one.size for one in found),
            to_prune=[one.path for one in chosen],
            kept=[{"path": one.path, "why": why} for one, why in kept],
        )
    else:
        _show_caches(found, chosen)
        _tell_removed("cache entry", "cache entries", chosen if told.yes else [], kept)
        if chosen and not told.yes:
            entries, freed = _count(chosen, "entry", "entries"), format_bytes(sum(one.size for one in chosen))
            print(f"nothing was touched: with --yes {entries} of {freed} would go")
    if kept:
        return SURVIVED
    return FOUND if chosen and not told.yes else CLEAN


def _show_caches(found: list[Cache], chosen: list[Cache]) -> None:
    """A data set by itself; a compiler's cache, whose entries are thousands of hashes, as one line."""
    if not found:
        print("no caches")
        return
    print(f"{'KIND':<8} {'SIZE':>9} {'UNUSED FOR':>14}  PATH")
    groups: dict[str, list[Cache]] = {}
    for one in found:
        groups.setdefault(one.path if one.kind == "data" else one.root, []).append(one)
    for path, members in groups.items():
        going, staying = [one for one in members if one in chosen], {one.kept for one in members if one.kept}
        note = f", {plural(len(members), 'entry')}" if members[0].kind != "data" else ""
        note += f"; to prune: {format_bytes(sum(one.size for one in going))} ({len(going)})" if going else ""
        note += f"; kept: {', '.join(sorted(staying))}" if staying else ""
        held, idle = format_bytes(sum(one.size for one in members)), format_duration(min(one.idle for one in members))
        _line(f"{members[0].kind:<8} {held:>9} {idle:>14}  {path}{note}")
    print(f"{'total':<8} {format_bytes(sum(one.size for one in found)):>9}")


def _show_processes(title: str, found: list[Leftover]) -> None:
    if not found:
        return
    print(f"{title}:\n  {'PID':>8} {'AGE':>12} {'RAM':>9} {'GPU':>9}  {'RUN':<30}  COMMAND")
    for one in found:
        rss, held = ("n/a" if many is None else format_bytes(many) for many in (one.rss, one.gpu_memory))
        why = f"  ({one.why})" if one.why else ""
        columns = f"{one.process.pid:>8} {format_duration(one.age):>12} {rss:>9} {held:>9}  {one.run or '-':<30}"
        _line(f"  {columns}  {_short(one.command)}{why}")


def _show_debris(found: list[Debris]) -> None:
    if found:
        print("files that no process uses any more:")
    for kind in dict.fromkeys(one.kind for one in found):
        alike = [one for one in found if one.kind == kind]
        for one in alike[:_LINES]:
            _line(f"  {one.path}  {kind}, {format_bytes(one.size)}, {format_duration(one.age)} old")
        rest = alike[_LINES:]
        if rest:
            held = format_bytes(sum(one.size for one in rest))
            print(f"  and {len(rest)} more ({kind}), {held}; --json lists them all")


def _show_locks(locks: list[Lock], strange: list[str]) -> None:
    """A free lock file stays for the next run. What is no lock file may be another user's: reported, kept."""
    held = [one for one in locks if one.held]
    if locks:
        free = len(locks) - len(held)
        print_text(f"GPU locks: {len(held)} held, {free} free (the files stay; a lock ends with its process)")
    for one in held:
        _line(f"  {one.gpu}  held by {one.who}")
    for line in strange[:_LINES]:
        _line(f"GPU locks: {line}; skipped")
    if len(strange) > _LINES:
        print_text(f"GPU locks: and {len(strange) - _LINES} more files that are not locks; --json lists them all")


def _show_others(others: list[OnGpu]) -> None:
    if others:
        print("on the GPUs, not touched:")
    for one in others:
        age = f", {format_duration(one.age)} old" if one.age is not None else ""
        memory = format_bytes(one.memory) if one.memory is not None else "n/a"
        _line(f"  {one.gpu}: pid {one.pid} ({one.user or '?'}{age}, {memory}) {_short(one.command or '?')}")
        _line(f"      {one.advice}")


def _tell(stopped: Stopped | None, back: Iterable[cleanup.Back]) -> None:
    if stopped is None:
        return
    forced = f", {len(stopped.killed)} by SIGKILL" if stopped.killed else ""
    if not stopped.survivors:
        print(f"stopped in {format_duration(stopped.seconds)}{forced}")
    for one in stopped.survivors:
        stuck = ": it waits in the kernel for a GPU or a disk, where no signal reaches it; a reboot may be needed"
        state = f"{one.state}{stuck if one.state == 'D' else ''}"
        _line(f"pid {one.pid} ({one.name}) survives after {format_duration(stopped.seconds)}, in state {state}")
    for gpu in back:
        took = format_duration(gpu.seconds)
        when = f"back after {took}" if gpu.whole else f"back; not all of what was held, {took} after"
        print(f"{gpu.gpu}: {format_bytes(gpu.freed)} {when}")


def _tell_removed(one: str, many: str, tried: list[Any], kept: list[tuple[Any, str]]) -> None:
    stays = {id(item) for item, _ in kept}
    gone = [item for item in tried if id(item) not in stays]
    if gone:
        print(f"removed {_count(gone, one, many)}, {format_bytes(sum(item.size for item in gone))}")
    for item, why in kept:
        _line(f"{item.path} stays: {why}")


def _line(text: str) -> None:
    """One line, whatever the names of processes and files hold."""
    print(escape(text))


def _count(items: list[Any], one: str, many: str) -> str:
    return f"{len(items)} {one if len(items) == 1 else many}"


def _short(command: str) -> str:
    return command if len(command) <= 100 else command[:99] + "…"


def _processes(found: list[Leftover]) -> list[dict[str, Any]]:
    return [
        pick_fields(one.process, "pid", "start", "state")
        | pick_fields(one, "user", "rss", "gpu_memory", "command", "run", "why")
        | {"age": round(one.age, 3)}
        for one in found
    ]


def _outcome(stopped: Stopped | None, back: list[cleanup.Back]) -> dict[str, Any]:
    return {"stopped": as_json(stopped), "memory_back": as_json(back)}


def _print_json(**fields: Any) -> None:
    print_json({"schema": 1, **fields})
