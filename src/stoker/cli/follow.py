"""`stoker attach [RUN]` and `stoker logs [RUN] --rank N [--follow]`: the output of a run and of one rank."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time

from stoker.contract import layout, terminal
from stoker.contract.env_vars import RECIPES
from stoker.contract.errors import EX_NOINPUT, EX_USAGE, Refusal, parsing
from stoker.contract.options import OptionParser
from stoker.contract.progress import read_progress
from stoker.contract.safe_io import open_regular
from stoker.contract.terminal import print_status, print_text, terminal_width, uses_colour
from stoker.control.launch.console import LineCutter
from stoker.control.launch.short_lines import LauncherLines, ShortLines
from stoker.control.record import log_tail, run_index, run_record

_MAX_TAIL = 1 << 16  # bytes of a log that are searched for its last lines


def build_attach_parser() -> OptionParser:
    description = (
        "Shows a run's output as its console does, from its newest start until it ends, and exits with the run's exit code."
        " Ctrl-C leaves the run running."
    )
    parser = OptionParser("stoker attach", description)
    parser.run_argument()
    parser.option("--lines -n", "N", "begin with the last N lines of each rank (default: 10)", int, default=10)
    parser.runs_dir()
    return parser


def attach_main(argv: list[str]) -> int:
    args = build_attach_parser().parse_args(argv)
    run = run_index.find_run(args.run, layout.runs_root(args.runs_dir, os.environ))
    with parsing(f"run {run.id}"):
        return _attach(run, args.lines)


def _attach(run: run_record.RunRecord, lines: int) -> int:
    on_terminal = sys.stdout.isatty()
    start = log_tail.find_newest_start(run)
    if start.number > 1:
        command = f"stoker logs {shlex.quote(run.id)} --attempt {start.first_attempt - 1}"
        hint = f"; `{command}` shows the previous one" if start.first_attempt else ""
        print_status(f"start {start.number} of run {run.id}{hint}")
    starts = {"": start}  # by role; "" is the run itself
    console = log_tail.LogTail(os.path.join(run.dir, layout.CONSOLE), start.console_at)
    own_lines = LauncherLines(uses_colour(), lambda: terminal_width(sys.stdout)) if on_terminal else None
    tails: dict[str, tuple[log_tail.LogTail, LineCutter]] = {"": (console, LineCutter(b"", own_lines))}
    first_pass = True
    try:
        while True:
            is_over = run_record.is_over(run)  # before reading, so that no output is missed
            for role, role_run in {"": run, **run_index.list_roles(run)}.items():
                if role not in starts:
                    starts[role] = log_tail.find_newest_start(role_run)
                logs = [
                    (attempt, rank, path)
                    for attempt, rank, path in log_tail.list_rank_logs(role_run)
                    if path not in tails and attempt >= starts[role].first_attempt
                ]
                labels = log_tail.read_rank_labels(role_run) if logs else {}
                is_recipe = str(role_run.data.get("script")).startswith(RECIPES)
                for attempt, rank, path in logs:
                    offset = _find_last_lines(path, lines) if first_pass else 0
                    label = labels.get((attempt, rank), f"rank {rank}")
                    prefix = (f"[{role}] " if role else "").encode() + f"{label}:".encode()
                    shorten = ShortLines(prefix, not rank, is_recipe) if on_terminal and (is_recipe or role) else None
                    tails[path] = (log_tail.LogTail(path, offset), LineCutter(prefix, shorten))
            first_pass = False
            for tail, cutter in tails.values():
                while data := tail.read_new():
                    if not run.mine:
                        data = log_tail.strip_control_codes(data)
                    if output := cutter.feed(data):
                        terminal.clear_bar()
                        sys.stdout.buffer.write(output)
            if is_over:
                break
            sys.stdout.buffer.flush()
            _draw_progress([run, *run_index.list_roles(run).values()])
            time.sleep(0.1)
    except KeyboardInterrupt:
        terminal.clear_line()
        print_text(f"left run {run.id}; it keeps running. `stoker stop {shlex.quote(run.id)}` stops it", sys.stderr)
        return 0
    terminal.clear_bar()
    for _, cutter in tails.values():
        sys.stdout.buffer.write(cutter.flush())
    sys.stdout.buffer.flush()
    ended = run_record.load_run(run.dir)
    return ended.verdict.exit_code if ended and ended.verdict else 70


def _draw_progress(runs: list[run_record.RunRecord]) -> None:
    """Draw the progress bar of the run, or of the one role of a job that has a bar."""
    if not terminal.shows_bars():
        return
    progress = next((progress for run in runs if (progress := read_progress(run.dir)) is not None), None)
    if progress is None:
        terminal.clear_bar()
    else:
        terminal.draw_bar(progress.bar(terminal.bar_width()))


def _find_last_lines(path: str, lines: int) -> int:
    """Return the offset at which the last `lines` lines of a file begin, or its last 64 KB if these have fewer lines."""
    try:
        descriptor = open_regular(path, follow=False)
    except OSError:
        return 0  # LogTail reports why the file can't be read
    with os.fdopen(descriptor, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        begin = max(0, size - _MAX_TAIL)
        file.seek(begin)
        data = file.read(_MAX_TAIL)  # the file may have grown since the seek
    at = len(data)
    for _ in range(lines + 1):
        at = data.rfind(b"\n", 0, at)
        if at < 0:
            return begin
    return begin + at + 1


def build_logs_parser() -> OptionParser:
    parser = OptionParser("stoker logs", "Prints what a rank printed, byte for byte.")
    parser.run_argument()
    parser.option("--role", "NAME", "the role, if the run is a multi-role job")
    parser.option("--rank", "N", "the rank (default: 0)", int)
    parser.option("--attempt", "K", "the attempt (default: the last)", int)
    parser.add_argument("--follow", "-f", action="store_true", help="follow the output until the run ends")
    parser.runs_dir()
    return parser


def logs_main(argv: list[str]) -> int:
    args = build_logs_parser().parse_args(argv)
    run = run_index.find_run(args.run, layout.runs_root(args.runs_dir, os.environ))
    run = run_index.role_of(run, args.role) if args.role else run
    with parsing(f"run {run.id}"):
        return _print_log(run, args)


def _print_log(run: run_record.RunRecord, args: argparse.Namespace) -> int:
    attempts = run.attempts
    if not attempts and (roles := run_index.list_roles(run)):
        raise Refusal(f"run {run.id} is a multi-role job; choose a role with --role {' or '.join(roles)}", EX_USAGE)
    if not attempts:
        raise Refusal(f"run {run.id} has started no rank yet", EX_NOINPUT)
    attempt = attempts[-1] if args.attempt is None else args.attempt
    if attempt not in attempts:
        raise Refusal(f"run {run.id} has no attempt {attempt}; there are {attempts[0]} to {attempts[-1]}", EX_NOINPUT)
    logged = [rank for number, rank, _ in log_tail.list_rank_logs(run) if number == attempt]
    planned = run.ranks if attempt == attempts[-1] else 0  # the record holds the plan of the newest attempt only
    world_size = max([planned, *(rank + 1 for rank in logged)])
    rank = args.rank or 0
    if not 0 <= rank < world_size:
        where = f" in attempt {attempt}" if len(attempts) > 1 else ""
        raise Refusal(f"run {run.id} has no rank {rank}{where}; there are 0 to {world_size - 1}", EX_NOINPUT)
    if rank not in logged and not args.follow:
        raise Refusal(f"rank {rank} was not started in attempt {attempt}, so it has no log", EX_NOINPUT)
    if args.rank is None and world_size > 1:
        print_status(f"rank {rank} of {world_size}; {_suggest_rank(run, rank, world_size)}")
    tail, has_output = log_tail.LogTail(layout.rank_log(run.dir, attempt, rank)), False
    while True:
        is_over = run_record.is_over(run)  # before reading, so that no output is missed
        while data := tail.read_new():
            has_output = True
            sys.stdout.buffer.write(data if run.mine or not sys.stdout.isatty() else log_tail.strip_control_codes(data))
        sys.stdout.buffer.flush()
        if is_over or not args.follow:
            if not has_output:
                print_status(f"rank {rank} {'printed nothing' if is_over else 'has printed nothing yet'}")
            return 0
        newest = run.attempts[-1]
        if args.attempt is None and newest != attempt:
            attempt = newest
            tail = log_tail.LogTail(layout.rank_log(run.dir, attempt, rank))
            continue
        time.sleep(0.1)


def _suggest_rank(run: run_record.RunRecord, rank: int, world_size: int) -> str:
    """Return a hint that names another rank to read: the one that failed, if it is known."""
    failed = run.verdict.rank if run.verdict is not None else None
    if failed is not None and 0 <= failed < world_size:
        return "it is the one that failed" if failed == rank else f"rank {failed} failed: --rank {failed}"
    return f"--rank 1 to {world_size - 1} shows another" if world_size > 2 else "--rank 1 shows the other"
