"""rank.*: what one rank did wrong by itself. The last family asked: it takes whatever the others did not."""

from __future__ import annotations

import re
import signal
from typing import Any

from stoker.contract.errors import EX_CONFIG, EX_DATAERR, EX_NOINPUT, EX_NOPERM, EX_USAGE
from stoker.contract.evidence import RankExit
from stoker.contract.stack_traces import is_library, parse_stacks
from stoker.contract.units import plural
from stoker.control.verdict.catalogue import Case, CauseMatch, Family
from stoker.control.verdict.echo import is_consequence
from stoker.control.verdict.exit_text import first_line, last_lines, place, signal_name
from stoker.control.verdict.rules.memory import memory_trend

ORDER = 99

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
# Of the program itself.
_DETERMINISTIC = ("NameError", "UnboundLocalError", "AttributeError", "TypeError", "NotImplementedError",
                  "RecursionError")  # fmt: skip
_LOGS = "stoker logs --rank {rank}"
_REFUSED = (EX_USAGE, EX_DATAERR, EX_NOINPUT, EX_NOPERM, EX_CONFIG)  # the same when it is tried again
_WORLD_SIZE = re.compile(r"(?i)world[ _]?size|num(?:ber)?[ _](?:of[ _])?(?:ranks|gpus|processes)")
family = Family(__name__, LOGS=_LOGS)


@family.cause("""
rank.breakpoint: A rank reached a breakpoint() and has no terminal.
  seen: BdbQuit left the script: a debugger found the end of its input
  fix: remove it from {place}, or debug with one rank: stoker run --nproc-per-node 1
  fix: only rank 0 has the terminal: `if rank == 0: breakpoint()`
""")
def breakpoint_(case: Case) -> CauseMatch | None:
    error = case.end.error
    if error is None or error.type != "BdbQuit":
        return None
    summary = f"{case.who}: breakpoint() at {place(case.end)}, in a rank without a terminal"
    return CauseMatch(summary, (f"BdbQuit at {place(case.end)}",))


@family.cause("""
rank.exception, again: The script raised an exception and did not catch it.
  seen: an exception left the script; the shim reported its type, place and time
  unless: the exception is a consequence of a peer's end (connection reset, collective timeout): then the peer is the cause
  fix: look at {place}
  fix: {LOGS}
""")
def exception(case: Case) -> CauseMatch | None:
    error = case.end.error
    if error is None:
        return None
    said = first_line(error.message)
    trace = error.traceback.strip().splitlines()
    checks_ranks = error.type == "AssertionError" and _WORLD_SIZE.search("\n".join(trace[-3:]))
    ranks = (
        f"this run has {plural(case.evidence.world_size, 'rank')}; --nproc-per-node sets how many there are per host"
    )
    return CauseMatch(
        f"{case.who}: {error.type}{': ' + said if said else ''} at {place(case.end)}",
        (f"exception {error.type} at {place(case.end)}", *trace[-12:]),
        (ranks, f"look at {place(case.end)}") if checks_ranks else (),
        retryable=False if error.type in _DETERMINISTIC and error.module == "builtins" else None,
    )


@family.cause("""
rank.early-exit, again: A rank exited with code 0 before the others were done.
  seen: a rank ended with exit code 0 while the others were still working, and they lost it or still wait for it
      Also where torch's threads abort its process after its script has returned
  unless: every rank ends with exit code 0 and no other rank waits for it
  fix: look for sys.exit(), os._exit(0) or a loop that is shorter on this rank (unequal number of batches)
  fix: did it make as many steps as the others? then it skipped a collective that they wait in: look for one under an
      `if rank` or a condition on data
  fix: {LOGS}
""")
def left_early(case: Case) -> CauseMatch | None:
    end = case.end
    if end.code != 0 and not (_aborted_after_script(end) and _others_needed(case)):
        return None
    after = f" after step {end.steps}" if end.steps else ""
    others = [other for other in case.evidence.ends if other.rank != end.rank and other.code != 0]
    heard = [
        f"rank {other.rank}: {other.error.type}: {first_line(other.error.message)}" for other in others if other.error
    ]
    script, how = end.script_end, f"ended with exit code {end.code}"
    if script is not None:
        how = "returned from its script" if script.how == "return" else f"called sys.exit({script.status})"
    where = f" at {script.place}" if script is not None and script.place else ""
    summary = f"{case.who} {how}{where}{after} while the others were still working"
    seen = f"rank {end.rank} ended with exit code {end.code}"
    if end.code:
        seen = f"rank {end.rank}'s process was aborted after that, by a thread of a library ({signal_name(-end.code)})"
    look = (f"look at {script.place}", f"stoker logs --rank {end.rank}") if script is not None and where else ()
    return CauseMatch(summary, (seen, *heard[:4]), look)


def _aborted_after_script(end: RankExit) -> bool:
    return end.code == -signal.SIGABRT and end.script_end is not None


def _others_needed(case: Case) -> bool:
    """Did other ranks lose this one, or have steps to make when it ended? Those that had made as many were shutting down."""
    end = case.end
    others = [other for other in case.evidence.ends if other.rank != end.rank and other.script_end is None]
    stopped = [other for other in others if other.ours or other.code is None]
    return any(map(is_consequence, others)) or any(not end.steps or other.steps < end.steps for other in stopped)


def _ended_by(case: Case) -> tuple[int, str, tuple[str, ...]]:
    code = case.end.code
    number = -code if code is not None and code < 0 else 0
    name = signal_name(number) if number else ""
    seen = (f"wait status: killed by {name}",) + ((f"it had reached step {case.end.steps}",) if case.end.steps else ())
    return number, name, seen


@family.cause("""
rank.killed, again: A rank was killed with SIGKILL from outside.
  seen: SIGKILL that Stoker did not send, no out-of-memory kill counted in the cgroup or written in the kernel's log
  unless: the cgroup's oom_kill counter rose, or the kernel's log names the pid: oom.host
  fix: an admin, a script or the OOM killer sent it; this host's log can't be read from here: look at dmesg there
""")
def killed(case: Case) -> CauseMatch | None:
    number, _, seen = _ended_by(case)
    if number != signal.SIGKILL:
        return None
    around = case.end.around
    # In a container the kernel's log has the host's pids: such a line is a hint, not a proof that it was this rank.
    hints = [f"kernel: {line}" for line in around.kernel if "emory" in line or "oom" in line][-2:]
    summary = f"{case.who} was killed with SIGKILL from outside"
    return CauseMatch(summary, (*seen, "no out-of-memory kill of this rank could be seen", *memory_trend(around), *hints))


@family.cause("""
rank.crash, again: Native code crashed the rank.
  seen: SIGSEGV, SIGBUS, SIGABRT, SIGFPE or SIGILL that no process sent; faulthandler's stack is in rank-N.stack.txt
  unless: the abort is NCCL's watchdog answering a lost peer; a bus error with a full /dev/shm: data.shm
  fix: the Python stack is in the record: rank-{rank}.stack.txt
  fix: without a line of Python in it, the script had already ended: is it a sys.exit() that nobody meant? else call
      torch.distributed.destroy_process_group() at its end
  fix: {LOGS}
""")
def crash(case: Case) -> CauseMatch | None:
    number, name, seen = _ended_by(case)
    if number not in CRASHES:
        return None
    if _aborted_after_script(case.end):
        return _aborted_when_done(case, name, seen)
    if parse_stacks(case.end.stack) and not any(thread["frames"] for thread in parse_stacks(case.end.stack)):
        return _crashed_while_ending(case, name, seen)
    where, frames = _crashed_at(case.end.stack)
    lines = [f'  File "{file}", line {line}, in {function}' for function, file, line in frames[:20]]
    look = (f"look at {where[3:]}",) if where.startswith("at ") else ()
    kept = (f"the Python stack is in the record: rank-{case.end.rank}.stack.txt",) if case.end.stack else ()
    summary = f"{case.who} died of {name}{f' {where}' if where else ''}"
    return CauseMatch(summary, (*seen, *lines), (*look, *kept, f"stoker logs --rank {case.end.rank}"))


def _crashed_while_ending(case: Case, name: str, seen: tuple[str, ...]) -> CauseMatch:
    """No thread had Python code left to run: the script was over, and a library's threads were not. gloo's are the
    usual ones (`terminate called without an active exception`), where no destroy_process_group() ended them.
    """
    after = f" after step {case.end.steps}" if case.end.steps else ""
    printed = tuple(f"it printed: {line}" for line in case.end.tail.splitlines() if "terminate called" in line)[-1:]
    return CauseMatch(
        f"{case.who} died of {name} while its process was ending: its script had already ended{after}",
        (*seen, "no thread of it was running Python code", *printed),
        (
            "if it should not have ended yet: look for sys.exit() or a loop that is shorter on this rank"
            " (unequal number of batches)",
            "if it was done: call torch.distributed.destroy_process_group() at the end of the script",
            f"stoker logs --rank {case.end.rank}",
        ),
    )


def _aborted_when_done(case: Case, name: str, seen: tuple[str, ...]) -> CauseMatch:
    """Nobody waits for this rank: a thread of a library aborted a process whose script had returned."""
    script = case.end.script_end
    assert script is not None
    how = "had returned" if script.how == "return" else f"had called sys.exit({script.status}) at {script.place}"
    after = f" after step {case.end.steps}" if case.end.steps else ""
    ends = case.evidence.ends
    all_done = len(ends) == case.evidence.world_size and all(
        end.code == 0 or _aborted_after_script(end) for end in ends
    )
    printed = tuple(f"it printed: {line}" for line in case.end.tail.splitlines() if "terminate called" in line)[-1:]
    work = ("the scripts of all ranks had ended: the work is complete",) if all_done else ()
    return CauseMatch(
        f"{case.who}: its script {how}{after}, then its process died of {name} while it was shutting down",
        (*seen, *work, *printed),
        (
            "call torch.distributed.destroy_process_group() at the end of the script: threads of torch that still run"
            " then can abort the process",
            f"stoker logs --rank {case.end.rank}",
        ),
        retryable=False if all_done else None,
    )


def _crashed_at(stack: str) -> tuple[str, list[list[Any]]]:
    """Where the thread was that crashed, the script's own line and the library's: `at x.py:3, in work (in string_at,
    ctypes/__init__.py:519)`.
    And its frames. faulthandler calls it the current one; other threads come before and after it."""
    threads = parse_stacks(stack)
    crashed: list[list[Any]] = next((thread["frames"] for thread in threads if thread["current"]), [])
    if not crashed:
        main: list[list[Any]] = next((thread["frames"] for thread in threads if thread["main"]), [])
        place = _own_and_innermost(main)
        return (f"in a thread without Python code; the main thread was {place}", main) if place else ("", [])
    return _own_and_innermost(crashed), crashed


def _own_and_innermost(frames: list[list[Any]]) -> str:
    own = next((frame for frame in frames if not is_library(frame[1])), None)
    if own is None:
        return f"in {frames[0][0]} ({frames[0][1]}:{frames[0][2]})" if frames else ""
    inside = f" (in {frames[0][0]}, {frames[0][1]}:{frames[0][2]})" if own is not frames[0] else ""
    return f"at {own[1]}:{own[2]}, in {own[0]}{inside}"


@family.cause("""
rank.signal, again: A signal from outside ended one rank.
  seen: a signal that Stoker did not send ended the rank
  unless: the launcher passed it on: launch.stopped
  fix: {LOGS}
""")
def signalled(case: Case) -> CauseMatch | None:
    number, name, seen = _ended_by(case)
    return CauseMatch(f"{case.who} died of {name}", seen) if number else None


@family.cause("""
rank.exit, again: The script ended itself with an exit code.
  seen: an exit code other than 0 and no exception
  unless: an exception was reported: rank.exception
  fix: {LOGS}
""")
def ended(case: Case) -> CauseMatch | None:
    seen = (f"exit code {case.end.code}, no exception", *last_lines(case.end))
    last = next((line for line in reversed(case.end.tail.splitlines()) if line.strip()), "")
    # A recipe of ours: one line, and a code that says of which kind.
    if case.end.code in _REFUSED and last.startswith("stoker: "):
        return CauseMatch(f"{case.who} refused: {last.removeprefix('stoker: ')}", seen, retryable=False)
    script = case.end.script_end
    if script is not None and script.place:
        why = f" ({first_line(last.partition(': ')[2])})" if ": error: " in last else ""  # argparse's last line
        summary = f"{case.who} ended with exit code {case.end.code}: sys.exit() was called at {script.place}{why}"
        return CauseMatch(summary, seen, (f"look at {script.place}",))
    return CauseMatch(f"{case.who} ended with exit code {case.end.code}", seen)
