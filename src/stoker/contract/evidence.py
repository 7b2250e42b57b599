"""Shapes that cross rooms and reach the disk: event, evidence of a rank's end, finding, verdict."""

from __future__ import annotations

from typing import Any

from stoker.contract.checkpoints import SavedCheckpoint
from stoker.contract.frozen import as_json, fields_of, frozen
from stoker.contract.typed_values import read_frozen

SCHEMA = 1


@frozen
class RankError:
    """What the shim wrote when an exception ended the script."""

    type: str
    message: str
    file: str = ""
    line: int = 0
    function: str = ""
    traceback: str = ""
    time_ns: int = 0
    import_name: str = ""  # the module an ImportError could not find
    module: str = ""  # where the exception's class lives
    files: tuple[str, ...] = ()  # that the code was reading when it failed, the innermost frame's first
    module_file: str = ""  # of an ImportError: the file that Python took for the module or its package
    collectives: tuple[dict[str, Any], ...] = ()  # where it was in its process groups (contract/flight_recorder.py)
    # found at exit, by a script that replaced the excepthook: only believed if the exit code is an exception's
    late: bool = False


@frozen
class ScriptEnd:
    """How a rank's script ended, as the shim saw it: its process may die after that, in a thread of a library."""

    how: str  # return | exit
    status: str = ""  # what sys.exit() was given
    file: str = ""  # of the line that called sys.exit()
    line: int = 0
    function: str = ""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}, in {self.function}" if self.file else ""


@frozen
class LastCall:
    """The call of torch.distributed that a rank was in when it ended."""

    name: str  # barrier
    where: str  # file:line, in function
    condition: str = ""  # the innermost condition on the rank around it: if rank == 0
    repeated: bool = False  # the same line had made a call before: it belongs to a loop


@frozen
class ExitContext:
    """What an agent sees when a rank ends badly: the keys of RankEnd.around, None where it could not be seen."""

    rss: tuple[tuple[float, int], ...] = ()  # (time, resident bytes) of the rank and its children, newest last
    host_available: int | None = None  # bytes
    host_total: int | None = None
    kernel: tuple[str, ...] = ()  # the kernel's log since its start: its pid, out-of-memory kills, Xids
    holders: tuple[dict[str, Any], ...] = ()  # processes on its GPU: pid, memory, command, user, run, ours
    gpu_total: int | None = None
    shm_free: int | None = None
    shm_total: int | None = None
    full_disks: tuple[
        tuple[str, int, int], ...
    ] = ()  # local file systems without room: (mount point, free, total bytes)
    loader_workers: int = 0  # data-loader workers of torch that the rank had at once
    address_limit: int | None = None  # RLIMIT_AS of the rank (`ulimit -v`), bytes; None: unlimited


@frozen
class RankExit:
    """How one rank ended, as its agent saw it. `code` is a wait status: negative for a signal."""

    rank: int
    host: str
    label: str
    pid: int
    code: int | None  # None: still running when the attempt was judged
    time: float
    ours: bool = False  # it got a signal from us before it ended
    error: RankError | None = None
    tail: str = ""  # last lines it printed
    steps: int = 0
    stack: str = ""  # what faulthandler wrote on a fatal signal
    oom_killed: bool = False
    core: bool = False
    last_call: LastCall | None = None  # None: it was in none, or its line is not known
    script_end: ScriptEnd | None = None  # None: not seen: an exception, a signal, os._exit()
    around: ExitContext = ExitContext()  # what its agent saw around a bad end


@frozen
class Evidence:
    """Everything an attempt left behind for the judge."""

    world_size: int
    ends: tuple[RankExit, ...]
    stop_signal: int = 0  # a signal the launcher received
    stop_now: bool = False
    stopped_at: float = 0.0  # when we began to stop the ranks, for whatever reason
    steps_reached: int = 0  # --stop-after-steps was satisfied, and the ranks were ended for that
    stall: Stall | None = None  # what was known of a rank that stopped when the attempt ended
    trouble: tuple[dict[str, Any], ...] = ()  # what Stoker stopped the job for: verdict/catalogue.py:make_report
    regrouping: str = ""  # a host that is back: the ranks were ended after a checkpoint so that it can join
    notes: tuple[str, ...] = ()  # what was noticed on the way and ended nothing: a straggler, a loss that is no number
    checkpoint: SavedCheckpoint | None = None  # the newest complete one below the run directory
    saved: bool = False  # a checkpoint was completed after the stop signal: rank 0 said so, or it lies there


@frozen
class Stall:
    """A rank that stopped making progress, as the watch room explains it."""

    # stopped, debugged, sleep, lock, io, child, gil, spin, worker, disk, kernel, op-mismatch, shape-mismatch, unequal,
    # diverged, left, together, place; busy: it works, and finishes no step
    kind: str
    rank: int | None
    ranks: tuple[int, ...] = ()  # all that are guilty of it
    waiting: tuple[int, ...] = ()  # those that wait for them
    where: str = ""  # file:line, in function
    detail: str = ""
    operation: str = ""  # what the others wait in
    backend: str = ""
    proof: bool = False  # it can't go on by itself
    silent_s: float = 0.0
    step: int = 0
    evidence: tuple[str, ...] = ()
    # Ranks that wait for each other: (ranks, what they entered, where), the wrong ones first.
    parties: tuple[tuple[tuple[int, ...], str, str], ...] = ()
    # What it waits for, where more than its system call is known: lock-order, own-lock, held-lock, event, coroutine, file-lock, pipe,
    # fifo, socket, child-input, child-output, child-at-exit. It selects the advice.
    waits_for: str = ""


@frozen
class BadNumber:
    """A loss or a gradient norm that is not finite, or explodes; a loss or a reward that never changes."""

    kind: str  # loss | exploding | grad-norm | constant
    rank: int
    step: int
    value: str
    source: str  # beat | line
    line: str = ""
    firm: bool = False  # it stays so: not one bad batch
    stops: bool = True  # if it stays so the job ends; else it is only reported
    counted: bool = False  # the line names no step: `step` is what had been counted when it arrived
    shared: bool = False  # only this rank prints a loss, and averaging spreads a NaN: it may have begun on any rank


@frozen
class Finding:
    id: str
    level: str  # ok | warn | fail | unknown
    text: str
    fix: str = ""
    gpu: int | None = None  # the card it is about


# Causes of runs that GRPO's stop rules ended. grpo.reward and grpo.server are failures: the same command tries again.
STOP_RULES = frozenset(f"grpo.{rule}" for rule in ("no-signal", "identical", "cut", "other-weights", "broken"))


@frozen
class Verdict:
    status: str  # completed | failed | stopped | refused | lost
    cause: str
    summary: str
    exit_code: int
    rank: int | None = None
    host: str | None = None
    gpu: str | None = None
    evidence: tuple[str, ...] = ()
    retryable: bool = False
    fix: tuple[str, ...] = ()
    detected_s: float | None = None
    run: str = ""
    attempt: int = 0
    schema: int = SCHEMA

    @property
    def stalled(self) -> bool:
        """Ranks that made no progress, not one that ended: `detected_s` is how long, when it was first noticed."""
        return self.cause.startswith("hang.") or self.cause.endswith((".diverged", ".unequal-batches"))

    @property
    def is_stop_rule(self) -> bool:
        """Return whether one of GRPO's stop rules ended the run: started again, it would end the same way."""
        return self.cause in STOP_RULES

    def to_json(self) -> dict[str, Any]:
        return dict(as_json(self))

    @staticmethod
    def from_json(data: dict[str, Any]) -> Verdict:
        """TypeError for what a verdict can't be: the file may be damaged, or another user's."""
        if not isinstance(data, dict):
            raise TypeError("a verdict is an object")
        known = {name: value for name, value in data.items() if name in fields_of(Verdict)}
        known |= {name: known.get(name) or () for name in ("evidence", "fix")}
        try:
            return read_frozen(Verdict, known)
        except ValueError as problem:
            raise TypeError(f"a verdict can't have {problem}") from None
