"""The coordinator: meets the agents, makes the plan, runs attempts, decides when to stop, writes the record.

Membership is decided here and only here: an attempt is (members, world size, fresh port). One select loop, no threads but the
console's.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from stoker.contract import layout, names, protocol
from stoker.contract.names import EX_OSERR, EX_SOFTWARE, EX_TEMPFAIL, EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.quantities import gb, span
from stoker.contract.shape import replace
from stoker.contract.shapes import RankEnd, Verdict
from stoker.control.cluster import transport
from stoker.control.launch import about, detach
from stoker.control.launch.attempt import Attempt, read_error
from stoker.control.launch.console import Console
from stoker.control.launch.gpus import NotFree
from stoker.control.launch.members import Member, Members
from stoker.control.launch.output import Output, wants_split
from stoker.control.launch.plan import GATE_TOTAL_S, RunPlan, common_environment, make_plan, rank_argv, rank_environment
from stoker.control.launch.request import Request, program
from stoker.control.launch.runplace import RunPlace, find_place
from stoker.control.machine.model import Machine, machine_from_json
from stoker.control.record.writer import RunRecord
from stoker.control.verdict.judge import judge

GRACE_FAILURE_S = 5.0
GRACE_STOP_S = 30.0
SETTLE_S = 1.0
MEET_S = 30.0
EARLY_S = 10.0
_TRAVEL = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "HF_", "OMP_")


class Interrupted(Exception):
    """A signal came before anything was started."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Coordinator:
    def __init__(self, request: Request, link: transport.Link | None, report: detach.Report | None = None) -> None:
        """`link`: the local agent, already on its way; None where agents are reached by ssh."""
        self.request = request
        self._link = link
        self.options = request.options
        self._report = report
        self._console = Console()
        self._began = time.time()
        self._signals: list[int] = []
        self._record: RunRecord | None = None
        self._output: Output | None = None
        self._attempt: Attempt | None = None
        self._answers: dict[str, dict[str, Any]] = {}  # the newest answer of each kind, by host and kind
        self._early_said: set[int] = set()

    # ---- the whole run ----

    def run(self) -> int:
        try:
            self._catch_signals()
            argv = program(self.request)
            self._check_ports()
            place = find_place(self.request, os.environ)
            self._meet(place)
            try:
                verdict = self._run(argv, place)
            finally:
                self._members.close()
            if verdict is None:
                return 0
            about.notify(self.options.notify, verdict, "ended", self._say, wait=True)
            return verdict.exit_code
        except Interrupted as stop:
            self._say(f"stoker: stopped by {signal.Signals(stop.signum).name} before anything was started")
            return 128 + stop.signum
        except Refusal as refusal:
            self._say(f"stoker: {refusal.line}")
            return refusal.code
        finally:
            self._console.close()

    def _run(self, argv: list[str], place: RunPlace) -> Verdict | None:
        """None for a dry run."""
        plan = self._plan(argv)
        if self.options.dry_run:
            self._print_plan(plan, place)
            return None
        self._common = {
            host: common_environment(plan, self.request, os.environ, place.id, place.dir, machine.cores) for host, machine in self._machines.items()
        }
        self._output = Output(self.options, plan, place.id, self._console)
        self._open_record(plan, place)
        if self.options.quiet is False:
            for line in ([place.notice] if place.notice else []) + list(plan.lines):
                self._say(line)
        verdict = self._attempts(plan, place)
        self._close_record(verdict, place)
        return verdict

    def _close_record(self, verdict: Verdict, place: RunPlace) -> None:
        assert self._record is not None
        self._record.verdict(verdict)
        shown = os.path.relpath(place.dir)
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
            verdict = self._one_attempt(plan, place, number)
            assert self._attempt is not None
            same = about.signature(verdict, self._attempt)
            if verdict.status == "failed" and same == before:
                verdict = replace(verdict, retryable=False, evidence=(*verdict.evidence, "the attempt before failed in the same way at the same place: deterministic"))
            before = same
            if verdict.status != "failed" or not verdict.retryable or tries_left == 0 or any(member.gone for member in self._members.all):
                return verdict
            assert self._record is not None
            done = self.options.max_restarts - tries_left + 1
            self._record.event("restart", attempt=number + 1, cause=verdict.cause, rank=verdict.rank)
            self._say(f"stoker: {verdict.summary}; starting again ({done} of {self.options.max_restarts})")
            about.notify(self.options.notify, verdict, "restarting", self._say, wait=False)
            number += 1
        raise AssertionError("the loop returns")

    # ---- meeting and planning ----

    def _meet(self, place: RunPlace) -> None:
        hosts = [host.strip() for host in self.options.hosts.split(",") if host.strip()] if self.options.hosts else []
        if self.options.hosts is not None and (not hosts or len(set(hosts)) < len(hosts)):
            raise Refusal(f"--hosts {self.options.hosts}: name each host once, separated by commas", EX_USAGE)
        if any(host.startswith("-") for host in hosts):
            raise Refusal(f"--hosts {self.options.hosts}: a host name does not begin with '-'", EX_USAGE)
        links = [self._link] if self._link is not None else [self._reach(host) for host in hosts]
        self._members = Members([Member(link) for link in links], self._hear, self._complain)
        try:
            self._members.say({
                "do": "open", "run": place.id, "dir": place.dir, "hup_ignored": signal.getsignal(signal.SIGHUP) is signal.SIG_IGN,
                "recorded": os.environ.get(names.MACHINE), "packages": about.packages_dir(),
            })  # fmt: skip
            self._await("host", MEET_S)
        except BaseException:
            self._members.close()
            raise

    def _reach(self, host: str) -> transport.Link:
        try:
            return transport.ssh(host, self.options.ssh_option, self.options.python or "python3")
        except FileNotFoundError as problem:
            raise Refusal("--hosts needs the ssh client, and there is none on the PATH", EX_UNAVAILABLE) from problem

    def _await(self, kind: str, seconds: float) -> None:
        """Until every agent has answered in this kind."""
        for member in self._members.all:
            self._answers.setdefault(member.host, {}).pop(kind, None)
        deadline = time.monotonic() + seconds
        while True:
            waiting = [member for member in self._members.all if kind not in self._answers[member.host]]
            if not waiting:
                return
            for member in waiting:
                where = f"host {member.host}" if member.host else "this machine"
                if member.gone:
                    raise Refusal(f"the agent on {where} is gone: {member.gone}", EX_UNAVAILABLE, cause="host.agent")
                if time.monotonic() > deadline:
                    raise Refusal(f"the agent on {where} does not answer within {seconds:.0f} s: a sick driver, or a machine without memory",
                                  EX_UNAVAILABLE, cause="host.agent")  # fmt: skip
            self._members.pump(0.5)
            if self._signals:
                raise Interrupted(self._signals[0])

    @property
    def _machines(self) -> dict[str, Machine]:
        return {member.host: machine_from_json(self._answers[member.host]["host"]["machine"]) for member in self._members.all}

    def _plan(self, argv: list[str]) -> RunPlan:
        """Looks, chooses, locks. With --wait it looks again until there is room; a lost race for a lock is a look again, too."""
        deadline = time.monotonic() + self.options.wait
        said = ""
        races = 0
        while True:
            held = {member.host: self._answers[member.host]["host"]["held"] for member in self._members.all}
            try:
                plan = make_plan(self.request, argv, os.environ, self._machines, held, wants_split(self.options))
                lost = {} if self.options.dry_run or self.options.share_gpus else self._lock(plan)
                if not lost:
                    return plan
                races += 1
                if races > 20:
                    who = "; ".join(f"GPU {uuid} by {holder}" for uuid, holder in lost.items())
                    raise NotFree(f"the GPUs are in use: {who}", EX_UNAVAILABLE, cause="gpu.busy")
            except NotFree as busy:
                if not self.options.wait:
                    raise
                if time.monotonic() > deadline:
                    raise Refusal(f"waited {span(self.options.wait)}: {busy.line}", EX_TEMPFAIL, cause="gpu.busy") from busy
                if busy.line != said:
                    said = busy.line
                    self._say(f"stoker: waiting for up to {span(deadline - time.monotonic())}: {busy.line}")
                self._pause(1.0)
            self._members.say({"do": "look"})
            self._await("host", MEET_S)

    def _lock(self, plan: RunPlan) -> dict[str, str]:
        if not any(place.gpu for place in plan.places):
            return {}
        for member in self._members.all:
            member.say({"do": "lock", "gpus": sorted({place.gpu.uuid for place in plan.places if place.gpu and place.host == member.host})})
        self._await("locked", MEET_S)
        return {uuid: who for member in self._members.all for uuid, who in self._answers[member.host]["locked"]["refused"].items()}

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._members.pump(left)
            if self._signals:
                raise Interrupted(self._signals[0])

    def _check_ports(self) -> None:
        options = self.options
        if options.max_restarts < 0:
            raise Refusal(f"--max-restarts {options.max_restarts}: give a number from 0 up", EX_USAGE)
        port = self._wanted_port()[0]
        if port and not 1024 <= port <= 65535:
            raise Refusal(f"--master-port {port}: ports from 1024 to 65535 can be used; 0 or no flag takes a free one", EX_USAGE, cause="launch.port")

    def _wanted_port(self) -> tuple[int, bool]:
        """(port or 0 for a free one, was it asked for as a flag)."""
        options = self.options
        if options.standalone:
            return 0, False
        if options.master_port is not None:
            return options.master_port, True
        if options.rdzv_endpoint:
            _, colon, port = options.rdzv_endpoint.rpartition(":")
            if colon and not port.isdigit():
                raise Refusal(f"--rdzv-endpoint {options.rdzv_endpoint}: write HOST:PORT", EX_USAGE)
            return (int(port), True) if colon else (0, False)
        asked = os.environ.get("MASTER_PORT", "")
        return (int(asked), False) if asked.isdigit() and 1024 <= int(asked) <= 65535 else (0, False)

    def _print_plan(self, plan: RunPlan, place: RunPlace) -> None:
        import json

        if self.options.json:
            text = json.dumps({"schema": 1, "run": place.id, **plan.to_json()}, indent=1)
        else:
            rows = [f"  rank {p.rank}  {p.label}" + (f"  {p.gpu.name} {p.gpu.uuid}" if p.gpu else "") for p in plan.places]
            text = "\n".join([*plan.lines, f"would start {plan.world_size} ranks of: {' '.join(plan.argv)}", *rows, f"record: {os.path.relpath(place.dir)}"])
        self._console.put(1, text.encode() + b"\n")

    # ---- the record ----

    def _open_record(self, plan: RunPlan, place: RunPlace) -> None:
        record = RunRecord(place.dir, os.uname().nodename, place.reopened)
        record.begin(about.describe(self.request, plan, place, self._machines, self._began))
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

    def _one_attempt(self, plan: RunPlan, place: RunPlace, number: int) -> Verdict:
        assert self._record is not None and self._output is not None
        attempt = self._attempt = Attempt(number, plan)
        self._early_said.clear()
        self._record.attempt(number)
        self._output.begin(number)
        address, port = self._reserve()
        self._record.event("attempt", attempt=number, world_size=plan.world_size, master_addr=address, master_port=port)
        self._start(plan, place, number, address, port)
        self._follow(attempt)
        self._finish(attempt)
        self._record.close_logs()
        verdict = judge(attempt.evidence())
        detected = round(attempt.first_failure - min((end.time for end in attempt.ends.values() if end.rank == verdict.rank), default=attempt.first_failure), 3)
        return replace(verdict, run=place.id, attempt=number, detected_s=max(detected, 0.0) if attempt.first_failure else None)

    def _reserve(self) -> tuple[str, int]:
        first = self._members.all[0]
        port, asked = self._wanted_port()
        address = self.options.master_addr or ("127.0.0.1" if len(self._members.all) == 1 else first.host.rpartition("@")[2])
        self._answers[first.host].pop("port", None)
        first.say({"do": "reserve", "addr": address, "port": port, "soft": not asked})
        deadline = time.monotonic() + 10.0
        while "port" not in self._answers[first.host]:
            if first.gone or time.monotonic() > deadline:
                raise Refusal(f"the agent did not reserve a port: {first.gone or 'no answer'}", EX_OSERR, cause="launch.port")
            self._members.pump(0.5)
        answer = self._answers[first.host]["port"]
        if not answer["port"]:
            raise Refusal(f"port {answer['wanted']} is in use by {answer['holder']}; leave --master-port out for a free one", EX_UNAVAILABLE,
                          cause="launch.port-in-use")  # fmt: skip
        if answer.get("wanted"):
            self._say(f"stoker: MASTER_PORT={answer['wanted']} is in use by {answer['holder']}; using port {answer['port']}")
        return address, int(answer["port"])

    def _start(self, plan: RunPlan, place: RunPlace, number: int, address: str, port: int) -> None:
        for member in self._members.all:
            mine = [one for one in plan.places if one.host == member.host]
            travel = {} if member.link.local else {key: value for key, value in os.environ.items() if key.startswith(_TRAVEL)}
            env = {**travel, **self._common[member.host], "MASTER_ADDR": address, "MASTER_PORT": str(port), "TORCHELASTIC_RESTART_COUNT": str(number - place.first_attempt)}
            member.say({
                "do": "start",
                "common": {"attempt": number, "env": env, "unset": ["PYTHONHOME"] if not member.link.local else [], "shim": plan.shim, "split": plan.split,
                           "cwd": os.getcwd(), "numa": self.options.numa_binding},
                "ranks": [{"rank": one.rank, "argv": rank_argv(one, plan), "env": rank_environment(one, plan), "gpu": one.gpu.uuid if one.gpu else None,
                           "pci": one.gpu.pci if one.gpu else None} for one in mine],
                "gate": {"slots": plan.init_slots[member.host], "slot_s": self.options.init_timeout, "total_s": GATE_TOTAL_S},
                "ram_limit": self.options.ram_limit,
            })  # fmt: skip

    def _follow(self, attempt: Attempt) -> None:
        """Until every rank has ended. Passes signals on, stops the rest when one fails."""
        while not attempt.all_ended:
            self._members.pump(0.25)
            now = time.time()
            self._pass_signals(attempt)
            for member in self._members.all:
                if member.gone:
                    self._member_lost(attempt, member)
            if not attempt.stopping and attempt.must_stop(now, SETTLE_S):
                attempt.stopping = True
                at_once = [entry["rank"] for entry in attempt.trouble if entry.get("at_once")]
                self._stop(signal.SIGTERM, GRACE_FAILURE_S, at_once)
            early = [rank for rank in attempt.left_early(now, EARLY_S) if rank not in self._early_said]
            if early and not attempt.stopping:
                self._early_said.update(early)
                names_ = ", ".join(str(rank) for rank in early)
                self._say(f"stoker: rank {names_} ended with 0 more than {EARLY_S:.0f} s ago; the others still run")
                assert self._record is not None
                self._record.event("suspicion", what="early-exit", ranks=early)

    def _finish(self, attempt: Attempt) -> None:
        """Everything the ranks left behind goes; on success it first gets the time to end by itself."""
        clean = all(end.code == 0 for end in attempt.ends.values()) and not attempt.stopping
        grace = (GRACE_FAILURE_S if self.options.grace is None else self.options.grace) if clean else 0.0
        self._members.say({"do": "finish", "grace": grace})
        deadline = time.monotonic() + grace + 15.0
        while any(not member.gone and member.host not in attempt.finished for member in self._members.all):
            if time.monotonic() > deadline:
                self._say("stoker: an agent did not finish sweeping in time; its guardian goes on with it")
                return
            self._members.pump(0.25)
            if any(signum for signum in self._signals):
                self._signals.clear()
                self._members.say({"do": "finish", "grace": 0.0})

    def _stop(self, signum: int, default_grace: float, at_once: list[int] | None = None) -> None:
        told = self.options.grace if self.options.grace is not None else self.options.shutdown_timeout
        self._members.say({"do": "stop", "signal": int(signum), "grace": default_grace if told is None else told, "at_once": at_once or []})

    def _member_lost(self, attempt: Attempt, member: Member) -> None:
        """Its ranks are gone with it: the guardian there sees to that."""
        mine = [place for place in attempt.plan.places if place.host == member.host]
        if not any(entry.get("host") == member.host for entry in attempt.trouble):
            where = f"host {member.host}" if member.host else "this machine"
            attempt.trouble.append({
                "cause": "host.agent-lost", "host": member.host, "summary": f"the agent on {where} was lost: {member.gone}; its ranks are stopped",
                "evidence": [member.complaint] if member.complaint else [], "fix": ["was it killed? dmesg may know"], "retryable": False, "exit_code": EX_SOFTWARE,
            })  # fmt: skip
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
                self._suspend()
                continue
            if signum not in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
                self._members.say({"do": "signal", "signal": signum})
                continue
            assert self._record is not None
            again = bool(attempt.stop_signal) or signum == signal.SIGQUIT
            attempt.stop_signal = attempt.stop_signal or signum
            attempt.stop_now = again
            attempt.stopping = True
            self._record.event("stop", signal=name, now=again)
            if again:
                self._say(f"stoker: {name}: ending the ranks at once")
                self._members.say({"do": "stop", "signal": int(signal.SIGKILL), "grace": 0.0})
            else:
                self._say(f"stoker: {name} passed on to the ranks; a second one ends them at once")
                self._stop(signum, GRACE_STOP_S)

    def _suspend(self) -> None:
        """Ctrl-Z: the ranks stop too, and nobody takes the silence for death."""
        self._members.say({"do": "suspend"})
        for member in self._members.all:
            self._answers[member.host].pop("suspended", None)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and any("suspended" not in self._answers[member.host] for member in self._members.all if not member.gone):
            self._members.pump(0.1)
        os.kill(os.getpid(), signal.SIGSTOP)
        now = time.monotonic()
        for member in self._members.all:
            member.heard = now
        self._members.say({"do": "resume"})

    # ---- hearing ----

    def _complain(self, member: Member, line: str) -> None:
        self._say(f"{member.host + ': ' if member.host else ''}{line}")

    def _hear(self, member: Member, message: protocol.Message, payload: bytes) -> None:
        kind = message["is"]
        if kind == "out":
            assert self._output is not None and self._record is not None
            self._output.take(self._record, message["rank"], message["fd"], payload)
            return
        if kind == "ping":
            return
        self._answers.setdefault(member.host, {})[kind] = message
        handler: Callable[[Member, protocol.Message], None] | None = getattr(self, "_on_" + kind.replace("-", "_"), None)
        if handler is not None and self._attempt is not None:
            handler(member, message)

    def _label(self, rank: int) -> str:
        assert self._attempt is not None
        return self._attempt.plan.places[rank].label

    def _on_up(self, member: Member, message: protocol.Message) -> None:
        attempt, record = self._attempt, self._record
        assert attempt is not None and record is not None
        attempt.up[message["rank"]] = message["pid"]
        record.output(layout.rank_log(record.dir, attempt.number, message["rank"]), b"")  # a rank that prints nothing has an empty log
        record.event("rank-up", rank=message["rank"], label=self._label(message["rank"]), pid=message["pid"], attempt=attempt.number, on=member.host or None)
        if len(attempt.up) == attempt.expected:
            record.save(os.path.join(record.dir, layout.RUN), about.enrich(record.dir))
            if self._report is not None:
                self._report.started(record.dir)

    def _on_unstarted(self, _member: Member, message: protocol.Message) -> None:
        assert self._attempt is not None
        rank = message["rank"]
        self._attempt.trouble.append({
            "cause": "launch.not-started", "rank": rank, "summary": f"rank {rank} could not be started: {message['text']}", "exit_code": EX_OSERR,
            "fix": ["does the program exist, and may it be executed?"],
        })  # fmt: skip

    def _on_error(self, _member: Member, message: protocol.Message) -> None:
        assert self._attempt is not None and self._record is not None
        error = read_error(message["error"])
        if error is not None:
            self._attempt.errors[message["rank"]] = error
            self._record.event("exception", rank=message["rank"], type=error.type, at=f"{error.file}:{error.line}")

    def _on_exit(self, member: Member, message: protocol.Message) -> None:
        attempt, record, output = self._attempt, self._record, self._output
        assert attempt is not None and record is not None and output is not None
        rank = message["rank"]
        output.ended(rank)
        error = read_error(message.get("error")) or attempt.errors.get(rank)
        stack = message.get("stack") or ""
        end = RankEnd(
            rank, member.host, self._label(rank), attempt.up.get(rank, 0), message["code"], message["time"], bool(message["ours"]), error, output.tail(rank),
            int(message["steps"]), stack, bool(message["oom_killed"]), bool(message["core"]),
        )  # fmt: skip
        attempt.ends[rank] = end
        record.event("rank-exit", rank=rank, code=end.code, steps=end.steps, ours=end.ours, attempt=attempt.number)
        if error is not None or message.get("elastic"):
            record.save(layout.rank_error(record.dir, attempt.number, rank), {**(message.get("error") or {}), "torchelastic": message.get("elastic")})
        if stack:
            record.save(layout.rank_stack(record.dir, attempt.number, rank), stack)

    def _on_finished(self, member: Member, message: protocol.Message) -> None:
        assert self._attempt is not None and self._record is not None
        self._attempt.finished.add(member.host)
        if message["stopped"]:
            self._record.event("leftovers", stopped=message["stopped"])
            self._say(f"stoker: stopped {len(message['stopped'])} helper process(es) the ranks left behind: {', '.join(message['stopped'][:5])}")
        for one in message["stuck"]:
            self._say(f"stoker: pid {one['pid']} ({one['name']}) can't be killed, it is in state {one['state']}: do not use its GPU until it is gone")
        for card in message["gpus_held"]:
            self._say(f"stoker: {card} still shows memory of a rank that is gone")

    def _on_mem(self, _member: Member, message: protocol.Message) -> None:
        assert self._record is not None and self._output is not None
        rank, where = message["rank"], message["at"]
        self._record.event("mem", rank=rank, at=where, rss=message["rss"], host_used=message["host_used"], host_total=message["host_total"], gpu=message["gpu"])
        line = f"[Rank {rank}] MEM:{where} RAM {gb(message['rss'] or 0)} (rank) {message['host_used'] / 1e9:.1f}/{gb(message['host_total'])} (host)"
        if message["gpu"]:
            line += f" GPU {message['gpu'][0] / 1e9:.1f}/{gb(message['gpu'][1])}"
        self._aside(rank, line + (f" ({message['note']})" if message["note"] else ""))

    def _on_lock(self, _member: Member, message: protocol.Message) -> None:
        assert self._record is not None
        rank, what = message["rank"], message["what"]
        self._record.event("lock", rank=rank, what=what, why=message.get("why"), slots=message.get("slots"))
        if what == "waiting":
            holders = ", ".join(f"rank {holder}" for holder in message["holders"])
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + message["seconds"]))
            line = f"LOCK: waiting for exclusive access... ({holders} has it, until {until} at the latest)"
        elif what == "acquired":
            line = "LOCK: acquired! Starting initialization..."
        else:
            line = "LOCK: released" + (f" (deadline of {span(self.options.init_timeout)} over)" if message["why"] == "deadline" else "")
        self._aside(rank, f"[Rank {rank}] {line}")

    def _aside(self, rank: int, line: str) -> None:
        assert self._record is not None and self._output is not None
        if self._output.shows(rank) and not self.options.quiet:
            self._say(line)
        else:
            self._record.say(line)

    def _on_ram(self, _member: Member, message: protocol.Message) -> None:
        assert self._attempt is not None
        rank = message["rank"]
        self._attempt.trouble.append({
            "cause": "oom.ram-limit", "rank": rank, "at_once": True, "exit_code": EX_SOFTWARE,
            "summary": f"rank {rank} ({self._label(rank)}) took {gb(message['bytes'])} of memory, past --ram-limit {gb(message['limit'])}",
            "evidence": [f"resident memory {message['bytes']} bytes, limit {message['limit']}"],
            "fix": ["fewer data-loader workers, a smaller batch, or a higher --ram-limit"],
        })  # fmt: skip

    def _on_first_step(self, _member: Member, message: protocol.Message) -> None:
        assert self._record is not None
        self._record.event("first-step", rank=message["rank"], at=message["time"])

    def _on_beats(self, _member: Member, message: protocol.Message) -> None:
        assert self._attempt is not None
        self._attempt.steps.update({int(rank): steps for rank, (steps, _) in message["ranks"].items()})

    def _on_mark(self, _member: Member, message: protocol.Message) -> None:
        assert self._record is not None
        self._record.event("mark", rank=message["rank"], name=message["name"])

    def _on_phase(self, _member: Member, message: protocol.Message) -> None:
        assert self._record is not None
        self._record.event("phase", rank=message["rank"], name=message["name"])

    def _on_note(self, _member: Member, message: protocol.Message) -> None:
        self._aside(message["rank"], f"[Rank {message['rank']}] {message['text']}")


def run(request: Request, link: transport.Link | None, report: detach.Report | None) -> int:
    """`stoker run`, whole."""
    try:
        code = Coordinator(request, link, report).run()
    except Exception:
        import traceback

        traceback.print_exc()
        code = EX_SOFTWARE
    if report is not None:
        report.ended(code)
    return code
