"""`stoker clean [--yes] [--pid N] [--cache]`: shows what dead runs left behind, or caches, and frees it with --yes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from stoker.contract import env_vars, errors
from stoker.contract.frozen import as_json, pick_fields
from stoker.contract.options import OptionParser
from stoker.contract.terminal import print_json, print_text
from stoker.contract.text import escape
from stoker.contract.units import format_bytes, format_duration, parse_bytes, parse_duration, plural
from stoker.control.doctor import cleanup, leftovers, stale_caches, stale_files
from stoker.control.doctor.cleanup import StopResult
from stoker.control.doctor.leftovers import GpuProcess, Leftover
from stoker.control.doctor.stale_caches import Cache
from stoker.control.doctor.stale_files import Debris, Lock
from stoker.control.machine.model import Machine

_DESCRIPTION = (
    "Shows what dead runs left behind: processes, shared memory, folders. Frees it with --yes. Never touches other users'"
    " processes."
)
_EXIT_CODES = (
    "Exit codes: 0 nothing to do, or all done; 1 found something, and --yes was not given; 2 something could not be stopped"
    " or removed; 3 could not check."
)
CLEAN, FOUND, SURVIVED, UNSURE = 0, 1, 2, 3  # exit codes
_MAX_LINES = 10  # for each kind of file: dead agents may leave hundreds of folders


def build_parser() -> OptionParser:
    parser = OptionParser("stoker clean", _DESCRIPTION, _EXIT_CODES)
    parser.switch("--yes", "stop and remove what is shown")
    parser.option("--grace", "TIME", "time between SIGTERM and SIGKILL (default: 5s)", parse_duration, default=5.0)
    runs_dir = "only what the runs in this folder left (default: all your runs, and files that no process uses)"
    parser.option("--runs-dir", "DIR", runs_dir)
    pid = "stop this process of yours, whatever started it; asks first"
    parser.option("--pid", "N", pid, int, action="append")
    parser.switch("--cache", "show data and compile caches instead; prune them with a limit and --yes")
    older = "with --cache: prune what has not been used for this long, such as 30d"
    parser.option("--older-than", "TIME", older, parse_duration)
    size = "with --cache: prune what has not been used for longest until this size is reached, e.g. 20GB"
    parser.option("--max-size", "SIZE", size, parse_bytes)
    parser.switch("--json", "print one JSON object")
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    has_limit = args.older_than is not None or args.max_size is not None
    if has_limit and not args.cache:
        raise errors.Refusal("--older-than and --max-size need --cache", errors.EX_USAGE)
    if args.cache and (args.pid or args.runs_dir):
        raise errors.Refusal("--cache can't be combined with --pid or --runs-dir", errors.EX_USAGE)
    if args.cache and args.yes and not has_limit:
        line = "--cache --yes needs a limit; add `--older-than 30d`, `--max-size 20GB` or both"
        raise errors.Refusal(line, errors.EX_USAGE)
    if args.pid and args.runs_dir:
        raise errors.Refusal("--pid can't be combined with --runs-dir", errors.EX_USAGE)
    if args.cache:
        return _clean_caches(args)
    return _stop_pids(args) if args.pid else _clean_leftovers(args)


def _clean_leftovers(args: argparse.Namespace) -> int:
    machine, gpu_memory = _observe_gpus()
    dead, uncertain = leftovers.find_leftovers(gpu_memory, args.runs_dir)
    others = leftovers.find_other_processes(
        machine, {leftover.process.pid for leftover in dead}, _recorded_machine_path() is not None
    )
    locks, not_locks = stale_files.find_locks()
    files = [] if args.runs_dir else stale_files.find_debris()
    if not args.json:
        _print_processes("processes left behind by dead runs", dead)
        _print_files(files)
        _print_processes("processes of runs that may have ended (not touched)", uncertain)
        _print_locks(locks, not_locks)
        _print_others(others)
        if machine.gpu_error:
            _print_line(f"GPUs could not be checked: {machine.gpu_error}")
    stopped: StopResult | None = None
    freed: list[cleanup.FreedMemory] = []
    not_removed: list[tuple[Debris, str]] = []
    if args.yes and dead:

        def find_more() -> list[Leftover]:
            return leftovers.find_leftovers({}, args.runs_dir)[0]

        stopped, freed = _stop(dead, args.grace, machine, find_more)
    if args.yes:
        # Search again: the files that the stopped processes had open are unused now.
        files = files if stopped is None or args.runs_dir else stale_files.find_debris()
        not_removed = cleanup.remove_debris(files)
    if args.json:
        _print_json(
            dry_run=not args.yes,
            leftovers=_processes_to_json(dead),
            left_alone=_processes_to_json(uncertain),
            files=as_json(files),
            locks=as_json(locks),
            not_locks=not_locks,
            others=as_json(others),
            gpu_error=machine.gpu_error,
            stopped=as_json(stopped),
            memory_back=as_json(freed),
            files_kept=[{"path": file.path, "why": why} for file, why in not_removed],
        )
    else:
        _print_stopped(stopped, freed)
        _print_removed("file or folder", "files and folders", files if args.yes else [], not_removed)
        if not dead and not files:
            print("nothing to clean")
        elif not args.yes:
            print_text("nothing was changed; `stoker clean --yes` stops and removes what is left behind")
    if (stopped and stopped.survivors) or not_removed:
        return SURVIVED
    if (dead or files) and not args.yes:
        return FOUND
    return UNSURE if uncertain or machine.gpu_error else CLEAN


def _stop_pids(args: argparse.Namespace) -> int:
    machine, gpu_memory = _observe_gpus()
    processes = leftovers.find_named(args.pid, gpu_memory)
    if not args.json:
        _print_processes("to be stopped", processes)
    confirmed = args.yes
    if not confirmed and not args.json:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            line = "--pid asks before it stops a process, and there is no terminal to ask on; add --yes"
            raise errors.Refusal(line, errors.EX_USAGE)
        question = "stop them? [y/N] " if len(processes) > 1 else "stop it? [y/N] "
        confirmed = input(question).strip().lower() in ("y", "yes")
    stopped, freed = _stop(processes, args.grace, machine) if confirmed else (None, [])
    if args.json:
        _print_json(
            dry_run=not confirmed,
            named=_processes_to_json(processes),
            gpu_error=machine.gpu_error,
            stopped=as_json(stopped),
            memory_back=as_json(freed),
        )
    elif stopped is None:
        print("nothing was changed")
    else:
        _print_stopped(stopped, freed)
    if stopped is None:
        return FOUND
    return SURVIVED if stopped.survivors else CLEAN


def _recorded_machine_path() -> str | None:
    return os.environ.get(env_vars.MACHINE) or None


def _observe_gpus() -> tuple[Machine, dict[int, int]]:
    """Return the machine, and the GPU memory of each process by pid.

    A recorded machine has no such processes, since its pids mean nothing here.
    """
    machine = leftovers.observe_gpus(_recorded_machine_path())
    if isinstance(machine, str):
        return Machine(os.uname().nodename, 0, 0, 0, gpu_error=machine), {}
    return machine, {} if _recorded_machine_path() else leftovers.sum_gpu_memory(machine)


def _stop(
    processes: list[Leftover], grace: float, before: Machine, find_more: Callable[[], list[Leftover]] = list
) -> tuple[StopResult, list[cleanup.FreedMemory]]:
    """Stop processes and those that `find_more` returns; return the outcome, and the GPU memory that was freed."""
    targets = [leftover.process for leftover in processes]
    stopped = cleanup.stop_processes(targets, grace, lambda: [leftover.process for leftover in find_more()])
    if _recorded_machine_path():
        return stopped, []
    stopped_pids = {leftover.process.pid for leftover in processes if leftover.gpu_memory is not None}
    stopped_pids -= {process.pid for process in stopped.survivors}
    return stopped, cleanup.wait_for_memory(before, stopped_pids, lambda: leftovers.observe_gpus(None))


def _clean_caches(args: argparse.Namespace) -> int:
    caches = stale_caches.find_caches(stale_caches.list_cache_roots(os.environ, os.getcwd()))
    to_prune = stale_caches.choose_to_prune(caches, args.older_than, args.max_size)
    not_pruned = cleanup.remove_caches(to_prune) if args.yes else []
    if args.json:
        _print_json(
            dry_run=not args.yes,
            caches=as_json(caches),
            total=sum(cache.size for cache in caches),
            to_prune=[cache.path for cache in to_prune],
            kept=[{"path": cache.path, "why": why} for cache, why in not_pruned],
        )
    else:
        _print_caches(caches, to_prune)
        _print_removed("cache entry", "cache entries", to_prune if args.yes else [], not_pruned)
        if to_prune and not args.yes:
            entries, size = plural(len(to_prune), "entry"), format_bytes(sum(cache.size for cache in to_prune))
            print(f"nothing was changed; --yes would remove {entries} of {size}")
    if not_pruned:
        return SURVIVED
    return FOUND if to_prune and not args.yes else CLEAN


def _print_caches(caches: list[Cache], to_prune: list[Cache]) -> None:
    """Print a line for each data set, and one for a compiler's cache, which has thousands of entries."""
    if not caches:
        print("no caches")
        return
    print(f"{'KIND':<8} {'SIZE':>9} {'UNUSED FOR':>14}  PATH")
    groups: dict[str, list[Cache]] = {}
    for cache in caches:
        groups.setdefault(cache.path if cache.kind == "data" else cache.root, []).append(cache)
    for path, entries in groups.items():
        pruned = [cache for cache in entries if cache in to_prune]
        reasons = {cache.kept for cache in entries if cache.kept}
        note = f", {plural(len(entries), 'entry')}" if entries[0].kind != "data" else ""
        note += f"; to prune: {format_bytes(sum(cache.size for cache in pruned))} ({len(pruned)})" if pruned else ""
        note += f"; kept: {', '.join(sorted(reasons))}" if reasons else ""
        size = format_bytes(sum(cache.size for cache in entries))
        idle = format_duration(min(cache.idle for cache in entries))
        _print_line(f"{entries[0].kind:<8} {size:>9} {idle:>14}  {path}{note}")
    print(f"{'total':<8} {format_bytes(sum(cache.size for cache in caches)):>9}")


def _print_processes(title: str, processes: list[Leftover]) -> None:
    if not processes:
        return
    print(f"{title}:\n  {'PID':>8} {'AGE':>12} {'RAM':>9} {'GPU':>9}  {'RUN':<30}  COMMAND")
    for leftover in processes:
        ram, gpu = ("n/a" if size is None else format_bytes(size) for size in (leftover.rss, leftover.gpu_memory))
        why = f"  ({leftover.why})" if leftover.why else ""
        columns = f"{leftover.process.pid:>8} {format_duration(leftover.age):>12} {ram:>9} {gpu:>9}  {leftover.run or '-':<30}"
        _print_line(f"  {columns}  {_shorten(leftover.command)}{why}")


def _print_files(files: list[Debris]) -> None:
    if files:
        print("files that no process uses anymore:")
    for kind in dict.fromkeys(file.kind for file in files):
        of_kind = [file for file in files if file.kind == kind]
        for file in of_kind[:_MAX_LINES]:
            _print_line(f"  {file.path}  {kind}, {format_bytes(file.size)}, {format_duration(file.age)} old")
        unlisted = of_kind[_MAX_LINES:]
        if unlisted:
            size = format_bytes(sum(file.size for file in unlisted))
            print(f"  and {len(unlisted)} more ({kind}), {size}; --json lists them all")


def _print_locks(locks: list[Lock], not_locks: list[str]) -> None:
    """Print the GPU locks. Free lock files stay for the next run. Other files stay, too, since they may be another user's."""
    held = [lock for lock in locks if lock.held]
    if locks:
        free = len(locks) - len(held)
        print_text(f"GPU locks: {len(held)} held, {free} free (the files stay; a lock ends with its process)")
    for lock in held:
        _print_line(f"  {lock.gpu}  held by {lock.who}")
    for line in not_locks[:_MAX_LINES]:
        _print_line(f"GPU locks: {line}; skipped")
    if len(not_locks) > _MAX_LINES:
        print_text(f"GPU locks: and {len(not_locks) - _MAX_LINES} more files that are not locks; --json lists them all")


def _print_others(others: list[GpuProcess]) -> None:
    if others:
        print("other processes on the GPUs (not touched):")
    for process in others:
        age = f", {format_duration(process.age)} old" if process.age is not None else ""
        memory = format_bytes(process.memory) if process.memory is not None else "n/a"
        owner = f"{process.user or '?'}{age}, {memory}"
        _print_line(f"  {process.gpu}: pid {process.pid} ({owner}) {_shorten(process.command or '?')}")
        _print_line(f"      {process.advice}")


def _print_stopped(stopped: StopResult | None, freed: Iterable[cleanup.FreedMemory]) -> None:
    if stopped is None:
        return
    seconds = format_duration(stopped.seconds)
    killed = f", {len(stopped.killed)} by SIGKILL" if stopped.killed else ""
    if not stopped.survivors:
        print(f"stopped in {seconds}{killed}")
    for process in stopped.survivors:
        stuck = ": waiting in the kernel for a GPU or a disk, where signals can't reach it; a reboot may be needed"
        state = f"{process.state}{stuck if process.state == 'D' else ''}"
        _print_line(f"pid {process.pid} ({process.name}) is still running after {seconds}, in state {state}")
    for gpu in freed:
        took = format_duration(gpu.seconds)
        when = f"freed after {took}" if gpu.whole else f"freed after {took}, less than was held"
        print(f"{gpu.gpu}: {format_bytes(gpu.freed)} {when}")


def _print_removed(noun: str, nouns: str, items: list[Any], not_removed: list[tuple[Any, str]]) -> None:
    kept_ids = {id(item) for item, _ in not_removed}
    removed = [item for item in items if id(item) not in kept_ids]
    if removed:
        count = f"{len(removed)} {noun if len(removed) == 1 else nouns}"
        print(f"removed {count}, {format_bytes(sum(item.size for item in removed))}")
    for item, why in not_removed:
        _print_line(f"{item.path} was not removed: {why}")


def _print_line(text: str) -> None:
    """Print one line without control codes, which names of processes and files may contain."""
    print(escape(text))


def _shorten(command: str) -> str:
    return command if len(command) <= 100 else command[:99] + "…"


def _processes_to_json(processes: list[Leftover]) -> list[dict[str, Any]]:
    return [
        pick_fields(leftover.process, "pid", "start", "state")
        | pick_fields(leftover, "user", "rss", "gpu_memory", "command", "run", "why")
        | {"age": round(leftover.age, 3)}
        for leftover in processes
    ]


def _print_json(**fields: Any) -> None:
    print_json({"schema": 1, **fields})
