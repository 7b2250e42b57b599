"""The session of one `stoker run`: console, signals, record, helper processes and the exit code.

A `Run` (launch/run.py) or a multi-role `Job` (roles/job.py) executes inside a session.
"""

from __future__ import annotations

import os
import shlex
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
from stoker.control.launch import background
from stoker.control.launch.console import Console
from stoker.control.launch.signals import Interrupted, SignalQueue
from stoker.control.machine import host_limits
from stoker.control.plan import run_json
from stoker.control.plan.request import Request
from stoker.control.plan.run_dir import AlreadyComplete, EndedByStopRule, RunDir
from stoker.control.plan.run_plan import RunPlan
from stoker.control.record import run_record
from stoker.control.record.resume_command import describe_resume, list_files_elsewhere, resume_command
from stoker.control.record.run_writer import RunWriter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from stoker.control.launch.exporter import Exporter
    from stoker.control.launch.notify import Notifier

    class Execution(Protocol):
        """What a session executes: a Run or a Job."""

        def execute(self) -> Verdict | None:
            """Return the verdict, or None for a dry run. Raises Refusal or Interrupted while nothing has started."""
            ...

        def close(self) -> None:
            """Release the agents or the GPU locks."""
            ...


OnEnd = Callable[[Verdict, str, Callable[[str], None]], None]  # gets the verdict, the run directory and Session.log


class Session:
    """The parts of a `stoker run` that a single run and a multi-role job share."""

    def __init__(self, request: Request, report: background.StartReport | None, on_end: OnEnd | None = None) -> None:
        self.options = request.options
        self.console = Console()
        self.start_time = time.time()
        self.signals = SignalQueue(request.options, self.log, self.record_event)
        self.record: RunWriter | None = None  # set once the run directory is open
        self.notifier: Notifier | None = None
        self._args = request.args
        self._report = report
        self._on_end = on_end
        self._exporter: Exporter | None = None
        self._cwd = os.getcwd()

    def run(self, create: Callable[[], Execution]) -> int:
        """Create the execution, execute it and return the exit code. Prints every failure."""
        try:
            code = self._run(create)
        except (OSError, RuntimeError) as problem:  # such as no free thread or file descriptor, or no working directory
            print(f"stoker: system error: {problem}", file=sys.stderr)
            code = EX_OSERR
        except Exception:
            import traceback

            traceback.print_exc()
            code = EX_SOFTWARE
        if self._report is not None:
            self._report.ended(code)
        return code

    def _run(self, create: Callable[[], Execution]) -> int:
        try:
            host_limits.raise_files_limit()  # every rank has an open log file
            self._learn_secrets()
            if self.options.notify:
                from stoker.control.launch.notify import Notifier

                self.notifier = Notifier(self.options.notify, self.log)
            execution = create()
            try:
                self.signals.catch()
                verdict = execution.execute()
            finally:
                execution.close()
                if self._exporter is not None:
                    self._exporter.close()
            if verdict is None:
                return 0
            self._notify(verdict, "ended")
            if self._on_end is not None and self.record is not None:
                self._on_end(verdict, self.record.dir, self.log)
            return verdict.exit_code
        except Interrupted as stop:
            name = signal.Signals(stop.signum).name
            self.log(f"stoker: stopped by {name} before anything was started", color=WARNING)
            return 128 + stop.signum
        except AlreadyComplete as complete:
            self.log(f"✓ {complete}")
            return 0
        except EndedByStopRule as ended:
            return self._report_stop_rule(ended.run)
        except Refusal as refusal:
            for line in f"stoker: {refusal.line}".split("\n"):
                self.log(line, color=ERROR)
            if self._report is not None:
                self._report.refused(refusal)
            from stoker.control.verdict import launch_failures

            self._notify(launch_failures.make_refusal_verdict(refusal), "refused")
            return refusal.code
        finally:
            self.console.close()

    def _learn_secrets(self) -> None:
        """Mask the values of --env, a config file and --notify. The environment and the command line are masked already."""
        variables = dict(word.split("=", 1) for word in self.options.env if "=" in word)
        learn_secrets(variables, (*self._args, self.options.notify or ""))
        if self.options.notify:
            from stoker.control.launch.notify import find_secret_path

            learn_secrets({"NOTIFY_TOKEN": find_secret_path(self.options.notify)})

    def _notify(self, verdict: Verdict, what: str) -> None:
        """Notify a scheduler that reads torch's error file, and the receiver of --notify."""
        run_dir = self.record.dir if self.record is not None else ""
        if os.environ.get("TORCHELASTIC_ERROR_FILE"):
            from stoker.control.launch.torchrun_files import write_launcher_error

            write_launcher_error(verdict, run_dir, self.log)
        if self.notifier is not None:
            self.notifier.send(verdict, what, run_dir)
            self.notifier.close()

    # ---- services for the execution ----

    def log(self, line: str, *, color: str = "") -> None:
        """Print one line to the console and write it to the record. Control codes in quoted texts are escaped."""
        line = escape(line)
        self.console.say(2, line, color or (SUCCESS if line.startswith("✓") else ""))
        if self.record is not None:
            self.record.write_console_line(line)

    def record_event(self, kind: str, **fields: object) -> None:
        """Write an event to events.jsonl, if the record is open."""
        if self.record is not None:
            self.record.event(kind, **fields)

    def open_metrics_port(self, port: int) -> None:
        """Listen for --metrics-port before anything starts, so that a port in use is a refusal."""
        from stoker.control.launch.exporter import Exporter

        self._exporter = Exporter(port, self.log)

    def report_start(self, run_dir: RunDir) -> None:
        """Start the metrics exporter, and tell the waiting shell that a detached run has started. It reads no lines after that."""
        if self._exporter is not None:
            self._exporter.start(run_dir.dir)
        if self._report is not None:
            self.console.settle()
            self._report.started(run_dir.dir)

    def print_run_dir(self, run_dir: RunDir) -> None:
        """Print where a dry run would record, and what its --name means, as a real start does."""
        if self.options.quiet is False:
            for line in filter(None, (run_dir.location_notice, *run_dir.notice.splitlines())):
                self.log(line)

    def print_plan(self, plan: RunPlan, run_dir: RunDir) -> None:
        """Print the plan of a dry run to stdout, as text or as JSON."""
        if self.options.json:
            import json

            text = json.dumps(mask_json({"schema": 1, "run": run_dir.id, **plan.to_json()}), indent=1)
        else:
            gpus = [f"  {rank.gpu.name} {rank.gpu.uuid}" if rank.gpu else "" for rank in plan.places]
            ranks = [f"  rank {rank.rank}  {rank.label}{gpu}" for rank, gpu in zip(plan.places, gpus, strict=True)]
            start = f"would start {plural(plan.world_size, 'rank')} of: {' '.join(mask_argv(plan.roles[0].argv))}"
            record = f"would record in: {os.path.relpath(run_dir.dir, self._cwd)}"
            text = "\n".join(map(escape, (*plan.lines, start, *ranks, record)))
        self.console.say(1, text)

    # ---- the end ----

    def close_record(self, verdict: Verdict, request: Request, run_dir: RunDir) -> None:
        """Write verdict.json and print how the run ended. For a role only the job prints."""
        assert self.record is not None
        in_job = env_vars.JOB in os.environ
        from_outside = verdict.status == "stopped" or verdict.cause == "host.lost"  # the program is not at fault
        resume = ""
        if not in_job and verdict.status != "completed":
            resume = run_json.make_continue_command(request, run_dir, verdict)
            if not from_outside and not resume.startswith("stoker "):
                resume = ""  # a ladder or a calling program started the run, and its command is unknown
        run = run_record.load_run(run_dir.dir)
        resume_purpose = describe_resume(run) if resume else ""
        resume_fix = [f"{resume}   # {resume_purpose}"] if resume else []
        elsewhere = list_files_elsewhere(run, verdict.status == "completed") if run is not None else ()
        notes = [text for text, copy_command in elsewhere if not copy_command]
        copy_fixes = [f"{copy_command}   # {text}" for text, copy_command in elsewhere if copy_command]
        # A cause in the program must be fixed before the run is resumed.
        fixes = [*resume_fix, *verdict.fix] if from_outside else [*verdict.fix, *resume_fix]
        write_failures = self._write_failures()
        evidence = (*verdict.evidence, *notes, *write_failures)
        self.record.write_verdict(replace(verdict, evidence=evidence, fix=(*fixes, *copy_fixes)))
        if not in_job:
            self._print_end(verdict, run_dir)
            for text, copy_command in elsewhere:
                self.log(f"stoker: {text}" + (f"; to copy the model: {copy_command}" if copy_command else ""))
            if resume:
                self.log(f"stoker: {resume_purpose}: {resume}")
        for line in (*write_failures, *self._write_failures()):
            self.log(f"stoker: {line}", color=WARNING)

    def _print_end(self, verdict: Verdict, run_dir: RunDir) -> None:
        duration = format_duration(time.time() - self.start_time)
        if verdict.status == "completed":
            inside = run_dir.dir.startswith(self._cwd + os.sep)
            record = os.path.relpath(run_dir.dir, self._cwd) if inside else run_dir.dir
            self.log(f"✓ {verdict.summary} in {duration}; record: {record}")
            return
        color = WARNING if verdict.status == "stopped" else ERROR
        self.log(f"stoker: {verdict.summary}", color=color)
        if verdict.fix:
            self.log(f"stoker: what to do: {_quote_command(verdict.fix[0])}", color=color)
        details = f"`stoker why {shlex.quote(run_dir.id)}` says more"
        ended = f"{verdict.status} after {duration}, exit code {verdict.exit_code}"
        self.log(f"stoker: {ended}; {details}", color=color)

    def _report_stop_rule(self, run: run_record.RunRecord) -> int:
        """Report the verdict of an earlier run that a stop rule ended, and return its exit code."""
        verdict = run.verdict
        assert verdict is not None
        self.log(f"stoker: run {run.name} ({run.id}) was ended by a stop rule: {verdict.summary}", color=ERROR)
        if verdict.fix:
            self.log(f"stoker: what to do: {_quote_command(verdict.fix[0])}", color=ERROR)
        details = f"`stoker why {shlex.quote(run.id)}` says more; --again starts a new run"
        self.log(f"stoker: nothing was started, exit code {verdict.exit_code}; {details}", color=ERROR)
        self.log(f"stoker: {describe_resume(run)}: {resume_command(run)}")
        return verdict.exit_code

    def _write_failures(self) -> list[str]:
        """Return a line for each file of the record that lost data."""
        assert self.record is not None
        return [
            f"{lost.bytes} bytes of {os.path.basename(path)} could not be written: {lost.why}"
            for path, lost in self.record.pop_lost_output().items()
        ]


def _quote_command(fix: str) -> str:
    """Return a fix of the form `command   # comment` as the quoted command; others unchanged."""
    command, comment, _ = fix.partition("   # ")
    return f"`{command}`" if comment else fix
