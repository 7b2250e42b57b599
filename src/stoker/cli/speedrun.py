"""`stoker speedrun [options]`: runs the whole chain from tokenizer to GRPO to report; resumes where it was stopped."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator

from stoker.cli.machines import has_usable_gpus, observe_machine
from stoker.contract import errors
from stoker.contract.frozen import replace
from stoker.contract.options import OptionParser, add_flags, build_options
from stoker.contract.terminal import print_json, print_text, wrap_text
from stoker.contract.units import plural
from stoker.speedrun.options import SpeedrunOptions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.speedrun.course import Course
    from stoker.speedrun.drive import Tools

_DESCRIPTION = "Trains a model through every stage and writes a report. Each stage is a separate run with verdict, restarts and logs."
_EPILOG = """stages, in this order: {stages}

  stoker speedrun                                       as large as this machine can train, on the built-in data set
  stoker speedrun --plan                                print what it would run, with an estimate of the time
  stoker speedrun --set sft:train.max_steps=500         runs sft and the stages that depend on it again
  stoker speedrun --preset d20 --data my-data/          real data
  stoker speedrun --only grpo-density --set grpo:grpo.kl=0.05

The same command resumes where it was stopped or killed. When all stages are complete, it prints that and exits with 0.
exit codes: the failed stage's own; 128+n for a signal; 64 a flag, 65 and 66 data or a missing input, 69 GPUs, 73 the folder can't be written or
is full, 75 another speedrun uses the folder."""


def build_parser() -> OptionParser:
    from stoker.training.stages.registry import links

    stages = ", ".join(("world", *(link.name for link, _ in links()), "report"))
    epilog = _EPILOG.format(stages=textwrap.fill(stages, 130, break_on_hyphens=False))
    usage = "stoker speedrun [options]"
    parser = OptionParser("stoker speedrun", _DESCRIPTION, epilog, usage=usage, allow_abbrev=False)
    add_flags(parser, SpeedrunOptions)
    return parser


def main(argv: list[str], tools: Tools | None = None) -> int:
    """Run the chain. `tools` runs the stages; tests pass other tools."""
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.refuse_unknown(unknown)
    options = build_options(SpeedrunOptions, vars(args))
    if options.json and not options.plan:
        raise errors.Refusal("--json needs --plan", errors.EX_USAGE)
    from stoker.speedrun.course import lacking, settle

    machine = observe_machine()
    course = settle(options, machine, has_usable_gpus(machine, options.nproc_per_node), os.environ)
    nothing_to_do = course.finished and options.only != "report"  # --only report always writes the report again
    refusal = None if nothing_to_do else lacking(course, argv)
    if options.plan:
        if refusal is not None and not course.refused:
            course = replace(course, refused=refusal.line)
        return _print_plan(course)
    for line in course.lines:
        print_text(line)
    if nothing_to_do:
        report = os.path.join(course.folder, "report.html")
        hint = f"; report: {os.path.relpath(report)}" if os.path.exists(report) else ""
        count = len(course.selected)
        print_text(f"finished: {plural(count, 'stage')} complete in {os.path.relpath(course.folder)}{hint}")
        return 0
    if refusal is not None:
        raise refusal
    from stoker.speedrun import drive, state

    for name in sorted(name for name in os.environ if name.startswith(drive.VARIABLES)):
        print_text(f"{name} is not passed on to the stages; set it with --set")
    lock = state.hold(course.folder)
    try:
        with _reserve_gpus(course) as (variables, locks):
            env = {**os.environ, **variables}
            return drive.Drive(course, tools or drive.Tools(), env, print_text, argv, locks).run()
    finally:
        os.close(lock)


@contextlib.contextmanager
def _reserve_gpus(course: Course) -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
    """Keep the GPUs locked between the stages. Yields environment variables for the stages and the fds of the locks."""
    if not course.gpus or course.selected == ("report",):
        yield {}, ()
        return
    from stoker.speedrun.child import Reserved

    name = os.path.basename(course.folder)
    reserved = Reserved(name, course.machine, course.nproc_per_node, os.environ, print_text)
    try:
        yield reserved.environment, reserved.handles
    finally:
        reserved.close()


def _print_plan(course: Course) -> int:
    from stoker.speedrun import plan

    if course.options.json:
        print_json(plan.as_data(course))
        return 0
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    refused = [f"would be refused here: {course.refused}"] if course.refused else []
    lines = (wrap_text(line, columns or 0) for line in (*course.lines, *refused))
    print("\n".join((*lines, "", plan.as_text(course, columns))))
    return 0
