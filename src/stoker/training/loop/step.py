"""One optimizer step, without a word from the GPU: forward, backward, norm, finite check, clipping, update.

Loss, gradient norm and the flag "not finite" travel to the host behind the step and are read one step later. A step
that is not finite changes nothing, and neither does any after it: the weights stay those that made it, for the replay.
In fp16 a gradient that overflows is no such step: its update is left out, and the loss is scaled by half (loss_scale.py).
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stoker.contract.frozen import frozen
from stoker.training.balance.comm import Meeting, StepClock, to_host
from stoker.training.balance.plan import Plans
from stoker.training.forensics.replay import Drill
from stoker.training.loop.feeder import Material, MicroBatch, StepBatch
from stoker.training.loop.learner import Learner
from stoker.training.loop.run import Answers
from stoker.training.model.adapters import Beside
from stoker.training.model.attention import Documents, documents
from stoker.training.model.decoder import Decoder
from stoker.training.optim.loss_scale import LossScale
from stoker.training.optim.optimizer import Optimizer, gradient_norm
from stoker.training.parallel.group import Group, no_sync

WARM_UP = 3  # eager calls before a graph's capture: compilation, cuBLAS and autograd must have settled
# Of a step's time in which its kernels are launched: from here on it is taken to wait for launches. A 1.1 B model with
# 4 × 2,048 tokens (H200) was above 0.85 in one run and below it in another, and 1.36 times as fast as a graph.
BOUND = 0.6
ROOM = 1.25  # of what a step takes besides what stays: free before a graph is captured unasked
MOST_GRAPHS = 8


@frozen
class Numbers:
    """What a step said, the same on all ranks."""

    step: int
    loss: float
    norm: float
    bad: bool
    loss_scale: float  # of this step; 0: none
    skipped: bool  # a gradient overflowed in fp16, and nothing was updated
    answers: Answers
    # Seconds of each rank's own work, of the step `StepClock.lag` before; nothing where nobody measures.
    compute: tuple[float, ...]
    waiting: tuple[float, ...]  # and of the exchange after it


class Pending:
    """A step's numbers on their way to the host."""

    def __init__(self, step: int, values: Tensor) -> None:
        self.step = step
        self._host, self._event = to_host(values if values.is_cuda else values.clone())
        self.when = None if values.is_cuda else time.perf_counter()  # done; on GPUs that is when it is read

    def read(self) -> Numbers:
        """Waits for the step, while the GPU already works on the next."""
        if self._event is not None:
            self._event.synchronize()
        loss, norm, bad, scale, skipped, *rest = self._host.tolist()
        answers, seconds = Answers(*(value > 0 for value in rest[:4])), rest[4:]
        ranks = len(seconds) // 2
        work, waiting = tuple(seconds[:ranks]), tuple(seconds[ranks:])
        return Numbers(self.step, loss, norm, bad > 0, scale, skipped > 0, answers, work, waiting)


class MicroStep:
    """Forward and backward; where launches take longer than kernels, as one CUDA graph. Packed rows need a graph for each
    number and length of documents, both rounded up: few.
    """

    def __init__(
        self, wrapped: nn.Module, scale: Tensor, graph_with: Optimizer | None, *, only_if_bound: bool = False
    ) -> None:
        """`only_if_bound`: graphs only if a step turns out to wait for its launches, and there is memory for them."""
        self._wrapped, self._scale, self._optimizer = wrapped, scale, graph_with
        self._only_if_bound, self._calls = only_if_bound, 0
        self._graphs: dict[Sizes, _Graph] = {}
        self._met: Counter[Sizes] = Counter()
        self._pool: Any = None
        self._beside: Any = None
        self.peak_before: int | None = None  # bytes of the GPU at most, until the first graph was captured

    @property
    def graphed(self) -> bool:
        """Gradients keep their place from now on."""
        return bool(self._graphs) or (self._optimizer is not None and not self._only_if_bound)

    def eager(self, micro: MicroBatch) -> Tensor:
        return self._eager(micro, documents(micro.segments, self._scale.device))

    def _eager(self, micro: MicroBatch, packed: Documents | None) -> Tensor:
        device = self._scale.device
        inputs, targets = (x.to(device, non_blocking=True) for x in (micro.inputs, micro.targets))
        loss = self._wrapped(inputs, targets, self._scale, packed)
        loss.backward()
        found: Tensor = loss.detach()
        return found

    def __call__(self, micro: MicroBatch) -> Tensor:
        if self._optimizer is None:
            return self.eager(micro)
        packed = documents(micro.segments, self._scale.device)
        sizes = None if packed is None else (len(packed.offsets), packed.longest)
        self._calls += 1
        self._met[sizes] += 1
        if self._calls == WARM_UP and self._only_if_bound:
            return self._timed(micro, packed)
        # What came once may not come again: it is not worth a capture, nor the memory.
        rare = packed is not None and self._met[sizes] < 2
        if self._calls <= WARM_UP or (sizes not in self._graphs and (rare or len(self._graphs) == MOST_GRAPHS)):
            return self._eager(micro, packed)
        graph = self._graphs.get(sizes)
        if graph is None:
            graph = self._graphs[sizes] = _Graph(micro, packed, self._scale.device)
            self._capture(graph)
        else:
            graph.fill(micro, packed)
        return graph.replay()

    def _timed(self, micro: MicroBatch, packed: Documents | None) -> Tensor:
        """A call that decides whether there will be graphs: are all kernels done soon after the last was launched?"""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        before, begun = torch.cuda.memory_allocated(), time.perf_counter()
        begin.record()
        loss = self._eager(micro, packed)
        end.record()
        launched = time.perf_counter() - begun
        end.synchronize()
        if launched < BOUND * begin.elapsed_time(end) / 1000 or not _room_for(
            torch.cuda.max_memory_allocated() - before
        ):
            self._optimizer = None
        return loss

    def _capture(self, graph: _Graph) -> None:
        """The gradients of the eager calls are the buffers the graph adds to."""
        if self.peak_before is None:
            self.peak_before = torch.cuda.max_memory_allocated()
        # A number sampled here would make other dropout than the replay of this step has.
        dice = torch.cuda.get_rng_state()
        kept = [p.grad.clone() if p.grad is not None else None for p in self._wrapped.parameters()]
        # One for all captures: cuBLAS takes memory for each stream.
        side = self._beside = self._beside or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # kernels are compiled, and workspaces made, before the capture
            self._wrapped(graph.inputs, graph.targets, self._scale, graph.packed).backward()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.empty_cache()
        # One pool for all graphs: they run one after the other, and nothing of one is used after the next.
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # thread_local: other threads pin memory meanwhile
        with torch.cuda.graph(graph.graph, pool=self._pool, capture_error_mode="thread_local"):
            loss = self._wrapped(graph.inputs, graph.targets, self._scale, graph.packed)
            loss.backward()
            graph.loss = loss.detach()
        for parameter, before in zip(self._wrapped.parameters(), kept, strict=True):
            if parameter.grad is not None:
                parameter.grad.zero_() if before is None else parameter.grad.copy_(before)
        torch.cuda.set_rng_state(dice)


def _room_for(needed: int) -> bool:
    """A graph has memory of its own: what eager steps left over can't serve it."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] > ROOM * needed


Sizes = tuple[int, int] | None  # of documents: their offsets, the longest; None: rows are not packed


class _Graph:
    """A captured micro-step, and the tensors that it reads and writes."""

    def __init__(self, micro: MicroBatch, packed: Documents | None, device: torch.device) -> None:
        self.inputs, self.targets = micro.inputs.to(device), micro.targets.to(device)
        if packed is not None:
            packed = Documents(packed.segments.clone(), packed.offsets.clone(), packed.longest)
        self.packed, self.graph = packed, torch.cuda.CUDAGraph()
        self.loss: Tensor | None = None

    def fill(self, micro: MicroBatch, packed: Documents | None) -> None:
        self.inputs.copy_(micro.inputs, non_blocking=True)
        self.targets.copy_(micro.targets, non_blocking=True)
        if self.packed is not None and packed is not None:
            self.packed.segments.copy_(packed.segments)
            self.packed.offsets.copy_(packed.offsets)

    def replay(self) -> Tensor:
        assert self.loss is not None
        self.graph.replay()
        return self.loss


@frozen
class Parts:
    """A run's finished parts, as recipes/build.py makes them."""

    group: Group
    material: Material
    learner: Learner
    model: Decoder
    wrapped: nn.Module  # the module to call: the model, or DDP around it
    optimizer: Optimizer
    own_micro: int  # samples that fit this rank at once
    micro: int  # that fit every rank
    batch: int  # samples of a step, all ranks together
    plans: Plans | None  # who computes how many of them; None: all alike
    meeting: (
        Meeting | None
    )  # ranks that learn alone for some steps: their gradients stay their own, and weights meet when it says so
    clock: StepClock | None
    drill: Drill
    graph: str  # whether a micro-step is one CUDA graph: off, on, or auto (if it turns out to wait for its launches)
    adapters: Beside | None = None  # None: all weights learn
    loss_scale: LossScale | None = None  # of fp16
    exchange_each: bool = False  # fsdp: gradients of each micro-batch, so that no rank holds all of them


class Stepper:
    def __init__(
        self,
        parts: Parts,
        seed: int,
        *,
        check: bool,
        before_update: Callable[[], None],
        look: Callable[[int], None] | None,
    ) -> None:
        """`look`: sees each step's gradients."""
        self._wrapped, self._optimizer, self._group = parts.wrapped, parts.optimizer, parts.group
        self._loss_scale, self._each = parts.loss_scale, parts.exchange_each
        self._dropout, self._chat = parts.model.config.dropout > 0, parts.material.train.chat
        self._clock, self._meeting, self._after_backward = parts.clock, parts.meeting, parts.drill.spoil_gradients
        self._seed, self._check, self._before_update, self._look = seed, check, before_update, look
        device = parts.group.device
        self.bad = torch.zeros((), device=device)
        self._scale = torch.ones((), device=device)
        self._unscaled = torch.zeros(2, device=device)
        self._alone = torch.ones((), device=device)  # this rank's share of the tokens, where ranks learn alone
        graphed = parts.optimizer if parts.graph != "off" else None
        self._micro = MicroStep(parts.wrapped, self._scale, graphed, only_if_bound=parts.graph == "auto")

    def set_seed(self, step: int, number: int) -> None:
        """Dropout is a function of (seed, step, rank, micro-batch): nothing to save, and a replay repeats it."""
        if self._dropout:
            text = f"{self._seed} {step} {self._group.rank} {number}".encode()
            torch.manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1)

    def scale(self, batch: StepBatch) -> Tensor:
        """Ranks ÷ learned tokens of all: DDP's and FSDP2's mean over ranks becomes one over tokens, however uneven the
        split. Where ranks learn alone for some steps, it is 1 ÷ this rank's own tokens. In fp16 times the loss scale.
        """
        if self._chat:
            labels = torch.tensor(float(batch.labels), pin_memory=self._scale.is_cuda).to(
                self._group.device, non_blocking=True
            )
            self._scale.copy_(self._group.world / self._group.sum(labels))
        else:
            self._scale.fill_(self._group.world / batch.tokens)
        if self._meeting is not None:
            self._alone.copy_(self._scale * (max(batch.labels, 1) / self._group.world))
            self._scale.fill_(1 / max(batch.labels, 1))
        if self._loss_scale is not None:
            self._scale *= self._loss_scale.value
        return self._scale

    @property
    def peak_before_graphs(self) -> int | None:
        """Bytes of the GPU, at most, before a step became a CUDA graph; None: none did."""
        return self._micro.peak_before

    def forward_backward(self, micro: MicroBatch) -> Tensor:
        return self._micro.eager(micro)

    def step(self, batch: StepBatch, share: float, *, words: Callable[[], Sequence[bool]]) -> Pending:
        """`words`: this rank's stop, save, busy and slow, asked when its work is launched; all read the same later."""
        self.scale(batch)
        if self._clock is not None:
            self._clock.begin()
        total = torch.zeros((), device=self._group.device)
        last = len(batch.micro_batches) - 1
        for number, micro in enumerate(batch.micro_batches):
            self.set_seed(batch.step, number)
            with no_sync(self._wrapped, number == last or self._each, number == last):
                total += self._micro(micro)
        if self._clock is not None:
            self._clock.end()
        self._after_backward()
        flags = torch.tensor([*map(float, words()), *self._seconds()], pin_memory=total.is_cuda).to(
            total.device, non_blocking=True
        )
        norm, scaled = gradient_norm(self._optimizer.parameters), self._loss_scale
        if scaled is not None:
            norm, total = norm / scaled.value, total / scaled.value
        # A gradient that one rank alone spoils after the exchange (a flipped bit, say) is bad on all: they stop at the
        # same step, or wait for each other.
        spoiled = (~torch.isfinite(norm)).float()
        loss = total / self._group.world if self._meeting is None else total * self._alone
        values = self._group.sum(torch.cat([loss[None], spoiled[None], flags]))
        # Only the gradients are scaled: a loss that is not finite is the model's own, whatever the scale.
        finite, overflowed = torch.isfinite(values[0]), (values[1] > 0).float()
        if self._check:
            broken = overflowed if scaled is None else scaled.lasting(overflowed)
            self.bad.copy_(torch.maximum(self.bad, torch.maximum(broken, (~finite).float())))
        about = self._unscaled if scaled is None else torch.stack([scaled.value, overflowed])
        if self._look is not None:
            self._look(batch.step)
        self._before_update()
        if scaled is None:
            self._optimizer.step(share, norm, self.bad)
        else:
            self._optimizer.step(share, norm, torch.maximum(self.bad, overflowed), scaled.value)
            scaled.update(overflowed, self.bad)
        self._optimizer.zero(keep=self._micro.graphed)
        if self._meeting is not None:
            self._meeting.learned(batch.labels)
            if self._meeting.due(batch.step):
                # A bad step's weights stay as they are, for its replay.
                self._meeting.meet(self._optimizer.parameters, bad=self.bad)
        return Pending(batch.step, torch.cat([values[:1], norm[None], self.bad[None], about, values[2:]]))

    def _seconds(self) -> list[float]:
        """This rank's in its own places, zeros elsewhere: the sum over ranks, which a step makes anyway, has all."""
        if self._clock is None:
            return []
        found = [0.0] * (2 * self._group.world)
        found[self._group.rank], found[self._group.world + self._group.rank] = self._clock.read()
        return found
