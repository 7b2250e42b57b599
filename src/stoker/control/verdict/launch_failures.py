"""launch.*: what Stoker itself was told or decided, and the verdicts that are not about one rank's end."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

from stoker.contract.errors import EX_OSERR, EX_SOFTWARE, Refusal
from stoker.contract.evidence import Evidence, RankExit, Verdict
from stoker.contract.units import format_bytes, format_duration, rank_name
from stoker.control.verdict.catalogue import CATALOGUE, Family, report
from stoker.control.verdict.exit_text import signal_name

AT_ONCE_S = 2.5
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
launch.refused: What was asked for can't be done.
  seen: a flag, a value or a combination that makes no sense; exit code 64 to 78 says of which kind
  fix: the message says what was wrong and what is possible
launch.script-missing: The script, module or program does not exist.
  seen: before the start: no such file, module or program
  fix: check the spelling and the folder
launch.syntax-error: The script is not valid Python.
  seen: before the start: it does not parse
  fix: fix the line that the message names
launch.nodes: The machines of the run were not given, or did not connect to each other.
  seen: --nnodes, --node-rank, --master-addr or --rdzv-* that don't fit
  fix: stoker run --hosts a,b,c on one of them starts all
  fix: by hand, the same command on each, with its own --node-rank: --nnodes 2 --node-rank 0 --master-addr A
launch.hosts: Hosts of the hosts file can't be used.
  seen: before the start: no connection, no Python, no working directory, no way to each other
  unless: it was connected and was lost later: host.lost
  fix: ssh HOST true   # must work within seconds, without a password or a question
  fix: stoker cluster check looks at all of them side by side
launch.regroup, again: The attempt was ended after a checkpoint so that a host that is back can join.
  seen: --rejoin checkpoint, a host that answers again, and rank 0's stoker.mark("CHECKPOINT")
  unless: a rank failed by itself before that
launch.port: A port for the store, or for metrics, could not be reserved.
  seen: --master-port outside 1024 to 65535, an agent that could not reserve one, or a --metrics-port that is refused
  fix: leave --master-port out; --metrics-port 0 takes a free one
launch.port-in-use: The requested port is in use.
  seen: before the start: another process listens on --master-port or --metrics-port
  unless: a port of the script's own choice: net.port-in-use
  fix: leave --master-port out, or --metrics-port 0: a free one is taken
launch.runs-dir: The run directory can't be written, or is not safe from other users.
  seen: creating or writing below --runs-dir fails; or another user can replace what is there, or has moved the run
      directory during the run
  unless: a rank's own files: data.no-space, data.permission
  fix: another folder, of your own: --runs-dir DIR, or $STOKER_RUNS
launch.no-space: The disk or the quota of the run directory is full.
  seen: before the start: ENOSPC or EDQUOT when the run's record is made
  unless: the disk fills later: the run continues, the verdict is written into reserved space, and a rank that fails
      because of it is data.no-space
  fix: df -h and df -i on that folder; stoker clean --cache shows what caches take
  fix: another folder: --runs-dir DIR, or $STOKER_RUNS
launch.system: The operating system refused Stoker something after the start.
  seen: an OSError in the launcher itself
  fix: descriptors, processes and disk: ulimit -n, ulimit -u, df -h
launch.not-started: A rank's process could not be started.
  seen: the agent's spawn failed: no such program, not executable, no processes or descriptors left
  unless: it started and ended at once: then its end is the cause
  fix: check that the program exists and is executable, and the limits of open files and processes (ulimit -n, -u)
launch.killed, again: The launcher is gone and left no verdict.
  seen: no verdict.json, and the launcher's process is gone: SIGKILL, or the machine went down
  unless: its process lives on another host
  fix: the agent stopped the ranks when the launcher ended; start the same command again
role.not-ready: A role was started and did not become ready.
  seen: its ready rule (port, http, file, line, mark) was not met within its timeout
  unless: it ended before: then its end is the cause
  fix: its last lines are in the evidence; `stoker logs RUN --role NAME` has the rest
  fix: a large model loads for longer: ready: timeout: 30m in the roles file
role.unhealthy, again: A role that was ready no longer answers.
  seen: its process lives, and its ready rule (port, http) failed three times in a row
  unless: it ended: then its end is the cause
  fix: `stoker logs RUN --role NAME`; restart: always in the roles file replaces it
role.ended: A server ended with exit code 0 while another role still needed it.
  seen: its ready rule is a port or an HTTP path, it ended by itself, and a role that waits for it failed afterwards: it
      lost its connection, or its rewards were no longer useful
  unless: its clients continued without it: they may have told it to end
  fix: its last lines are in the evidence; restart: always in the roles file starts it again
role.restart-loop: A role was started again and again, and failed every time.
  seen: the same cause five times within ten minutes
  fix: its cause is in the evidence; start the role alone with `stoker run` to look at it
gpu.too-few: Fewer GPUs exist, or are free, than were requested.
  seen: before the start: the plan needs more than the machine has
  unless: enough exist, but are in use: gpu.busy
  fix: fewer ranks (--nproc-per-node), or --share-gpus; is CUDA_VISIBLE_DEVICES hiding some?
gpu.legal: The job can't run with that number of ranks.
  seen: before the start: --legal-ranks does not hold the number of GPUs that are usable
  fix: --nproc-per-node with one of them
host.agent-lost: The connection to a host's agent was lost while its ranks ran.
  seen: end-of-file on its connection, or no sign of life for 8 s
  unless: a rank ended first: then that is the cause
  fix: was it killed? look at dmesg on that host
  fix: a host that went down or a cable that was cut looks the same: ping it
host.lost: A host of a multi-host run was lost while its ranks ran.
  seen: no sign of life of its agent for 8 s (power, cable, a frozen machine), or the end of its connection (agent or
      sshd killed)
  unless: a rank failed by itself before that: then that is the cause. Ranks that lost their connection to it
      failed because of it
  fix: is it up, and is its cable in? ping it; dmesg there shows whether the agent was killed
  fix: --min-hosts K continues without lost hosts, from the last checkpoint, and takes them back when they return
unknown: The job ended without a cause that can be seen.
  seen: no rank failed by itself, and not all ended with exit code 0
  unless: any evidence for another cause
  fix: stoker logs --rank N, for each rank
  fix: dmesg, for what the kernel did
""")


def stopped(evidence: Evidence, known: str = "", seen: tuple[str, ...] = (), fix: tuple[str, ...] = ()) -> Verdict:
    """`known`: what was wrong by then, with evidence and fix. More time to save would not have helped."""
    name = signal.Signals(evidence.stop_signal).name
    late = [] if evidence.stop_now else [end for end in evidence.ends if _ran_out_of_time(end, evidence.stopped_at)]
    if late:
        ranks = ", ".join(str(end.rank) for end in late[:8])
        how = f"; rank {ranks} did not end within the grace period and {'was' if len(late) == 1 else 'were'} killed"
        fix = fix or (() if known else ("--grace 5m gives ranks longer to save and end",))
    elif evidence.stop_now:
        how = "; the ranks were killed at once"
    elif evidence.saved:
        how = " gracefully"
    elif evidence.ends and all(end.code is not None and end.code < 0 for end in evidence.ends):
        how = "; the ranks have no handler for it and ended without saving"
    else:
        how = "; the ranks ended on their own"
    ends = [f"rank {end.rank} {_ended(end.code)}" for end in evidence.ends[:8]]
    fix = (*fix, *outlive_terminal(evidence.stop_signal))
    summary = f"stopped by {name}{how}; {_kept(evidence)}" + (f". Before the stop: {known}" if known else "")
    return Verdict(
        "stopped",
        "launch.stopped",
        summary,
        128 + evidence.stop_signal,
        evidence=(f"the launcher received {name}", *ends, *seen),
        retryable=False,
        fix=fix,
    )


def outlive_terminal(stop_signal: int) -> tuple[str, ...]:
    """Return the advice for a run that was stopped because its terminal or connection was closed."""
    if stop_signal != signal.SIGHUP:
        return ()
    return ("its terminal was closed: start with --detach, or type `stoker detach` while it runs, and it continues",)


def _ended(code: int | None) -> str:
    if code is None:
        return "was still running"
    return f"ended with exit code {code}" if code >= 0 else f"was ended by {signal_name(-code)}"


def _kept(evidence: Evidence) -> str:
    """What survives a stop, as far as it can be seen from here."""
    newest = evidence.checkpoint
    if evidence.saved:
        return f"saved: {_short(newest.path)}" if newest else "a checkpoint was saved"
    if newest is not None:
        older = f"{format_duration(max(evidence.stopped_at - newest.time, 0.0))} older"
        return f"nothing was saved at the stop, the newest checkpoint is {_short(newest.path)}, {older}"
    return "no checkpoint was seen in the run's checkpoints/"


def _short(path: str) -> str:
    """From checkpoints/ on."""
    return "/".join(path.rsplit("/", 2)[1:])


def _ran_out_of_time(end: RankExit, stopped_at: float) -> bool:
    """Killed by SIGKILL, or late by a second SIGTERM, as a rank with a handler may be; without one it ends at once."""
    return end.ours and (
        end.code == -signal.SIGKILL or (end.code == -signal.SIGTERM and end.time - stopped_at > AT_ONCE_S)
    )


def trouble(evidence: Evidence) -> Verdict:
    """Stoker stopped the job itself, for a reason it knows."""
    first = evidence.trouble[0]
    end = next((end for end in evidence.ends if end.rank == first.get("rank")), None)
    return Verdict(
        "failed",
        first["cause"],
        first["summary"],
        int(first.get("exit_code", EX_SOFTWARE)),
        rank=first.get("rank"),
        host=(end.host or None) if end else first.get("host"),
        gpu=end.label if end and "GPU" in end.label else None,
        evidence=tuple(first.get("evidence", ())),
        retryable=bool(first.get("retryable", False)),
        fix=tuple(first.get("fix", ())),
    )


def unknown(evidence: Evidence) -> Verdict:
    ends = [f"rank {end.rank} {_ended(end.code)}" for end in evidence.ends]
    missing = evidence.world_size - len([end for end in evidence.ends if end.code is not None])
    untold = f"{missing} of {evidence.world_size} ranks have no end on record"
    line = f"the job ended without a cause that can be seen; {untold}"
    return Verdict("failed", "unknown", line, EX_SOFTWARE, evidence=tuple(ends), fix=CATALOGUE["unknown"].fix)


def lost(run: str, saved: str = "", host: str = "") -> Verdict:
    """The launcher is gone and left no verdict. `saved`: the newest checkpoint, or their folder on that host."""
    kept = f"the newest checkpoint is {_short(saved)}" if saved else "there is no checkpoint in the run's checkpoints/"
    if host:
        kept = f"the checkpoints are on host {host}, in {saved}"
    return Verdict(
        "lost",
        "launch.killed",
        "the launcher ended without a verdict: it was killed (SIGKILL), or the machine went down",
        137,
        run=run,
        evidence=("no verdict.json, and the launcher's process is gone", kept),
        retryable=True,
        fix=CATALOGUE["launch.killed"].fix,
    )


def over_ram_limit(rank: int, label: str, taken: int, limit: int, workers: int, where: str) -> dict[str, Any]:
    """`workers`: data-loader workers of the rank. `where`: the line at which it was suspected to be stuck; may be empty."""
    from stoker.control.verdict.rules.memory import FEWER_WORKERS

    seen = f"; last seen at {where}" if where else ""
    summary = (
        f"{rank_name(rank, label)} took {format_bytes(taken)} of memory, past --ram-limit {format_bytes(limit)}{seen}"
    )
    fix = [line for line in CATALOGUE["oom.ram-limit"].fix if workers or line != FEWER_WORKERS]
    evidence = [f"resident memory {taken} bytes, limit {limit}"]
    return report("oom.ram-limit", summary, evidence, rank=rank, at_once=True, fix=fix)


def agent_lost(host: str, why: str, complaint: str) -> dict[str, Any]:
    where = f"host {host}" if host else "this machine"
    summary = f"the agent on {where} was lost: {why}; its ranks are stopped"
    return report("host.agent-lost", summary, [complaint] if complaint else [], host=host)


def host_lost(host: str, why: str, complaint: str) -> dict[str, Any]:
    summary = f"host {host} is lost: {why.removeprefix('it ended: ')}"
    return report("host.lost", summary, [complaint] if complaint and complaint not in why else [], host=host)


def of_role(cause: str, summary: str, evidence: Sequence[str] = ()) -> Verdict:
    """Of a role that a job watches from outside."""
    known = CATALOGUE[cause]
    return Verdict(
        "failed", cause, summary, EX_SOFTWARE, evidence=tuple(evidence), retryable=known.retryable, fix=known.fix
    )


def regrouped(host: str) -> Verdict:
    line = f"ended after a checkpoint so that host {host} can join"
    return Verdict("failed", "launch.regroup", line, EX_SOFTWARE, retryable=True)


def not_started(rank: int, why: str) -> dict[str, Any]:
    return report("launch.not-started", f"rank {rank} could not be started: {why}", [], rank=rank, exit_code=EX_OSERR)


def refused(refusal: Refusal) -> Verdict:
    fix = (refusal.fix,) if refusal.fix else ()
    return Verdict("refused", refusal.cause, refusal.line.splitlines()[0], refusal.code, fix=fix)


def broken(cause: str, line: str, code: int) -> Verdict:
    """Stoker itself could not go on after the start."""
    return Verdict("failed", cause, line, code)
