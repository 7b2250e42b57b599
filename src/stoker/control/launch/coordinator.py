"""A run from its request to its verdict: refuses what can't start, opens the record, has the attempts made, closes it.

One select loop; threads only write: the console's and the pings'.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

from stoker.contract import env_vars
from stoker.contract.errors import EX_OSERR, EX_SOFTWARE, Refusal
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import replace
from stoker.contract.masking import learn_secrets, mask_argv, mask_json
from stoker.contract.terminal import ERROR, SUCCESS, WARNING
from stoker.contract.text import escape
from stoker.contract.units import format_duration, plural
from stoker.control.cluster import transport
from stoker.control.cluster.agent_pool import UnusableHosts
from stoker.control.launch import background
from stoker.control.launch.console import Console
from stoker.control.launch.live import LiveRun
from stoker.control.launch.rank_output import RankOutput
from stoker.control.launch.signals import Interrupted, SignalQueue
from stoker.control.machine import host_limits
from stoker.control.plan import run_json
from stoker.control.plan.request import Request, check_numbers, program
from stoker.control.plan.run_dir import AlreadyComplete, EndedByStopRule, RunDir, discard_run_dir, open_run_dir
from stoker.control.plan.run_plan import RunPlan
from stoker.control.record import run_record
from stoker.control.record.resume_command import describe_resume, files_elsewhere, resume_command
from stoker.control.record.run_writer import RunWriter

TYPE_CHECKING = False
if TYPE_CHECKING:  # a run on one machine loads none of these
    from stoker.control.cluster.hosts import Hosts
    from stoker.control.launch.exporter import Exporter
    from stoker.control.launch.notify import Notifier


Ended = Callable[[Verdict, str, Callable[[str], None]], None]  # verdict, run directory, how to say a line


class Coordinator:
    """`hosts`: those of a run with several; None: this machine, through `link`."""

    def __init__(
        self,
        request: Request,
        link: transport.AgentLink | None,
        report: background.StartReport | None,
        hosts: Hosts | None,
        ended: Ended | None,
    ) -> None:
        self.request = request
        self.options = request.options
        self._report = report
        self._console = Console()
        self._began = time.time()
        self._cwd = os.getcwd()
        self._signals = SignalQueue(request.options, self._say, self._tell)
        self._record: RunWriter | None = None
        self._link = link
        self._hosts = hosts
        self._ended = ended
        self._notifier: Notifier | None = None
        self._exporter: Exporter | None = None

    def run(self) -> int:
        try:
            host_limits.raise_files_limit()  # a log file a rank
            self._learn_secrets()
            if self.options.notify:
                from stoker.control.launch.notify import Notifier

                self._notifier = Notifier(self.options.notify, self._say)
            self._open()
            try:
                self._signals.catch()
                verdict = self._run()
            finally:
                self._close()
                if self._exporter is not None:
                    self._exporter.close()
            if verdict is None:
                return 0
            self._tell_others(verdict, "ended")
            if self._ended is not None and self._record is not None:
                self._ended(verdict, self._record.dir, self._say)
            return verdict.exit_code
        except Interrupted as stop:
            self._say(
                f"stoker: stopped by {signal.Signals(stop.signum).name} before anything was started", colour=WARNING
            )
            return 128 + stop.signum
        except AlreadyComplete as done:
            self._say(f"✓ {done}")
            return 0
        except EndedByStopRule as ended:
            return self._say_not_started(ended.run)
        except Refusal as refusal:
            for line in f"stoker: {refusal.line}".split("\n"):
                self._say(line, colour=ERROR)
            if self._report is not None:
                self._report.refused(refusal)
            from stoker.control.verdict import launch_failures

            self._tell_others(launch_failures.refused(refusal), "refused")
            return refusal.code
        finally:
            self._console.close()

    def _open(self) -> None:
        self._live = LiveRun(self.request, self._link, self._hosts, self._signals, self._say, self._tell)
        self._live.notifier = self._notifier

    def _close(self) -> None:
        self._live.agents.members.close()

    def _tell_others(self, verdict: Verdict, what: str) -> None:
        """Who waits for the end: --notify, and a scheduler that reads torch's error file."""
        if os.environ.get("TORCHELASTIC_ERROR_FILE"):
            from stoker.control.launch.torchrun_files import write_launcher_error

            write_launcher_error(verdict, self._record.dir if self._record is not None else "", self._say)
        if self._notifier is not None:
            self._notifier.tell(verdict, what, self._record.dir if self._record is not None else "")
            self._notifier.close()

    def _learn_secrets(self) -> None:
        """Learn those of a config file and a hosts file: the environment and the command line are known already."""
        variables = dict(word.split("=", 1) for word in self.options.env if "=" in word)
        variables |= self._hosts.env if self._hosts is not None else {}
        learn_secrets(variables, (*self.request.args, self.options.notify or ""))
        if self.options.notify:
            from stoker.control.launch.notify import secret_of

            learn_secrets({"NOTIFY_TOKEN": secret_of(self.options.notify)})

    def _run(self) -> Verdict | None:
        """None for a dry run."""
        argv = program(self.request)
        check_numbers(self.request)
        place = open_run_dir(self.request, os.environ)
        try:
            plan = self._prepare(argv, place)
        except BaseException:
            discard_run_dir(place)
            raise
        if self.options.dry_run:
            self._say_place(place)
            self._print_plan(plan, place)
            return None
        try:
            verdict = self._live.run(plan, place)
        except (Refusal, OSError) as problem:
            from stoker.control.verdict import launch_failures

            if isinstance(problem, Refusal):
                verdict = replace(launch_failures.refused(problem), status="failed", run=place.id)
            else:
                verdict = launch_failures.broken("launch.system", f"the system refuses: {problem}", EX_OSERR)
        self._close_record(verdict, place)
        return verdict

    def _prepare(self, argv: list[str], place: RunDir) -> RunPlan:
        """All that can be refused; ends with the record open. Nothing has been started."""
        live = self._live
        if self.options.metrics_port is not None and not self.options.dry_run:
            from stoker.control.launch.exporter import Exporter

            self._exporter = Exporter(self.options.metrics_port, self._say)
        (live.membership or live.agents).meet(place)
        while True:
            try:
                plan, warnings = self._make_ready(argv, place)
                break
            except UnusableHosts as gone:
                if live.membership is None or not live.membership.start_without(gone):
                    raise
        if self.options.dry_run:
            return plan
        live.equip(plan, place)
        notice = self._open_record(plan, place)
        if place.elsewhere:
            self._say(place.elsewhere)
        if self.options.quiet is False:
            # What a role continues from, its job has said; one that starts from scratch says why.
            begins = "" if env_vars.JOB in os.environ and place.reopened else place.notice
            for line in filter(None, (*begins.splitlines(), notice, *plan.lines)):
                self._say(line)
            for line in warnings:
                self._say(line, colour=WARNING)
        if self._exporter is not None:
            self._exporter.start(place.dir)
        self._leave_shell(place)
        return plan

    def _leave_shell(self, place: RunDir) -> None:
        """The shell that waits for a detached run reads no further than this."""
        if self._report is not None:
            self._console.settle()
            self._report.started(place.dir)

    def _make_ready(self, argv: list[str], place: RunDir) -> tuple[RunPlan, list[str]]:
        """The plan, with everything it needs reserved, and what to warn of."""
        live = self._live
        plan = live.planner.plan(argv)
        warnings: list[str] = []
        if self.options.dry_run:
            return plan, warnings
        machine = live.agents.machines.get("")
        if not self.options.no_preflight and machine is not None:
            from stoker.control.launch import preflight

            preflight.check_legal(self.options, plan)
            warnings = preflight.preflight(self.options, plan, machine)
        if live.network is not None:
            warnings = live.network.prepare(plan, place)
        recipe = self.options.module and self.request.script.startswith(env_vars.RECIPES)
        live.output = RankOutput(self.options, plan, place.id, self._console, recipe)
        # Before the record: a port that can't be had leaves nothing behind.
        return live.reserve(plan), warnings

    def _close_record(self, verdict: Verdict, place: RunDir) -> None:
        assert self._record is not None
        missing = self._not_written()
        alone = env_vars.JOB not in os.environ
        not_its_fault = verdict.status == "stopped" or verdict.cause == "host.lost"
        resume = ""
        if alone and verdict.status != "completed":
            resume = run_json.continue_command(self.request, place, verdict)
        if not not_its_fault and not resume.startswith("stoker "):
            resume = ""  # of a ladder, or of a program that called us: its own command is not known
        run = run_record.load_run(place.dir)
        why = describe_resume(run) if resume else ""
        elsewhere = files_elsewhere(run, verdict.status == "completed") if run is not None else ()
        places = [what for what, command in elsewhere if not command]
        commands = [f"{resume}   # {why}"] if resume else []
        advice = [*commands, *verdict.fix] if not_its_fault else [*verdict.fix, *commands]  # the cause is fixed first
        copies = [f"{command}   # {what}" for what, command in elsewhere if command]
        self._record.verdict(
            replace(
                verdict,
                evidence=(*verdict.evidence, *places, *missing),
                fix=(*advice, *copies),
            )
        )
        if alone:  # else the job says how its roles ended
            self._say_how(verdict, place)
            for what, command in elsewhere:
                self._say(f"stoker: {what}" + (f"; to copy the model: {command}" if command else ""))
            if resume:
                self._say(f"stoker: {why}: {resume}")
        for line in (*missing, *self._not_written()):
            self._say(f"stoker: {line}", colour=WARNING)

    def _say_how(self, verdict: Verdict, place: RunDir) -> None:
        shown = os.path.relpath(place.dir, self._cwd) if place.dir.startswith(self._cwd + os.sep) else place.dir
        took = format_duration(time.time() - self._began)
        if verdict.status == "completed":
            self._say(f"✓ {verdict.summary} in {took}; record: {shown}")
        else:
            colour = WARNING if verdict.status == "stopped" else ERROR
            self._say(f"stoker: {verdict.summary}", colour=colour)
            import shlex

            if verdict.fix:
                self._say(f"stoker: what to do: {_inline(verdict.fix[0])}", colour=colour)
            why = f"`stoker why {shlex.quote(place.id)}` says more"
            self._say(f"stoker: {verdict.status} after {took}, exit code {verdict.exit_code}; {why}", colour=colour)

    def _say_not_started(self, run: run_record.RunRecord) -> int:
        """Report the verdict of a run that a stop rule ended, and return its exit code."""
        verdict = run.verdict
        assert verdict is not None
        import shlex

        self._say(f"stoker: run {run.name} ({run.id}) was ended by a stop rule: {verdict.summary}", colour=ERROR)
        if verdict.fix:
            self._say(f"stoker: what to do: {_inline(verdict.fix[0])}", colour=ERROR)
        why = f"`stoker why {shlex.quote(run.id)}` says more; --again starts a new run"
        self._say(f"stoker: nothing was started, exit code {verdict.exit_code}; {why}", colour=ERROR)
        self._say(f"stoker: {describe_resume(run)}: {resume_command(run)}")
        return verdict.exit_code

    def _say_place(self, place: RunDir) -> None:
        """Print where a dry run would record, and what its --name means, as the start does."""
        if self.options.quiet is False:
            for line in filter(None, (place.elsewhere, *place.notice.splitlines())):
                self._say(line)

    def _print_plan(self, plan: RunPlan, place: RunDir) -> None:
        import json

        if self.options.json:
            text = json.dumps(mask_json({"schema": 1, "run": place.id, **plan.to_json()}), indent=1)
        else:
            cards = [f"  {p.gpu.name} {p.gpu.uuid}" if p.gpu else "" for p in plan.places]
            rows = [f"  rank {p.rank}  {p.label}{card}" for p, card in zip(plan.places, cards, strict=True)]
            command = " ".join(mask_argv(plan.roles[0].argv))
            start = f"would start {plural(plan.world_size, 'rank')} of: {command}"
            record = f"would record in: {os.path.relpath(place.dir, self._cwd)}"
            text = "\n".join(map(escape, (*plan.lines, start, *rows, record)))
        self._console.say(1, text)

    def _open_record(self, plan: RunPlan, place: RunDir) -> str:
        record = RunWriter(place.dir, os.uname().nodename, place.reopened)
        live = self._live
        apart = live.network.apart if live.network is not None else None
        about = run_json.describe(self.request, plan, place, live.agents.machines, self._began, apart)
        notice = record.begin(about, place.first_attempt)
        self._record = self._live.record = record
        return notice

    def _tell(self, kind: str, **more: object) -> None:
        if self._record is not None:
            self._record.event(kind, **more)

    def _say(self, line: str, *, colour: str = "") -> None:
        """One line, whatever the texts that it quotes hold."""
        line = escape(line)
        self._console.say(2, line, colour or (SUCCESS if line.startswith("✓") else ""))
        if self._record is not None:
            self._record.say(line)

    def _not_written(self) -> list[str]:
        assert self._record is not None
        return [
            f"{lost.bytes} bytes of {os.path.basename(path)} could not be written: {lost.why}"
            for path, lost in self._record.lost().items()
        ]


def _inline(fix: str) -> str:
    """One that is a command with a comment, as the command alone."""
    command, comment, _ = fix.partition("   # ")
    return f"`{command}`" if comment else fix


def run(
    request: Request,
    link: transport.AgentLink | None,
    report: background.StartReport | None,
    hosts: Hosts | None = None,
    ended: Ended | None = None,
) -> int:
    """`stoker run`, whole. `ended`: called at the end of a run that was started."""
    return guarded(Coordinator(request, link, report, hosts, ended), report)


def guarded(coordinator: Coordinator, report: background.StartReport | None) -> int:
    try:
        code = coordinator.run()
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
