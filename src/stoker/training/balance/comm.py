"""How gradients travel: whole, in bf16, as PowerSGD's low-rank parts, or not at all for N steps (local SGD).

Each token's weight stays exact: every rank's loss is scaled by ranks ÷ tokens of all, and each of these takes a mean over
the ranks. What is lost is precision: docs/balance.md has what it did to a loss.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stoker.training.parallel.config import local_steps
from stoker.training.parallel.group import Group, wrap

Marks = tuple[Any, Any, Any]  # begin, own work done, exchange done


class StepClock:
    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self.lag = 2 if self._cuda else 0  # steps between a time and the step that carries it to the others
        self._begin = self._computed = None
        self._done: deque[Marks] = deque(maxlen=self.lag + 1)
        first = next(one for one in model.parameters() if one.requires_grad)
        first.register_post_accumulate_grad_hook(self._own_work_done)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        self._begin = now(self._device)

    def _own_work_done(self, parameter: torch.Tensor) -> None:
        self._computed = now(self._device)  # of the last micro-step, in the end

    def end(self) -> None:
        self._done.append((self._begin, self._computed, now(self._device)))

    def read(self) -> tuple[float, float]:
        """Seconds (computing, waiting) of the step `lag` before the newest; zeros where there was none."""
        if len(self._done) <= self.lag:
            return 0.0, 0.0
        begin, computed, done = self._done[0]
        if begin is None or computed is None:
            return 0.0, 0.0
        if self._cuda:
            return begin.elapsed_time(computed) / 1000, computed.elapsed_time(done) / 1000
        return computed - begin, done - computed


def to_host(values: Tensor) -> tuple[Tensor, Any]:
    """(where they will be on the host, the event to wait for; None: they are there)."""
    if not values.is_cuda:
        return values, None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return host, event


def now(device: torch.device) -> Any:
    """Seconds; on a GPU an event on its stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


POWERSGD_RANK = 4
# Steps with whole gradients: the first ones have no low rank, and DDP rebuilds its buckets after one.
POWERSGD_AFTER = 20
# PowerSGD exchanges from its callbacks, which gloo runs in threads: those of several buckets mix their collectives up,
# and ranks abort (torch 2.13). It waits for the GPU after each bucket anyway: one bucket loses nothing.
ONE_BUCKET = 2**20  # MB
BUCKET = 8 * 2**20  # numbers that are averaged at once: memory for one bucket, not for a second model


def wrapped(model: nn.Module, group: Group, told: str) -> nn.Module:
    """The module to call. With local:N each rank's gradients are its own, and nothing is around the model."""
    if local_steps(told):
        # As DDP does: unlike cards draw unlike numbers from one seed.
        learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in learned if group.world > 1 else ():
            dist.broadcast(parameter.detach(), 0)
        return model
    module = wrap(model, group, ONE_BUCKET if told == "powersgd" else None)
    if isinstance(module, nn.parallel.DistributedDataParallel):
        compress(module, told)
    return module


def compress(ddp: nn.parallel.DistributedDataParallel, told: str) -> None:
    if told == "bf16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        # By its own name DDP refuses this hook where there is no NCCL, though gloo has bf16 too.
        ddp.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))  # noqa: PLW0108
    elif told == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        state = PowerSGDState(
            None,
            matrix_approximation_rank=POWERSGD_RANK,
            start_powerSGD_iter=POWERSGD_AFTER,
            orthogonalization_epsilon=1e-8,
        )
        ddp.register_comm_hook(state, powerSGD_hook)


class Meeting:
    """Local SGD: every `every` steps the ranks take the mean of their parameters, weighted by the tokens each has learned
    since. The step decides, so a resumed run meets at the same ones. Moments stay each rank's own; in a checkpoint they
    are averaged too: whoever resumes, with however many ranks, begins where all of them stood.
    """

    def __init__(self, group: Group, every: int) -> None:
        self._group, self.every = group, every
        self._tokens = self._steps = self._before = 0

    def learned(self, tokens: int) -> None:
        """This rank's, in one step."""
        self._tokens += tokens
        self._steps += 1

    def due(self, step: int) -> bool:
        return (step + 1) % self.every == 0

    @torch.no_grad()
    def meet(self, tensors: Sequence[Tensor], more: Sequence[Tensor] = (), bad: Tensor | None = None) -> None:
        """All ranks call it at the same step. `more`: averaged besides. `bad`: above 0 nothing is changed."""
        fresh = self._steps > 0
        if not fresh and not more:
            return
        own = torch.tensor(float(self._tokens if fresh else self._before), device=self._group.device)
        share = own / self._group.sum(own.clone()).clamp(min=1.0)
        for bucket in _buckets([*(tensors if fresh else ()), *more]):
            flat = torch.cat([one.flatten() for one in bucket]).mul_(share)
            self._group.sum(flat)
            for one, mean in zip(bucket, torch.split(flat, [one.numel() for one in bucket]), strict=True):
                one.copy_(mean.view_as(one) if bad is None else torch.where(bad > 0, one, mean.view_as(one)))
        if fresh:
            self._before, self._tokens, self._steps = self._tokens, 0, 0


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for one in tensors:
        if bucket and (sum(held.numel() for held in bucket) + one.numel() > BUCKET or one.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(one)
    if bucket:
        yield bucket
