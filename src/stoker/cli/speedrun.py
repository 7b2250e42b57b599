"""stoker speedrun [options]: the whole chain, tokenizer to GRPO to report; goes on where it was"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator

from stoker.cli.sight import gpus_to_use, look
from stoker.contract import errors
from stoker.contract.frozen import replace
from stoker.contract.options import OptionParser, add_flags, build_options
from stoker.contract.terminal import print_json, print_text, wrap_text
from stoker.speedrun.options import SpeedrunOptions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.speedrun.course import Course
    from stoker.speedrun.drive import Tools

_ABOUT = "Trains a model through every stage, each one a run of its own with verdict, restarts and logs, and writes a report."
_EPILOG = """stages, in this order: {stages}

  stoker speedrun                                       what this machine can do, on the built-in data set
  stoker speedrun --plan                                what it would run, and about how long
  stoker speedrun --set sft:train.max_steps=500         runs sft again, and what is built on it
  stoker speedrun --preset d20 --data my-data/          real data
  stoker speedrun --only grpo-density --set grpo:grpo.kl=0.05

The same command resumes where it was stopped or killed. When all stages are done it prints that and exits with 0.
exit codes: the failed stage's own; 128+n for a signal; 64 a flag, 65 and 66 data or a missing input, 69 GPUs, 73 the folder can't be written or
is full, 75 another speedrun works there."""


def parser() -> OptionParser:
    from stoker.training.stages.registry import links

    order = ", ".join(("world", *(link.name for link, _ in links()), "report"))
    epilog = _EPILOG.format(stages=textwrap.fill(order, 130, break_on_hyphens=False))
    made = OptionParser("stoker speedrun", _ABOUT, epilog, usage="stoker speedrun [options]", allow_abbrev=False)
    add_flags(made, SpeedrunOptions)
    return made


def main(argv: list[str], tools: Tools | None = None) -> int:
    """`tools`: what runs the stages; given by tests."""
    made = parser()
    told, extra = made.parse_known_args(argv)
    if extra:
        made.unknown(extra)
    options = build_options(SpeedrunOptions, vars(told))
    if options.json and not options.plan:
        raise errors.Refusal("--json needs --plan", errors.EX_USAGE)
    from stoker.speedrun.course import lacking, settle

    machine = look()
    course = settle(options, machine, gpus_to_use(machine, options.nproc_per_node), os.environ)
    nothing_to_do = course.finished and options.only != "report"  # that is made again whenever it is asked for
    lacks = None if nothing_to_do else lacking(course, argv)
    if options.plan:
        return _plan(replace(course, refused=lacks.line) if lacks is not None and not course.refused else course)
    for line in course.lines:
        _say(line)
    if nothing_to_do:
        report = os.path.join(course.folder, "report.html")
        where = f"; report: {os.path.relpath(report)}" if os.path.exists(report) else ""
        count = len(course.selected)
        done = f"{count} {'stages are' if count > 1 else 'stage is'} done"
        _say(f"finished: {done} in {os.path.relpath(course.folder)}{where}")
        return 0
    if lacks is not None:
        raise lacks
    from stoker.speedrun import state
    from stoker.speedrun.drive import VARIABLES, Drive
    from stoker.speedrun.drive import Tools as Real

    for name in sorted(name for name in os.environ if name.startswith(VARIABLES)):
        _say(f"{name} is not passed on to the stages: give it with --set")
    lock = state.hold(course.folder)
    try:
        with _reserved(course) as (lent, handles):
            return Drive(course, tools or Real(), {**os.environ, **lent}, _say, argv, handles).run()
    finally:
        os.close(lock)


@contextlib.contextmanager
def _reserved(course: Course) -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
    """The GPUs stay ours between the stages. Gives the variables by which stages know it, and the locks' open files."""
    if not course.gpus or course.selected == ("report",):
        yield {}, ()
        return
    from stoker.speedrun.child import Reserved

    name = os.path.basename(course.folder)
    reserved = Reserved(name, course.machine, course.nproc_per_node, os.environ, _say)
    try:
        yield reserved.environment, reserved.handles
    finally:
        reserved.close()


def _plan(course: Course) -> int:
    from stoker.speedrun import plan

    if course.options.json:
        print_json(plan.as_data(course))
        return 0
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    refused = [f"here it would be refused: {course.refused}"] if course.refused else []
    before = (wrap_text(line, columns or 0) for line in (*course.lines, *refused))
    print("\n".join((*before, "", plan.as_text(course, columns))))
    return 0


def _say(line: str) -> None:
    print_text(line)
