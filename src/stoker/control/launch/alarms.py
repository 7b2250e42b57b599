"""Carries out what the watch decides: asks the agents, tells the user, stops the job."""

from __future__ import annotations

import time
from collections.abc import Callable

from stoker.contract import layout
from stoker.contract.quantities import span
from stoker.contract.shapes import Stall
from stoker.control.launch.attempt import Attempt
from stoker.control.record.writer import RunRecord
from stoker.control.verdict import hang
from stoker.control.watch.watcher import Inspect, Relieve, Suspect

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.launch.live import LiveRun

EARLY_S = 10.0
PAUSE_S = 0.1  # between two looks: each goes over every rank, and hundreds of ranks wake us hundreds of times a second


class Alarms:
    """Of one attempt."""

    def __init__(self, run: LiveRun, attempt: Attempt) -> None:
        self._attempt = attempt
        self._record = run.record
        self._output = run.output
        self._options = run.options
        self._members = run.agents.members
        self._say = run.say
        self._early: set[int] = set()
        self._looked = 0.0

    def look(self) -> None:
        now = time.monotonic()
        if self._attempt.stopping or self._attempt.unwatched or now - self._looked < PAUSE_S:
            return
        self._looked = now
        try:
            self._look()
        except Exception as problem:
            give_up(self._attempt, self._record, self._say, problem)

    def _look(self) -> None:
        attempt = self._attempt
        for action in attempt.watch.look(time.monotonic()):
            if isinstance(action, Inspect):
                self._members.say(dict(action.order))
            elif isinstance(action, Suspect):
                self._suspect(action.stall, action.stops_in)
            elif isinstance(action, Relieve):
                who = f"rank {action.rank}" if action.rank is not None else "the job"
                self._say(f"stoker: {who} makes progress again, after {span(action.silent_s)}")
                self._record.event("relief", rank=action.rank, silent_s=round(action.silent_s, 1))
            else:
                rank = action.stall.rank
                printed = self._output.tail(rank) if rank is not None else ""
                attempt.trouble.append(hang.trouble(action.stall, self._label(rank), action.why, printed))
        self._tell_stragglers()
        self._tell_early()

    def _suspect(self, stall: Stall, stops_in: float | None) -> None:
        attempt, record = self._attempt, self._record
        summary = hang.summary(stall, self._label(stall.rank))
        attempt.suspected_s = stall.silent_s
        record.event(
            "suspicion",
            attempt=attempt.number,
            cause=hang.cause_of(stall),
            rank=stall.rank,
            ranks=list(stall.ranks),
            waiting=list(stall.waiting),
            where=stall.where,
            step=stall.step,
            silent_s=stall.silent_s,
            proof=stall.proof,
            summary=summary,
            evidence=list(stall.evidence),
        )
        record.save(
            layout.stacks(record.dir, attempt.number),
            "\n".join(text for _, text in sorted(attempt.watch.text_of_stacks().items())),
        )
        self._say(f"stoker: {summary} ({self._then(stall, stops_in)})")

    def _then(self, stall: Stall, stops_in: float | None) -> str:
        """What will happen, and when."""
        if stall.proof:
            return "it can't continue by itself" + ("; the job will be stopped" if stops_in is not None else "")
        pid = self._attempt.up.get(stall.rank, 0) if stall.rank is not None and stall.kind == "stopped" else 0
        again = f"`kill -CONT {pid}` continues it; " if pid else ""
        if stops_in is None:
            return f"{again}the job keeps running"
        return (
            f"{again}the job keeps running; without progress it is stopped in {span(stops_in)}, by --hang-timeout"
            f" {span(self._options.hang_timeout)}"
        )

    def _tell_stragglers(self) -> None:
        found = self._attempt.watch.stragglers.found
        while found:
            one = found.pop(0)
            cost = f"the others wait {one.wait_s:.2g} s of each {one.step_s:.2g} s step"
            line = f"rank {one.rank} ({self._label(one.rank)}) is slow because {one.because}; {cost}"
            self._attempt.notes.append(line)
            self._say(f"stoker: {line}")
            self._record.event(
                "straggler",
                cause=one.cause,
                rank=one.rank,
                step=one.step,
                wait_s=one.wait_s,
                step_s=one.step_s,
                where=one.where,
                summary=line,
            )

    def _tell_early(self) -> None:
        early = [rank for rank in self._attempt.left_early(time.time(), EARLY_S) if rank not in self._early]
        if early:
            self._early.update(early)
            line = (
                f"rank {', '.join(str(rank) for rank in early)} ended with 0 more than {EARLY_S:.0f} s ago; the others"
                " still run"
            )
            self._say(f"stoker: {line}")
            self._record.event("suspicion", cause="rank.early-exit", rank=early[0], ranks=early, summary=line)

    def _label(self, rank: int | None) -> str:
        return self._attempt.plan.place(rank).label if rank is not None else ""


def give_up(attempt: Attempt, record: RunRecord, say: Callable[[str], None], problem: Exception) -> None:
    """The watch room failed. A watcher must not end what it watches: it is said, recorded, and the job goes on without."""
    import traceback

    attempt.unwatched = True
    record.event("watch-failed", traceback="".join(traceback.format_exception(problem)))
    say(
        f"stoker: watching failed ({type(problem).__name__}: {problem}): the job goes on unwatched; events.jsonl has"
        " the traceback"
    )
