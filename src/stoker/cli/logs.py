"""stoker logs [RUN] [--role NAME] --rank N [--follow]"""

from __future__ import annotations

import argparse
import os
import sys
import time

from stoker.contract import layout
from stoker.contract.errors import EX_NOINPUT, EX_USAGE, Refusal, parsing
from stoker.contract.options import OptionParser
from stoker.contract.terminal import print_status
from stoker.control.record import log_tail, run_index, run_record


def parser() -> OptionParser:
    made = OptionParser("stoker logs", "What a rank printed, byte for byte.")
    made.run_argument()
    made.option("--role", "NAME", "of a job of several roles: which one")
    made.option("--rank", "N", "which rank (default: 0)", int)
    made.option("--attempt", "K", "which attempt (default: the last)", int)
    made.add_argument("--follow", "-f", action="store_true", help="follow until the run ends")
    made.runs_dir()
    return made


def main(argv: list[str]) -> int:
    told = parser().parse_args(argv)
    run = run_index.find_run(told.run, layout.runs_root(told.runs_dir, os.environ))
    run = run_index.role_of(run, told.role) if told.role else run
    with parsing(f"run {run.id}"):
        return _show(run, told)


def _show(run: run_record.RunRecord, told: argparse.Namespace) -> int:
    attempts = run.attempts
    if not attempts and (names := run_index.list_roles(run)):
        raise Refusal(f"run {run.id} is a job of several roles: --role {' or '.join(names)}", EX_USAGE)
    if not attempts:
        raise Refusal(f"run {run.id} has started no rank yet", EX_NOINPUT)
    attempt = attempts[-1] if told.attempt is None else told.attempt
    if attempt not in attempts:
        raise Refusal(f"run {run.id} has no attempt {attempt}; there are {attempts[0]} to {attempts[-1]}", EX_NOINPUT)
    ranks = [rank for number, rank, _ in log_tail.rank_logs(run) if number == attempt]
    planned = run.ranks if attempt == attempts[-1] else 0  # the newest plan is the newest attempt's
    world = max([planned, *(rank + 1 for rank in ranks)])
    shown = told.rank or 0
    if not 0 <= shown < world:
        where = f" in attempt {attempt}" if len(attempts) > 1 else ""
        raise Refusal(f"run {run.id} has no rank {shown}{where}; there are 0 to {world - 1}", EX_NOINPUT)
    if shown not in ranks and not told.follow:
        raise Refusal(f"rank {shown} has no log in attempt {attempt}: it was not started", EX_NOINPUT)
    if told.rank is None and world > 1:
        print_status(f"this is rank {shown} of {world}; {_others(run, shown, world)}")
    tail, silent = log_tail.LogTail(layout.rank_log(run.dir, attempt, shown)), True
    while True:
        over = run_record.is_over(run)  # asked before the last look, so that nothing is missed
        while data := tail.new():
            silent = False
            sys.stdout.buffer.write(data if run.mine or not sys.stdout.isatty() else log_tail.strip_control_codes(data))
        sys.stdout.buffer.flush()
        if over or not told.follow:
            if silent:
                print_status(f"rank {shown} {'printed nothing' if over else 'has printed nothing yet'}")
            return 0
        newest = run.attempts[-1]
        if told.attempt is None and newest != attempt:
            attempt = newest
            tail = log_tail.LogTail(layout.rank_log(run.dir, attempt, shown))
            continue
        time.sleep(0.1)


def _others(run: run_record.RunRecord, shown: int, world: int) -> str:
    """Which of them to look at: the one that failed, where that is known."""
    failed = run.verdict.rank if run.verdict is not None else None
    if failed is not None and 0 <= failed < world:
        return "it is the one that failed" if failed == shown else f"rank {failed} failed: --rank {failed}"
    return f"--rank 1 to {world - 1} shows another" if world > 2 else "--rank 1 shows the other"
