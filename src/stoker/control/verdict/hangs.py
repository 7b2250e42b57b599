"""Causes of ranks that are alive but make no progress: hang.*, rank.busy, and gloo.* and nccl.* in which ranks diverged."""

from __future__ import annotations

import re
from typing import Any

from stoker.contract.evidence import Stall
from stoker.contract.stack_traces import is_library
from stoker.contract.units import format_duration, format_ranks, plural, rank_name
from stoker.control.verdict.catalogue import Family, get_cause, make_report

_SILENT = "no finished step for longer than max(3 s, 5 × the p99 of its steps); "
_STACKS = "stacks of all ranks and their workers: attempt-N/stacks.txt in the run directory"
family = Family(__name__, always=_STACKS, SILENT=_SILENT)
family.entries("""
hang.stopped, again: A rank's process is stopped.
  seen: /proc reports state T. The job is only stopped for it when --hang-timeout is over
  unless: it was continued in the meantime, or the whole run is suspended (Ctrl-Z)
  fix: kill -STOP, a debugger, or a shell that put it in the background has stopped it; kill -CONT PID continues it
hang.debugged: A debugger or tracer holds a rank's process.
  seen: /proc reports state t
  unless: state T: hang.stopped
  fix: the run waits as long as the debugger holds the process: continue it there, or detach
hang.sleep, again: A rank is sleeping while the others wait for it.
  seen: {SILENT}its main thread is in nanosleep and has not entered the collective that the others wait in
  unless: it beats, prints or reports a phase: then it makes progress
  fix: look at {where}
hang.lock, again: A rank is waiting for a lock or another of its threads.
  seen: {SILENT}its main thread is in futex, outside of any collective. The thread that holds the lock is inferred from the
      source around the lines of all threads; it is certain if py-spy shows that it is the same object
  unless: it is in a collective like the others
  fix: look at {where}: which thread holds the lock? a common reason is a fork while a thread held it
hang.io, again: A rank is waiting for a file, a pipe or a socket.
  seen: {SILENT}its main thread is in read, poll, recv, connect, flock or the like. /proc shows the file, the lock or the
      peer's address, and the processes of this host that hold the lock or have the other end open
  unless: bytes move: then it is slow, not stuck
  fix: look at {where}: which file or peer does it read from, and which process should write?
hang.child, again: A rank is waiting for a process it started.
  seen: {SILENT}its main thread is in wait4 and one of its children is alive; or it reads a pipe that only its children
      write to. /proc shows the child and what that is waiting for
  unless: the child reads, writes, touches new memory, prints, or its stack changes: then it is slow, not stuck (rank.busy)
  fix: look at {where}: give the call a timeout
hang.gil, again: Native code holds the GIL and does not return.
  seen: {SILENT}its main thread holds the GIL in every sample and is not running
  unless: another thread holds the GIL in one of the samples
  fix: look at {where}: the native call there must release the GIL, or return
hang.spin, again: A rank computes and never finishes.
  seen: {SILENT}its main thread uses a core, on the same line with the same local variables in every sample, and enters no
      collective. If no rank is waiting for it, it is reported after 10 s
  unless: it beats, prints, reads or writes files, touches new memory, or its stack or variables change: then it is
      a long computation (rank.busy)
  fix: look at {where}: is it an endless loop? before an evaluation, call stoker.phase("eval")
hang.worker, again: A rank is waiting for a data-loader worker that is stuck.
  seen: {SILENT}its main thread waits in the DataLoader, and a worker is stopped or inside the data set's own code
  unless: the workers are waiting for work themselves: then the rank requests none
  fix: look at {where}, in the data set; DataLoader(timeout=60) raises an exception instead of waiting forever
hang.disk: A rank is in uninterruptible sleep.
  seen: {SILENT}/proc reports state D in both inspections
  unless: the state changes: then the disk is slow, but responding
  fix: a network file system, a disk or a driver is not responding: see dmesg. Such a process can't be killed, and its GPU
      stays in use until it ends
hang.gpu-kernel, again: A GPU kernel does not finish.
  seen: {SILENT}its main thread waits for the GPU, which is at 100 %, and it is in no collective
  unless: the other ranks have not entered its collective: then they are late, and the kernel is NCCL's
  fix: look at {where}, and at the kernels launched before it (launches are asynchronous): --debug-retry makes them
      blocking
hang.place, again: A rank makes no progress for an unknown reason.
  seen: {SILENT}none of the known ways of waiting
  unless: any of them
  fix: look at {where}
hang.op-mismatch: Ranks have entered different operations.
  seen: the flight recorder shows different operations under the same number of the same group. The rank that differs
      from most others is blamed; in a tie, the one that left the earlier order of operations; if there is no
      such order, both are reported and none is blamed
  unless: the operation is done on some rank: then they do match
  fix: look at {where}: every rank of a group must make the same calls in the same order
hang.shape-mismatch: Ranks have entered the same operation with different shapes.
  seen: the flight recorder shows an all_reduce or broadcast of different sizes under the same number, at the same line; gloo
      may have ended a rank for it (SIGABRT)
  unless: operations whose sizes may differ (gather, all_to_all); another line: gloo.diverged
  fix: look at {where}: the tensors must have one shape and dtype on all ranks; is a last batch shorter here?
hang.rank-only: Only some ranks have entered a collective: the call depends on the rank.
  seen: the stacks and the source: the line is inside a condition like `if rank == 0:`, or after `if rank != 0: return`, and
      the ranks it waits for are in no branch of it: they are in another collective, or have ended
  unless: the others are in the other branch: hang.op-mismatch; they are in no collective: then they are late
  fix: look at {where}: all ranks must make this call: move it out of the condition, and keep only the writing of files in it
  fix: saving a sharded model gathers it from all ranks (state_dict(), full_tensor(), save_model(), save_pretrained()): call
      it on every rank, and write the file on one
hang.together, again: All ranks have entered the same operation and it does not finish.
  seen: the flight recorder shows the same number, operation and shape on every rank; without one, the same stack on every
      rank. Also ranks that are all still connecting in init_process_group
  unless: one of them has not entered it
  fix: check the connection between the ranks: `stoker doctor` (it also finds a name server that is not responding), and one
      run with NCCL_DEBUG=INFO; with several hosts: firewall, interface names, MTU
""")
family.entries("""
rank.busy: A rank is working, but did not finish a step in time.
  seen: no finished step for longer than --busy-timeout, or than the process-group timeout of the ranks that wait for it, and evidence
      of work to the end: it printed, read or wrote files, touched new memory, entered other collectives, its stack or
      its local variables changed while it used CPU, or that is true of the processes and threads it waits for
  unless: none of that was seen for --hang-timeout: hang.*
  fix: a long evaluation, download or preparation at {where}: raise --busy-timeout, or call stoker.phase("eval") before it;
      if torch's timeout ended the waiting ranks, raise the timeout of init_process_group
  fix: an endless loop at {where}: stacks.txt has the lines it was seen at
""")
_DIVERGED = """
{backend}.unequal-batches: A rank had fewer batches than the others and left the loop.
  seen: the flight recorder shows another operation under the same number; the others are in a backward pass, this rank is
      not
  unless: all are in a backward pass: then the model's paths differ
  fix: give every rank the same number of batches: DistributedSampler(drop_last=True), or DDP's join()
  fix: look at {where}
{backend}.diverged: Ranks are on different paths: each waits in a call the others have not made.
  seen: the flight recorder shows ranks that wait for each other in different groups, or in calls of different sizes at
      different lines, or in sends and receives that don't pair. The rank that left the path of most ranks is
      blamed; in a tie, the one that left the order of earlier steps
  unless: one of them waits for no other rank: then that one is late
  fix: look at {where}: a branch that depends on the rank, or on data that differs, must not contain a collective
  fix: seeds and data order must be equal where control flow depends on them
"""
for _backend in ("gloo", "nccl"):
    family.entries(_DIVERGED.replace("{backend}", _backend))
# Keyed by Stall.waits_for. This advice replaces the cause's, which has to cover every way of waiting.
_ADVICE_BY_WAIT = {
    "lock-order": "look at {where}: threads that need the same locks must take them in the same order",
    "own-lock": "look at {where}: one thread can't take a threading.Lock twice: use threading.RLock, or take it once",
    "held-lock": "look at {where}: the thread that holds the lock must release it before it waits for anything",
    "event": "look at {where}: which thread or process should finish, set or put what this call waits for, and what is it doing?",
    "coroutine": "look at {where}: what should finish what is awaited there? asyncio.wait_for() makes it fail instead",
    "file-lock": "look at {where}: the holder must release the lock or end; to fail instead, lock with LOCK_NB and a time limit",
    "fifo": "look at {where}: open and serve the other end of the named pipe, or open it with O_NONBLOCK",
    "pipe": "look at {where}: the other end of the pipe must be read, written or closed",
    "socket": "look at {where}: check the peer, and give the socket a timeout (settimeout) so that this call fails instead",
    "child-input": "look at {where}: close the child's standard input before waiting, or use communicate()",
    "child-at-exit": "look at {where}: end the process before the script ends (terminate()), or start it with daemon=True",
    "child-output": "look at {where}: read the child's output before waiting (communicate()), and give the call a timeout",
}
_CAUSES_BY_KIND = {"busy": "rank.busy", "kernel": "hang.gpu-kernel", "left": "rank.early-exit"}


def cause_of(stall: Stall) -> str:
    if stall.kind in ("unequal", "diverged"):
        backend = stall.backend if stall.backend in ("gloo", "nccl") else "gloo"
        return f"{backend}.{'unequal-batches' if stall.kind == 'unequal' else 'diverged'}"
    return _CAUSES_BY_KIND.get(stall.kind, f"hang.{stall.kind}")


def summarize_stall(stall: Stall, label: str) -> str:
    """Return one line about a stall. `label` is the device of the blamed rank.

    Example: "rank 1 (CPU 1) has made no progress since step 20: it is sleeping at train.py:31; 3 ranks are waiting for it".
    """
    after_step = f" after step {stall.step}" if stall.step else " before the first step"
    if stall.parties:
        return _summarize_parties(stall, label, after_step)
    if stall.rank is None:
        where = f" ({stall.where})" if stall.where else ""
        return f"no rank has made progress for {stall.silent_s:.0f} s: {stall.detail}{where}"
    ranks, have = _name_blamed_ranks(stall, label), "has" if len(stall.ranks) < 2 else "have"
    if stall.kind == "spin" and not stall.waiting:
        at = f" at {stall.where}" if stall.where else ""
        return f"{ranks} {have} not finished a step for {stall.silent_s:.0f} s{after_step}: {stall.detail}{at}"
    at = f" at {stall.where}" if stall.where and stall.where not in stall.detail else ""
    others = ""
    if stall.waiting:
        count = len(stall.waiting)
        waiting = f"rank {stall.waiting[0]} is" if count == 1 else f"{plural(count, 'rank')} are"
        inside = f" in {stall.operation}" if stall.operation else ""
        others = f"; {waiting} waiting for it{inside}"
    if stall.kind == "rank-only":
        inside = f", inside `{stall.detail}`" if stall.detail else ""
        missing = f"; {format_ranks(stall.waiting)} did not enter it"
        return f"{ranks} entered a collective alone{after_step}{inside}: {stall.operation}{at}{missing}"
    if stall.kind == "left":
        return f"{ranks} ended with exit code 0{after_step}{others}{at}"
    if stall.kind == "busy":
        duration = format_duration(stall.silent_s)
        return f"{ranks} {have} been busy for {duration} without finishing a step: {stall.detail}{at}{others}"
    since = f"made no progress since step {stall.step}" if stall.step else "not finished the first step"
    return f"{ranks} {have} {since}: {stall.detail}{at}{others}"


def _summarize_parties(stall: Stall, label: str, after_step: str) -> str:
    """Return one line about ranks in different calls.

    Example: "rank 1 (CPU 1) diverged from ranks 0, 2-3 after step 20: it entered gloo:barrier at train.py:31; …".
    """
    entries = []
    for ranks, entered, where in stall.parties[:4]:
        subject, verb = "it" if ranks == (stall.rank,) else format_ranks(ranks), "entered"
        if stall.rank is None and stall.detail == "messages":
            verb = "is waiting in" if len(ranks) == 1 else "are waiting in"
        entries.append(f"{subject} {verb} {entered}{f' at {where}' if where else ''}")
    more = f"; and {len(stall.parties) - 4} more calls" if len(stall.parties) > 4 else ""
    calls = "; ".join(entries) + more
    if stall.rank is None:
        all_ranks = format_ranks(rank for ranks, _, _ in stall.parties for rank in ranks)
        if stall.detail == "messages":
            return f"{all_ranks} are waiting for each other{after_step}: {calls}"
        return f"{all_ranks} diverged{after_step}: {calls}; it is unknown which of them is wrong"
    others = format_ranks(stall.waiting)
    condition = f", inside `{stall.detail}`" if stall.detail else ""
    verb = "uses" if len(stall.ranks) < 2 else "use"
    difference = {
        "rank-only": f"entered a collective alone{after_step}{condition}",
        "unequal": f"left the training loop{after_step}, with fewer batches than {others}",
        "shape-mismatch": f"{verb} another {stall.detail or 'size'} than {others}{after_step}",
    }.get(stall.kind, f"diverged from {others}{after_step}")
    return f"{_name_blamed_ranks(stall, label)} {difference}: {calls}"


def _name_blamed_ranks(stall: Stall, label: str) -> str:
    return rank_name(stall.rank, label) + (f" and {len(stall.ranks) - 1} more" if len(stall.ranks) > 1 else "")


_THREAD_CRASH = re.compile(
    r"Exception in thread (?P<name>[^\n]{1,200}?):?\n(?P<trace>Traceback .*?\n)(?P<error>\w[^\n]*)", re.S
)


def _find_crashed_thread(printed: str) -> str:
    """Return which thread of the rank ended with which exception, from the traceback that Python printed for it, or ""."""
    crashes = list(_THREAD_CRASH.finditer(printed))
    if not crashes:
        return ""
    crash = crashes[-1]
    frames = re.findall(r'^ *File "([^"\n]+)", line (\d+), in (\S+)', crash["trace"], re.M)
    file, line, function = next((frame for frame in reversed(frames) if not is_library(frame[0])), ("", "", ""))
    where = f" at {file}:{line}, in {function}" if file else ""
    return f"its thread {crash['name']} ended with {crash['error'][:200]}{where}"


_MESSAGE = re.compile(r"\bi?(?:send|recv)\b")
_SAVES_SHARDS = re.compile(r"state_dict|full_tensor|save_model|save_pretrained")


def _choose_advice(stall: Stall) -> tuple[str, ...]:
    """Return the lines of advice that apply to this stall."""
    if stall.waits_for in _ADVICE_BY_WAIT:
        return (_ADVICE_BY_WAIT[stall.waits_for], _STACKS)
    advice = get_cause(cause_of(stall)).fix
    if stall.detail == "messages":
        order = "of two ranks one must send first and the other receive first"
        return (f"look at {{where}}: {order}; or use isend, irecv or batch_isend_irecv",)
    if stall.kind == "diverged" and any(_MESSAGE.search(entered) for _, entered, _ in stall.parties):
        pairs = "each send needs a receive on its peer, with the same group and tag and in the same order"
        return (f"look at {{where}}: {pairs}", _STACKS)
    if stall.kind == "shape-mismatch" and stall.detail == "dtype":
        dtype = "look at {where}: the tensors must have one dtype on all ranks"
        return (f"{dtype}; or the ranks are in different calls below it: does one leave its loop earlier?", _STACKS)
    if stall.kind == "rank-only" and not any(_SAVES_SHARDS.search(line) for line in stall.evidence):
        return tuple(line for line in advice if not line.startswith("saving a sharded model"))
    return advice


def make_stall_report(stall: Stall, label: str, why: str, printed: str = "") -> dict[str, Any]:
    """Return the report of a stall for which Stoker stops the job.

    `why` is the reason to stop it now. `printed` is the blamed rank's last output, which may show why a thread or worker died.
    """
    fields = {"rank": stall.rank, "at_once": True, "where": stall.where, "step": stall.step}
    missing = "a step" if stall.kind == "busy" else "progress"
    stopped = f"the job was stopped after {stall.silent_s:.1f} s without {missing}: {why}"
    shm_errors = [line for line in printed.splitlines() if "unable to allocate shared memory(shm)" in line]
    if shm_errors and stall.kind == "worker":
        rank = rank_name(stall.rank, label)
        text = f"{rank} is waiting for data that its workers could not put into /dev/shm: it is full"
        return make_report("data.shm", text, [shm_errors[0].strip()[:300], stopped, *stall.evidence], **fields)
    crashed_thread = _find_crashed_thread(printed) if stall.kind in ("lock", "place") else ""
    if crashed_thread:
        text = f"{summarize_stall(stall, label)}; before that {crashed_thread}"
        fix = [f"look at {stall.where}: it may be waiting for work of that thread"]
        return make_report(cause_of(stall), text, [stopped, *stall.evidence], fix=fix, **fields)
    # Name the lines of the other ranks, too: the call that the blamed rank skipped is where they wait.
    lines = dict.fromkeys(filter(None, (stall.where, *(where for _, _, where in stall.parties[:4]))))
    where = ", and at ".join(lines) or "the stacks"
    fix = [line.replace("{where}", where).replace("{rank}", str(stall.rank)) for line in _choose_advice(stall)]
    evidence = [stopped if stall.silent_s else why, *stall.evidence]
    return make_report(cause_of(stall), summarize_stall(stall, label), evidence, fix=fix, **fields)
