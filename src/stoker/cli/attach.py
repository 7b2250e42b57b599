"""stoker attach [RUN]"""

from __future__ import annotations

import os
import shlex
import sys
import time

from stoker.contract import layout, terminal
from stoker.contract.env_vars import RECIPES
from stoker.contract.errors import parsing
from stoker.contract.options import OptionParser
from stoker.contract.progress import read_progress
from stoker.contract.safe_io import open_regular
from stoker.contract.terminal import print_status, print_text, terminal_width, uses_colour
from stoker.control.launch.console import LineCutter
from stoker.control.launch.short_lines import LauncherLines, ShortLines
from stoker.control.record import log_tail, run_index, run_record

_LOOK_BACK = 1 << 16  # bytes


def parser() -> OptionParser:
    about = (
        "Follows the newest start of a run as its own console would show it. Ctrl-C leaves the run alone. Ends with the run's"
        " exit code."
    )
    made = OptionParser("stoker attach", about)
    made.run_argument()
    made.option("--lines -n", "N", "begin with this many of the last lines of each rank (default: 10)", int, default=10)
    made.runs_dir()
    return made


def main(argv: list[str]) -> int:
    told = parser().parse_args(argv)
    run = run_index.find_run(told.run, layout.runs_root(told.runs_dir, os.environ))
    with parsing(f"run {run.id}"):
        return _follow(run, told.lines)


def _follow(run: run_record.RunRecord, lines: int) -> int:
    watched = sys.stdout.isatty()
    start = log_tail.newest_start(run)
    if start.number > 1:
        command = f"stoker logs {shlex.quote(run.id)} --attempt {start.first_attempt - 1}"
        before = f"; `{command}` shows the one before" if start.first_attempt else ""
        print_status(f"this is start {start.number} of run {run.id}{before}")
    starts = {"": start}
    console = log_tail.LogTail(os.path.join(run.dir, layout.CONSOLE), start.console_at)
    open_: dict[str, tuple[log_tail.LogTail, LineCutter]] = {
        "": (
            console,
            LineCutter(b"", LauncherLines(uses_colour(), lambda: terminal_width(sys.stdout)) if watched else None),
        )
    }
    first = True
    try:
        while True:
            over = run_record.is_over(run)
            for name, part in {"": run, **run_index.list_roles(run)}.items():
                if name not in starts:
                    starts[name] = log_tail.newest_start(part)
                since = starts[name].first_attempt
                new = [one for one in log_tail.rank_logs(part) if one[2] not in open_ and one[0] >= since]
                labels = log_tail.labels(part) if new else {}
                recipe = str(part.data.get("script")).startswith(RECIPES)
                for attempt, rank, path in new:
                    skip = _start_of_last(path, lines) if first else 0
                    label = labels.get((attempt, rank), f"rank {rank}")
                    prefix = (f"[{name}] " if name else "").encode() + f"{label}:".encode()
                    shorten = ShortLines(prefix, not rank, recipe) if watched and (recipe or name) else None
                    open_[path] = (log_tail.LogTail(path, skip), LineCutter(prefix, shorten))
            first = False
            for tail, cutter in open_.values():
                while data := tail.new():
                    if not run.mine:
                        data = log_tail.strip_control_codes(data)
                    if shown := cutter.feed(data):
                        terminal.clear_bar()
                        sys.stdout.buffer.write(shown)
            if over:
                break
            sys.stdout.buffer.flush()
            _draw([run, *run_index.list_roles(run).values()])
            time.sleep(0.1)
    except KeyboardInterrupt:
        terminal.start_line()
        print_text(f"left run {run.id}; it keeps running. `stoker stop {shlex.quote(run.id)}` ends it", sys.stderr)
        return 0
    terminal.clear_bar()
    for _, cutter in open_.values():
        sys.stdout.buffer.write(cutter.flush())
    sys.stdout.buffer.flush()
    ended = run_record.load_run(run.dir)
    return ended.verdict.exit_code if ended and ended.verdict else 70


def _draw(runs: list[run_record.RunRecord]) -> None:
    """Of a job's roles one has a bar."""
    if not terminal.shows_bars():
        return
    state = next((state for run in runs if (state := read_progress(run.dir)) is not None), None)
    if state is None:
        terminal.clear_bar()
    else:
        terminal.draw_bar(state.bar(terminal.bar_width()))


def _start_of_last(path: str, lines: int) -> int:
    """Where the last `lines` lines of a file begin, looking back 64 KB at most."""
    try:
        handle = open_regular(path, follow=False)
    except OSError:
        return 0  # following it reports why it can't be read
    with os.fdopen(handle, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        begin = max(0, size - _LOOK_BACK)
        file.seek(begin)
        data = file.read(_LOOK_BACK)  # it may have grown by any amount meanwhile
    at = len(data)
    for _ in range(lines + 1):
        at = data.rfind(b"\n", 0, at)
        if at < 0:
            return begin
    return begin + at + 1
