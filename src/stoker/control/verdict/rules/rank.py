"""Causes rank.*: a rank raised, crashed, was killed or exited. Tried last: they match every exit that no other rule explains."""

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
from stoker.control.verdict.exit_text import first_line, last_lines, location, signal_name
from stoker.control.verdict.rules.memory import describe_memory_trend

ORDER = 99

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
# These exceptions are mistakes in the program, which another attempt would repeat.
_DETERMINISTIC = ("NameError", "UnboundLocalError", "AttributeError", "TypeError", "NotImplementedError",
                  "RecursionError")  # fmt: skip
_LOGS = "stoker logs --rank {rank}"
_REFUSALS = (EX_USAGE, EX_DATAERR, EX_NOINPUT, EX_NOPERM, EX_CONFIG)  # another attempt would be refused, too
_WORLD_SIZE = re.compile(r"(?i)world[ _]?size|num(?:ber)?[ _](?:of[ _])?(?:ranks|gpus|processes)")
family = Family(__name__, LOGS=_LOGS)


@family.cause("""
rank.breakpoint: A rank reached a breakpoint() and has no terminal.
  seen: BdbQuit left the script: a debugger found the end of its input
  fix: remove it from {place}, or debug with one rank: stoker run --nproc-per-node 1
  fix: only rank 0 has the terminal: `if rank == 0: breakpoint()`
""")
def match_breakpoint(case: Case) -> CauseMatch | None:
    error = case.end.error
    if error is None or error.type != "BdbQuit":
        return None
    summary = f"{case.rank_name}: breakpoint() at {location(case.end)}, in a rank without a terminal"
    return CauseMatch(summary, (f"BdbQuit at {location(case.end)}",))


@family.cause("""
rank.exception, again: The script raised an exception and did not catch it.
  seen: an exception left the script; the shim reported its type, location and time
  unless: the exception is a consequence of a peer's exit (connection reset, collective timeout): then the peer is the cause
  fix: look at {place}
  fix: {LOGS}
""")
def match_exception(case: Case) -> CauseMatch | None:
    error = case.end.error
    if error is None:
        return None
    message, where = first_line(error.message), location(case.end)
    trace = error.traceback.strip().splitlines()
    fix: tuple[str, ...] = ()
    if error.type == "AssertionError" and _WORLD_SIZE.search("\n".join(trace[-3:])):
        world_size = plural(case.evidence.world_size, "rank")
        fix = (f"this run has {world_size}; --nproc-per-node sets the number of ranks per host", f"look at {where}")
    return CauseMatch(
        f"{case.rank_name}: {error.type}{': ' + message if message else ''} at {where}",
        (f"exception {error.type} at {where}", *trace[-12:]),
        fix,
        retryable=False if error.type in _DETERMINISTIC and error.module == "builtins" else None,
    )


@family.cause("""
rank.early-exit, again: A rank exited with code 0 before the others were done.
  seen: a rank ended with exit code 0 while the others were still working, and they lost it or are still waiting for it.
      Also if torch's threads abort its process after its script has returned
  unless: every rank ends with exit code 0 and no other rank waits for it
  fix: look for sys.exit(), os._exit(0) or a loop that is shorter on this rank (unequal number of batches)
  fix: did it make as many steps as the others? then it skipped a collective that they wait in: look for one under an
      `if rank` or a condition on data
  fix: {LOGS}
""")
def match_early_exit(case: Case) -> CauseMatch | None:
    end = case.end
    if end.code != 0 and not (_aborted_after_script(end) and _others_needed(case)):
        return None
    others = [other for other in case.evidence.ends if other.rank != end.rank and other.code != 0]
    errors = [
        f"rank {other.rank}: {other.error.type}: {first_line(other.error.message)}" for other in others if other.error
    ]
    script, ending = end.script_end, f"ended with exit code {end.code}"
    if script is not None:
        ending = "returned from its script" if script.how == "return" else f"called sys.exit({script.status})"
    where = f" at {script.place}" if script is not None and script.place else ""
    after = f" after step {end.steps}" if end.steps else ""
    summary = f"{case.rank_name} {ending}{where}{after} while the others were still working"
    exit_status = f"rank {end.rank} ended with exit code {end.code}"
    if end.code:
        name = signal_name(-end.code)
        exit_status = f"rank {end.rank}'s process was aborted after that, by a library's thread ({name})"
    fix = (f"look at {script.place}", f"stoker logs --rank {end.rank}") if script is not None and where else ()
    return CauseMatch(summary, (exit_status, *errors[:4]), fix)


def _aborted_after_script(end: RankExit) -> bool:
    return end.code == -signal.SIGABRT and end.script_end is not None


def _others_needed(case: Case) -> bool:
    """Return whether other ranks lost this one, or had fewer steps than this one when they were stopped.

    Ranks with as many steps were shutting down.
    """
    end = case.end
    others = [other for other in case.evidence.ends if other.rank != end.rank and other.script_end is None]
    stopped = [other for other in others if other.ours or other.code is None]
    return any(map(is_consequence, others)) or any(not end.steps or other.steps < end.steps for other in stopped)


def _signal_of(case: Case) -> tuple[int, str, tuple[str, ...]]:
    """Return (signal that ended the rank, or 0; its name; evidence)."""
    code = case.end.code
    number = -code if code is not None and code < 0 else 0
    name = signal_name(number) if number else ""
    steps = (f"it had reached step {case.end.steps}",) if case.end.steps else ()
    return number, name, (f"wait status: killed by {name}", *steps)


@family.cause("""
rank.killed, again: A rank was killed with SIGKILL from outside.
  seen: SIGKILL that Stoker did not send, and no out-of-memory kill in the cgroup's counter or the kernel's log
  unless: the cgroup's oom_kill counter rose, or the kernel's log names the pid: oom.host
  fix: an administrator, a script or the OOM killer sent it; Stoker can't read that host's kernel log: see dmesg there
""")
def match_killed(case: Case) -> CauseMatch | None:
    number, _, evidence = _signal_of(case)
    if number != signal.SIGKILL:
        return None
    context = case.context
    # In a container the kernel's log has the host's pids, so such a line is a hint and doesn't prove that it was this rank.
    hints = [f"kernel: {line}" for line in context.kernel if "emory" in line or "oom" in line][-2:]
    no_oom = "no out-of-memory kill of this rank was found"
    summary = f"{case.rank_name} was killed with SIGKILL from outside"
    return CauseMatch(summary, (*evidence, no_oom, *describe_memory_trend(context), *hints))


@family.cause("""
rank.crash, again: Native code crashed the rank.
  seen: SIGSEGV, SIGBUS, SIGABRT, SIGFPE or SIGILL that no process sent; faulthandler's stack is in rank-N.stack.txt
  unless: the abort is NCCL's watchdog reacting to a lost peer; a bus error with a full /dev/shm: data.shm
  fix: the Python stack is in the record: rank-{rank}.stack.txt
  fix: if it has no line of Python, the script had already ended: look for an unintended sys.exit(); else call
      torch.distributed.destroy_process_group() at its end
  fix: {LOGS}
""")
def match_crash(case: Case) -> CauseMatch | None:
    number, name, evidence = _signal_of(case)
    if number not in CRASHES:
        return None
    if _aborted_after_script(case.end):
        return _match_abort_after_script(case, name, evidence)
    if parse_stacks(case.end.stack) and not any(thread["frames"] for thread in parse_stacks(case.end.stack)):
        return _match_crash_at_end(case, name, evidence)
    where, frames = _find_crash_location(case.end.stack)
    lines = [f'  File "{file}", line {line}, in {function}' for function, file, line in frames[:20]]
    look_at = (f"look at {where[3:]}",) if where.startswith("at ") else ()
    stack = (f"the Python stack is in the record: rank-{case.end.rank}.stack.txt",) if case.end.stack else ()
    summary = f"{case.rank_name} died of {name}{f' {where}' if where else ''}"
    return CauseMatch(summary, (*evidence, *lines), (*look_at, *stack, f"stoker logs --rank {case.end.rank}"))


def _match_crash_at_end(case: Case, name: str, evidence: tuple[str, ...]) -> CauseMatch:
    """Return the match for a crash after the script had ended, in a thread of a library.

    It is usually a thread of gloo that runs because destroy_process_group() was not called, and the process prints
    `terminate called without an active exception`.
    """
    after = f" after step {case.end.steps}" if case.end.steps else ""
    return CauseMatch(
        f"{case.rank_name} died of {name} while its process was ending: its script had already ended{after}",
        (*evidence, "no thread was running Python code", *_find_terminate_lines(case)),
        (
            "if it should not have ended yet: look for sys.exit() or a loop that is shorter on this rank"
            " (unequal number of batches)",
            "if it was done: call torch.distributed.destroy_process_group() at the end of the script",
            f"stoker logs --rank {case.end.rank}",
        ),
    )


def _match_abort_after_script(case: Case, name: str, evidence: tuple[str, ...]) -> CauseMatch:
    """Return the match for a process that a library's thread aborted after its script had ended, while no rank needed it."""
    script = case.end.script_end
    assert script is not None
    ending = "had returned" if script.how == "return" else f"had called sys.exit({script.status}) at {script.place}"
    after = f" after step {case.end.steps}" if case.end.steps else ""
    ends = case.evidence.ends
    all_done = len(ends) == case.evidence.world_size and all(
        end.code == 0 or _aborted_after_script(end) for end in ends
    )
    complete = ("the scripts of all ranks had ended: the work is complete",) if all_done else ()
    return CauseMatch(
        f"{case.rank_name}: its script {ending}{after}, then its process died of {name} while it was shutting down",
        (*evidence, *complete, *_find_terminate_lines(case)),
        (
            "call torch.distributed.destroy_process_group() at the end of the script: torch's threads that are still"
            " running then can abort the process",
            f"stoker logs --rank {case.end.rank}",
        ),
        retryable=False if all_done else None,
    )


def _find_terminate_lines(case: Case) -> tuple[str, ...]:
    return tuple(f"it printed: {line}" for line in case.end.tail.splitlines() if "terminate called" in line)[-1:]


def _find_crash_location(stack: str) -> tuple[str, list[list[Any]]]:
    """Return (location, frames) of the crashed thread, from the stacks that faulthandler wrote.

    The location names the script's line and the library's: "at x.py:3, in work (in string_at, ctypes/__init__.py:519)".
    """
    threads = parse_stacks(stack)
    crashed: list[list[Any]] = next((thread["frames"] for thread in threads if thread["current"]), [])
    if not crashed:
        main: list[list[Any]] = next((thread["frames"] for thread in threads if thread["main"]), [])
        where = _describe_innermost(main)
        return (f"in a thread without Python code; the main thread was {where}", main) if where else ("", [])
    return _describe_innermost(crashed), crashed


def _describe_innermost(frames: list[list[Any]]) -> str:
    script = next((frame for frame in frames if not is_library(frame[1])), None)
    if script is None:
        return f"in {frames[0][0]} ({frames[0][1]}:{frames[0][2]})" if frames else ""
    inside = f" (in {frames[0][0]}, {frames[0][1]}:{frames[0][2]})" if script is not frames[0] else ""
    return f"at {script[1]}:{script[2]}, in {script[0]}{inside}"


@family.cause("""
rank.signal, again: A signal from outside ended one rank.
  seen: a signal that Stoker did not send ended the rank
  unless: the launcher passed it on: launch.stopped
  fix: {LOGS}
""")
def match_signal(case: Case) -> CauseMatch | None:
    number, name, evidence = _signal_of(case)
    return CauseMatch(f"{case.rank_name} died of {name}", evidence) if number else None


@family.cause("""
rank.exit, again: The script ended itself with an exit code.
  seen: an exit code other than 0 and no exception
  unless: an exception was reported: rank.exception
  fix: {LOGS}
""")
def match_exit(case: Case) -> CauseMatch | None:
    evidence = (f"exit code {case.end.code}, no exception", *last_lines(case.end))
    last = next((line for line in reversed(case.end.tail.splitlines()) if line.strip()), "")
    # Stoker's own recipes refuse with one line on stderr and an exit code of _REFUSALS.
    if case.end.code in _REFUSALS and last.startswith("stoker: "):
        refused = f"{case.rank_name} refused: {last.removeprefix('stoker: ')}"
        return CauseMatch(refused, evidence, retryable=False)
    summary = f"{case.rank_name} ended with exit code {case.end.code}"
    script = case.end.script_end
    if script is not None and script.place:
        message = f" ({first_line(last.partition(': ')[2])})" if ": error: " in last else ""  # argparse's last line
        summary = f"{summary}: sys.exit() was called at {script.place}{message}"
        return CauseMatch(summary, evidence, (f"look at {script.place}",))
    return CauseMatch(summary, evidence)
