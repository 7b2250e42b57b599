"""Data classes for an agent's inspection of a rank (stacks, collectives, processes, open files) and their parser.

Agents send inspections as JSON. A field that is missing or has the wrong type keeps its default, which means unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.contract.frozen import frozen, replace
from stoker.contract.typed_values import read_known_fields
from stoker.contract.units import plural

_MAX_SHAPES_LENGTH = 400  # characters: an operation may have hundreds of tensors


@frozen
class Condition:
    """A condition on the rank in the script: only some ranks run the code inside it."""

    line: int
    text: str  # if rank == 0

    as_list = True  # JSON: [line, text]


@frozen
class Frame:
    name: str
    file: str
    line: int
    loops: tuple[int, ...] = ()  # first lines of the loops around it, if the source could be read
    conditions: tuple[Condition, ...] = ()  # conditions on the rank that the line depends on, outermost first

    as_list = True  # JSON: [name, file, line, loops, conditions]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, in {self.name}"

    @property
    def function(self) -> str:
        """Return the name without the class: py-spy reports Loader._next_data from Python 3.11 on, faulthandler _next_data."""
        return self.name.rpartition(".")[2]


@frozen
class LockUse:
    """A lock that a thread waits for, or that it holds according to the source around its line."""

    text: str  # self.lock
    key: str  # identifies the lock object; "" if it is unknown
    held: bool
    name: str  # the function
    file: str
    line: int

    as_list = True  # JSON: [text, key, held, name, file, line]

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}, in {self.name}"


@frozen
class Thread:
    main: bool
    frames: tuple[Frame, ...]  # innermost first
    active: bool = False
    gil: bool = False
    name: str = ""
    current: bool = False  # this thread crashed
    values: str = ""  # digest of the local variables of its frames; "" if they can't be read
    locks: tuple[LockUse, ...] = ()  # innermost first


@frozen
class Op:
    """An operation in the flight recorder of a process group."""

    seq: int
    p2p: int
    name: str  # gloo:all_reduce
    sizes: tuple[Any, ...]
    done: bool
    order: int = 0
    usual: bool | None = None  # whether it followed the same operations before (contract/flight_recorder.py), if known
    frames: tuple[Frame, ...] = ()  # the script's lines at the call; () for operations that torch starts in C++ (DDP)
    dtype: str = ""

    def __str__(self) -> str:
        if not self.sizes:
            return self.name
        if self.dtype:  # the operation comes from the call log, which has no shapes
            return f"{self.name} of {plural(self.sizes[0][0], 'element')} ({self.dtype})"
        limit = _MAX_SHAPES_LENGTH
        shapes = ", ".join(str(size[:limit] if isinstance(size, (list, str)) else size) for size in self.sizes[:limit])
        cut = shapes if len(shapes) <= limit else shapes[:limit] + "…"
        return f"{self.name} of shape{'s' if len(self.sizes) > 1 else ''} {cut}"


@frozen
class Party:
    """Ranks that entered the same operation."""

    ranks: tuple[int, ...]
    group: str = ""
    op: Op | None = None  # None if gloo ended these ranks: then their flight recorders are lost


@frozen
class Wait:
    """An edge of the wait graph: one rank waits for another in an operation."""

    rank: int
    target: int  # the rank it waits for
    reason: str  # absent, other-op, other-shape, peer
    group: str
    op: Op
    target_op: Op | None = None  # the operation that the target entered instead


@frozen
class Group:
    name: str
    ops: tuple[Op, ...]
    backend: str = ""
    about: str = ""
    ranks: tuple[int, ...] = ()  # () if they are unknown

    @property
    def pending(self) -> Op | None:
        """Return the first operation that is not done, in which the rank waits, or None."""
        undone = [op for op in self.ops if not op.done]
        if len(undone) > 20:  # this version of torch never marks operations as done, so only the newest can be pending
            return undone[-1]
        return undone[0] if undone else None


@frozen
class Call:
    """A call of torch.distributed by the script (control/rank/call_log.py). The log can be read after the rank has ended."""

    number: int
    count: int
    name: str
    group: str
    entered_ns: int
    left_ns: int  # when it returned; 0 if it has not returned, 1 if it raised
    elements: int = -1
    dtype: str = ""
    peer: int | None = None
    frames: tuple[Frame, ...] = ()  # the script's lines, innermost first

    @property
    def returned(self) -> bool:
        return self.left_ns > 1

    @property
    def where(self) -> str:
        return str(self.frames[0]) if self.frames else ""


@frozen
class OtherProcess:
    """A process that holds a file lock, or has the other end of a pipe or socket open."""

    pid: int
    command: str = ""
    rank: int | None = None  # the rank of this run that it belongs to, if any
    is_rank: bool = False  # whether it is the rank's own process rather than a child


@frozen
class BlockedOn:
    """A file, pipe, socket or file lock that a process waits for (control/machine/blocking.py)."""

    kind: str  # lock, pipe, fifo, socket, file
    call: str = ""  # the system call
    fd: int = -1
    name: str = ""  # path of the file, address of the socket
    writes: bool = False
    state: str = ""  # of a socket: listening, connecting, not accepted, closed
    others: tuple[OtherProcess, ...] = ()
    hidden: int = 0  # number of processes whose open files can't be read, and which may have the other end open


@frozen
class Worker:
    """A descendant process of a rank, for example a data-loader worker."""

    pid: int
    parent: int = 0
    name: str = "?"
    state: str = "?"
    cpu: float = 0.0
    moved: int = 0  # bytes read and written since it started
    faults: int = 0  # page faults since it started
    wchan: str = ""
    syscall: str = ""
    blocked: tuple[BlockedOn, ...] = ()
    awaited_pid: int = 0  # the child whose exit it waits for
    wait_unseen: str = ""
    command: str = ""
    threads: tuple[Thread, ...] = ()

    @property
    def frames(self) -> tuple[Frame, ...]:
        main = main_thread(self.threads)
        return main.frames if main else ()


@frozen
class RankInspection:
    """One inspection of a rank. The field names are the keys of the agent's JSON."""

    rank: int
    state: str = "?"
    cpu: float = 0.0  # cores used during the inspection
    main_cpu: float = 0.0
    waiting_for_core: float = 0.0  # share of the time that its main thread was ready but not running
    faults: float = 0.0  # major page faults per second
    swap: int = 0
    main_bytes: int = 0  # read and written by the main thread since the process started
    all_bytes: int = 0  # read and written by all threads
    main_faults: int = 0  # page faults of the main thread
    all_faults: int = 0
    cpus: int = 0  # number of CPUs it may run on
    wchan: str = ""
    syscall: str = ""
    blocked: tuple[BlockedOn, ...] = ()
    awaited_pid: int = 0  # the child whose exit the main thread waits for; 0 if it waits for any child or none
    wait_unseen: str = ""  # why the system call could not be read
    samples: tuple[tuple[Thread, ...], ...] = ()
    stacks_by: str = ""
    stacks_unseen: str = ""  # why there is no stack
    groups: tuple[Group, ...] = ()
    no_groups: str = ""
    calls: tuple[Call, ...] = ()  # its newest calls, oldest first
    workers: tuple[Worker, ...] = ()  # the first of its descendants
    children: tuple[int, ...] = ()  # pids of all descendants at the end of the inspection
    children_before: tuple[int, ...] = ()  # the same at its beginning
    gpu_use: int | None = None
    throttle: tuple[str, ...] = ()
    lanes: tuple[int | None, ...] = ()  # PCIe lanes of its GPU: current, maximum

    @property
    def newest_entry_ns(self) -> int:
        """Return when it entered its newest collective, in nanoseconds of its host's clock, or 0."""
        return max((op.order for group in self.groups for op in group.ops), default=0)

    @property
    def main(self) -> tuple[Frame, ...]:
        """Return the main thread's frames in the last sample that has any, innermost first, or ()."""
        for threads in reversed(self.samples):
            thread = main_thread(threads)
            if thread is not None and thread.frames:
                return thread.frames
        return ()


InspectionSet = Mapping[int, RankInspection]  # by rank
Members = Mapping[str, tuple[int, ...]]  # name of a process group -> its ranks


def main_thread(threads: tuple[Thread, ...]) -> Thread | None:
    return next((thread for thread in threads if thread.main), threads[0] if threads else None)


def parse_inspection(rank: int, data: dict[str, Any]) -> RankInspection:
    """Parse an agent's JSON, and give each operation the lines of the script that started it, from the call log."""
    gpu = data["gpu"] if isinstance(data.get("gpu"), dict) else {}
    gpu_fields = {"gpu_use": gpu.get("use"), "throttle": gpu.get("throttle"), "lanes": gpu.get("lanes")}
    inspection = RankInspection(**{**read_known_fields(RankInspection, {**data, **gpu_fields}), "rank": rank})
    groups = tuple(
        replace(group, ops=tuple(replace(op, frames=_find_caller(op, group, inspection.calls)) for op in group.ops))
        for group in inspection.groups
    )
    return replace(inspection, groups=groups)


def _find_caller(op: Op, group: Group, calls: tuple[Call, ...]) -> tuple[Frame, ...]:
    """Return the frames of the call that was in progress when the operation started, or ()."""
    for call in reversed(calls):
        same_group = not call.group or call.group == group.name or call.name == "new_group"
        if same_group and call.entered_ns <= op.order and (not call.returned or op.order <= call.left_ns):
            return call.frames
    return ()
