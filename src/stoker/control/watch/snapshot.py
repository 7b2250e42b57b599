"""An agent's inspection of a rank, read back. A missing or wrong field is evidence we don't have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.contract.shape import shape


@shape
class Frame:
    name: str
    file: str
    line: int
    loops: tuple[int, ...] = ()  # first lines of the loops around it, where the source could be read

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, in {self.name}"

    @property
    def function(self) -> str:
        """Without its class: py-spy says Loader._next_data from Python 3.11 on, faulthandler _next_data."""
        return self.name.rpartition(".")[2]


@shape
class Thread:
    main: bool
    active: bool
    gil: bool
    frames: tuple[Frame, ...]  # innermost first


@shape
class Op:
    seq: int
    p2p: int
    name: str  # gloo:all_reduce
    sizes: tuple[Any, ...]
    done: bool
    order: int
    usual: bool | None = None  # it is what came next before too (contract/collectives.py)

    def __str__(self) -> str:
        return f"{self.name} {list(self.sizes)}" if self.sizes else self.name


@shape
class Group:
    name: str
    backend: str
    about: str
    ranks: tuple[int, ...]  # empty where torch does not say
    ops: tuple[Op, ...]

    @property
    def pending(self) -> Op | None:
        undone = [op for op in self.ops if not op.done]
        if len(undone) > 20:  # a torch that never marks them done: only the newest can be what it waits in
            return undone[-1]
        return undone[0] if undone else None


@shape
class Worker:
    pid: int
    name: str
    state: str
    cpu: float
    syscall: str
    command: str
    frames: tuple[Frame, ...]


@shape
class Snapshot:
    rank: int
    state: str = "?"
    cpu: float = 0.0  # cores, over the time of the inspection
    main_cpu: float = 0.0
    waiting_for_core: float = 0.0  # share of the time its main thread was ready and not running
    faults: float = 0.0  # major page faults a second
    swap: int = 0
    cpus: int = 0  # it may run on
    wchan: str = ""
    syscall: str = ""
    samples: tuple[tuple[Thread, ...], ...] = ()
    stacks_by: str = ""
    groups: tuple[Group, ...] = ()
    no_groups: str = ""
    workers: tuple[Worker, ...] = ()
    message: str = ""  # recv or send, where its main thread is in one
    peer: int | None = None  # with whom
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


Snapshots = Mapping[int, Snapshot]  # by rank
Members = Mapping[str, tuple[int, ...]]  # a group's name -> its ranks


def main_thread(threads: tuple[Thread, ...]) -> Thread | None:
    return next((one for one in threads if one.main), threads[0] if threads else None)


def read(rank: int, data: dict[str, Any]) -> Snapshot:
    gpu = data["gpu"] if isinstance(data.get("gpu"), dict) else {}
    return Snapshot(
        rank=rank,
        state=str(data.get("state", "?")),
        cpu=_number(data, "cpu"),
        main_cpu=_number(data, "main_cpu"),
        waiting_for_core=_number(data, "waiting_for_core"),
        faults=_number(data, "faults"),
        swap=int(_number(data, "swap")),
        cpus=int(_number(data, "cpus")),
        wchan=str(data.get("wchan", "")),
        syscall=str(data.get("syscall", "")),
        samples=tuple(tuple(_thread(one) for one in threads) for threads in data.get("samples") or ()),
        stacks_by=str(data.get("stacks_by", "")),
        groups=groups(data.get("groups")),
        no_groups=str(data.get("no_groups", "")),
        workers=tuple(_worker(one) for one in data.get("workers") or ()),
        message=str(data.get("message") or ""),
        peer=_whole(data.get("peer")),
        gpu_use=_whole(gpu.get("use")),
        throttle=tuple(str(one) for one in gpu.get("throttle") or ()),
        lanes=tuple(_whole(one) for one in gpu.get("lanes") or ()),
    )


def _operation(op: Any) -> Op:
    sizes, usual = tuple(op["sizes"]), op.get("usual")
    return Op(int(op["seq"]), int(op["p2p"]), str(op["op"]), sizes, bool(op["done"]), int(op["order"]), usual)


def groups(told: Any) -> tuple[Group, ...]:
    return tuple(
        Group(
            str(one.get("group", "?")),
            str(one.get("backend", "")),
            str(one.get("about", "")),
            tuple(int(rank) for rank in one.get("ranks") or ()),
            tuple(_operation(op) for op in one.get("ops") or ()),
        )
        for one in told or ()
    )


def _number(data: dict[str, Any], key: str) -> float:
    value = data.get(key)
    return float(value) if isinstance(value, (int, float)) else 0.0


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def _frames(told: Any) -> tuple[Frame, ...]:
    return tuple(
        Frame(str(one[0]), str(one[1]), int(one[2]), tuple(one[3]) if len(one) > 3 else ()) for one in told or ()
    )


def _thread(one: dict[str, Any]) -> Thread:
    return Thread(bool(one.get("main")), bool(one.get("active")), bool(one.get("gil")), _frames(one.get("frames")))


def _worker(one: dict[str, Any]) -> Worker:
    threads = tuple(_thread(thread) for thread in one.get("threads") or ())
    main = main_thread(threads)
    return Worker(
        int(one.get("pid", 0)),
        str(one.get("name", "?")),
        str(one.get("state", "?")),
        _number(one, "cpu"),
        str(one.get("syscall", "")),
        str(one.get("command", "")),
        main.frames if main else (),
    )
