"""An agent's inspection of a rank, read back. A missing or wrong field is evidence we don't have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.contract.frozen import frozen, replace
from stoker.contract.typed_values import known_fields
from stoker.contract.units import plural

_SIZES = 400  # characters of the sizes of an operation: it may have hundreds of tensors


@frozen
class Condition:
    """On the rank, in the script: what the code inside is for some ranks alone."""

    line: int
    text: str  # if rank == 0

    as_list = True  # it travels as [line, text]


@frozen
class Frame:
    name: str
    file: str
    line: int
    loops: tuple[int, ...] = ()  # first lines of the loops around it, where the source could be read
    conditions: tuple[Condition, ...] = ()  # on the rank, around it or before it, outermost first

    as_list = True  # it travels as [name, file, line, loops, conditions]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, in {self.name}"

    @property
    def function(self) -> str:
        """Without its class: py-spy says Loader._next_data from Python 3.11 on, faulthandler _next_data."""
        return self.name.rpartition(".")[2]


@frozen
class LockUse:
    """A lock that a thread waits for, or holds as far as the source around its line says."""

    text: str  # self.lock
    key: str  # two uses with the same key are of the same object; empty: the object is not known
    held: bool
    name: str  # the function
    file: str
    line: int

    as_list = True  # it travels as [text, key, held, name, file, line]

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
    current: bool = False  # it crashed
    values: str = ""  # digest of the local variables of its frames; empty where they can't be read
    locks: tuple[LockUse, ...] = ()  # innermost first


@frozen
class Op:
    seq: int
    p2p: int
    name: str  # gloo:all_reduce
    sizes: tuple[Any, ...]
    done: bool
    order: int = 0
    usual: bool | None = None  # it is what came next before too (contract/flight_recorder.py)
    frames: tuple[Frame, ...] = ()  # of the script, when it made the call; none for what torch starts in C++ (DDP)
    dtype: str = ""

    def __str__(self) -> str:
        if not self.sizes:
            return self.name
        if self.dtype:  # from the log of calls, which has no shape
            return f"{self.name} of {plural(self.sizes[0][0], 'element')} ({self.dtype})"
        shapes = ", ".join(str(one[:_SIZES] if isinstance(one, (list, str)) else one) for one in self.sizes[:_SIZES])
        cut = shapes if len(shapes) <= _SIZES else shapes[:_SIZES] + "…"
        return f"{self.name} of shape{'s' if len(self.sizes) > 1 else ''} {cut}"


@frozen
class Party:
    """Ranks that entered the same operation."""

    ranks: tuple[int, ...]
    group: str = ""
    op: Op | None = None  # None: it is not known: gloo ended these ranks, and their recorders with them


@frozen
class Wait:
    rank: int
    target: int  # the rank it waits for
    why: str  # absent, other-op, other-shape, peer
    group: str
    op: Op
    other: Op | None = None  # what the target did instead


@frozen
class Group:
    name: str
    ops: tuple[Op, ...]
    backend: str = ""
    about: str = ""
    ranks: tuple[int, ...] = ()  # empty where torch does not say

    @property
    def pending(self) -> Op | None:
        undone = [op for op in self.ops if not op.done]
        if len(undone) > 20:  # a torch that never marks them done: only the newest can be what it waits in
            return undone[-1]
        return undone[0] if undone else None


@frozen
class Call:
    """A call of torch.distributed as the script made it (control/rank/call_log.py). It can be read after the rank's end."""

    number: int
    count: int
    name: str
    group: str
    entered_ns: int
    left_ns: int  # 0: it has not returned; 1: it raised
    elements: int = -1
    dtype: str = ""
    peer: int | None = None
    frames: tuple[Frame, ...] = ()  # of the script, the innermost first

    @property
    def returned(self) -> bool:
        return self.left_ns > 1

    @property
    def where(self) -> str:
        return str(self.frames[0]) if self.frames else ""


@frozen
class OtherProcess:
    """A process that holds a file lock, or has the other end of a pipe or a socket open."""

    pid: int
    command: str = ""
    rank: int | None = None  # whose process it is; None: it belongs to no rank of this run on this host
    is_rank: bool = False  # it is the rank itself, not a child


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
    hidden: int = 0  # processes whose files may not be read: one of them may be at the other end


@frozen
class Worker:
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
    awaited_pid: int = 0  # the child whose end it waits for
    wait_unseen: str = ""
    command: str = ""
    threads: tuple[Thread, ...] = ()

    @property
    def frames(self) -> tuple[Frame, ...]:
        main = main_thread(self.threads)
        return main.frames if main else ()


@frozen
class RankInspection:
    rank: int
    state: str = "?"
    cpu: float = 0.0  # cores, over the time of the inspection
    main_cpu: float = 0.0
    waiting_for_core: float = 0.0  # share of the time its main thread was ready and not running
    faults: float = 0.0  # major page faults a second
    swap: int = 0
    main_bytes: int = 0  # read and written by the main thread since the process started
    all_bytes: int = 0  # by all threads
    main_faults: int = 0  # page faults of the main thread
    all_faults: int = 0
    cpus: int = 0  # it may run on
    wchan: str = ""
    syscall: str = ""
    blocked: tuple[BlockedOn, ...] = ()
    awaited_pid: int = 0  # the child whose end the main thread waits for; 0: any, or none
    wait_unseen: str = ""  # why the system call could not be read
    samples: tuple[tuple[Thread, ...], ...] = ()
    stacks_by: str = ""
    stacks_unseen: str = ""  # why there is no stack
    groups: tuple[Group, ...] = ()
    no_groups: str = ""
    calls: tuple[Call, ...] = ()  # its newest, oldest first
    workers: tuple[Worker, ...] = ()  # the first of its children
    children: tuple[int, ...] = ()  # all of them, and theirs, at the end of the look
    children_before: tuple[int, ...] = ()  # at its beginning
    gpu_use: int | None = None
    throttle: tuple[str, ...] = ()
    lanes: tuple[int | None, ...] = ()  # of its card's PCIe link: now, and at most

    @property
    def newest(self) -> int:
        """When it entered its newest collective, in its own host's time."""
        return max((op.order for group in self.groups for op in group.ops), default=0)

    @property
    def main(self) -> tuple[Frame, ...]:
        """The main thread's frames in the last sample that has any, innermost first."""
        for threads in reversed(self.samples):
            found = main_thread(threads)
            if found is not None and found.frames:
                return found.frames
        return ()


InspectionSet = Mapping[int, RankInspection]  # by rank
Members = Mapping[str, tuple[int, ...]]  # a group's name -> its ranks


def main_thread(threads: tuple[Thread, ...]) -> Thread | None:
    return next((one for one in threads if one.main), threads[0] if threads else None)


def read(rank: int, data: dict[str, Any]) -> RankInspection:
    card = data["gpu"] if isinstance(data.get("gpu"), dict) else {}
    of_card = {"gpu_use": card.get("use"), "throttle": card.get("throttle"), "lanes": card.get("lanes")}
    snapshot = RankInspection(**{**known_fields(RankInspection, {**data, **of_card}), "rank": rank})
    groups = tuple(
        replace(group, ops=tuple(replace(op, frames=_caller(op, group, snapshot.calls)) for op in group.ops))
        for group in snapshot.groups
    )
    return replace(snapshot, groups=groups)


def _caller(op: Op, group: Group, calls: tuple[Call, ...]) -> tuple[Frame, ...]:
    """Return the lines of the script that started an operation: those of the call that was under way at that time."""
    for call in reversed(calls):
        same_group = not call.group or call.group == group.name or call.name == "new_group"
        if same_group and call.entered_ns <= op.order and (not call.returned or op.order <= call.left_ns):
            return call.frames
    return ()
