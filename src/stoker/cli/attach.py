"""stoker attach [RUN]"""

from __future__ import annotations

import os
import shlex
import sys
import time

from stoker.contract import layout
from stoker.contract.settings import Parser
from stoker.contract.untrusted import open_regular
from stoker.control.launch.console import LineCutter
from stoker.control.record import follow, reader


def parser() -> Parser:
    about = (
        "Follows a run as its own console would show it. Ctrl-C leaves the run alone. Ends with the run's exit code."
    )
    made = Parser("stoker attach", about)
    made.run_argument()
    made.option("--lines -n", "N", "begin with this many of the last lines of each rank (default: 10)", int, default=10)
    made.runs_dir()
    return made


def main(argv: list[str]) -> int:
    told = parser().parse_args(argv)
    run = reader.find(told.run, layout.runs_root(told.runs_dir, os.environ))
    with reader.of_others(run):
        return _follow(run, told.lines)


def _follow(run: reader.Run, lines: int) -> int:
    console = follow.Tail(os.path.join(run.dir, layout.CONSOLE))
    open_: dict[str, tuple[follow.Tail, LineCutter]] = {"": (console, LineCutter(b""))}
    first = True
    try:
        while True:
            over = reader.over(run)
            new = [one for one in follow.rank_logs(run) if one[2] not in open_]
            labels = follow.labels(run) if new else {}
            for attempt, rank, path in new:
                skip = _start_of_last(path, lines) if first else 0
                label = labels.get((attempt, rank), f"rank {rank}")
                open_[path] = (follow.Tail(path, skip), LineCutter(f"{label}:".encode()))
            first = False
            for tail, cutter in open_.values():
                while data := tail.new():
                    sys.stdout.buffer.write(cutter.feed(data))
            if over:
                break
            sys.stdout.buffer.flush()
            time.sleep(0.1)
    except KeyboardInterrupt:
        print(f"\nleft run {run.id}; it goes on. `stoker stop {shlex.quote(run.id)}` ends it", file=sys.stderr)
        return 0
    for _, cutter in open_.values():
        sys.stdout.buffer.write(cutter.flush())
    sys.stdout.buffer.flush()
    ended = reader.load(run.dir)
    return ended.verdict.exit_code if ended and ended.verdict else 70


def _start_of_last(path: str, lines: int) -> int:
    """Where the last `lines` lines of a file begin, looking back 64 KB at most."""
    try:
        handle = open_regular(path, follow=False)
    except OSError:
        return 0  # following it reports why it can't be read
    with os.fdopen(handle, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        begin = max(0, size - (1 << 16))
        file.seek(begin)
        data = file.read()
    at = len(data)
    for _ in range(lines + 1):
        at = data.rfind(b"\n", 0, at)
        if at < 0:
            return begin
    return begin + at + 1
