"""FSDP2's exchanges by memory that all ranks of a machine share, for ranks that share one GPU: NCCL refuses those, and gloo sends every weight through sockets.

A rank copies its part into the memory, all meet, a rank copies what it needs out of it, all meet again. On the GPU there is what there is with any
other exchange: FSDP2 allocates what is gathered and what is reduced; besides, `PIECE` bytes while gradients are added.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from stoker.training.optim.host import locked

SIZE = 2 << 30  # bytes of the shared memory
PIECE = 16 << 20  # of gradients that are added at once


def made() -> int:
    """A descriptor of such memory, which ranks inherit."""
    handle = os.memfd_create("exchange")
    os.ftruncate(handle, SIZE)
    return handle


class Exchange:
    def __init__(self, handle: int, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._memory = torch.frombuffer(mmap.mmap(handle, SIZE), dtype=torch.uint8)
        locked([self._memory], print)

    def install(self, model: torch.nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(_Gather(self))  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(_Reduce(self))  # type: ignore[arg-type]

    def _meet(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        dist.barrier()

    def gather(self, output: torch.Tensor, own: torch.Tensor) -> None:
        whole, part = output.view(torch.uint8).flatten(), own.contiguous().view(torch.uint8).flatten()
        size, most = len(part), SIZE // self.world
        for begin in range(0, size, most):
            end = min(begin + most, size)
            count = end - begin
            self._memory[self.rank * most :][:count].copy_(part[begin:end])
            self._meet(output.device)
            for rank in range(self.world):
                whole[rank * size + begin : rank * size + end].copy_(self._memory[rank * most :][:count])
            self._meet(output.device)

    def reduce(self, output: torch.Tensor, parts: torch.Tensor, op: Any) -> None:
        """Every rank's `parts` are one after the other what each rank is to have of its gradients."""
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), op
        size, most = output.numel(), SIZE // self.world**2 // parts.itemsize
        flat, mine, memory = parts.flatten(), output.flatten(), self._memory.view(parts.dtype)
        for begin in range(0, size, most):
            count = min(most, size - begin)
            for rank in range(self.world):
                place = (self.rank * self.world + rank) * most
                memory[place : place + count].copy_(flat[rank * size + begin :][:count])
            self._meet(output.device)
            for at in range(0, count, PIECE // parts.itemsize):
                more = min(PIECE // parts.itemsize, count - at)
                total = mine[begin + at :][:more]
                for rank in range(self.world):
                    came = memory[(rank * self.world + self.rank) * most + at :][:more]
                    total.copy_(came) if rank == 0 else total.add_(came.to(output.device))
                if op == dist.ReduceOp.AVG:
                    total.div_(self.world)
            self._meet(output.device)


class _Allocates:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Allocates):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None:
        self._exchange.gather(output_tensor, input_tensor)


class _Reduce(_Allocates):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        self._exchange.reduce(output_tensor, input_tensor, op)
