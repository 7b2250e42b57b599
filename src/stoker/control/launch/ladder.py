"""Runs the ladder: a script's imports one by one, then the script on 1, half and all ranks for a few steps each.

Each rung with ranks is a separate `stoker run` with its own record. The first rung that fails ends the
ladder.
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
from stoker.control.launch.import_check import ImportResult, ScriptImport, find_imports, start_child, try_imports
from stoker.control.launch.signals import STOPS, handled
from stoker.control.plan.options import TORCHRUN_VARIABLES, RunOptions
from stoker.control.plan.request import Request, python_flags, rank_command
from stoker.control.plan.run_plan import default_name
from stoker.control.record import run_index, run_record
from stoker.control.verdict.launch_failures import make_lost_verdict

IMPORTS, SINGLE, ALL = "imports", "single", "all"  # parts of the ladder that can be requested
STEPS = 20
MIN_EFFICIENCY = 0.8  # of one rank's steps/s; with less the throughput does not scale
# Set for the ranks of a rung. Its value makes the rung's settings unique, so that no older rung is resumed.
RUN_VARIABLE = "STOKER_LADDER"
_VARIABLES = {"RUN_IMPORT_TEST": IMPORTS, "RUN_SINGLE_GPU_TEST": SINGLE}
# Options that a rung decides itself, or that would make it something other than a short run in the foreground.
_NOT_PASSED = {"config", "detach", "dry_run", "gpu", "gpus", "json", "ladder", "max_restarts", "metrics_port", "name", "notify", "nproc_per_node", "quiet",
               "show"}  # fmt: skip


@frozen
class RungResult:
    """The measurements of a rung with ranks, from its record. None means that the script did not report the value."""

    ranks: int
    exit_code: int
    run: str = ""
    dir: str = ""
    steps: int = 0
    first_step_s: float | None = None
    steps_per_s: float | None = None  # of the slowest rank
    rss: int | None = None  # of the largest rank, at POST-MODEL
    rss_all: int | None = None
    gpu: tuple[int, int] | None = None  # used and total memory of the fullest GPU
    host_used: int | None = None
    host_total: int | None = None


@frozen
class Scaling:
    """How throughput and host memory scale with the number of ranks."""

    efficiency: float | None = None  # steps/s of the highest rung, relative to one rank alone
    throughput: str = ""  # scales | does not scale
    memory_needed: int | None = None
    memory_others: int = 0
    memory_total: int | None = None
    memory: str = ""  # scales | does not scale


@frozen
class LadderReport:
    """The result of the whole ladder. `verdict` is that of the rung that failed."""

    world_size: int
    rungs: tuple[int, ...]
    steps: int
    imports: tuple[ImportResult, ...]
    climbed: tuple[RungResult, ...]
    verdict: Verdict | None
    exit_code: int


@frozen
class LadderPlan:
    """The ranks and GPUs that the whole run would use."""

    world_size: int
    uuids: tuple[str, ...]  # of each rank's GPU, or () for CPU ranks
    hides_gpus: bool  # CPU ranks on a machine with GPUs


def list_rungs(world_size: int) -> tuple[int, ...]:
    """Return the numbers of ranks to try: 1, half, all."""
    return tuple(sorted({1, max(1, world_size // 2), world_size}))


def parse_ladder_variables(environ: Mapping[str, str]) -> set[str]:
    """Return the parts of the ladder that variables request."""
    return {
        part for name, part in _VARIABLES.items() if environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")
    }


# ---- command lines ----


def format_flags(options: Mapping[str, Any]) -> list[str]:
    """Return options of `stoker run` as flags that are parsed to the same values."""
    words: list[str] = []
    for name in options_of(RunOptions):
        value = options.get(name)
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            values = value if isinstance(value, (tuple, list)) else (value,)
            words += [f"{flag}={format(item, 'f') if isinstance(item, float) else item}" for item in values]
    return words


def make_arguments(options: Mapping[str, Any], script: str, args: Sequence[str]) -> list[str]:
    """Return the arguments of `stoker run`. argparse drops the first --, which must not be one of the script's."""
    return [*format_flags(options), "--", script, *args]


def make_rung_arguments(request: Request, plan: LadderPlan, ranks: int, steps: int, stamp: str) -> list[str]:
    """Return the arguments of a rung's `stoker run`. It uses GPUs of the whole run, so that rungs are comparable."""
    options = request.options
    values = {name: getattr(options, name) for name in request.given - _NOT_PASSED}
    name = f"{(options.name or default_name(request))[:80]}-ladder-{ranks}"
    values |= {"nproc_per_node": ranks, "stop_after_steps": steps, "name": name, "show": "none", "quiet": True}
    values["env"] = (*options.env, f"{RUN_VARIABLE}={stamp}")
    if plan.uuids:
        values["gpus"] = ",".join(dict.fromkeys(plan.uuids[:ranks]))
    return make_arguments(values, request.script, request.args)


# ---- measurements ----


def measure_rung(ranks: int, exit_code: int, run: run_record.RunRecord | None) -> RungResult:
    """Return the measurements in the record of a rung."""
    if run is None:
        return RungResult(ranks, exit_code)
    attempt_time, host_used, host_total = 0.0, None, None
    first_steps: dict[int, float] = {}
    ends: dict[int, tuple[float, int]] = {}
    rss: dict[int, int] = {}
    gpu_memory: list[tuple[int, int]] = []
    for event in run_record.read_events(run.dir):
        kind = event["event"]
        if kind == "attempt":
            attempt_time = event["time"]
        elif kind == "first-step":
            first_steps[event["rank"]] = event["at"]
        elif kind == "rank-exit":
            ends[event["rank"]] = (event["time"], event["steps"])
        elif kind == "mem" and event["at"] == "POST-MODEL":
            rss[event["rank"]] = event["rss"] or 0
            host_used, host_total = event["host_used"], event["host_total"]
            if event["gpu"]:
                gpu_memory.append((event["gpu"][0], event["gpu"][1]))
    rates = []
    for rank, (end, steps) in ends.items():
        if rank in first_steps and steps > 1 and end > first_steps[rank]:
            rates.append((steps - 1) / (end - first_steps[rank]))
    has_all_rss = len(rss) == ranks  # a sum without some ranks means nothing
    return RungResult(
        ranks,
        exit_code,
        run.id,
        run.dir,
        steps=min((steps for _, steps in ends.values()), default=0),
        first_step_s=max(first_steps.values()) - attempt_time if len(first_steps) == ranks else None,
        steps_per_s=min(rates) if len(rates) == ranks else None,
        rss=max(rss.values()) if has_all_rss else None,
        rss_all=sum(rss.values()) if has_all_rss else None,
        gpu=max(gpu_memory, default=None),
        host_used=host_used,
        host_total=host_total,
    )


def compute_scaling(climbed: Sequence[RungResult], world_size: int) -> Scaling:
    """Return the throughput of the highest rung relative to one rank, and the host memory that all ranks will need."""
    passed = [rung for rung in climbed if rung.exit_code == 0]
    efficiency, throughput = None, ""
    rated = [rung for rung in passed if rung.steps_per_s]
    if len(rated) > 1 and rated[0].ranks == 1 and rated[0].steps_per_s and rated[-1].steps_per_s:
        efficiency = rated[-1].steps_per_s / rated[0].steps_per_s
        throughput = "scales" if efficiency >= MIN_EFFICIENCY else "does not scale"
    measured = [rung for rung in passed if rung.rss and rung.rss_all and rung.host_total]
    if not measured:
        return Scaling(efficiency, throughput)
    highest = measured[-1]
    assert highest.rss and highest.rss_all and highest.host_total
    needed = highest.rss_all if highest.ranks == world_size else highest.rss * world_size
    others = max(0, (highest.host_used or 0) - highest.rss_all)
    memory = "scales" if others + needed <= highest.host_total else "does not scale"
    return Scaling(efficiency, throughput, needed, others, highest.host_total, memory)


def format_memory_need(result: Scaling, world_size: int) -> str:
    if result.memory_needed is None or result.memory_total is None:
        return ""
    needed = f"{format_bytes(result.memory_needed)} of {format_bytes(result.memory_total)} host memory"
    line = f"memory {result.memory}: {plural(world_size, 'rank')} will need {needed}"
    if result.memory == "scales":
        return line
    return f"{line}, and other processes use {format_bytes(result.memory_others)}"


# ---- climbing ----


class Ladder:
    """Runs the rungs of one request. `log` gets lines about the progress."""

    def __init__(self, request: Request, steps: int, log: Callable[[str], None]) -> None:
        limit = request.options.stop_after_steps
        if steps < 1:
            raise Refusal(f"--steps must be 1 or more, got {steps}", EX_USAGE)
        if request.options.hosts is not None:
            line = "the ladder runs on one machine: leave --hosts out and start it on each of them"
            raise Refusal(line, EX_USAGE, cause="launch.nodes")
        self._request = request
        self._steps = min(steps, limit) if limit > 0 else steps
        self._log = log
        self._python_flags = python_flags(sys.orig_argv)[0]
        self._child: subprocess.Popen[bytes] | None = None  # of the current rung
        self._stop_signal = 0
        self._imports: list[ImportResult] = []
        self._climbed: list[RungResult] = []
        self._plan = LadderPlan(0, (), False)

    def climb(self, parts: Collection[str]) -> LadderReport:
        """Try these parts up to the first that fails. Raises Refusal for a program that can't start at all."""
        rank_command(self._request)
        with handled((*STOPS, signal.SIGTSTP), self._on_signal):
            rank_counts: tuple[int, ...] = ()
            verdict = None if {SINGLE, ALL}.isdisjoint(parts) else self._read_plan()
            if verdict is None and self._plan.world_size:
                rank_counts = list_rungs(self._plan.world_size) if ALL in parts else (1,)
            if verdict is None and not {IMPORTS, ALL}.isdisjoint(parts):
                verdict = try_imports(
                    self._request, self._python_flags, self._imports, self._log, lambda: self._stop_signal
                )
            for number, ranks in enumerate(rank_counts, 1):
                if verdict is None:
                    verdict = self._make_stopped_verdict() or self._try_rung(
                        ranks, f"rung {number} of {len(rank_counts)}"
                    )
        verdict = verdict or self._make_stopped_verdict()
        return LadderReport(
            self._plan.world_size,
            rank_counts,
            self._steps,
            tuple(self._imports),
            tuple(self._climbed),
            verdict,
            verdict.exit_code if verdict else 0,
        )

    def preview(self) -> tuple[tuple[ScriptImport, ...], tuple[int, ...]]:
        """Return the imports and the rungs, for --dry-run."""
        rank_command(self._request)
        verdict = self._read_plan()
        if verdict is not None:
            raise Refusal(verdict.summary, verdict.exit_code, cause=verdict.cause)
        return find_imports(self._request, self._log)[0], list_rungs(self._plan.world_size)

    def _read_plan(self) -> Verdict | None:
        """Read the plan that `stoker run` would make. Returns a verdict if it can't start."""
        request = self._request
        passed = request.given - {"config", "detach", "ladder", "name"}
        values = {name: getattr(request.options, name) for name in passed} | {"dry_run": True, "json": True}
        words = make_arguments(values, request.script, request.args)
        code, out, message, _ = self._run_stoker(words, logs_output=False)
        if code:
            return self._make_stopped_verdict() or Verdict("refused", "launch.refused", message, code)
        plan = json.loads(out)
        uuids = tuple(rank["gpu"]["uuid"] for rank in plan["places"] if rank["gpu"])
        self._plan = LadderPlan(len(plan["places"]), uuids, not uuids and "" in plan["visible"].values())
        for line in plan["lines"]:
            self._log(line)
        return None

    def _try_rung(self, ranks: int, title: str) -> Verdict | None:
        request, plan = self._request, self._plan
        forecast = compute_scaling(self._climbed, ranks)
        if forecast.memory == "does not scale":
            self._log(format_memory_need(forecast, ranks))
        self._log(f"{title}: {plural(ranks, 'rank')}, {plural(self._steps, 'step')} or the script's end")
        words = make_rung_arguments(request, plan, ranks, self._steps, time.strftime("%Y%m%d-%H%M%S"))
        code, _, message, pid = self._run_stoker(words, logs_output=True, hides_gpus=plan.hides_gpus)
        runs = run_index.own_runs(layout.runs_root(request.options.runs_dir, os.environ))
        rung_runs = [run for run in runs if run.launcher[0] == pid and run.name.endswith(f"-ladder-{ranks}")]
        run = rung_runs[-1] if rung_runs else None
        self._climbed.append(measure_rung(ranks, code, run))
        if code == 0:
            return None
        if run is None:
            return self._make_stopped_verdict() or Verdict("refused", "launch.refused", message, code)
        return run.verdict or make_lost_verdict(run.id)

    def _run_stoker(self, words: list[str], logs_output: bool, hides_gpus: bool = False) -> tuple[int, bytes, str, int]:
        """Run a `stoker run` to its end. Returns (exit code, stdout, last message, pid). Its messages are always logged."""
        public, secret = split_secret_options(words)
        resolved = TORCHRUN_VARIABLES | set(_VARIABLES)  # the options already have their values
        env = {name: value for name, value in os.environ.items() if name not in resolved} | secret
        if hides_gpus:
            env["CUDA_VISIBLE_DEVICES"] = ""
        message = ""
        with tempfile.TemporaryFile() as out:
            argv = stoker_command(["run", *public], self._python_flags)
            # stdin is not inherited: a first rung that read it would leave nothing for the others.
            with start_child(argv, env, out, subprocess.PIPE, signal.SIGTERM) as child:
                self._child = child
                try:
                    assert child.stderr is not None
                    for raw in child.stderr:
                        line = raw.decode("utf-8", "replace").rstrip("\n")
                        is_message = line.startswith("stoker: ")
                        if is_message:
                            message = line.removeprefix("stoker: ")
                        if logs_output or is_message:
                            self._log(line)
                    code = child.wait()
                finally:
                    self._child = None
            out.seek(0)
            return code if code >= 0 else 128 - code, out.read(), message or "it ended without a message", child.pid

    # ---- signals ----

    def _make_stopped_verdict(self) -> Verdict | None:
        if not self._stop_signal:
            return None
        summary = f"stopped by {signal.Signals(self._stop_signal).name}"
        return Verdict("stopped", "launch.stopped", summary, 128 + self._stop_signal)

    def _on_signal(self, signum: int, _frame: object) -> None:
        """Pass a signal on, once: the rung has a session of its own, so a terminal's Ctrl-C reaches only this process."""
        child = self._child
        if signum != signal.SIGTSTP:
            self._stop_signal = self._stop_signal or signum
        if child is not None:
            child.send_signal(signum)
        if signum == signal.SIGTSTP:
            signal.raise_signal(signal.SIGSTOP)
            if child is not None:
                child.send_signal(signal.SIGCONT)
