"""Supervises one attempt until every rank has exited and all hosts are swept.

`Supervisor` passes signals on and stops the other ranks after a failure, `WatchReporter` reports what the watcher finds,
and `HistoryRecorder` writes the run's history. This module is imported while the ranks start: no launch waits for it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from stoker.contract import checkpoints, layout
from stoker.contract.evidence import RankExit, Stall
from stoker.contract.frozen import pick_fields
from stoker.contract.terminal import WARNING
from stoker.contract.units import format_duration, format_ranks, rank_name
from stoker.control.cluster.agent_pool import AgentClient
from stoker.control.launch.agents import Agents
from stoker.control.launch.attempt import Attempt
from stoker.control.launch.rank_output import RankOutput
from stoker.control.launch.reports import stop_watching
from stoker.control.launch.signals import SignalQueue
from stoker.control.plan.options import RunOptions
from stoker.control.record.run_writer import RunWriter
from stoker.control.verdict import hangs, launch_failures
from stoker.control.watch.watcher import Busy, Inspect, Recovered, Suspect

TYPE_CHECKING = False
if TYPE_CHECKING:  # a run on one machine does not load it
    from stoker.control.launch.membership import Membership

GRACE_FAILURE_S = 5.0
GRACE_STOP_S = 30.0
UNKILLABLE_S = 60.0  # after the grace time, because a driver may take long to free the memory of eight GPUs
SETTLE_S = 1.0  # a cause may be reported this much later than its echo
REPEAT_S = 1.0
# A second one of these counts even within REPEAT_S: Ctrl-C, Ctrl-\ and `stoker stop --now`.
URGENT = (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL)
EARLY_EXIT_S = 10.0
SWEEP_S = 15.0
HISTORY_S = 2.0  # between two points of the history
# Seconds between two calls of the watcher. It checks every rank, and 512 ranks wake the launcher hundreds of times a second.
WATCH_S = 0.1


class Supervisor:
    """Supervises one attempt."""

    def __init__(
        self,
        attempt: Attempt,
        options: RunOptions,
        agents: Agents,
        membership: Membership | None,
        signals: SignalQueue,
        record: RunWriter,
        output: RankOutput,
        log: Callable[..., None],
    ) -> None:
        self._attempt = attempt
        self._options = options
        self._agents = agents
        self._membership = membership
        self._signals = signals
        self._record = record
        self._output = output
        self._log = log
        self._watch = WatchReporter(attempt, options, agents, record, output, log)
        self._history = HistoryRecorder(attempt, record, log)
        self._checkpoints_before_return = attempt.checkpoints  # reported before a lost host returned
        self._unkillable_at = 0.0  # time after which a living rank counts as unkillable, or 0 if none is being stopped

    def follow(self) -> None:
        """Supervise until every rank has exited."""
        attempt = self._attempt
        while not attempt.all_ended:
            self._agents.pool.pump(0.25)
            self._output.settle(self._record)
            now = time.time()
            self._handle_signals()
            host_is_quiet = self._membership is not None and any(
                client.is_quiet or client.gone for client in self._agents.clients
            )
            if not host_is_quiet:  # don't judge ranks while a host may be lost: they are only waiting for it
                self._watch.update()
            self._history.update()
            for client in self._agents.clients:
                if client.gone:
                    self._handle_lost_host(client)
            if not attempt.stopping and attempt.must_stop(now, SETTLE_S, host_is_quiet):
                attempt.stopping, attempt.stopped_at = True, now
                self._stop_after_failure()
            max_steps = self._options.stop_after_steps
            if max_steps and not attempt.stopping and attempt.min_steps >= max_steps:
                attempt.stopping, attempt.steps_reached, attempt.stopped_at = True, max_steps, now
                self._stop(signal.SIGTERM, GRACE_FAILURE_S)
            if self._unkillable_at and time.monotonic() > self._unkillable_at:
                self._abandon_unkillable_ranks()
            if self._membership is not None:
                self._membership.has_checkpoint = self._membership.has_checkpoint or attempt.checkpoints > 0
                self._membership.update()
                self._stop_for_returned_host(self._membership.returned_host)
        self._history.close()

    def finish(self) -> None:
        """Have the agents sweep what the ranks left running. After a success they first get time to exit."""
        attempt = self._attempt
        success = all(end.code == 0 for end in attempt.ends.values()) and not attempt.stopping
        grace = 0.0
        if success:
            grace = GRACE_FAILURE_S if self._options.grace is None else self._options.grace
        self._agents.pool.say({"do": "finish", "grace": grace})
        deadline = time.monotonic() + grace + SWEEP_S
        while any(not client.gone and client.host not in attempt.finished for client in self._agents.clients):
            if time.monotonic() > deadline:
                self._log("stoker: an agent did not finish its sweep in time; its guardian completes the sweep")
                return
            self._agents.pool.pump(0.25)
            if signum := self._signals.take():
                if not success and signum != signal.SIGTSTP:  # the ranks have ended, but must not be started again
                    attempt.stop_signal = attempt.stop_signal or signum
                    attempt.stopped_at = attempt.stopped_at or time.time()
                self._agents.pool.say({"do": "finish", "grace": 0.0})

    # ---- signals ----

    def _handle_signals(self) -> None:
        attempt = self._attempt
        while signum := self._signals.take():
            if signum == signal.SIGTSTP:
                self._agents.suspend()
                attempt.watch.restart_clocks(time.monotonic())
                continue
            now, name = time.time(), signal.Signals(signum).name
            is_second = bool(attempt.stop_signal)
            if is_second and signum not in URGENT and now - attempt.stopped_at < REPEAT_S:
                continue  # a closing terminal sends SIGHUP twice: from the kernel and from its shell
            if not is_second:
                attempt.checkpoint_before = checkpoints.find_newest_checkpoint(self._record.dir)
            attempt.stop_signal = attempt.stop_signal or signum
            attempt.stopped_at = attempt.stopped_at or now
            attempt.stop_now = is_second
            attempt.stopping = True
            self._record.event("stop", signal=name, now=is_second)
            if is_second:
                self._log(f"stoker: {name}: killing the ranks now")
                self._kill()
            else:
                self._log(f"stoker: {name}: asking the ranks to save and end; a second signal kills them")
                self._stop(signum, GRACE_STOP_S)

    # ---- stopping ----

    def _stop_after_failure(self) -> None:
        trouble = self._attempt.trouble
        if any(entry["cause"] == "host.lost" for entry in trouble):
            self._kill()  # without the lost ranks' collectives nothing can be saved any more
            return
        at_once = [entry["rank"] for entry in trouble if entry.get("at_once") and entry["rank"] is not None]
        self._stop(signal.SIGTERM, GRACE_FAILURE_S, at_once)

    def _stop_for_returned_host(self, host: str) -> None:
        """Stop the ranks so that a returned host can join, as soon as they have saved another checkpoint."""
        attempt = self._attempt
        if not host:
            self._checkpoints_before_return = attempt.checkpoints
        elif attempt.checkpoints > self._checkpoints_before_return and not attempt.stopping:
            attempt.stopping, attempt.regrouping, attempt.stopped_at = True, host, time.time()
            self._log(f"stoker: a checkpoint is saved: ending the ranks so that host {host} can join")
            self._stop(signal.SIGTERM, GRACE_STOP_S)

    def _stop(self, signum: int, default_grace: float, at_once: Sequence[int] = ()) -> None:
        """Send a signal to all ranks and kill them after the grace time, those in `at_once` immediately."""
        options = self._options
        grace = options.grace if options.grace is not None else options.shutdown_timeout
        grace = default_grace if grace is None else grace
        self._unkillable_at = time.monotonic() + grace + UNKILLABLE_S
        self._agents.pool.say({"do": "stop", "signal": int(signum), "grace": grace, "at_once": list(at_once)})

    def _kill(self) -> None:
        self._unkillable_at = time.monotonic() + UNKILLABLE_S
        self._agents.pool.say({"do": "stop", "signal": int(signal.SIGKILL), "grace": 0.0})

    def _abandon_unkillable_ranks(self) -> None:
        """Continue without ranks that SIGKILL does not end: one stuck in a driver must not hold up the rest."""
        attempt = self._attempt
        ranks = [rank for rank in attempt.pids if rank not in attempt.ends]
        names = ", ".join(rank_name(rank, f"{attempt.label(rank)}, pid {attempt.pids[rank]}") for rank in ranks)
        if ranks:
            self._log(
                f"stoker: {names} can't be killed: stuck in the kernel; the run continues without waiting",
                color=WARNING,
            )
        attempt.stopping_hosts.update(rank.host for rank in attempt.plan.places)
        self._record_unreported_ends(ranks)

    def _handle_lost_host(self, client: AgentClient) -> None:
        """End the ranks of a lost host: its guardian kills them. What stopped the job before remains the cause."""
        attempt = self._attempt
        if not attempt.stopping and not any(entry.get("host") == client.host for entry in attempt.trouble):
            is_cluster = self._membership is not None and len(self._agents.by_name) > 1
            lost = launch_failures.report_lost_host if is_cluster else launch_failures.report_lost_agent
            attempt.trouble.append(lost(client.host, client.gone, client.complaint))
        attempt.stopping_hosts.add(client.host)
        ranks = [rank.rank for rank in attempt.plan.places if rank.host == client.host]
        self._record_unreported_ends([rank for rank in ranks if rank not in attempt.ends])

    def _record_unreported_ends(self, ranks: list[int]) -> None:
        """Record ranks whose end was not reported as stopped by Stoker."""
        attempt = self._attempt
        for rank in ranks:
            place, pid = attempt.plan.place(rank), attempt.pids.setdefault(rank, 0)
            error = attempt.errors.get(rank)
            attempt.ends[rank] = RankExit(rank, place.host, place.label, pid, None, time.time(), ours=True, error=error)


class WatchReporter:
    """Calls the watcher and acts on its findings: inspects ranks, prints and records suspicions, stops the job for a hang."""

    def __init__(
        self,
        attempt: Attempt,
        options: RunOptions,
        agents: Agents,
        record: RunWriter,
        output: RankOutput,
        log: Callable[..., None],
    ) -> None:
        self._attempt = attempt
        self._options = options
        self._agents = agents
        self._record = record
        self._output = output
        self._log = log
        self._updated_at = 0.0
        self._reported_exits: set[int] = set()

    def update(self) -> None:
        now = time.monotonic()
        if self._attempt.stopping or self._attempt.watch_failed or now - self._updated_at < WATCH_S:
            return
        self._updated_at = now
        try:
            self._act(now)
            self._report_stragglers()
            self._report_early_exits()
        except Exception as problem:
            stop_watching(self._attempt, self._record, self._log, problem)

    def _act(self, now: float) -> None:
        attempt = self._attempt
        for action in attempt.watch.next_actions(now):
            if isinstance(action, Inspect):
                self._agents.pool.say(dict(action.order))
            elif isinstance(action, Suspect):
                self._report_suspicion(action.stall, action.stops_in)
            elif isinstance(action, Busy):
                self._report_busy(action.stall, action.stops_in)
            elif isinstance(action, Recovered):
                subject = f"rank {action.rank}" if action.rank is not None else "the job"
                self._log(f"stoker: {subject} makes progress again, after {format_duration(action.silent_s)}")
                self._record.event("relief", rank=action.rank, silent_s=round(action.silent_s, 1))
            else:
                rank = action.stall.rank
                printed = self._output.tail(rank) if rank is not None else ""
                attempt.trouble.append(hangs.make_stall_report(action.stall, attempt.label(rank), action.why, printed))

    def _report_suspicion(self, stall: Stall, stops_in: float | None) -> None:
        attempt, record = self._attempt, self._record
        summary = hangs.summarize_stall(stall, attempt.label(stall.rank))
        attempt.stall_detected_s = stall.silent_s
        fields = pick_fields(stall, "rank", "ranks", "waiting", "where", "step", "silent_s", "proof", "evidence")
        record.event("suspicion", attempt=attempt.number, cause=hangs.cause_of(stall), summary=summary, **fields)
        stacks = "\n".join(text for _, text in sorted(attempt.watch.format_stacks().items()))
        record.save(layout.all_stacks(record.dir, attempt.number), stacks)
        if not attempt.first_failure:  # else the verdict, which knows more, follows within seconds
            self._log(f"stoker: {summary} ({self._consequence(stall, stops_in)})", color=WARNING)

    def _report_busy(self, stall: Stall, stops_in: float | None) -> None:
        """Report that a rank is busy but has not finished a step for long. It is not a suspicion."""
        attempt = self._attempt
        summary = hangs.summarize_stall(stall, attempt.label(stall.rank))
        fields = pick_fields(stall, "rank", "ranks", "waiting", "where", "step", "silent_s", "evidence")
        self._record.event("busy", attempt=attempt.number, cause=hangs.cause_of(stall), summary=summary, **fields)
        if not attempt.first_failure:
            consequence = "the job keeps running"
            if stops_in is not None:
                consequence += f"; --busy-timeout stops it in {format_duration(stops_in)} unless a step ends"
            self._log(f"stoker: {summary} ({consequence})")

    def _consequence(self, stall: Stall, stops_in: float | None) -> str:
        """Return what will happen because of a stall, and when."""
        if stall.proof:
            return "it can't recover" + ("; the job will be stopped" if stops_in is not None else "")
        pid = self._attempt.pids.get(stall.rank, 0) if stall.rank is not None and stall.kind == "stopped" else 0
        consequence = f"`kill -CONT {pid}` continues it; the job keeps running" if pid else "the job keeps running"
        if stops_in is not None:
            limit = f"--hang-timeout {format_duration(self._options.hang_timeout)}"
            consequence += f"; {limit} stops it in {format_duration(stops_in)} unless it makes progress"
        return consequence

    def _report_stragglers(self) -> None:
        attempt, stragglers = self._attempt, self._attempt.watch.stragglers
        while stragglers.newly_slow:
            slow = stragglers.newly_slow.pop(0)
            cost = f"the others wait {slow.wait_s:.2g} s of each {slow.step_s:.2g} s step"
            line = f"{rank_name(slow.rank, attempt.label(slow.rank))} is slow because {slow.because}; {cost}"
            attempt.notes.append(line)
            self._log(f"stoker: {line}", color=WARNING)
            fields = pick_fields(slow, "cause", "rank", "step", "wait_s", "step_s", "where")
            self._record.event("straggler", summary=line, **fields)
        while stragglers.recovered:
            rank = stragglers.recovered.pop(0)
            line = f"{rank_name(rank, attempt.label(rank))} is no longer slow"
            attempt.notes.append(line)
            self._log(f"stoker: {line}")
            self._record.event("straggler-over", rank=rank, summary=line)

    def _report_early_exits(self) -> None:
        early = self._attempt.find_early_exits(time.time(), EARLY_EXIT_S)
        early = [rank for rank in early if rank not in self._reported_exits]
        if early:
            self._reported_exits.update(early)
            exited = f"{format_ranks(early)} ended with exit code 0 more than {EARLY_EXIT_S:.0f} s ago"
            line = f"{exited}; the others still run"
            self._log(f"stoker: {line}", color=WARNING)
            self._record.event("suspicion", cause="rank.early-exit", rank=early[0], ranks=early, summary=line)


class HistoryRecorder:
    """Writes a point of the run's history every few seconds. An attempt that ends sooner has no history."""

    def __init__(self, attempt: Attempt, record: RunWriter, log: Callable[..., None]) -> None:
        self._attempt = attempt
        self._record = record
        self._log = log
        self._written_at = time.monotonic()
        self._has_points = False
        self._failed = False

    def update(self) -> None:
        if time.monotonic() - self._written_at >= HISTORY_S:
            self._write()

    def close(self) -> None:
        """Write how the attempt ended, if it has a history."""
        if self._has_points:
            self._write()

    def _write(self) -> None:
        if self._attempt.watch_failed or self._failed:
            return
        self._written_at, self._has_points = time.monotonic(), True
        try:
            from stoker.control.launch.history_points import make_history_point

            self._record.write_history_point(make_history_point(self._attempt, self._written_at))
        except Exception as problem:
            self._failed = True
            import traceback

            self._record.event("history-failed", traceback="".join(traceback.format_exception(problem)))
            failure = f"{type(problem).__name__}: {problem}"
            self._log(f"stoker: the history of this attempt ends here ({failure}); the job continues", color=WARNING)
