"""What agents report, into the attempt, the record and the console. A new kind of report is a new method."""

from __future__ import annotations

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
from stoker.control.launch.attempt import Attempt, read_around, read_error, read_last_call, read_script_end
from stoker.control.launch.restart import CAN_HALVE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.launch.live import LiveRun


def place_in(error: RankError) -> list[Any]:
    """Where an exception was raised, as the one frame of a stack."""
    return [[error.function, error.file, error.line]] if error.file else []


def main_thread(stack: str) -> list[Any]:
    """The main thread's frames in faulthandler's report."""
    return next((thread["frames"] for thread in parse_stacks(stack) if thread["main"]), [])


class ReportHandler:
    """Of one attempt."""

    def __init__(self, run: LiveRun, attempt: Attempt) -> None:
        self._run = run
        self._attempt = attempt
        self._record = run.record
        self._output = run.output
        self._options = run.options
        self._say = run.say

    def hear(self, host: str, message: protocol.Message, payload: bytes) -> None:
        """Take a message, which has its kind's fields and types (contract/protocol.py)."""
        if message["is"] == "out":
            self._output.take(self._record, message["rank"], message["fd"], payload)
            self._feed(self._read_output, message["rank"], payload)
            return
        if message["is"] == "inspection":
            self._feed(self._attempt.watch.answered, host, message["ask"], payload, time.monotonic())
            return
        handler = getattr(self, "_on_" + message["is"].replace("-", "_"), None)
        if handler is not None:
            handler(host, message)

    def _feed(self, tell: Callable[..., None], *said: Any) -> None:
        """To the watch room. What it can't read must not end the job it watches."""
        if self._attempt.unwatched:
            return
        try:
            tell(*said)
        except Exception as problem:
            from stoker.control.launch.supervision import give_up

            give_up(self._attempt, self._record, self._say, problem)

    def _read_output(self, rank: int, payload: bytes) -> None:
        self._attempt.watch.printed(rank, time.monotonic())
        for bad in self._attempt.losses.read(rank, payload):
            self._bad_number(bad)

    def _on_up(self, host: str, message: protocol.Message) -> None:
        attempt, record = self._attempt, self._record
        attempt.up[message["rank"]] = message["pid"]
        place = pick_fields(attempt.plan.place(message["rank"]), "rank", "role", "label")
        record.event("rank-up", **place, pid=message["pid"], attempt=attempt.number, on=host or None)
        # A rank that prints nothing has an empty log. After the event: who sees the log finds its label.
        record.output(layout.rank_log(record.dir, attempt.number, message["rank"]), b"")
        if len(attempt.up) == attempt.expected:
            self._run.all_up(attempt.plan)

    def _on_unstarted(self, _host: str, message: protocol.Message) -> None:
        from stoker.control.verdict import launch_failures

        why = escape(message["text"])
        self._attempt.trouble.append(launch_failures.not_started(message["rank"], why))

    def _on_error(self, _host: str, message: protocol.Message) -> None:
        error = read_error(message["error"])
        if error is not None:
            self._attempt.errors[message["rank"]] = error
            self._record.event("exception", rank=message["rank"], type=error.type, at=f"{error.file}:{error.line}")
            self._feed(self._attempt.watch.failed, message["rank"], error.collectives, place_in(error))

    def _on_exit(self, host: str, message: protocol.Message) -> None:
        attempt, record, output = self._attempt, self._record, self._output
        rank, code = message["rank"], message["code"]
        output.ended(record, rank)
        error = read_error(message.get("error")) or attempt.errors.get(rank)
        if error is not None and error.late and code != 1:
            error = None
        stack = message["stack"]
        end = attempt.ends[rank] = RankExit(
            rank,
            host,
            attempt.label(rank),
            attempt.up.get(rank, 0),
            error=error,
            tail=output.tail(rank),
            stack=stack,
            last_call=read_last_call(message["calls"]),
            script_end=read_script_end(message["script_end"]),
            around=read_around(message["around"]),
            **{name: message[name] for name in ("code", "time", "ours", "steps", "oom_killed", "core")},
        )
        self._feed(attempt.watch.ended, rank, code)
        if error is not None or stack or (code != 0 and message["calls"]):
            collectives = error.collectives if error is not None else ()
            frames = place_in(error) if error is not None else main_thread(stack)
            self._feed(attempt.watch.failed, rank, collectives, frames, message["calls"])
        record.event("rank-exit", rank=rank, code=end.code, steps=end.steps, ours=end.ours, attempt=attempt.number)
        if error is not None or message["elastic"]:
            reported = message["error"] if isinstance(message["error"], dict) else {}
            kept = {**reported, "torchelastic": message["elastic"]}
            record.save(layout.rank_error(record.dir, attempt.number, rank), kept)
            output.keep_error(record, rank, kept)
        if stack:
            record.save(layout.rank_stack(record.dir, attempt.number, rank), stack)

    def _on_stopping(self, host: str, _message: protocol.Message) -> None:
        self._attempt.told.add(host)

    def _on_finished(self, host: str, message: protocol.Message) -> None:
        self._attempt.finished.add(host)
        if message["stopped"]:
            self._record.event("leftovers", stopped=message["stopped"])
            helpers = plural(len(message["stopped"]), "helper process")
            self._say(f"stoker: stopped {helpers} the ranks left behind: {_listed(message['stopped'])}")
        for one in message["stuck"]:
            stuck = f"stoker: pid {one['pid']} ({one['name']}) can't be killed, it is in state {one['state']}"
            self._say(escape(f"{stuck}: do not use its GPU until it is gone"), colour=WARNING)
        for card in message["gpus_held"]:
            self._say(f"stoker: {escape(card)} still shows memory of a rank that is gone", colour=WARNING)

    def _on_helpers(self, _host: str, message: protocol.Message) -> None:
        limit, names = format_duration(message["seconds"]), _listed(message["names"])
        self._say(f"stoker: the ranks are done; waiting up to {limit} for what they left running: {names}")

    def _on_mem(self, _host: str, message: protocol.Message) -> None:
        rank, where = message["rank"], message["at"]
        fields = ("rank", "at", "rss", "host_used", "host_total", "gpu")
        self._record.event("mem", **{name: message[name] for name in fields})
        more = f" {message['host_used'] / 1e9:.1f}/{message['host_total'] / 1e9:.1f} GB (host)"
        if message["gpu"]:
            more += f" GPU {message['gpu'][0] / 1e9:.1f}/{message['gpu'][1] / 1e9:.1f} GB"
        more += f" ({message['note']})" if message["note"] else ""
        # The field notes' line, which people grep for: decimal gigabytes, unlike all other texts.
        resident = message["rss"] or 0
        rss = f"{resident / 1e9:.1f} GB" if resident >= 1e9 else f"{resident / 1e6:.0f} MB"
        self._aside(rank, f"[Rank {rank}] MEM:{where} RAM {rss} (rank){more}")

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
            late = (
                f" (deadline of {format_duration(self._options.init_timeout)} over)"
                if message.get("why") == "deadline"
                else ""
            )
            line = f"LOCK: released{late}"
        self._aside(rank, f"[Rank {rank}] {line}")

    def _aside(self, rank: int, line: str) -> None:
        line = escape(line, 2000)
        if self._output.shows(rank) and not self._options.quiet:
            self._say(line)
        else:
            self._record.say(line)

    def _on_ram(self, _host: str, message: protocol.Message) -> None:
        from stoker.control.verdict import launch_failures

        rank = message["rank"]
        stall = self._attempt.watch.stall
        where = stall.where if stall is not None and rank == stall.rank else ""
        taken, limit, workers = message["bytes"], message["limit"], message.get("loader_workers", 0)
        trouble = launch_failures.over_ram_limit(rank, self._attempt.label(rank), taken, limit, workers, where)
        self._attempt.trouble.append(trouble)

    def _on_first_step(self, _host: str, message: protocol.Message) -> None:
        self._record.event("first-step", rank=message["rank"], at=message["time"])

    def _on_beats(self, _host: str, message: protocol.Message) -> None:
        self._attempt.steps.update({int(rank): beats[0] for rank, beats in message["ranks"].items()})
        self._feed(self._take_beats, message)

    def _take_beats(self, message: protocol.Message) -> None:
        attempt, now = self._attempt, time.monotonic()
        for rank, (steps, _, count, longest, _) in message["ranks"].items():
            attempt.watch.beats(int(rank), steps, count, longest, now)
        losses = [(step, int(rank), float(loss)) for rank, beats in message["ranks"].items() for step, loss in beats[4]]
        for bad in attempt.losses.heard_all(losses):
            self._bad_number(bad)

    def _on_vitals(self, _host: str, message: protocol.Message) -> None:
        for rank, (state, cpu, moved) in message["ranks"].items():
            self._feed(self._attempt.watch.vitals, int(rank), state, cpu, moved, time.monotonic())

    def _on_gauges(self, host: str, message: protocol.Message) -> None:
        self._attempt.gauges[host] = time.time(), message

    def _on_beatless(self, _host: str, message: protocol.Message) -> None:
        self._feed(self._attempt.watch.beatless, message["rank"], time.monotonic())

    def _on_groups(self, _host: str, message: protocol.Message) -> None:
        self._feed(self._attempt.watch.groups, message["groups"])

    def _bad_number(self, bad: BadNumber) -> None:
        from stoker.control.verdict.rules import numbers

        label, world = self._attempt.label(bad.rank), self._attempt.plan.world_size
        if not bad.step:  # the line has none: the optimizer's count, as of the last beat
            bad = replace(bad, step=self._attempt.steps.get(bad.rank, 0), counted=True)
        said = numbers.summary(bad, label, world)
        fields = pick_fields(bad, "rank", "step", "value", "source", "firm")
        self._record.event("numbers", cause=f"nan.{bad.kind}", summary=said, **fields)
        if not bad.firm:
            stops = self._options.on_nan == "stop" and bad.stops
            self._say(f"stoker: {said}" + ("; if it stays so the job is stopped" if stops else ""), colour=WARNING)
        elif self._options.on_nan == "stop":
            trouble = numbers.trouble(bad, label, world)
            # Lines of the rank that had it first may arrive last.
            later = [
                number
                for number, known in enumerate(self._attempt.trouble)
                if known["cause"] == trouble["cause"] and 0 < bad.step < known["step"] and not bad.counted
            ]
            if later:
                self._attempt.trouble[later[0]] = trouble
            else:
                self._attempt.trouble.append(trouble)
        else:
            self._attempt.notes.append(f"{said}, and stayed so (--on-nan warn)")
            self._say(f"stoker: {said}, and stays so; the job keeps running (--on-nan warn)", colour=WARNING)

    def _on_mark(self, _host: str, message: protocol.Message) -> None:
        self._record.event("mark", rank=message["rank"], name=message["name"])
        self._feed(self._attempt.watch.said, message["rank"], time.monotonic())
        if message["name"] == CAN_HALVE:  # of all marks only this one: a script may mark every step of a run of weeks
            self._attempt.can.add(CAN_HALVE)
        if message["name"] == CHECKPOINT and message["rank"] == 0:
            self._attempt.checkpoints += 1
            self._attempt.checkpoint_at = time.time()

    def _on_listening(self, _host: str, message: protocol.Message) -> None:
        self._record.event("listening", rank=message["rank"], port=message["port"])

    def _on_phase(self, _host: str, message: protocol.Message) -> None:
        self._record.event("phase", rank=message["rank"], name=message["name"])
        self._feed(self._attempt.watch.said, message["rank"], time.monotonic(), message["name"])

    def _on_note(self, _host: str, message: protocol.Message) -> None:
        self._aside(message["rank"], f"[Rank {message['rank']}] {message['text']}")


def _listed(names: list[str]) -> str:
    return ", ".join(escape(name, 100) for name in names[:5])
