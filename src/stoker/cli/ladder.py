"""stoker ladder [options] script.py [args]"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any

from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.frozen import as_json
from stoker.contract.options import OptionParser, add_flags
from stoker.contract.terminal import print_json, print_text
from stoker.contract.units import format_bytes, format_duration, format_used, plural
from stoker.control.launch import ladder
from stoker.control.plan.options import RunOptions
from stoker.control.plan.request import Request

_ABOUT = "Finds where a script begins to fail: its imports one by one, then one rank, half, all. Takes `stoker run`'s options."
_EXAMPLES = """examples:
  stoker ladder train.py --lr 3e-4                  imports, then 1 rank, half, all of them, 20 steps each
  stoker ladder --nproc-per-node 4 --steps 50 train.py

exit codes: 0 if every rung held; else that of the rung that failed, as `stoker run` has them; an import that fails: 1."""
_HELP = {"json": "the result as JSON, the progress on stderr", "dry_run": "print the rungs and start nothing"}


def parser() -> OptionParser:
    from stoker.cli.run import add_script

    made = OptionParser(
        "stoker ladder", _ABOUT, _EXAMPLES, usage="stoker ladder [options] [--steps N] script.py [args]"
    )
    made.option("--steps", "N", f"steps of each rung (default: {ladder.STEPS})", int, default=ladder.STEPS)
    add_flags(made, RunOptions)
    for action in made._actions:
        action.help = _HELP.get(action.dest, action.help)
    add_script(made)
    return made


def parse(argv: list[str]) -> tuple[Request, int]:
    from stoker.cli import run

    told, script, args = run.split(argv, parser())
    steps = told.pop("steps")
    if not script:
        raise Refusal("no script given: stoker ladder [options] script.py [args]", EX_USAGE)
    if told.get("detach"):
        raise Refusal("stoker ladder runs in the foreground only: leave --detach out", EX_USAGE)
    return run.parse(ladder.command_words(told, script, args)), steps  # PET_* and --config come in there


def main(argv: list[str]) -> int:
    request, steps = parse(argv)
    as_data = request.options.json
    say: Callable[[str], None] = _to_stderr if as_data else _to_stdout
    climber = ladder.Ladder(request, steps, say)
    if request.options.dry_run:
        imports, rungs = climber.foresee()
        if as_data:
            _dump({"schema": 1, "imports": [one.name for one in imports], "rungs": rungs, "steps": steps})
        else:
            print_text(f"would import: {', '.join(one.name for one in imports) or 'nothing but the standard library'}")
            counts = ", ".join(str(ranks) for ranks in rungs)
            ranks = f"{counts} rank{'s' if rungs[-1] > 1 else ''}"
            print(f"would start {ranks}, one after the other, {plural(steps, 'step')} each")
        return 0
    climb = climber.climb({ladder.ALL})
    if as_data:
        _dump(to_json(request, climb))
    else:
        for line in report(climb):
            _to_stdout(line)
    return climb.exit_code


def before_run(request: Request, wanted: Collection[str], steps: int = ladder.STEPS) -> int:
    """The rungs that `stoker run` climbs first: 0, or the failed one's code. On stderr: stdout is the script's."""
    climb = ladder.Ladder(request, steps, _to_stderr).climb(wanted)
    for line in report(climb):
        _to_stderr(line)
    return climb.exit_code


def report(climb: ladder.LadderStepRun) -> list[str]:
    lines: list[str] = []
    done = [rung for rung in climb.climbed if rung.exit_code == 0]
    if done:
        lines.append(_columns("RUNG", "RANKS", "FIRST STEP", "STEPS/S", "OF 1 RANK", "RAM/RANK", "GPU MEMORY"))
        shares = [ladder.scaling((done[0], rung), rung.ranks) for rung in done]
        lines += [_row(number, rung, share) for number, (rung, share) in enumerate(zip(done, shares, strict=True), 1)]
        found = ladder.scaling(done, climb.world_size)
        if found.efficiency is not None:
            top = done[-1]
            each = f"each makes {_rate(top)} steps/s, {found.efficiency:.0%} of one rank alone"
            lines.append(f"throughput {found.throughput}: with {top.ranks} ranks {each}")
        elif any(rung.steps_per_s is None for rung in done):
            counts = "torch's optimizer steps count, and stoker.beat()"
            lines.append(f"throughput: not measured, the script made no two steps ({counts})")
        if memory := ladder.memory_line(found, climb.world_size):
            lines.append(memory)
    if climb.verdict is None:
        there = sum(not one.problem for one in climb.imports)
        what = [plural(there, "import")] if there else []
        ranks = ", ".join(str(rung.ranks) for rung in done)
        what += [f"{ranks} rank{'s' if done[-1].ranks > 1 else ''}"] if done else []
        return [*lines, f"✓ ladder passed: {' and '.join(what) or 'nothing to try'}"]
    failed = next((rung for rung in climb.climbed if rung.exit_code), None)
    where = f"with {plural(failed.ranks, 'rank')}" if failed else "before the first rank"
    lines.append(f"✗ the ladder ends {where}: {climb.verdict.cause}, exit code {climb.exit_code}")
    lines.append(f"  {climb.verdict.summary}")
    lines += [f"  {fix}" for fix in climb.verdict.fix]
    if failed and failed.run:
        lines.append(f"  `stoker why {failed.run}` says more")
    return lines


def _row(number: int, rung: ladder.LadderResult, found: ladder.Scaling) -> str:
    first = format_duration(rung.first_step_s) if rung.first_step_s is not None else "n/a"
    share = f"{found.efficiency:.0%}" if found.efficiency is not None else "n/a"
    if rung.ranks == 1 and rung.steps_per_s:
        share = "100%"
    card = format_used(*rung.gpu) if rung.gpu else "n/a"
    memory = format_bytes(rung.rss) if rung.rss else "n/a"
    return _columns(number, rung.ranks, first, _rate(rung), share, memory, card)


def _columns(*cells: object) -> str:
    return " ".join(f"{cell!s:>{width}}" for cell, width in zip(cells, (4, 5, 11, 9, 9, 9, 16), strict=True))


def _rate(rung: ladder.LadderResult) -> str:
    return f"{rung.steps_per_s:.3g}" if rung.steps_per_s else "n/a"


def to_json(request: Request, climb: ladder.LadderStepRun) -> dict[str, Any]:
    return {
        "schema": 1,
        "script": request.script,
        "status": climb.verdict.status if climb.verdict else "passed",
        **as_json(climb),
        "scaling": as_json(ladder.scaling(climb.climbed, climb.world_size)),
    }


def _dump(data: dict[str, Any]) -> None:
    print_json(data)


def _to_stdout(line: str) -> None:
    print_text(line)


def _to_stderr(line: str) -> None:
    print_text(line, sys.stderr)
