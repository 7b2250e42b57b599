"""`stoker ladder [options] script.py [args]`: tries a script's imports, then 1, half and all ranks, to find what fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection

from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.frozen import as_json
from stoker.contract.options import OptionParser, add_flags
from stoker.contract.terminal import print_json, print_text
from stoker.contract.units import format_bytes, format_duration, format_used, plural
from stoker.control.launch import ladder
from stoker.control.plan.options import RunOptions
from stoker.control.plan.request import Request

_DESCRIPTION = "Finds where a script begins to fail: tries its imports one by one, then 1 rank, half and all. Takes the options of `stoker run`."
_EXAMPLES = """examples:
  stoker ladder train.py --lr 3e-4                  imports, then 1 rank, half, all of them, 20 steps each
  stoker ladder --nproc-per-node 4 --steps 50 train.py

exit codes: 0 if every rung passed; else the exit code of `stoker run` for the rung that failed; 1 for an import that fails."""
_HELP = {"json": "print the result as JSON, the progress on stderr", "dry_run": "print the rungs and start nothing"}


def build_parser() -> OptionParser:
    from stoker.cli.run import add_script_arguments

    usage = "stoker ladder [options] [--steps N] script.py [args]"
    parser = OptionParser("stoker ladder", _DESCRIPTION, _EXAMPLES, usage=usage)
    parser.option("--steps", "N", f"steps of each rung (default: {ladder.STEPS})", int, default=ladder.STEPS)
    add_flags(parser, RunOptions)
    for action in parser._actions:
        action.help = _HELP.get(action.dest, action.help)
    add_script_arguments(parser)
    return parser


def parse(argv: list[str]) -> tuple[Request, int]:
    """Return the request of the run to try and the number of steps per rung."""
    from stoker.cli import run

    options, script, args = run.split(argv, build_parser())
    steps = options.pop("steps")
    if not script:
        raise Refusal("the script is missing; type stoker ladder [options] script.py [args]", EX_USAGE)
    if options.get("detach"):
        raise Refusal("stoker ladder runs in the foreground only; leave --detach out", EX_USAGE)
    return run.parse(ladder.make_arguments(options, script, args)), steps  # run.parse adds PET_* and --config


def main(argv: list[str]) -> int:
    request, steps = parse(argv)
    prints_json = request.options.json
    print_progress: Callable[[str], None] = _print_to_stderr if prints_json else print_text
    climber = ladder.Ladder(request, steps, print_progress)
    if request.options.dry_run:
        imports, rungs = climber.preview()
        names = [module.name for module in imports]
        if prints_json:
            print_json({"schema": 1, "imports": names, "rungs": rungs, "steps": steps})
        else:
            print_text(f"would import: {', '.join(names) or 'nothing but the standard library'}")
            ranks = f"{', '.join(map(str, rungs))} rank{'s' if rungs[-1] > 1 else ''}"
            print(f"would start {ranks}, one after the other, {plural(steps, 'step')} each")
        return 0
    climb = climber.climb({ladder.ALL})
    if prints_json:
        print_json(
            {
                "schema": 1,
                "script": request.script,
                "status": climb.verdict.status if climb.verdict else "passed",
                **as_json(climb),
                "scaling": as_json(ladder.compute_scaling(climb.climbed, climb.world_size)),
            }
        )
    else:
        for line in format_report(climb):
            print_text(line)
    return climb.exit_code


def before_run(request: Request, rungs: Collection[str], steps: int = ladder.STEPS) -> int:
    """Climb the rungs that a run asks for before it starts. Return 0, or the exit code of the rung that failed.

    Prints to stderr, since stdout belongs to the script.
    """
    climb = ladder.Ladder(request, steps, _print_to_stderr).climb(rungs)
    for line in format_report(climb):
        _print_to_stderr(line)
    return climb.exit_code


def format_report(climb: ladder.LadderReport) -> list[str]:
    lines: list[str] = []
    passed = [rung for rung in climb.climbed if rung.exit_code == 0]
    if passed:
        lines.append(_align_cells("RUNG", "RANKS", "FIRST STEP", "STEPS/S", "OF 1 RANK", "RAM/RANK", "GPU MEMORY"))
        for number, rung in enumerate(passed, 1):
            lines.append(_format_rung(number, rung, ladder.compute_scaling((passed[0], rung), rung.ranks)))
        scaling = ladder.compute_scaling(passed, climb.world_size)
        if scaling.efficiency is not None:
            top = passed[-1]
            each = f"each runs {_format_rate(top)} steps/s, {scaling.efficiency:.0%} of one rank alone"
            lines.append(f"throughput {scaling.throughput}: with {top.ranks} ranks {each}")
        elif any(rung.steps_per_s is None for rung in passed):
            definition = "a step is one of a torch optimizer, or a stoker.beat()"
            lines.append(f"throughput: not measured, since the script ran fewer than two steps ({definition})")
        if memory := ladder.format_memory_need(scaling, climb.world_size):
            lines.append(memory)
    if climb.verdict is None:
        imported = sum(not module.problem for module in climb.imports)
        tried = [plural(imported, "import")] if imported else []
        if passed:
            counts = ", ".join(str(rung.ranks) for rung in passed)
            tried.append(f"{counts} rank{'s' if passed[-1].ranks > 1 else ''}")
        return [*lines, f"✓ ladder passed: {' and '.join(tried) or 'nothing to try'}"]
    failed = next((rung for rung in climb.climbed if rung.exit_code), None)
    stage = f"with {plural(failed.ranks, 'rank')}" if failed else "before the first rank"
    lines.append(f"✗ ladder failed {stage}: {climb.verdict.cause}, exit code {climb.exit_code}")
    lines.append(f"  {climb.verdict.summary}")
    lines += [f"  {fix}" for fix in climb.verdict.fix]
    if failed and failed.run:
        lines.append(f"  `stoker why {failed.run}` shows the details")
    return lines


def _format_rung(number: int, rung: ladder.RungResult, scaling: ladder.Scaling) -> str:
    first_step = format_duration(rung.first_step_s) if rung.first_step_s is not None else "n/a"
    efficiency = f"{scaling.efficiency:.0%}" if scaling.efficiency is not None else "n/a"
    if rung.ranks == 1 and rung.steps_per_s:
        efficiency = "100%"
    gpu_memory = format_used(*rung.gpu) if rung.gpu else "n/a"
    ram = format_bytes(rung.rss) if rung.rss else "n/a"
    return _align_cells(number, rung.ranks, first_step, _format_rate(rung), efficiency, ram, gpu_memory)


def _align_cells(*cells: object) -> str:
    return " ".join(f"{cell!s:>{width}}" for cell, width in zip(cells, (4, 5, 11, 9, 9, 9, 16), strict=True))


def _format_rate(rung: ladder.RungResult) -> str:
    return f"{rung.steps_per_s:.3g}" if rung.steps_per_s else "n/a"


def _print_to_stderr(line: str) -> None:
    print_text(line, sys.stderr)
