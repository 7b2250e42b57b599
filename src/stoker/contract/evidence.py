"""Records that packages pass to each other or write to disk: how a rank ended or stalled, findings and the verdict."""

from __future__ import annotations

from typing import Any

from stoker.contract.checkpoints import SavedCheckpoint
from stoker.contract.frozen import as_json, fields_of, frozen
from stoker.contract.typed_values import read_frozen

SCHEMA = 1


@frozen
class RankError:
    """The exception that ended a script, as the shim wrote it."""

    type: str
    message: str
    file: str = ""
    line: int = 0
    function: str = ""
    traceback: str = ""
    time_ns: int = 0
    import_name: str = ""  # the module an ImportError could not find
    module: str = ""  # where the exception's class lives
    files: tuple[str, ...] = ()  # the code was reading these when it failed, the innermost frame's first
    module_file: str = ""  # for an ImportError: the file that Python took for the module or its package
    collectives: tuple[dict[str, Any], ...] = ()  # its operations per process group (contract/flight_recorder.py)
    # Found at exit because the script replaced the excepthook: counts only if the exit code is an exception's.
    late: bool = False


@frozen
class ScriptEnd:
    """How a rank's script ended, as the shim saw it. The process may still die later, in a thread of a library."""

    how: str  # return | exit
    status: str = ""  # the argument of sys.exit()
    file: str = ""  # of the line that called sys.exit()
    line: int = 0
    function: str = ""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}, in {self.function}" if self.file else ""


@frozen
class LastCall:
    """The torch.distributed call in which a rank ended."""

    name: str  # barrier
    where: str  # file:line, in function
    condition: str = ""  # the innermost condition on the rank around the call: if rank == 0
    repeated: bool = False  # the same line had called before, so it is in a loop


@frozen
class ExitContext:
    """The state of a host when a rank ends badly, as its agent sees it. A field is None if it could not be read."""

    rss: tuple[tuple[float, int], ...] = ()  # (time, resident bytes) of the rank and its children, newest last
    host_available: int | None = None  # bytes
    host_total: int | None = None
    # Lines of the kernel's log since the rank's start: those with its pid, out-of-memory kills and Xids.
    kernel: tuple[str, ...] = ()
    holders: tuple[dict[str, Any], ...] = ()  # processes on its GPU: pid, memory, command, user, run, ours
    gpu_total: int | None = None
    shm_free: int | None = None
    shm_total: int | None = None
    full_disks: tuple[tuple[str, int, int], ...] = ()  # full local disks: (mount point, free, total bytes)
    loader_workers: int = 0  # most data-loader workers of torch that the rank had at one time
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
    ours: bool = False  # Stoker signalled it before it ended
    error: RankError | None = None
    tail: str = ""  # the last lines it printed
    steps: int = 0
    stack: str = ""  # what faulthandler wrote on a fatal signal
    oom_killed: bool = False
    core: bool = False
    last_call: LastCall | None = None  # None if it was in no call, or if the line is unknown
    script_end: ScriptEnd | None = None  # None after an exception, a signal or os._exit()
    around: ExitContext = ExitContext()


@frozen
class Evidence:
    """Everything that the judge knows about one attempt."""

    world_size: int
    ends: tuple[RankExit, ...]
    stop_signal: int = 0  # the signal that the launcher received
    stop_now: bool = False
    stopped_at: float = 0.0  # when Stoker began to stop the ranks, for any reason
    steps_reached: int = 0  # --stop-after-steps was reached, so Stoker ended the ranks
    stall: Stall | None = None  # the stall that was known when the attempt ended
    # The reasons for which Stoker stopped the job (verdict/catalogue.py:make_report).
    trouble: tuple[dict[str, Any], ...] = ()
    regrouping: str = ""  # a host that came back: the ranks were ended after a checkpoint to let it join
    notes: tuple[str, ...] = ()  # observations that ended nothing: a straggler, a loss of NaN
    checkpoint: SavedCheckpoint | None = None  # the newest complete one in the run directory
    saved: bool = False  # a checkpoint was completed after the stop signal


@frozen
class Stall:
    """A rank that stopped making progress, as control/watch explains it."""

    # stopped, debugged, sleep, lock, io, child, gil, spin, worker, disk, kernel, op-mismatch, shape-mismatch, unequal,
    # diverged, left, together, place; busy: it computes without finishing a step
    kind: str
    rank: int | None
    ranks: tuple[int, ...] = ()  # all guilty ranks
    waiting: tuple[int, ...] = ()  # the ranks that wait for them
    where: str = ""  # file:line, in function
    detail: str = ""
    operation: str = ""  # the operation in which the others wait
    backend: str = ""
    proof: bool = False  # it is certain that the rank can't continue
    silent_s: float = 0.0
    step: int = 0
    evidence: tuple[str, ...] = ()
    # Ranks that wait for each other: (ranks, operation, code location), the wrong ones first.
    parties: tuple[tuple[tuple[int, ...], str, str], ...] = ()
    # Selects the advice, if more than the rank's system call is known: lock-order, own-lock, held-lock, event,
    # coroutine, file-lock, pipe, fifo, socket, child-input, child-output, child-at-exit.
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
    firm: bool = False  # the value has stayed bad for more than one batch
    stops: bool = True  # the job is stopped if the value stays bad; otherwise it is only reported
    counted: bool = False  # the line names no step, so `step` is the number of steps counted at its arrival
    shared: bool = False  # only this rank prints a loss and averaging spreads NaN, so any rank may be its source


@frozen
class Finding:
    id: str
    level: str  # ok | warn | fail | unknown
    text: str
    fix: str = ""
    gpu: int | None = None  # index of the GPU


# Causes of runs that GRPO's stop rules ended. grpo.reward and grpo.server are failures: the same command may succeed.
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
        """Return whether ranks stopped making progress. `detected_s` is the time until Stoker noticed."""
        return self.cause.startswith("hang.") or self.cause.endswith((".diverged", ".unequal-batches"))

    @property
    def is_stop_rule(self) -> bool:
        """Return whether one of GRPO's stop rules ended the run: started again, it would end the same way."""
        return self.cause in STOP_RULES

    def to_json(self) -> dict[str, Any]:
        return dict(as_json(self))

    @staticmethod
    def from_json(data: dict[str, Any]) -> Verdict:
        """Return a recorded verdict. Unknown fields are ignored. Raises TypeError for a damaged one."""
        if not isinstance(data, dict):
            raise TypeError("a verdict must be an object")
        fields = {name: value for name, value in data.items() if name in fields_of(Verdict)}
        fields |= {name: fields.get(name) or () for name in ("evidence", "fix")}
        try:
            return read_frozen(Verdict, fields)
        except ValueError as problem:
            raise TypeError(f"not a verdict: {problem}") from None
