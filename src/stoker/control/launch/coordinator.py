"""The coordinator: runs attempts, decides when to stop and whether to start again, writes the record.

Membership is decided here and only here: an attempt is (members, world size, fresh port). One select loop; threads
only write: the console's and the pings'.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from stoker.contract import layout
from stoker.contract.names import EX_OSERR, EX_SOFTWARE, EX_USAGE, Refusal
from stoker.contract.quantities import span
from stoker.contract.shape import replace
from stoker.contract.shapes import RankEnd, Verdict
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
from stoker.control.launch.runplace import Complete, RunPlace, abandon, find_place
from stoker.control.machine import host
from stoker.control.record.writer import RunRecord

GRACE_FAILURE_S = 5.0
GRACE_STOP_S = 30.0
SETTLE_S = 1.0
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
        except Complete as done:
            self._say(f"✓ {done}")
            return 0
        except Refusal as refusal:
            self._say(f"stoker: {refusal.line}")
            from stoker.control.verdict import launch

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
            from stoker.control.verdict import launch

            verdict = replace(launch.refused(refusal), status="failed", run=place.id)
        except OSError as problem:
            from stoker.control.verdict import launch

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
        self._common = self._environments(plan, place)
        self._output = Output(self.options, plan, place.id, self._console)
        self._endpoint = self._muster.reserve()  # before the record: a port that can't be had leaves nothing behind
        self._open_record(plan, place)
        if self.options.quiet is False:
            for line in ([place.notice] if place.notice else []) + list(plan.lines) + warnings:
                self._say(line)
        if self._report is not None:
            self._report.started(place.dir)
        return plan

    def _environments(self, plan: RunPlan, place: RunPlace) -> dict[str, dict[str, str]]:
        machines = self._muster.machines
        return {host: common_environment(plan, self.request, os.environ, place.id, place.dir, machines[host].cores) for host in plan.hosts}

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
        from stoker.control.launch.restarts import Restarts

        number = place.first_attempt
        restarts = Restarts(self.options)
        env: tuple[tuple[str, str], ...] = ()
        while True:
            attempt = Attempt(number, plan)
            began = time.monotonic()
            verdict = self._one_attempt(attempt, place, env)
            verdict, again = restarts.decide(verdict, attempt, time.monotonic() - began)
            if again is None or any(member.gone for member in self._muster.members.all):
                return self._diagnosed(verdict, plan) if verdict.cause == "gpu.busy" else verdict
            number += 1
            assert self._record is not None
            self._record.event("restart", attempt=number, cause=verdict.cause, rank=verdict.rank, wait_s=again.wait_s, env=[name for name, _ in again.env])
            self._say(f"stoker: {again.line}")
            about.notify(self.options.notify, verdict, "restarting", self._say, wait=False)
            try:
                self._muster.pause(again.wait_s)
                plan, bad = self._without_failed_card(plan, place, verdict) if again.probe else (plan, None)
            except Interrupted as stop:
                name = signal.Signals(stop.signum).name
                said = f"stopped by {name} between two attempts; the last one: {verdict.summary}"
                return Verdict("stopped", "launch.stopped", said, 128 + stop.signum, evidence=verdict.evidence, run=place.id, attempt=verdict.attempt)
            if bad is not None:
                return bad
            env = again.env

    def _diagnosed(self, verdict: Verdict, plan: RunPlan) -> Verdict:
        card = plan.places[verdict.rank].gpu if verdict.rank is not None else None
        if card is None or "" not in self._muster.machines:
            return verdict
        from stoker.control.launch import preflight

        try:
            self._muster.look()
        except (Refusal, Interrupted) as problem:
            return replace(verdict, evidence=(*verdict.evidence, f"it could not be looked at again: {problem}"))
        return replace(verdict, evidence=(*verdict.evidence, *preflight.diagnosis(self._muster.machines[""], card)))

    def _without_failed_card(self, plan: RunPlan, place: RunPlace, verdict: Verdict) -> tuple[RunPlan, Verdict | None]:
        """The guilty rank's card is proved; a bad one is left out of the next attempt. A verdict where that leaves too few."""
        card = plan.places[verdict.rank].gpu if verdict.rank is not None else None
        if card is None or "" not in self._muster.machines:
            return plan, None
        from stoker.control.launch import preflight

        broken = preflight.proof(self._muster.machines[""], card)
        if not broken:
            return plan, None
        self._muster.left_out[card.uuid] = broken
        assert self._record is not None
        self._record.event("gpu-left-out", gpu=card.uuid, label=card.label, why=broken)
        self._say(f"stoker: {card.label} ({card.uuid}) fails its proof ({broken}): it is left out")
        try:
            again = self._muster.plan_again(list(plan.argv))
            if not self.options.no_preflight:
                preflight.check_legal(self.options, again)
        except Refusal as refusal:
            said = (f"{card.label} fails its proof: {broken}", f"without it: {refusal.line}")
            return plan, replace(verdict, retryable=False, evidence=(*verdict.evidence, *said))
        assert self._output is not None
        self._output.replan(again)
        self._common = self._environments(again, place)
        for line in again.lines:
            self._say(line)
        return again, None

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

    def _one_attempt(self, attempt: Attempt, place: RunPlace, env: tuple[tuple[str, str], ...]) -> Verdict:
        assert self._record is not None and self._output is not None
        plan, number = attempt.plan, attempt.number
        self._record.attempt(number)
        self._output.begin(number)
        address, port = self._endpoint if self._endpoint else self._muster.reserve()
        self._endpoint = None  # a fresh port for every attempt
        # Not sooner: what an agent still says of the attempt before belongs to that one.
        self._muster.listener = Hearing(attempt, self._record, self._output, self.options, self._say, lambda: self._all_up(place)).hear
        self._record.event("attempt", attempt=number, world_size=plan.world_size, master_addr=address, master_port=port)
        self._start(plan, place, number, address, port, dict(env))
        attempt.begin_watch(self.options.hang_timeout)
        self._follow(attempt)
        self._finish(attempt)
        self._record.close_logs()
        from stoker.control.verdict.judge import judge

        verdict = judge(attempt.evidence())
        detected = round(attempt.first_failure - min((end.time for end in attempt.ends.values() if end.rank == verdict.rank), default=attempt.first_failure), 3)
        seen = attempt.suspected_s if attempt.suspected_s is not None and _is_stall(verdict) else max(detected, 0.0) if attempt.first_failure else None
        return replace(verdict, run=place.id, attempt=number, detected_s=seen, evidence=(*verdict.evidence, *attempt.notes))

    def _all_up(self, place: RunPlace) -> None:
        """Every rank is on its way: time for what nobody should wait for."""
        assert self._record is not None
        self._record.save(os.path.join(self._record.dir, layout.RUN), about.enrich(self._record.dir, self.request), durable=False)

    def _start(self, plan: RunPlan, place: RunPlace, number: int, address: str, port: int, more: dict[str, str]) -> None:
        for member in self._muster.members.all:
            mine = [one for one in plan.places if one.host == member.host]
            travel = {} if member.link.local else {key: value for key, value in os.environ.items() if key.startswith(_TRAVEL)}
            env = {
                **travel,
                **self._common[member.host],
                **more,
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
        assert self._record is not None and self._output is not None
        from stoker.control.launch.watching import Watching  # what the launch does not wait for is loaded when the ranks are on their way

        watching = Watching(attempt, self._record, self._output, self.options, self._muster.members, self._say)
        while not attempt.all_ended:
            self._muster.members.pump(0.25)
            self._output.settle(self._record)
            now = time.time()
            self._pass_signals(attempt)
            watching.look()
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
            from stoker.control.verdict import launch

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
