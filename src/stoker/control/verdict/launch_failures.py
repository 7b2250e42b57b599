"""Causes launch.*, role.* and others that are not read off a rank's exit, and the verdicts and reports that name them."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

from stoker.contract.errors import EX_OSERR, EX_SOFTWARE, Refusal
from stoker.contract.evidence import Evidence, RankExit, Verdict
from stoker.contract.units import format_bytes, format_duration, rank_name
from stoker.control.verdict.catalogue import CATALOGUE, Family, make_report
from stoker.control.verdict.exit_text import signal_name

SECOND_SIGTERM_S = (
    2.5  # after the first: a rank that ends this late has a handler; without a handler, the first SIGTERM ends it
)
family = Family(__name__)
family.entries("""
completed: The job is complete.
  seen: every rank ended with exit code 0, or made the requested number of steps
  unless: a rank exited early: rank.early-exit
launch.stopped: The run was stopped.
  seen: the launcher received a signal (Ctrl-C, stoker stop, the scheduler) before any rank failed
  unless: a rank failed before the signal came: then that is the cause
  fix: stopped by SIGHUP, when the terminal or the connection was closed: start with --detach, or type `stoker detach`
      while it runs
launch.refused: The request can't be carried out.
  seen: an option, a value or a combination that is not possible; the exit code (64 to 78) shows which kind
  fix: the message says what is wrong and what is possible
launch.script-missing: The script, module or program does not exist.
  seen: before the start: no such file, module or program
  fix: check the spelling and the folder
launch.syntax-error: The script is not valid Python.
  seen: before the start: it can't be parsed
  fix: fix the line that the message names
launch.nodes: The machines of the run were not given, or did not connect to each other.
  seen: --nnodes, --node-rank, --master-addr or --rdzv-* that don't fit together
  fix: stoker run --hosts a,b,c on one of them starts all
  fix: by hand, the same command on each, with its own --node-rank: --nnodes 2 --node-rank 0 --master-addr A
launch.hosts: Hosts of the hosts file can't be used.
  seen: before the start: no connection, no Python, no working directory, or hosts that can't reach each other
  unless: it was connected and was lost later: host.lost
  fix: ssh HOST true   # must work within seconds, without a password or a question
  fix: stoker cluster check checks all of them and compares them
launch.regroup, again: The attempt was ended after a checkpoint so that a host that is back can join.
  seen: --rejoin checkpoint, a host that responds again, and rank 0's stoker.mark("CHECKPOINT")
  unless: a rank failed before that
launch.port: A port for the store, or for metrics, could not be reserved.
  seen: --master-port outside 1024 to 65535, an agent that could not reserve one, or a --metrics-port that is refused
  fix: omit --master-port; --metrics-port 0 takes a free one
launch.port-in-use: The requested port is in use.
  seen: before the start: another process listens on --master-port or --metrics-port
  unless: a port that the script chose itself: net.port-in-use
  fix: omit --master-port, or use --metrics-port 0: a free port is taken
launch.runs-dir: The run directory can't be written, or is not safe from other users.
  seen: creating or writing a file below --runs-dir fails; or another user can replace the files there, or has moved the run
      directory during the run
  unless: a rank's own files: data.no-space, data.permission
  fix: another folder, which must be your own: --runs-dir DIR, or $STOKER_RUNS
launch.no-space: The disk or the quota of the run directory is full.
  seen: ENOSPC or EDQUOT when the run directory is created, before the start
  unless: the disk fills later: the run continues, the verdict is written into reserved space, and a rank that fails
      because of it is data.no-space
  fix: df -h and df -i on that folder; stoker clean --cache shows the size of caches
  fix: another folder: --runs-dir DIR, or $STOKER_RUNS
launch.system: The operating system refused Stoker something after the start.
  seen: an OSError in the launcher itself
  fix: check descriptors, processes and disk: ulimit -n, ulimit -u, df -h
launch.not-started: A rank's process could not be started.
  seen: the agent's spawn failed: no such program, not executable, no processes or descriptors left
  unless: it started and ended immediately: then its exit is the cause
  fix: check that the program exists and is executable, and the limits of open files and processes (ulimit -n, -u)
launch.killed, again: The launcher ended without a verdict.
  seen: verdict.json is missing and the launcher's process is gone: SIGKILL, or the machine went down
  unless: its process is on another host
  fix: the agent stopped the ranks when the launcher ended; start the same command again
role.not-ready: A role was started and did not become ready.
  seen: its ready rule (port, http, file, line, mark) was not met within its timeout
  unless: it ended before: then its exit is the cause
  fix: its last lines are in the evidence; `stoker logs RUN --role NAME` has the rest
  fix: a large model takes longer to load: ready: timeout: 30m in the roles file
role.unhealthy, again: A role that was ready has stopped responding.
  seen: its process is alive, and its ready rule (port, http) failed three times in a row
  unless: it ended: then its exit is the cause
  fix: `stoker logs RUN --role NAME`; restart: always in the roles file replaces it
role.ended: A server ended with exit code 0 while another role still needed it.
  seen: its ready rule is a port or an HTTP path, Stoker did not end it, and a role that waits for it failed afterwards: it
      lost its connection, or its rewards were no longer useful
  unless: its clients continued without it: they may have told it to end
  fix: its last lines are in the evidence; restart: always in the roles file starts it again
role.restart-loop: A role was restarted several times, and failed every time.
  seen: the same cause five times within ten minutes
  fix: its cause is in the evidence; start the role alone with `stoker run` to debug it
gpu.too-few: Fewer GPUs exist, or are free, than were requested.
  seen: before the start: the plan needs more than the machine has
  unless: enough exist, but are in use: gpu.busy
  fix: fewer ranks (--nproc-per-node), or --share-gpus; does CUDA_VISIBLE_DEVICES hide some?
gpu.legal: The job can't run with that number of ranks.
  seen: before the start: --legal-ranks does not contain the number of usable GPUs
  fix: --nproc-per-node with one of them
host.agent-lost: The connection to a host's agent was lost while its ranks ran.
  seen: end-of-file on its connection, or no sign of life for 8 s
  unless: a rank ended first: then that is the cause
  fix: dmesg on that host shows whether the agent was killed
  fix: a host that went down or a cable that was cut looks the same: ping it
host.lost: A host of a multi-host run was lost while its ranks ran.
  seen: no sign of life of its agent for 8 s (power, cable, a frozen machine), or the end of its connection (agent or
      sshd killed)
  unless: a rank failed before that: then that is the cause. Ranks that lost their connection to it
      failed because of it
  fix: ping it: is it up, and is its cable plugged in? its dmesg shows whether the agent was killed
  fix: --min-hosts K continues without lost hosts, from the last checkpoint, and takes them back when they return
unknown: The job ended for an unknown reason.
  seen: no failure of a rank is on record, and not all ranks ended with exit code 0
  unless: any evidence for another cause
  fix: stoker logs --rank N, for each rank
  fix: dmesg, for messages of the kernel
""")


def make_stop_verdict(
    evidence: Evidence, problem: str = "", problem_evidence: tuple[str, ...] = (), fix: tuple[str, ...] = ()
) -> Verdict:
    """Return the verdict of a run that received a signal. `problem` says in one line what was wrong before the signal."""
    name = signal.Signals(evidence.stop_signal).name
    late = [] if evidence.stop_now else [end for end in evidence.ends if _ran_out_of_time(end, evidence.stopped_at)]
    if late:
        ranks = ", ".join(str(end.rank) for end in late[:8])
        how = f"; rank {ranks} did not end within the grace period and {'was' if len(late) == 1 else 'were'} killed"
        # A longer grace period would not have helped a rank that had a problem before the stop.
        fix = fix or (() if problem else ("--grace 5m gives ranks longer to save and end",))
    elif evidence.stop_now:
        how = "; the ranks were killed at once"
    elif evidence.saved:
        how = " gracefully"
    elif evidence.ends and all(end.code is not None and end.code < 0 for end in evidence.ends):
        how = "; the ranks have no handler for it and ended without saving"
    else:
        how = "; the ranks exited"
    ends = [f"rank {end.rank} {_describe_end(end.code)}" for end in evidence.ends[:8]]
    before = f". Before the stop: {problem}" if problem else ""
    return Verdict(
        "stopped",
        "launch.stopped",
        f"stopped by {name}{how}; {_describe_saved(evidence)}{before}",
        128 + evidence.stop_signal,
        evidence=(f"the launcher received {name}", *ends, *problem_evidence),
        retryable=False,
        fix=(*fix, *terminal_advice(evidence.stop_signal)),
    )


def terminal_advice(stop_signal: int) -> tuple[str, ...]:
    """Return the advice for a run whose terminal or connection was closed, or ()."""
    if stop_signal != signal.SIGHUP:
        return ()
    return ("its terminal was closed: start with --detach, or type `stoker detach` while it runs, and it continues",)


def _describe_end(code: int | None) -> str:
    if code is None:
        return "was still running"
    return f"ended with exit code {code}" if code >= 0 else f"was ended by {signal_name(-code)}"


def _describe_saved(evidence: Evidence) -> str:
    """Return a clause about the newest checkpoint that the launcher can see."""
    newest = evidence.checkpoint
    if evidence.saved:
        return f"saved: {_short_path(newest.path)}" if newest else "a checkpoint was saved"
    if newest is not None:
        age = f"{format_duration(max(evidence.stopped_at - newest.time, 0.0))} older"
        return f"nothing was saved at the stop, the newest checkpoint is {_short_path(newest.path)}, {age}"
    return "no checkpoint was seen in the run's checkpoints/"


def _short_path(path: str) -> str:
    """Return the last two components of the path: checkpoints/NAME."""
    return "/".join(path.rsplit("/", 2)[1:])


def _ran_out_of_time(end: RankExit, stopped_at: float) -> bool:
    """Return whether Stoker killed the rank: by SIGKILL, or by a second SIGTERM if its handler took too long."""
    return end.ours and (
        end.code == -signal.SIGKILL or (end.code == -signal.SIGTERM and end.time - stopped_at > SECOND_SIGTERM_S)
    )


def make_report_verdict(evidence: Evidence) -> Verdict:
    """Return the verdict of a job that Stoker stopped, from the first report in `evidence.trouble`."""
    report = evidence.trouble[0]
    end = next((end for end in evidence.ends if end.rank == report.get("rank")), None)
    return Verdict(
        "failed",
        report["cause"],
        report["summary"],
        int(report.get("exit_code", EX_SOFTWARE)),
        rank=report.get("rank"),
        host=(end.host or None) if end else report.get("host"),
        gpu=end.label if end and "GPU" in end.label else None,
        evidence=tuple(report.get("evidence", ())),
        retryable=bool(report.get("retryable", False)),
        fix=tuple(report.get("fix", ())),
    )


def make_unknown_verdict(evidence: Evidence) -> Verdict:
    ends = [f"rank {end.rank} {_describe_end(end.code)}" for end in evidence.ends]
    missing = evidence.world_size - len([end for end in evidence.ends if end.code is not None])
    line = f"the job ended for an unknown reason; {missing} of {evidence.world_size} ranks have no exit on record"
    return Verdict("failed", "unknown", line, EX_SOFTWARE, evidence=tuple(ends), fix=CATALOGUE["unknown"].fix)


def make_lost_verdict(run: str, saved: str = "", host: str = "") -> Verdict:
    """Return the verdict of a run whose launcher was killed.

    `saved` is the path of the newest checkpoint or, if `host` is given, of the folder with the checkpoints on that host.
    """
    checkpoint = "there is no checkpoint in the run's checkpoints/"
    if host:
        checkpoint = f"the checkpoints are on host {host}, in {saved}"
    elif saved:
        checkpoint = f"the newest checkpoint is {_short_path(saved)}"
    return Verdict(
        "lost",
        "launch.killed",
        "the launcher ended without a verdict: it was killed (SIGKILL), or the machine went down",
        137,
        run=run,
        evidence=("verdict.json is missing, and the launcher's process is gone", checkpoint),
        retryable=True,
        fix=CATALOGUE["launch.killed"].fix,
    )


def report_ram_limit(rank: int, label: str, taken: int, limit: int, workers: int, where: str) -> dict[str, Any]:
    """Report a rank that used more memory than --ram-limit.

    `workers` is the number of its data-loader workers, `where` the line at which it seemed stuck, or "".
    """
    from stoker.control.verdict.rules.memory import FEWER_WORKERS

    seen = f"; last seen at {where}" if where else ""
    memory = f"used {format_bytes(taken)} of memory, more than --ram-limit {format_bytes(limit)}"
    fix = [line for line in CATALOGUE["oom.ram-limit"].fix if workers or line != FEWER_WORKERS]
    evidence = [f"resident memory {taken} bytes, limit {limit}"]
    summary = f"{rank_name(rank, label)} {memory}{seen}"
    return make_report("oom.ram-limit", summary, evidence, rank=rank, at_once=True, fix=fix)


def report_lost_agent(host: str, why: str, complaint: str) -> dict[str, Any]:
    """Report that the connection to an agent was lost. `complaint` is what the agent or its connection printed."""
    where = f"host {host}" if host else "this machine"
    summary = f"the agent on {where} was lost: {why}; its ranks are stopped"
    return make_report("host.agent-lost", summary, [complaint] if complaint else [], host=host)


def report_lost_host(host: str, why: str, complaint: str) -> dict[str, Any]:
    summary = f"host {host} is lost: {why.removeprefix('it ended: ')}"
    return make_report("host.lost", summary, [complaint] if complaint and complaint not in why else [], host=host)


def make_role_verdict(cause_id: str, summary: str, evidence: Sequence[str] = ()) -> Verdict:
    """Return the verdict of a role from what its job observed."""
    cause = CATALOGUE[cause_id]
    return Verdict(
        "failed", cause_id, summary, EX_SOFTWARE, evidence=tuple(evidence), retryable=cause.retryable, fix=cause.fix
    )


def make_regroup_verdict(host: str) -> Verdict:
    line = f"ended after a checkpoint so that host {host} can join"
    return Verdict("failed", "launch.regroup", line, EX_SOFTWARE, retryable=True)


def report_unstarted_rank(rank: int, why: str) -> dict[str, Any]:
    summary = f"rank {rank} could not be started: {why}"
    return make_report("launch.not-started", summary, [], rank=rank, exit_code=EX_OSERR)


def make_refusal_verdict(refusal: Refusal) -> Verdict:
    fix = (refusal.fix,) if refusal.fix else ()
    return Verdict("refused", refusal.cause, refusal.line.splitlines()[0], refusal.code, fix=fix)


def make_failure_verdict(cause: str, line: str, code: int) -> Verdict:
    """Return the verdict of a run that Stoker could not continue because of a system error or an internal error."""
    return Verdict("failed", cause, line, code)
