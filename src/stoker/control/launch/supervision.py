"""Follows one attempt until every rank has ended and all is swept: passes signals on, stops the rest when one fails or
a host is lost.
"""

from __future__ import annotations

import signal
import time

from stoker.contract import checkpoints
from stoker.contract.shapes import RankEnd
from stoker.control.launch.attempt import Attempt
from stoker.control.launch.members import Member

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.launch.live import LiveRun

GRACE_FAILURE_S = 5.0
GRACE_STOP_S = 30.0
UNKILLABLE_S = 60.0  # from the end of the grace: a driver may take long to give eight cards' memory back
SETTLE_S = 1.0
TWICE_S = 1.0
HASTY = (
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGKILL,
)  # two of these at once are meant: Ctrl-C, Ctrl-\\ and `stoker stop --now`


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

    def follow(self) -> None:
        """Until every rank has ended."""
        # What the launch does not wait for is loaded when the ranks are on their way.
        from stoker.control.launch.alarms import Alarms

        attempt, alarms = self._attempt, Alarms(self._run, self._attempt)
        while not attempt.all_ended:
            self._members.pump(0.25)
            self._output.settle(self._record)
            now = time.time()
            self._pass_signals()
            quiet = self._membership is not None and any(member.quiet or member.gone for member in self._members.all)
            if not quiet:  # ranks wait for a host that may be lost: nothing to accuse them of
                alarms.look()
            for member in self._members.all:
                if member.gone:
                    self._lost(member)
            if not attempt.stopping and attempt.must_stop(now, SETTLE_S, quiet):
                attempt.stopping, attempt.stopped_at = True, now
                self._stop_rest()
            wanted = self._options.stop_after_steps
            if (
                wanted
                and not attempt.stopping
                and min((attempt.steps.get(rank, 0) for rank in attempt.plan.ranks), default=0) >= wanted
            ):
                attempt.stopping, attempt.steps_reached, attempt.stopped_at = True, wanted, now
                self._stop(signal.SIGTERM, GRACE_FAILURE_S)
            if self._killed_by and time.monotonic() > self._killed_by:
                self._go_on_without()
            if self._membership is not None:
                self._membership.tend()
                self._make_room(self._membership.returned)

    def _go_on_without(self) -> None:
        """SIGKILL has had its time: a rank that is stuck in a driver or on a dead disk ends when the machine does. The
        rest must not wait for it.
        """
        attempt = self._attempt
        left = [rank for rank in attempt.up if rank not in attempt.ends]
        names = ", ".join(f"rank {rank} ({attempt.plan.place(rank).label}, pid {attempt.up[rank]})" for rank in left)
        if left:
            self._say(f"stoker: {names} can't be killed: stuck in the kernel; going on without")
        attempt.told.update(place.host for place in attempt.plan.places)
        self._end_by_us(left)

    def _stop_rest(self) -> None:
        trouble = self._attempt.trouble
        if any(
            entry["cause"] == "host.lost" for entry in trouble
        ):  # their collectives are dead: nothing can be saved any more
            self._kill()
            return
        self._stop(
            signal.SIGTERM,
            GRACE_FAILURE_S,
            [entry["rank"] for entry in trouble if entry.get("at_once") and entry["rank"] is not None],
        )

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

    def _lost(self, member: Member) -> None:
        """Its ranks are gone with it: the guardian there sees to that. What ended the job before it is still what ended
        it.
        """
        attempt = self._attempt
        mine = [place for place in attempt.plan.places if place.host == member.host]
        if not attempt.stopping and not any(entry.get("host") == member.host for entry in attempt.trouble):
            from stoker.control.verdict import launch

            several = self._membership is not None and len(self._run.agents.by_name) > 1
            attempt.trouble.append(
                (launch.host_lost if several else launch.agent_lost)(member.host, member.gone, member.complaint)
            )
        attempt.told.add(member.host)
        self._end_by_us([one.rank for one in mine if one.rank not in attempt.ends])

    def _end_by_us(self, ranks: list[int]) -> None:
        """Nobody saw how they ended."""
        attempt = self._attempt
        for rank in ranks:
            one, pid = attempt.plan.place(rank), attempt.up.setdefault(rank, 0)
            attempt.ends[rank] = RankEnd(
                rank, one.host, one.label, pid, None, time.time(), ours=True, error=attempt.errors.get(rank)
            )

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
                attempt.checkpoint_before = checkpoints.newest(self._record.dir)
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
