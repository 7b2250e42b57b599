"""Writes the agents' reports about ranks to the attempt, the record and the console, with a method for each kind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from stoker.contract import layout, protocol
from stoker.contract.env_vars import CHECKPOINT
from stoker.contract.evidence import BadNumber, RankError, RankExit
from stoker.contract.frozen import pick_fields, replace
from stoker.contract.stack_traces import parse_stacks
from stoker.contract.terminal import WARNING
from stoker.contract.text import escape
from stoker.contract.units import format_duration, plural
from stoker.control.launch.attempt import Attempt, read_error, read_exit_context, read_last_call, read_script_end
from stoker.control.launch.rank_output import RankOutput
from stoker.control.launch.restart import CAN_HALVE
from stoker.control.plan import run_json
from stoker.control.plan.request import Request
from stoker.control.record.run_writer import RunWriter


def stop_watching(attempt: Attempt, record: RunWriter, log: Callable[..., None], problem: Exception) -> None:
    """Report a failure of the watcher. It must not end what it watches: the job continues."""
    import traceback

    attempt.watch_failed = True
    record.event("watch-failed", traceback="".join(traceback.format_exception(problem)))
    failure = f"watching failed ({type(problem).__name__}: {problem})"
    log(f"stoker: {failure}: the job continues without it; events.jsonl has the traceback", color=WARNING)


class ReportHandler:
    """Handles the reports of one attempt: `_on_KIND` for each kind of message (contract/protocol.py)."""

    def __init__(
        self, attempt: Attempt, request: Request, record: RunWriter, output: RankOutput, log: Callable[..., None]
    ) -> None:
        self._attempt = attempt
        self._request = request
        self._options = request.options
        self._record = record
        self._output = output
        self._log = log

    def handle(self, host: str, message: protocol.Message, payload: bytes) -> None:
        """Handle a message. The types of its fields have been checked already."""
        if message["is"] == "out":
            self._output.take(self._record, message["rank"], message["fd"], payload)
            self._feed_watcher(self._read_output, message["rank"], payload)
            return
        if message["is"] == "inspection":
            self._feed_watcher(self._attempt.watch.take_answer, host, message["ask"], payload, time.monotonic())
            return
        handler = getattr(self, "_on_" + message["is"].replace("-", "_"), None)
        if handler is not None:
            handler(host, message)

    def _feed_watcher(self, feed: Callable[..., None], *args: Any) -> None:
        """Call a method of the watcher. If it fails, the job continues without the watcher."""
        if self._attempt.watch_failed:
            return
        try:
            feed(*args)
        except Exception as problem:
            stop_watching(self._attempt, self._record, self._log, problem)

    # ---- start and end of ranks ----

    def _on_up(self, host: str, message: protocol.Message) -> None:
        attempt, record, rank = self._attempt, self._record, message["rank"]
        attempt.pids[rank] = message["pid"]
        fields = pick_fields(attempt.plan.place(rank), "rank", "role", "label")
        record.event("rank-up", **fields, pid=message["pid"], attempt=attempt.number, on=host or None)
        # A rank that prints nothing has an empty log. It comes after the event, which has the log's label.
        record.append_output(layout.rank_log(record.dir, attempt.number, rank), b"")
        if (
            len(attempt.pids) == attempt.expected
        ):  # all ranks are starting, so there is time to read versions and the Git revision
            description = run_json.enrich(record.dir, self._request, attempt.plan)
            record.save(os.path.join(record.dir, layout.RUN), description, durable=False)

    def _on_unstarted(self, _host: str, message: protocol.Message) -> None:
        from stoker.control.verdict import launch_failures

        self._attempt.trouble.append(launch_failures.report_unstarted_rank(message["rank"], escape(message["text"])))

    def _on_error(self, _host: str, message: protocol.Message) -> None:
        error = read_error(message["error"])
        if error is not None:
            self._attempt.errors[message["rank"]] = error
            self._record.event("exception", rank=message["rank"], type=error.type, at=f"{error.file}:{error.line}")
            self._feed_watcher(
                self._attempt.watch.note_failure, message["rank"], error.collectives, frames_of_error(error)
            )

    def _on_exit(self, host: str, message: protocol.Message) -> None:
        """Record how a rank ended. All its texts are masked: the agent has masked error and stack, `tail` the output."""
        attempt, record, output = self._attempt, self._record, self._output
        rank, code, stack = message["rank"], message["code"], message["stack"]
        output.ended(record, rank)
        error = read_error(message.get("error")) or attempt.errors.get(rank)
        if error is not None and error.late and code != 1:
            error = None
        end = attempt.ends[rank] = RankExit(
            rank,
            host,
            attempt.label(rank),
            attempt.pids.get(rank, 0),
            error=error,
            tail=output.tail(rank),
            stack=stack,
            last_call=read_last_call(message["calls"]),
            script_end=read_script_end(message["script_end"]),
            around=read_exit_context(message["around"]),
            **{name: message[name] for name in ("code", "time", "ours", "steps", "oom_killed", "core")},
        )
        self._feed_watcher(attempt.watch.note_exit, rank, code)
        if error is not None or stack or (code != 0 and message["calls"]):
            collectives = error.collectives if error is not None else ()
            frames = frames_of_error(error) if error is not None else parse_main_thread_frames(stack)
            self._feed_watcher(attempt.watch.note_failure, rank, collectives, frames, message["calls"])
        record.event("rank-exit", rank=rank, code=end.code, steps=end.steps, ours=end.ours, attempt=attempt.number)
        if error is not None or message["elastic"]:
            report = message["error"] if isinstance(message["error"], dict) else {}
            report = {**report, "torchelastic": message["elastic"]}
            record.save(layout.rank_error(record.dir, attempt.number, rank), report)
            output.write_error(record, rank, report)
        if stack:
            record.save(layout.rank_stack(record.dir, attempt.number, rank), stack)

    def _on_stopping(self, host: str, _message: protocol.Message) -> None:
        self._attempt.stopping_hosts.add(host)

    def _on_helpers(self, _host: str, message: protocol.Message) -> None:
        limit, names = format_duration(message["seconds"]), _first_names(message["names"])
        self._log(f"stoker: the ranks have ended; waiting up to {limit} for processes they left running: {names}")

    def _on_finished(self, host: str, message: protocol.Message) -> None:
        self._attempt.finished.add(host)
        if message["stopped"]:
            self._record.event("leftovers", stopped=message["stopped"])
            helpers = plural(len(message["stopped"]), "helper process")
            self._log(f"stoker: stopped {helpers} the ranks left behind: {_first_names(message['stopped'])}")
        for process in message["stuck"]:
            stuck = f"pid {process['pid']} ({process['name']}) can't be killed, it is in state {process['state']}"
            self._log(escape(f"stoker: {stuck}: do not use its GPU until it is gone"), color=WARNING)
        for gpu in message["gpus_held"]:
            self._log(f"stoker: {escape(gpu)} still shows memory of a rank that is gone", color=WARNING)

    # ---- what ranks do ----

    def _read_output(self, rank: int, payload: bytes) -> None:
        self._attempt.watch.note_output(rank, time.monotonic())
        for bad in self._attempt.losses.read(rank, payload):
            self._handle_bad_number(bad)

    def _on_beats(self, _host: str, message: protocol.Message) -> None:
        self._attempt.steps.update({int(rank): beats[0] for rank, beats in message["ranks"].items()})
        self._feed_watcher(self._read_beats, message)

    def _read_beats(self, message: protocol.Message) -> None:
        attempt, now = self._attempt, time.monotonic()
        for rank, (steps, _, count, longest, _) in message["ranks"].items():
            attempt.watch.note_steps(int(rank), steps, count, longest, now)
        losses = [(step, int(rank), float(loss)) for rank, beats in message["ranks"].items() for step, loss in beats[4]]
        for bad in attempt.losses.heard_all(losses):
            self._handle_bad_number(bad)

    def _handle_bad_number(self, bad: BadNumber) -> None:
        """Record a NaN, warn of it, and stop the job for it unless --on-nan is warn."""
        from stoker.control.verdict.rules import numbers

        attempt, label, world_size = self._attempt, self._attempt.label(bad.rank), self._attempt.plan.world_size
        if not bad.step:  # a printed line without a step: use that of the last beat
            bad = replace(bad, step=attempt.steps.get(bad.rank, 0), counted=True)
        summary = numbers.summarize_bad_number(bad, label, world_size)
        fields = pick_fields(bad, "rank", "step", "value", "source", "firm")
        self._record.event("numbers", cause=f"nan.{bad.kind}", summary=summary, **fields)
        stops = self._options.on_nan == "stop"
        if not bad.firm:
            consequence = "; the job is stopped if it stays so" if stops and bad.stops else ""
            self._log(f"stoker: {summary}{consequence}", color=WARNING)
        elif not stops:
            attempt.notes.append(f"{summary}, and stayed so (--on-nan warn)")
            self._log(f"stoker: {summary}, and stays so; the job keeps running (--on-nan warn)", color=WARNING)
        else:
            trouble = numbers.make_loss_report(bad, label, world_size)
            # The lines of the rank that had it first may arrive last: the earliest step replaces a later one.
            for number, entry in enumerate(attempt.trouble):
                if entry["cause"] == trouble["cause"] and 0 < bad.step < entry["step"] and not bad.counted:
                    attempt.trouble[number] = trouble
                    return
            attempt.trouble.append(trouble)

    def _on_vitals(self, _host: str, message: protocol.Message) -> None:
        for rank, (state, cpu, moved) in message["ranks"].items():
            self._feed_watcher(self._attempt.watch.note_vitals, int(rank), state, cpu, moved, time.monotonic())

    def _on_gauges(self, host: str, message: protocol.Message) -> None:
        self._attempt.gauges[host] = time.time(), message

    def _on_beatless(self, _host: str, message: protocol.Message) -> None:
        self._feed_watcher(self._attempt.watch.note_unreadable_beats, message["rank"], time.monotonic())

    def _on_groups(self, _host: str, message: protocol.Message) -> None:
        self._feed_watcher(self._attempt.watch.note_groups, message["groups"])

    def _on_first_step(self, _host: str, message: protocol.Message) -> None:
        self._record.event("first-step", rank=message["rank"], at=message["time"])

    def _on_mark(self, _host: str, message: protocol.Message) -> None:
        rank, name = message["rank"], message["name"]
        self._record.event("mark", rank=rank, name=name)
        self._feed_watcher(self._attempt.watch.note_mark, rank, time.monotonic())
        if name == CAN_HALVE:  # other marks are not kept, because a script may mark every step for weeks
            self._attempt.capabilities.add(CAN_HALVE)
        if name == CHECKPOINT and rank == 0:
            self._attempt.checkpoints += 1
            self._attempt.checkpoint_at = time.time()

    def _on_phase(self, _host: str, message: protocol.Message) -> None:
        self._record.event("phase", rank=message["rank"], name=message["name"])
        self._feed_watcher(self._attempt.watch.note_mark, message["rank"], time.monotonic(), message["name"])

    def _on_listening(self, _host: str, message: protocol.Message) -> None:
        self._record.event("listening", rank=message["rank"], port=message["port"])

    def _on_ram(self, _host: str, message: protocol.Message) -> None:
        """Note that a rank exceeds --ram-limit. Its agent is stopping it."""
        from stoker.control.verdict import launch_failures

        rank = message["rank"]
        stall = self._attempt.watch.stall
        location = stall.where if stall is not None and rank == stall.rank else ""
        used, limit, workers = message["bytes"], message["limit"], message.get("loader_workers", 0)
        trouble = launch_failures.report_ram_limit(rank, self._attempt.label(rank), used, limit, workers, location)
        self._attempt.trouble.append(trouble)

    # ---- documented lines of single ranks, which people grep for ----

    def _on_mem(self, _host: str, message: protocol.Message) -> None:
        rank, stage = message["rank"], message["at"]
        fields = ("rank", "at", "rss", "host_used", "host_total", "gpu")
        self._record.event("mem", **{name: message[name] for name in fields})
        # Decimal gigabytes, unlike all other texts.
        rss = message["rss"] or 0
        line = f"MEM:{stage} RAM {f'{rss / 1e9:.1f} GB' if rss >= 1e9 else f'{rss / 1e6:.0f} MB'} (rank)"
        line += f" {message['host_used'] / 1e9:.1f}/{message['host_total'] / 1e9:.1f} GB (host)"
        if message["gpu"]:
            line += f" GPU {message['gpu'][0] / 1e9:.1f}/{message['gpu'][1] / 1e9:.1f} GB"
        line += f" ({message['note']})" if message["note"] else ""
        self._log_for_rank(rank, line)

    def _on_lock(self, _host: str, message: protocol.Message) -> None:
        rank, what, seconds = message["rank"], message["what"], message.get("seconds", 0.0)
        self._record.event("lock", rank=rank, what=what, why=message.get("why"), slots=message.get("slots"))
        if what == "waiting":
            holders = ", ".join(f"rank {holder}" for holder in message.get("holders", ()))
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
            line = f"LOCK: waiting for exclusive access... ({holders} has it, until {until} at the latest)"
        elif what == "acquired":
            line = "LOCK: acquired! Starting initialization..."
        else:
            line = "LOCK: released"
            if message.get("why") == "deadline":
                line += f" (deadline of {format_duration(self._options.init_timeout)} over)"
        self._log_for_rank(rank, line)

    def _on_note(self, _host: str, message: protocol.Message) -> None:
        self._log_for_rank(message["rank"], message["text"])

    def _log_for_rank(self, rank: int, line: str) -> None:
        """Print a line of a rank if its output is shown, else write it only to the record."""
        line = escape(f"[Rank {rank}] {line}", 2000)
        if self._output.shows(rank) and not self._options.quiet:
            self._log(line)
        else:
            self._record.write_console_line(line)


def frames_of_error(error: RankError) -> list[Any]:
    """Return where an exception was raised, as the only frame of a stack."""
    return [[error.function, error.file, error.line]] if error.file else []


def parse_main_thread_frames(stack: str) -> list[Any]:
    """Return the main thread's frames in faulthandler's report."""
    return next((thread["frames"] for thread in parse_stacks(stack) if thread["main"]), [])


def _first_names(names: list[str]) -> str:
    return ", ".join(escape(name, 100) for name in names[:5])
