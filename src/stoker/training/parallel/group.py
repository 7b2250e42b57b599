"""The process group, this rank's device, and the model wrapped for its strategy."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stoker.contract import env_vars, host_memory
from stoker.contract.errors import EX_CANTCREAT, EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.host_memory import limit_memory, read_used_memory
from stoker.training.parallel.config import EVERYTHING, IN_HOST, NOTHING, ParallelConfig


@frozen
class Share:
    """One rank's part of a step: samples [begin, end) of the step's, in micro-batches of `micro`."""

    begin: int
    end: int
    micro: int
    micro_steps: int

    def rows(self, index: int) -> tuple[int, int]:
        """Of micro-step `index`, as offsets within the step; may be empty (all padding)."""
        begin = min(self.begin + index * self.micro, self.end)
        return begin, min(begin + self.micro, self.end)


def split(samples: int, ranks: int, rank: int, micro: int, equal_steps: bool) -> Share:
    """`equal_steps`: as many micro-steps on every rank, for FSDP. At least one on each: DDP's exchange needs all."""
    base, more = divmod(samples, ranks)
    begin = rank * base + min(rank, more)
    end = begin + base + (rank < more)
    most = base + (more > 0) if equal_steps else end - begin
    return Share(begin, end, micro, max(-(-most // micro), 1))


def cut(shares: Sequence[int], rank: int, micro: int) -> Share:
    """The same for shares that a plan gives."""
    begin = sum(shares[:rank])
    return Share(begin, begin + shares[rank], micro, max(-(-shares[rank] // micro), 1))


def even_micro(share: int, most: int) -> int:
    """The micro-batch up to `most` that wastes least: 12 samples with room for 8 are 2 × 6, not 8 + 4 and padding."""
    return -(-share // -(-share // most))


def _bound_memory(ranks: int) -> None:
    """Each of a host's ranks may take its part of what is free now. A stranger's model or config of some MB may ask for any
    amount; then this rank is refused memory, and nobody else's process is killed for it.
    """
    limit_memory(read_used_memory() + host_memory.read_usable_memory() // ranks)


T = TypeVar("T")
FOR_FIRST = timedelta(days=1)
SEEN_S = 3.0  # after which a file that another host made is seen, or its disk is another: NFS keeps names for a moment


class Group:
    """This rank among the others. One rank needs no process group."""

    def __init__(self, c: ParallelConfig) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.local = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = _device(c, self.local)
        if c.strategy == "auto":
            line = "parallel.strategy auto is decided by `stoker train` before there are ranks"
            raise Refusal(f"{line}: start them with it, or say ddp or fsdp", EX_USAGE)
        self.strategy, self.offload, self.sharding = c.strategy, c.offload, c.sharding
        self.beside = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))  # ranks of this host, with it
        self._meetings = 0
        card = os.environ.get("GPU_RANK", str(self.local))
        self.label = f"GPU {card}" if self.device.type == "cuda" else f"CPU {self.rank}"
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            _bound_memory(self.beside)
        # NCCL refuses several ranks on one card, gloo does not.
        shared = os.environ.get(env_vars.SHARED_GPU) == "1"
        nccl = self.device.type == "cuda" and dist.is_nccl_available() and not shared
        limit = timedelta(seconds=c.timeout)
        backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
        if self.world > 1 or (c.strategy == "fsdp" and "MASTER_ADDR" in os.environ):
            dist.init_process_group(backend, timeout=limit, device_id=self.device if nccl else None)
        elif c.strategy == "fsdp":
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=limit)
        self.check_hosts()

    @property
    def shards(self) -> int:
        """That each tensor of a model is cut into."""
        if self.strategy != "fsdp":
            return 1
        return self.beside if self.sharding == IN_HOST else self.world

    def check_hosts(self) -> None:
        """parallel.sharding host: all hosts must have as many ranks, one after the other."""
        if self.sharding == IN_HOST and self.strategy == "fsdp":
            places = self.all((self.beside, self.local))
            uneven = any(place != (self.beside, rank % self.beside) for rank, place in enumerate(places))
            if uneven or self.world % self.beside:
                line = f"parallel.sharding host needs as many ranks on every host: {self.world} are not hosts of {self.beside}"
                raise Refusal(f"{line}; use the same number everywhere, or parallel.sharding all", EX_USAGE)

    @property
    def home(self) -> torch.device:
        """Of weights in shards, between the passes of their block."""
        return torch.device("cpu") if self.offload == EVERYTHING else self.device

    @property
    def visited(self) -> torch.device | None:
        """Where an update computes whose moments live in host memory; None: they don't."""
        return None if self.offload == NOTHING else self.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def turns(self, count: int) -> range:
        """Which of so many this rank works on where nothing is learned: its share; of a model in shards all, as every rank does."""
        if self.strategy == "fsdp":
            return range(count)
        return range(self.rank, count, self.world)

    def sum(self, tensor: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def smallest(self, value: int) -> int:
        return int(min(self.all(value)))

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def agreed(self, work: Callable[[], T]) -> T:
        """Rank 0 does it, all get its result; if it refuses, all refuse with its line, and nobody waits for anybody."""
        found: Any = None
        refusal: tuple[str, int] | None = None
        if self.first:
            try:
                found = work()
            except Refusal as problem:
                refusal = (problem.line, problem.code)
        self._await_first()
        found, refusal = self.from_first((found, refusal))
        if refusal is not None:
            raise Refusal(*refusal)
        result: T = found
        return result

    def _await_first(self) -> None:
        """Until rank 0 is here, by the store: reading or writing a large model may outlast a collective's timeout."""
        if self.world == 1:
            return
        self._meetings += 1
        store, name = dist.distributed_c10d._get_default_store(), f"stoker/first/{self._meetings}"
        if self.first:
            store.set(name, "here")
        else:
            store.wait([name], FOR_FIRST)

    @property
    def several_hosts(self) -> bool:
        return self.beside < self.world

    def spread(self, tensor: Tensor) -> None:
        """Rank 0's numbers, into every rank's."""
        if self.world > 1:
            dist.broadcast(tensor, src=0)

    def seeing(self, folder: str) -> tuple[int, ...]:
        """Ranks whose `folder` is the one that rank 0 has, not another of that name on another host's disk."""
        if not self.several_hosts:
            return tuple(range(self.world))
        mark = os.path.join(folder, f".seen-{os.urandom(8).hex()}")
        mark = self.agreed(lambda: _marked(mark))
        try:
            return tuple(rank for rank, there in enumerate(self.all(_sees(mark))) if there)
        finally:
            if self.first:
                os.unlink(mark)

    def all(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def close(self) -> None:
        if dist.is_initialized():
            if self.world > 1:
                self._await_first()  # it may be writing the model
                dist.barrier()  # torch 2.13's gloo aborts when a rank leaves while another still talks to it
            # gloo's destructor can wait for a thread that waits for the GIL (docs/log.md): the process's end will do.
            if "gloo" in dist.get_backend():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
            dist.destroy_process_group()


def _marked(path: str) -> str:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except OSError as problem:
        raise Refusal(f"{os.path.dirname(path)} can't be written: {problem.strerror}", EX_CANTCREAT) from problem
    return path


def _sees(path: str) -> bool:
    until = time.monotonic() + SEEN_S
    while not os.path.exists(path):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _device(c: ParallelConfig, local: int) -> torch.device:
    if c.device == "cpu" or (c.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise Refusal("parallel.device is cuda and this torch sees no GPU: `stoker doctor` says why", EX_UNAVAILABLE)
    if local >= torch.cuda.device_count():
        raise Refusal(
            f"local rank {local} and {torch.cuda.device_count()} visible GPUs: start fewer ranks", EX_UNAVAILABLE
        )
    return torch.device("cuda", local)


def wrap(model: nn.Module, group: Group, bucket_mb: int | None = None) -> nn.Module:
    """The module to call. `bucket_mb`: how much of the gradient is exchanged at once; None: as DDP likes it.

    DDP and FSDP2 both take the mean over the ranks: the loss is scaled by their number (Stepper.scale).
    """
    if group.world == 1 or group.strategy == "fsdp":
        return model
    devices = [group.device.index] if group.device.type == "cuda" else None
    # Each rank has read them from the same folder: DDP would send them around once more.
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, frozen)  # type: ignore[no-untyped-call]
    return nn.parallel.DistributedDataParallel(
        model, device_ids=devices, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb
    )


def no_sync(wrapped: nn.Module, last: bool, of_step: bool = True) -> AbstractContextManager[Any]:
    """Gradients are exchanged with the last micro-batch of a step only; sharded ones perhaps with each (`Parts.exchange_each`), but
    between hosts that hold copies with the last `of_step`."""
    if hasattr(wrapped, "set_requires_gradient_sync"):
        wrapped.set_requires_gradient_sync(last)  # type: ignore[operator]
        wrapped.set_requires_all_reduce(of_step)  # type: ignore[operator]
        return nullcontext()
    if isinstance(wrapped, nn.parallel.DistributedDataParallel) and not last:
        return wrapped.no_sync()
    return nullcontext()
