"""The coordinator: runs attempts, decides when to stop and whether to start again, writes the record.

Membership is decided here and only here: an attempt is (members, world size, fresh port). One select loop; threads
only write: the console's and the pings'.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from stoker.contract import layout
from stoker.contract.names import EX_OSERR, EX_SOFTWARE, EX_USAGE, Refusal
from stoker.contract.quantities import span
from stoker.contract.shape import replace
from stoker.contract.shapes import RankEnd, Stall, Verdict
from stoker.control.cluster import transport
from stoker.control.launch import about, detach
from stoker.control.launch.attempt import Attempt
from stoker.control.launch.console import Console
from stoker.control.launch.hearing import Hearing
from stoker.control.launch.members import Member
from stoker.control.launch.muster import Interrupted, Muster, check_numbers
from stoker.control.launch.output import Output
from stoker.control.launch.plan import GATE_TOTAL_S, RunPlan, common_environment, rank_argv, rank_environment
from stoker.control.launch.request import Request, program
from stoker.control.launch.runplace import RunPlace, abandon, find_place
from stoker.control.machine import host
from stoker.control.record.writer import RunRecord
from stoker.control.verdict import hang, launch
from stoker.control.verdict.judge import judge
from stoker.control.watch.watcher import Inspect, Relieve, Suspect

GRACE_FAILURE_S = 5.0
GRACE_STOP_S = 30.0
SETTLE_S = 1.0
EARLY_S = 10.0
TWICE_S = 1.0
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_TRAVEL = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "HF_", "OMP_")


class Coordinator:
    def __init__(self, request: Request, link: transport.Link | None, report: detach.Report | None = None) -> None:
        self.request = request
        self.options = request.options
        self._report = report
        self._console = Console()
        self._began = time.time()
        self._cwd = os.getcwd()
        self._signals: list[int] = []
        self._record: RunRecord | None = None
        self._output: Output | None = None
        self._early_said: set[int] = set()
        self._endpoint: tuple[str, int] | None = None
        self._link = link

    # ---- the whole run ----

    def run(self) -> int:
        try:
            host.raise_files_limit()  # a log file a rank
            self._muster = Muster(self.request, self._link, self._signals, self._say)
            try:
                self._catch_signals()
                verdict = self._run()
            finally:
                self._muster.members.close()
            if verdict is None:
                return 0
            about.notify(self.options.notify, verdict, "ended", self._say, wait=True)
            return verdict.exit_code
        except Interrupted as stop:
            self._say(f"stoker: stopped by {signal.Signals(stop.signum).name} before anything was started")
            return 128 + stop.signum
        except Refusal as refusal:
            self._say(f"stoker: {refusal.line}")
            about.notify(self.options.notify, launch.refused(refusal), "refused", self._say, wait=True)
            return refusal.code
        finally:
            self._console.close()

    def _run(self) -> Verdict | None:
        """None for a dry run."""
        argv = program(self.request)
        check_numbers(self.request)
        place = find_place(self.request, os.environ)
        try:
            plan = self._prepare(argv, place)
        except BaseException:
            abandon(place)
            raise
        if self.options.dry_run:
            self._print_plan(plan, place)
            return None
        try:
            verdict = self._attempts(plan, place)
        except Refusal as refusal:
            verdict = replace(launch.refused(refusal), status="failed", run=place.id)
        except OSError as problem:
            verdict = launch.broken("launch.system", f"the system refuses: {problem}", EX_OSERR)
        self._close_record(verdict, place)
        return verdict

    def _prepare(self, argv: list[str], place: RunPlace) -> RunPlan:
        """All that can be refused; ends with the record open. Nothing has been started."""
        self._muster.meet(place)
        plan = self._muster.plan(argv)
        if self.options.dry_run:
            return plan
        warnings: list[str] = []
        if not self.options.no_preflight and "" in self._muster.machines:
            from stoker.control.launch import preflight

            preflight.check_legal(self.options, plan)
            warnings = preflight.preflight(self.options, plan, self._muster.machines[""])
        self._common = {
            host: common_environment(plan, self.request, os.environ, place.id, place.dir, machine.cores) for host, machine in self._muster.machines.items()
        }
        self._output = Output(self.options, plan, place.id, self._console)
        self._endpoint = self._muster.reserve()  # before the record: a port that can't be had leaves nothing behind
        self._open_record(plan, place)
        if self.options.quiet is False:
            for line in ([place.notice] if place.notice else []) + list(plan.lines) + warnings:
                self._say(line)
        if self._report is not None:
            self._report.started(place.dir)
        return plan

    def _close_record(self, verdict: Verdict, place: RunPlace) -> None:
        assert self._record is not None
        self._record.verdict(verdict)
        shown = os.path.relpath(place.dir, self._cwd)
        took = span(time.time() - self._began)
        if verdict.status == "completed":
            self._say(f"✓ {verdict.summary} in {took}; record: {shown}")
        else:
            self._say(f"stoker: {verdict.summary}")
            fix = f"; {verdict.fix[0]}" if verdict.fix else ""
            self._say(f"stoker: {verdict.status} after {took}, exit code {verdict.exit_code}{fix}; `stoker why {place.id}` says more")
        self._tell_lost()

    def _attempts(self, plan: RunPlan, place: RunPlace) -> Verdict:
        number = place.first_attempt
        before: tuple[Any, ...] = ()
        for tries_left in range(self.options.max_restarts, -1, -1):
            attempt = Attempt(number, plan, self.options.hang_timeout)
            verdict = self._one_attempt(attempt, place)
            same = about.signature(verdict, attempt)
            if verdict.status == "failed" and same == before:
                verdict = replace(
                    verdict, retryable=False, evidence=(*verdict.evidence, "the attempt before failed in the same way at the same place: deterministic")
                )
            before = same
            if verdict.status != "failed" or not verdict.retryable or tries_left == 0 or any(member.gone for member in self._muster.members.all):
                return verdict
            assert self._record is not None
            done = self.options.max_restarts - tries_left + 1
            self._record.event("restart", attempt=number + 1, cause=verdict.cause, rank=verdict.rank)
            self._say(f"stoker: {verdict.summary}; starting again ({done} of {self.options.max_restarts})")
            about.notify(self.options.notify, verdict, "restarting", self._say, wait=False)
            number += 1
        raise AssertionError("the loop returns")

    def _print_plan(self, plan: RunPlan, place: RunPlace) -> None:
        import json

        if self.options.json:
            text = json.dumps({"schema": 1, "run": place.id, **plan.to_json()}, indent=1)
        else:
            rows = [f"  rank {p.rank}  {p.label}" + (f"  {p.gpu.name} {p.gpu.uuid}" if p.gpu else "") for p in plan.places]
            text = "\n".join(
                [*plan.lines, f"would start {plan.world_size} ranks of: {' '.join(plan.argv)}", *rows, f"record: {os.path.relpath(place.dir, self._cwd)}"]
            )
        self._console.put(1, text.encode("utf-8", "backslashreplace") + b"\n")

    # ---- the record ----

    def _open_record(self, plan: RunPlan, place: RunPlace) -> None:
        record = RunRecord(place.dir, os.uname().nodename, place.reopened)
        record.begin(about.describe(self.request, plan, place, self._muster.machines, self._began))
        self._record = record

    def _say(self, line: str) -> None:
        if self._output is not None and not self._output.between_lines():
            line = "\n" + line
        self._console.put(2, line.encode("utf-8", "backslashreplace") + b"\n")
        if self._record is not None:
            self._record.say(line)

    def _tell_lost(self) -> None:
        assert self._record is not None
        for path, count in self._record.lost().items():
            self._say(f"stoker: {count} bytes of {os.path.basename(path)} could not be written (disk full?)")

    # ---- one attempt ----

    def _one_attempt(self, attempt: Attempt, place: RunPlace) -> Verdict:
        assert self._record is not None and self._output is not None
        plan, number = attempt.plan, attempt.number
        self._muster.listener = Hearing(attempt, self._record, self._output, self.options, self._say, lambda: self._all_up(place)).hear
        self._early_said.clear()
        self._record.attempt(number)
        self._output.begin(number)
        address, port = self._endpoint if self._endpoint else self._muster.reserve()
        self._endpoint = None  # a fresh port for every attempt
        self._record.event("attempt", attempt=number, world_size=plan.world_size, master_addr=address, master_port=port)
        self._start(plan, place, number, address, port)
        self._follow(attempt)
        self._finish(attempt)
        self._record.close_logs()
        verdict = judge(attempt.evidence())
        detected = round(attempt.first_failure - min((end.time for end in attempt.ends.values() if end.rank == verdict.rank), default=attempt.first_failure), 3)
        seen = attempt.suspected_s if attempt.suspected_s is not None and _is_stall(verdict) else max(detected, 0.0) if attempt.first_failure else None
        return replace(verdict, run=place.id, attempt=number, detected_s=seen, evidence=(*verdict.evidence, *attempt.notes))

    def _all_up(self, place: RunPlace) -> None:
        """Every rank is on its way: time for what nobody should wait for."""
        assert self._record is not None
        self._record.save(os.path.join(self._record.dir, layout.RUN), about.enrich(self._record.dir, self.request), durable=False)

    def _start(self, plan: RunPlan, place: RunPlace, number: int, address: str, port: int) -> None:
        for member in self._muster.members.all:
            mine = [one for one in plan.places if one.host == member.host]
            travel = {} if member.link.local else {key: value for key, value in os.environ.items() if key.startswith(_TRAVEL)}
            env = {
                **travel,
                **self._common[member.host],
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RESTART_COUNT": str(number - place.first_attempt),
            }
            member.say({
                "do": "start",
                "common": {"attempt": number, "env": env, "unset": ["PYTHONHOME"] if not member.link.local else [], "shim": plan.shim, "split": plan.split,
                           "cwd": self._cwd, "numa": self.options.numa_binding},
                "ranks": [{"rank": one.rank, "argv": rank_argv(one, plan), "env": rank_environment(one, plan), "gpu": one.gpu.uuid if one.gpu else None,
                           "pci": one.gpu.pci if one.gpu else None} for one in mine],
                "gate": {"slots": plan.init_slots[member.host], "slot_s": self.options.init_timeout, "total_s": GATE_TOTAL_S},
                "ram_limit": self.options.ram_limit,
            })  # fmt: skip

    def _follow(self, attempt: Attempt) -> None:
        """Until every rank has ended. Passes signals on, stops the rest when one fails."""
        while not attempt.all_ended:
            self._muster.members.pump(0.25)
            assert self._record is not None and self._output is not None
            self._output.settle(self._record)
            now = time.time()
            self._pass_signals(attempt)
            self._watch(attempt)
            for member in self._muster.members.all:
                if member.gone:
                    self._member_lost(attempt, member)
            if not attempt.stopping and attempt.must_stop(now, SETTLE_S):
                attempt.stopping, attempt.stopped_at = True, now
                at_once = [entry["rank"] for entry in attempt.trouble if entry.get("at_once")]
                self._stop(signal.SIGTERM, GRACE_FAILURE_S, at_once)
            wanted = self.options.stop_after_steps
            if wanted and not attempt.stopping and min((attempt.steps.get(rank, 0) for rank in range(attempt.expected)), default=0) >= wanted:
                attempt.stopping, attempt.steps_reached, attempt.stopped_at = True, wanted, now
                self._stop(signal.SIGTERM, GRACE_FAILURE_S)
            early = [rank for rank in attempt.left_early(now, EARLY_S) if rank not in self._early_said]
            if early and not attempt.stopping:
                self._early_said.update(early)
                names_ = ", ".join(str(rank) for rank in early)
                line = f"rank {names_} ended with 0 more than {EARLY_S:.0f} s ago; the others still run"
                self._say(f"stoker: {line}")
                self._event("suspicion", cause="rank.early-exit", rank=early[0], ranks=early, summary=line)

    def _watch(self, attempt: Attempt) -> None:
        """Does what the watch room decides: asks, says, stops."""
        watch = attempt.watch
        if attempt.stopping:
            return
        for action in watch.look(time.monotonic()):
            if isinstance(action, Inspect):
                self._muster.members.say(dict(action.order))
            elif isinstance(action, Suspect):
                self._suspect(attempt, action.stall)
            elif isinstance(action, Relieve):
                who = f"rank {action.rank}" if action.rank is not None else "the job"
                self._say(f"stoker: {who} goes on, after {span(action.silent_s)}")
                self._event("relief", rank=action.rank, silent_s=round(action.silent_s, 1))
            else:
                attempt.trouble.append(hang.trouble(action.stall, self._label(attempt, action.stall.rank), action.why))
        while watch.stragglers.found:
            one = watch.stragglers.found.pop(0)
            line = f"rank {one.rank} ({self._label(attempt, one.rank)}) is slow because {one.because}; the others wait {one.wait_s:.2g} s of each {one.step_s:.2g} s step"
            attempt.notes.append(line)
            self._say(f"stoker: {line}")
            self._event("straggler", cause=one.cause, rank=one.rank, step=one.step, wait_s=one.wait_s, step_s=one.step_s, where=one.where, summary=line)

    def _suspect(self, attempt: Attempt, stall: Stall) -> None:
        assert self._record is not None
        cause, summary = hang.cause_of(stall), hang.summary(stall, self._label(attempt, stall.rank))
        attempt.suspected_s = stall.silent_s
        self._event(
            "suspicion", attempt=attempt.number, cause=cause, rank=stall.rank, ranks=list(stall.ranks), waiting=list(stall.waiting), where=stall.where,
            step=stall.step, silent_s=stall.silent_s, proof=stall.proof, summary=summary, evidence=list(stall.evidence),
        )  # fmt: skip
        text = "\n".join(attempt.watch.text_of_stacks()[rank] for rank in sorted(attempt.watch.snapshots))
        self._record.save(layout.stacks(self._record.dir, attempt.number), text)
        then = "it can't go on by itself" if stall.proof else f"the job goes on; --hang-timeout {span(self.options.hang_timeout)} would stop it"
        self._say(f"stoker: {summary} ({then if self.options.hang_timeout else 'the job goes on'})")

    def _label(self, attempt: Attempt, rank: int | None) -> str:
        return attempt.plan.places[rank].label if rank is not None else ""

    def _event(self, kind: str, **more: Any) -> None:
        assert self._record is not None
        self._record.event(kind, **more)

    def _finish(self, attempt: Attempt) -> None:
        """Everything the ranks left behind goes; on success it first gets the time to end by itself."""
        clean = all(end.code == 0 for end in attempt.ends.values()) and not attempt.stopping
        grace = (GRACE_FAILURE_S if self.options.grace is None else self.options.grace) if clean else 0.0
        self._muster.members.say({"do": "finish", "grace": grace})
        deadline = time.monotonic() + grace + 15.0
        while any(not member.gone and member.host not in attempt.finished for member in self._muster.members.all):
            if time.monotonic() > deadline:
                self._say("stoker: an agent did not finish sweeping in time; its guardian goes on with it")
                return
            self._muster.members.pump(0.25)
            if self._signals:
                signum = self._signals.pop(0)
                if not clean and signum in _STOPS:  # what is over can't be stopped, but it must not start again
                    attempt.stop_signal = attempt.stop_signal or signum
                    attempt.stopped_at = attempt.stopped_at or time.time()
                self._muster.members.say({"do": "finish", "grace": 0.0})

    def _stop(self, signum: int, default_grace: float, at_once: list[int] | None = None) -> None:
        told = self.options.grace if self.options.grace is not None else self.options.shutdown_timeout
        self._muster.members.say({"do": "stop", "signal": int(signum), "grace": default_grace if told is None else told, "at_once": at_once or []})

    def _member_lost(self, attempt: Attempt, member: Member) -> None:
        """Its ranks are gone with it: the guardian there sees to that."""
        mine = [place for place in attempt.plan.places if place.host == member.host]
        if not any(entry.get("host") == member.host for entry in attempt.trouble):
            attempt.trouble.append(launch.agent_lost(member.host, member.gone, member.complaint))
        now = time.time()
        for one in mine:
            if one.rank not in attempt.ends:
                attempt.up.setdefault(one.rank, 0)
                attempt.ends[one.rank] = RankEnd(one.rank, one.host, one.label, attempt.up[one.rank], None, now, ours=True, error=attempt.errors.get(one.rank))

    # ---- signals ----

    def _catch_signals(self) -> None:
        for word in self.options.signals_to_handle.split(","):
            name = word.strip().upper()
            signum = getattr(signal, name if name.startswith("SIG") else f"SIG{name}", None)
            if not isinstance(signum, signal.Signals) or signum in (signal.SIGKILL, signal.SIGSTOP):
                raise Refusal(f"--signals-to-handle: no signal {word.strip()!r} that can be handled", EX_USAGE)
            if signum == signal.SIGHUP and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
                continue  # nohup
            signal.signal(signum, self._on_signal)
        if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
            signal.signal(signal.SIGTSTP, self._on_signal)

    def _on_signal(self, signum: int, _frame: object) -> None:
        self._signals.append(signum)

    def _pass_signals(self, attempt: Attempt) -> None:
        while self._signals:
            signum = self._signals.pop(0)
            name = signal.Signals(signum).name
            if signum == signal.SIGTSTP:
                self._muster.suspend()
                attempt.watch.resumed(time.monotonic())
                continue
            if signum not in _STOPS:
                self._muster.members.say({"do": "signal", "signal": signum})
                continue
            assert self._record is not None
            now = time.time()
            if attempt.stop_signal and signum != signal.SIGINT and now - attempt.stopped_at < TWICE_S:
                continue  # a closing terminal sends SIGHUP from the kernel and from its shell
            again = bool(attempt.stop_signal) or signum == signal.SIGQUIT
            attempt.stop_signal = attempt.stop_signal or signum
            attempt.stopped_at = attempt.stopped_at or now
            attempt.stop_now = again
            attempt.stopping = True
            self._record.event("stop", signal=name, now=again)
            if again:
                self._say(f"stoker: {name}: ending the ranks at once")
                self._muster.members.say({"do": "stop", "signal": int(signal.SIGKILL), "grace": 0.0})
            else:
                self._say(f"stoker: {name} passed on to the ranks; a second one ends them at once")
                self._stop(signum, GRACE_STOP_S)


def _is_stall(verdict: Verdict) -> bool:
    return verdict.cause.startswith("hang.") or verdict.cause.endswith((".diverged", ".unequal-batches"))


def run(request: Request, link: transport.Link | None, report: detach.Report | None) -> int:
    """`stoker run`, whole."""
    try:
        code = Coordinator(request, link, report).run()
    except (OSError, RuntimeError) as problem:  # no thread, no descriptor, no working directory
        print(f"stoker: the system refuses: {problem}", file=sys.stderr)
        code = EX_OSERR
    except Exception:
        import traceback

        traceback.print_exc()
        code = EX_SOFTWARE
    if report is not None:
        report.ended(code)
    return code
