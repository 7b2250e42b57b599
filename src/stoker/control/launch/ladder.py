"""The ladder: a script's imports one by one, then the script on one rank, on half and on all of them, a few steps each.

Each rung of ranks is a `stoker run` in a process of its own, with its own record; the first that fails ends the climb.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from stoker.contract import layout
from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import frozen, options_of
from stoker.contract.units import format_bytes, plural
from stoker.control.launch.children import split_secret_options, stoker_command
from stoker.control.launch.import_check import Import, Imported, find_imports, start, try_imports
from stoker.control.launch.signals import STOPS, handled
from stoker.control.plan.options import TORCHRUN_VARIABLES, RunOptions
from stoker.control.plan.request import Request, program, python_flags
from stoker.control.plan.run_plan import default_name
from stoker.control.record import run_index, run_record
from stoker.control.verdict.launch_failures import lost

IMPORTS, SINGLE, ALL = "imports", "single", "all"  # what can be wanted
STEPS = 20
SCALES = 0.8  # of a lone rank's steps/s: what is below, more ranks do not pay for
# told to a rung's ranks; also makes a rung a run with other settings, so that it never goes on with an older one
MARK = "STOKER_LADDER"
_TESTS = {"RUN_IMPORT_TEST": IMPORTS, "RUN_SINGLE_GPU_TEST": SINGLE}
# Options that a rung decides itself, or that would make it something other than a short run in the foreground.
_NOT_PASSED = {"config", "detach", "dry_run", "gpu", "gpus", "json", "ladder", "max_restarts", "metrics_port", "name", "notify", "nproc_per_node", "quiet",
               "show"}  # fmt: skip


@frozen
class LadderResult:
    """A rung of ranks that was run, in its record's numbers. None: the script never said."""

    ranks: int
    exit_code: int
    run: str = ""
    dir: str = ""
    steps: int = 0
    first_step_s: float | None = None
    steps_per_s: float | None = None  # the slowest rank's
    rss: int | None = None  # the largest rank's, at POST-MODEL
    rss_all: int | None = None
    gpu: tuple[int, int] | None = None  # used and total of the fullest card
    host_used: int | None = None
    host_total: int | None = None


@frozen
class Scaling:
    efficiency: float | None = None  # steps/s of the highest rung, in those of one rank alone
    throughput: str = ""  # scales | does not scale
    memory_needed: int | None = None
    memory_others: int = 0
    memory_total: int | None = None
    memory: str = ""  # scales | does not scale


@frozen
class LadderStepRun:
    """How the ladder went. `verdict` is that of the rung that failed."""

    world_size: int
    rungs: tuple[int, ...]
    steps: int
    imports: tuple[Imported, ...]
    climbed: tuple[LadderResult, ...]
    verdict: Verdict | None
    exit_code: int


@frozen
class Plan:
    world_size: int
    uuids: tuple[str, ...]  # of each rank's GPU; empty for CPU ranks
    hidden: bool  # CPU ranks on a machine with GPUs


def rungs(world: int) -> tuple[int, ...]:
    """1, half, all."""
    return tuple(sorted({1, max(1, world // 2), world}))


def wanted_by_environment(environ: Mapping[str, str]) -> set[str]:
    return {
        rung for name, rung in _TESTS.items() if environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")
    }


def flag_words(values: Mapping[str, Any]) -> list[str]:
    """Options as a command line that reads back to the same."""
    words: list[str] = []
    for name in options_of(RunOptions):
        value = values.get(name)
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            each = value if isinstance(value, (tuple, list)) else (value,)
            words += [f"{flag}={format(one, 'f') if isinstance(one, float) else one}" for one in each]
    return words


def command_words(values: Mapping[str, Any], script: str, args: Sequence[str]) -> list[str]:
    """With a -- before the script: argparse drops the first one it finds, and that must not be the script's own."""
    return [*flag_words(values), "--", script, *args]


def rung_words(request: Request, plan: Plan, ranks: int, steps: int, stamp: str) -> list[str]:
    """The `stoker run` of one rung: on the cards the whole run would use, so that the rungs compare."""
    options = request.options
    values = {name: getattr(options, name) for name in request.given - _NOT_PASSED}
    name = f"{(options.name or default_name(request))[:80]}-ladder-{ranks}"
    values |= {"nproc_per_node": ranks, "stop_after_steps": steps, "name": name, "show": "none", "quiet": True}
    values["env"] = (*options.env, f"{MARK}={stamp}")
    if plan.uuids:
        values["gpus"] = ",".join(dict.fromkeys(plan.uuids[:ranks]))
    return command_words(values, request.script, request.args)


def scaling(climbed: Sequence[LadderResult], world: int) -> Scaling:
    """Throughput of the highest rung against one rank's; memory of all ranks, from the highest rung measured."""
    passed = [rung for rung in climbed if rung.exit_code == 0]
    found = Scaling()
    rates = [rung for rung in passed if rung.steps_per_s]
    if len(rates) > 1 and rates[0].ranks == 1 and rates[0].steps_per_s and rates[-1].steps_per_s:
        efficiency = rates[-1].steps_per_s / rates[0].steps_per_s
        found = Scaling(efficiency, "scales" if efficiency >= SCALES else "does not scale")
    measured = [rung for rung in passed if rung.rss and rung.rss_all and rung.host_total]
    if not measured:
        return found
    last = measured[-1]
    assert last.rss and last.rss_all and last.host_total
    needed = last.rss_all if last.ranks == world else last.rss * world
    others = max(0, (last.host_used or 0) - last.rss_all)
    fits = "scales" if others + needed <= last.host_total else "does not scale"
    return Scaling(found.efficiency, found.throughput, needed, others, last.host_total, fits)


def memory_line(found: Scaling, world: int) -> str:
    if found.memory_needed is None or found.memory_total is None:
        return ""
    room = "" if found.memory == "scales" else f", and {format_bytes(found.memory_others)} of it is in use by others"
    need = f"will need {format_bytes(found.memory_needed)} of {format_bytes(found.memory_total)} host memory"
    return f"memory {found.memory}: {plural(world, 'rank')} {need}{room}"


def measure(ranks: int, exit_code: int, run: run_record.RunRecord | None) -> LadderResult:
    if run is None:
        return LadderResult(ranks, exit_code)
    began, host_used, host_total = 0.0, None, None
    first: dict[int, float] = {}
    ends: dict[int, tuple[float, int]] = {}
    rss: dict[int, int] = {}
    cards: list[tuple[int, int]] = []
    for event in run_record.read_events(run.dir):
        kind = event["event"]
        if kind == "attempt":
            began = event["time"]
        elif kind == "first-step":
            first[event["rank"]] = event["at"]
        elif kind == "rank-exit":
            ends[event["rank"]] = (event["time"], event["steps"])
        elif kind == "mem" and event["at"] == "POST-MODEL":
            rss[event["rank"]] = event["rss"] or 0
            host_used, host_total = event["host_used"], event["host_total"]
            if event["gpu"]:
                cards.append((event["gpu"][0], event["gpu"][1]))
    timed = [(first[rank], end, steps) for rank, (end, steps) in ends.items() if rank in first]
    rates = [(steps - 1) / (end - start) for start, end, steps in timed if steps > 1 and end > start]
    whole = len(rss) == ranks  # a rank that never said leaves a sum that means nothing
    return LadderResult(
        ranks,
        exit_code,
        run.id,
        run.dir,
        steps=min((steps for _, steps in ends.values()), default=0),
        first_step_s=max(first.values()) - began if len(first) == ranks else None,
        steps_per_s=min(rates) if len(rates) == ranks else None,
        rss=max(rss.values()) if whole else None,
        rss_all=sum(rss.values()) if whole else None,
        gpu=max(cards, default=None),
        host_used=host_used,
        host_total=host_total,
    )


class Ladder:
    """`say` gets what there is to tell on the way, line by line."""

    def __init__(self, request: Request, steps: int, say: Callable[[str], None]) -> None:
        limit = request.options.stop_after_steps
        if steps < 1:
            raise Refusal(f"--steps {steps}: give a number from 1 up", EX_USAGE)
        if request.options.hosts is not None:
            line = "the ladder climbs on one machine: leave --hosts out and start it on each of them"
            raise Refusal(line, EX_USAGE, cause="launch.nodes")
        self._request = request
        self._steps = min(steps, limit) if limit > 0 else steps
        self._say = say
        self._flags = python_flags(sys.orig_argv)[0]
        self._child: subprocess.Popen[bytes] | None = None  # the rung under way
        self._stop = 0
        self._imported: list[Imported] = []
        self._climbed: list[LadderResult] = []
        self._plan = Plan(0, (), False)

    def climb(self, wanted: Collection[str]) -> LadderStepRun:
        """Up to the first rung that fails. What can't start at all is refused before anything does."""
        program(self._request)
        with handled((*STOPS, signal.SIGTSTP), self._on_signal):
            rungs_: tuple[int, ...] = ()
            verdict = None if {SINGLE, ALL}.isdisjoint(wanted) else self._look()
            if verdict is None and self._plan.world_size:
                rungs_ = rungs(self._plan.world_size) if ALL in wanted else (1,)
            if verdict is None and not {IMPORTS, ALL}.isdisjoint(wanted):
                verdict = try_imports(self._request, self._flags, self._imported, self._say, lambda: self._stop)
            for number, ranks in enumerate(rungs_, 1):
                verdict = verdict or self._stopped() or self._rung(ranks, f"rung {number} of {len(rungs_)}")
        verdict = verdict or self._stopped()
        code = verdict.exit_code if verdict else 0
        imported, climbed = tuple(self._imported), tuple(self._climbed)
        return LadderStepRun(self._plan.world_size, rungs_, self._steps, imported, climbed, verdict, code)

    def foresee(self) -> tuple[tuple[Import, ...], tuple[int, ...]]:
        """For --dry-run: the imports and the rungs."""
        program(self._request)
        verdict = self._look()
        if verdict is not None:
            raise Refusal(verdict.summary, verdict.exit_code, cause=verdict.cause)
        return find_imports(self._request, self._say)[0], rungs(self._plan.world_size)

    def _stopped(self) -> Verdict | None:
        if not self._stop:
            return None
        summary = f"stopped by {signal.Signals(self._stop).name}"
        return Verdict("stopped", "launch.stopped", summary, 128 + self._stop)

    def _on_signal(self, signum: int, _frame: object) -> None:
        """The rung has a session of its own: a terminal's Ctrl-C comes here alone and is passed on, once."""
        child = self._child
        if signum != signal.SIGTSTP:
            self._stop = self._stop or signum
        if child is not None:
            child.send_signal(signum)
        if signum == signal.SIGTSTP:
            signal.raise_signal(signal.SIGSTOP)
            if child is not None:
                child.send_signal(signal.SIGCONT)

    def _look(self) -> Verdict | None:
        """The plan `stoker run` would make."""
        request = self._request
        passed = request.given - {"config", "detach", "ladder", "name"}
        values = {name: getattr(request.options, name) for name in passed} | {"dry_run": True, "json": True}
        code, out, said, _ = self._stoker(command_words(values, request.script, request.args), False)
        if code:
            return self._stopped() or Verdict("refused", "launch.refused", said, code)
        data = json.loads(out)
        uuids = tuple(place["gpu"]["uuid"] for place in data["places"] if place["gpu"])
        self._plan = Plan(len(data["places"]), uuids, not uuids and "" in data["visible"].values())
        for line in data["lines"]:
            self._say(line)
        return None

    def _rung(self, ranks: int, which: str) -> Verdict | None:
        request, plan = self._request, self._plan
        found = scaling(self._climbed, ranks)
        if found.memory == "does not scale":
            self._say(memory_line(found, ranks))
        self._say(f"{which}: {plural(ranks, 'rank')}, {plural(self._steps, 'step')} or the script's end")
        words = rung_words(request, plan, ranks, self._steps, time.strftime("%Y%m%d-%H%M%S"))
        code, _, said, pid = self._stoker(words, True, hide=plan.hidden)
        runs = run_index.all_runs(layout.runs_root(request.options.runs_dir, os.environ))
        ours = [run for run in runs if run.launcher[0] == pid and run.name.endswith(f"-ladder-{ranks}")]
        run = ours[-1] if ours else None
        self._climbed.append(measure(ranks, code, run))
        if code == 0:
            return None
        if run is None:
            return self._stopped() or Verdict("refused", "launch.refused", said, code)
        return run.verdict or lost(run.id)

    def _stoker(self, words: list[str], aloud: bool, hide: bool = False) -> tuple[int, bytes, str, int]:
        """A `stoker run` to its end: (exit code, stdout, its last word, pid). A refusal is said in any case."""
        ours = TORCHRUN_VARIABLES | set(_TESTS)  # resolved already; and a rung does not climb a ladder
        shown, hidden = split_secret_options(words)
        env = {name: value for name, value in os.environ.items() if name not in ours} | hidden
        if hide:
            env["CUDA_VISIBLE_DEVICES"] = ""
        said = ""
        with tempfile.TemporaryFile() as out:
            argv = stoker_command(["run", *shown], self._flags)
            # stdin stays ours: a first rung that read it would leave nothing for the others.
            with start(argv, env, out, subprocess.PIPE, signal.SIGTERM) as child:
                self._child = child
                try:
                    assert child.stderr is not None
                    for raw in child.stderr:
                        line = raw.decode("utf-8", "replace").rstrip("\n")
                        said = line.removeprefix("stoker: ") if line.startswith("stoker: ") else said
                        if aloud or line.startswith("stoker: "):
                            self._say(line)
                    code = child.wait()
                finally:
                    self._child = None
            out.seek(0)
            return code if code >= 0 else 128 - code, out.read(), said or "no word why", child.pid
