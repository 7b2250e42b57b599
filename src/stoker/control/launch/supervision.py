"""Follows one attempt until every rank has ended and all is swept: passes signals on, stops the rest, heeds the watch.

Loaded when the ranks are on their way: no launch waits for it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from stoker.contract import checkpoints, layout
from stoker.contract.evidence import RankExit, Stall
from stoker.contract.frozen import pick_fields
from stoker.contract.terminal import WARNING
from stoker.contract.units import format_duration, format_ranks, rank_name
from stoker.control.cluster.agent_pool import AgentClient
from stoker.control.launch.attempt import Attempt
from stoker.control.record.run_writer import RunWriter
from stoker.control.verdict import hangs, launch_failures
from stoker.control.watch.watcher import Busy, Inspect, Relieve, Suspect

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.launch.live import LiveRun

GRACE_FAILURE_S = 5.0
GRACE_STOP_S = 30.0
UNKILLABLE_S = 60.0  # from the end of the grace: a driver may take long to give eight cards' memory back
SETTLE_S = 1.0
TWICE_S = 1.0
# Two of these at once are meant: Ctrl-C, Ctrl-\\ and `stoker stop --now`.
HASTY = (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL)
EARLY_S = 10.0
EVERY_S = 2.0  # between two moments of its history
PAUSE_S = 0.1  # between two looks: each goes over every rank, and hundreds of ranks wake us hundreds of times a second


class Supervision:
    """Of one attempt."""

    def __init__(self, run: LiveRun, attempt: Attempt) -> None:
        self._run = run
        self._attempt = attempt
        self._members = run.agents.members
        self._membership = run.membership
        self._options = run.options
        self._record = run.record
        self._output = run.output
        self._say = run.say
        self._seen = attempt.checkpoints
        self._killed_by = 0.0  # after that, who still lives can't be killed
        self._early: set[int] = set()  # ranks that left, and were reported
        self._looked = 0.0
        self._noted = time.monotonic()
        self._has_history = False

    def follow(self) -> None:
        """Until every rank has ended."""
        attempt = self._attempt
        while not attempt.all_ended:
            self._members.pump(0.25)
            self._output.settle(self._record)
            now = time.time()
            self._pass_signals()
            quiet = self._membership is not None and any(member.quiet or member.gone for member in self._members.all)
            if not quiet:  # ranks wait for a host that may be lost: nothing to accuse them of
                self._watch()
            self._note()
            for member in self._members.all:
                if member.gone:
                    self._lost(member)
            if not attempt.stopping and attempt.must_stop(now, SETTLE_S, quiet):
                attempt.stopping, attempt.stopped_at = True, now
                self._stop_rest()
            wanted = self._options.stop_after_steps
            if wanted and not attempt.stopping and attempt.fewest_steps >= wanted:
                attempt.stopping, attempt.steps_reached, attempt.stopped_at = True, wanted, now
                self._stop(signal.SIGTERM, GRACE_FAILURE_S)
            if self._killed_by and time.monotonic() > self._killed_by:
                self._go_on_without()
            if self._membership is not None:
                self._membership.saves = self._membership.saves or attempt.checkpoints > 0
                self._membership.tend()
                self._make_room(self._membership.returned)
        if self._has_history:
            self._note(last=True)

    def _go_on_without(self) -> None:
        """SIGKILL has had its time: a rank stuck in a driver or on a dead disk must not hold up the rest."""
        attempt = self._attempt
        left = [rank for rank in attempt.up if rank not in attempt.ends]
        names = ", ".join(rank_name(rank, f"{attempt.plan.place(rank).label}, pid {attempt.up[rank]}") for rank in left)
        if left:
            self._say(f"stoker: {names} can't be killed: stuck in the kernel; going on without", colour=WARNING)
        attempt.told.update(place.host for place in attempt.plan.places)
        self._end_by_us(left)

    def _stop_rest(self) -> None:
        trouble = self._attempt.trouble
        if any(entry["cause"] == "host.lost" for entry in trouble):
            self._kill()  # their collectives are dead: nothing can be saved any more
            return
        at_once = [entry["rank"] for entry in trouble if entry.get("at_once") and entry["rank"] is not None]
        self._stop(signal.SIGTERM, GRACE_FAILURE_S, at_once)

    def _make_room(self, host: str) -> None:
        """A host is back, and a checkpoint has been saved since: the ranks end, the next attempt has everybody."""
        attempt = self._attempt
        if not host:
            self._seen = attempt.checkpoints
        elif attempt.checkpoints > self._seen and not attempt.stopping:
            attempt.stopping, attempt.regrouping, attempt.stopped_at = True, host, time.time()
            self._say(f"stoker: a checkpoint is saved: ending the ranks so that host {host} can join")
            self._stop(signal.SIGTERM, GRACE_STOP_S)

    def finish(self) -> None:
        """Everything the ranks left behind goes; on success it first gets the time to end by itself."""
        attempt = self._attempt
        clean = all(end.code == 0 for end in attempt.ends.values()) and not attempt.stopping
        asked = GRACE_FAILURE_S if self._options.grace is None else self._options.grace
        grace = asked if clean else 0.0
        self._members.say({"do": "finish", "grace": grace})
        deadline = time.monotonic() + grace + 15.0
        while any(not member.gone and member.host not in attempt.finished for member in self._members.all):
            if time.monotonic() > deadline:
                self._say("stoker: an agent did not finish sweeping in time; its guardian finishes it")
                return
            self._members.pump(0.25)
            if signum := self._run.signals.take():
                if not clean and signum != signal.SIGTSTP:  # what is over can't be stopped, but it must not start again
                    attempt.stop_signal = attempt.stop_signal or signum
                    attempt.stopped_at = attempt.stopped_at or time.time()
                self._members.say({"do": "finish", "grace": 0.0})

    def _stop(self, signum: int, default_grace: float, at_once: list[int] | None = None) -> None:
        told = self._options.grace if self._options.grace is not None else self._options.shutdown_timeout
        grace = default_grace if told is None else told
        self._killed_by = time.monotonic() + grace + UNKILLABLE_S
        self._members.say({"do": "stop", "signal": int(signum), "grace": grace, "at_once": at_once or []})

    def _kill(self) -> None:
        self._killed_by = time.monotonic() + UNKILLABLE_S
        self._members.say({"do": "stop", "signal": int(signal.SIGKILL), "grace": 0.0})

    def _lost(self, member: AgentClient) -> None:
        """Its ranks are gone with it: its guardian sees to that. What ended the job before is still the cause."""
        attempt = self._attempt
        mine = [place for place in attempt.plan.places if place.host == member.host]
        if not attempt.stopping and not any(entry.get("host") == member.host for entry in attempt.trouble):
            several = self._membership is not None and len(self._run.agents.by_name) > 1
            lost = launch_failures.host_lost if several else launch_failures.agent_lost
            attempt.trouble.append(lost(member.host, member.gone, member.complaint))
        attempt.told.add(member.host)
        self._end_by_us([one.rank for one in mine if one.rank not in attempt.ends])

    def _end_by_us(self, ranks: list[int]) -> None:
        """Nobody saw how they ended."""
        attempt = self._attempt
        for rank in ranks:
            one, pid = attempt.plan.place(rank), attempt.up.setdefault(rank, 0)
            error = attempt.errors.get(rank)
            attempt.ends[rank] = RankExit(rank, one.host, one.label, pid, None, time.time(), ours=True, error=error)

    def _pass_signals(self) -> None:
        attempt = self._attempt
        while signum := self._run.signals.take():
            if signum == signal.SIGTSTP:
                self._run.agents.suspend()
                attempt.watch.resumed(time.monotonic())
                continue
            now, name = time.time(), signal.Signals(signum).name
            if attempt.stop_signal and signum not in HASTY and now - attempt.stopped_at < TWICE_S:
                continue  # a closing terminal sends SIGHUP from the kernel and from its shell
            again = bool(attempt.stop_signal)
            if not again:
                attempt.checkpoint_before = checkpoints.find_newest_checkpoint(self._record.dir)
            attempt.stop_signal = attempt.stop_signal or signum
            attempt.stopped_at = attempt.stopped_at or now
            attempt.stop_now = again
            attempt.stopping = True
            self._record.event("stop", signal=name, now=again)
            if again:
                self._say(f"stoker: {name}: killing the ranks now")
                self._kill()
            else:
                self._say(f"stoker: {name}: asking the ranks to save and end; a second signal kills them")
                self._stop(signum, GRACE_STOP_S)

    def _watch(self) -> None:
        now = time.monotonic()
        if self._attempt.stopping or self._attempt.unwatched or now - self._looked < PAUSE_S:
            return
        self._looked = now
        try:
            self._look()
        except Exception as problem:
            give_up(self._attempt, self._record, self._say, problem)

    def _note(self, last: bool = False) -> None:
        """Into the run's history, every few seconds. A job that is over sooner has none."""
        now = time.monotonic()
        if self._attempt.unwatched or (now - self._noted < EVERY_S and not last) or self._noted > now:
            return
        self._noted, self._has_history = now, True
        try:
            from stoker.control.launch.history_points import history_point

            self._record.moment(history_point(self._attempt, now))
        except Exception as problem:
            self._noted = float("inf")
            import traceback

            self._record.event("history-failed", traceback="".join(traceback.format_exception(problem)))
            why = f"{type(problem).__name__}: {problem}"
            self._say(f"stoker: no history of this attempt from here on ({why}); the job continues", colour=WARNING)

    def _look(self) -> None:
        attempt = self._attempt
        for action in attempt.watch.look(time.monotonic()):
            if isinstance(action, Inspect):
                self._run.agents.members.say(dict(action.order))
            elif isinstance(action, Suspect):
                self._suspect(action.stall, action.stops_in)
            elif isinstance(action, Busy):
                self._report_busy(action.stall, action.stops_in)
            elif isinstance(action, Relieve):
                who = f"rank {action.rank}" if action.rank is not None else "the job"
                self._say(f"stoker: {who} makes progress again, after {format_duration(action.silent_s)}")
                self._record.event("relief", rank=action.rank, silent_s=round(action.silent_s, 1))
            else:
                rank = action.stall.rank
                printed = self._run.output.tail(rank) if rank is not None else ""
                attempt.trouble.append(hangs.trouble(action.stall, attempt.label(rank), action.why, printed))
        self._tell_stragglers()
        self._tell_early()

    def _suspect(self, stall: Stall, stops_in: float | None) -> None:
        attempt, record = self._attempt, self._record
        summary = hangs.summary(stall, attempt.label(stall.rank))
        attempt.suspected_s = stall.silent_s
        seen = pick_fields(stall, "rank", "ranks", "waiting", "where", "step", "silent_s", "proof", "evidence")
        record.event("suspicion", attempt=attempt.number, cause=hangs.cause_of(stall), summary=summary, **seen)
        stacks = "\n".join(text for _, text in sorted(attempt.watch.text_of_stacks().items()))
        record.save(layout.all_stacks(record.dir, attempt.number), stacks)
        if not attempt.first_failure:  # else the verdict comes within seconds, and it knows more
            self._say(f"stoker: {summary} ({self._then(stall, stops_in)})", colour=WARNING)

    def _report_busy(self, stall: Stall, stops_in: float | None) -> None:
        """Say once that a rank works for long. It is no suspicion: nothing is wrong as far as can be seen."""
        attempt, summary = self._attempt, hangs.summary(stall, self._attempt.label(stall.rank))
        seen = pick_fields(stall, "rank", "ranks", "waiting", "where", "step", "silent_s", "evidence")
        self._record.event("busy", attempt=attempt.number, cause=hangs.cause_of(stall), summary=summary, **seen)
        if not attempt.first_failure:
            then = "the job keeps running"
            if stops_in is not None:
                then += f"; it is stopped in {format_duration(stops_in)} unless a step ends (--busy-timeout)"
            self._say(f"stoker: {summary} ({then})")

    def _then(self, stall: Stall, stops_in: float | None) -> str:
        """Return what will happen, and when."""
        if stall.proof:
            return "it can't continue by itself" + ("; the job will be stopped" if stops_in is not None else "")
        pid = self._attempt.up.get(stall.rank, 0) if stall.rank is not None and stall.kind == "stopped" else 0
        again = f"`kill -CONT {pid}` continues it; " if pid else ""
        if stops_in is None:
            return f"{again}the job keeps running"
        limit = f"--hang-timeout {format_duration(self._run.options.hang_timeout)}"
        return f"{again}the job keeps running; {limit} stops it in {format_duration(stops_in)} unless it makes progress"

    def _tell_stragglers(self) -> None:
        found = self._attempt.watch.stragglers.found
        while found:
            one = found.pop(0)
            cost = f"the others wait {one.wait_s:.2g} s of each {one.step_s:.2g} s step"
            line = f"{rank_name(one.rank, self._attempt.label(one.rank))} is slow because {one.because}; {cost}"
            self._attempt.notes.append(line)
            self._say(f"stoker: {line}", colour=WARNING)
            seen = pick_fields(one, "cause", "rank", "step", "wait_s", "step_s", "where")
            self._record.event("straggler", summary=line, **seen)
        over = self._attempt.watch.stragglers.over
        while over:
            rank = over.pop(0)
            line = f"{rank_name(rank, self._attempt.label(rank))} is no longer slow"
            self._attempt.notes.append(line)
            self._say(f"stoker: {line}")
            self._record.event("straggler-over", rank=rank, summary=line)

    def _tell_early(self) -> None:
        early = [rank for rank in self._attempt.left_early(time.time(), EARLY_S) if rank not in self._early]
        if early:
            self._early.update(early)
            line = f"{format_ranks(early)} ended with exit code 0 more than {EARLY_S:.0f} s ago; the others still run"
            self._say(f"stoker: {line}", colour=WARNING)
            self._record.event("suspicion", cause="rank.early-exit", rank=early[0], ranks=early, summary=line)


def give_up(attempt: Attempt, record: RunWriter, say: Callable[..., None], problem: Exception) -> None:
    """The watch room failed. A watcher must not end what it watches: its failure is reported and recorded, and the job continues."""
    import traceback

    attempt.unwatched = True
    record.event("watch-failed", traceback="".join(traceback.format_exception(problem)))
    why = f"{type(problem).__name__}: {problem}"
    line = f"stoker: watching failed ({why}): the job continues without it; events.jsonl has the traceback"
    say(line, colour=WARNING)
