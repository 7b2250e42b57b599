"""A step's batches, read from the mapped shards into pinned memory by a thread during the step before."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.contract.frozen import frozen
from stoker.training.balance.plan import Plans
from stoker.training.data.config import DataConfig
from stoker.training.data.order import Order
from stoker.training.data.reader import IGNORED, Batch, Samples
from stoker.training.data.shards import Prepared
from stoker.training.parallel.group import Group, Share, cut, even_micro, split


class Rows(Protocol):
    context: int
    chat: bool  # rows have targets that are not learned: a step counts those that are
    packed: bool  # rows hold several documents, and tokens see only their own
    bytes_per_target: float

    def __len__(self) -> int: ...

    def batch(self, ids: NDArray[np.int64]) -> Batch: ...


@frozen
class Material:
    key: str  # of these very bytes, in these rows
    vocab_size: int
    tokenizer: str  # its folder
    tokenizer_digest: str
    train: Rows
    held_out: Rows | None
    entries: tuple[int, ...] = ()  # samples of each entry of `data.path`


def from_prepared(prepared: Prepared, data: DataConfig) -> Material:
    """Other shares of a mixture are another order of the same samples."""

    def samples(split: str) -> Samples:
        return Samples(prepared, split, data.context_length, data.documents)

    held_out = samples("validation") if prepared.validation_tokens > 1 else None
    train = samples("train")
    return Material(
        " ".join((prepared.key, *data.mixture)),
        prepared.vocab_size,
        prepared.tokenizer,
        prepared.tokenizer_digest,
        train,
        held_out,
        tuple(train.entries),
    )


HOST = torch.device("cpu")
AHEAD = 2  # steps
# No batch of the step this many behind one whose numbers are heard has been begun: another is launched, AHEAD wait, one
# is being made.
CUT_AHEAD = AHEAD + 4


@frozen
class MicroBatch:
    ids: tuple[int, ...]  # real samples; the rows behind them are padding
    inputs: Tensor  # [micro, T]
    targets: Tensor
    segments: Tensor | None


@frozen
class StepBatch:
    step: int
    samples: int  # of all ranks
    tokens: int  # of all ranks, padding not counted
    labels: int  # of this rank: targets that are learned
    micro_batches: tuple[MicroBatch, ...]

    @property
    def ids(self) -> list[int]:
        return [one for micro in self.micro_batches for one in micro.ids]


@frozen
class Course:
    """Which samples each step has: `batch` at a time from global index `start`, up to `total` (0: no end)."""

    batch: int
    start: int
    total: int

    def of_step(self, index: int) -> tuple[int, int]:
        begin = self.start + index * self.batch
        end = begin + self.batch
        return (min(begin, self.total), min(end, self.total)) if self.total else (begin, end)


class Feeder:
    """`plans`: who computes how many of a step's samples, `micro` at once at most; without them, equal shares."""

    def __init__(
        self,
        samples: Rows,
        order: Order,
        course: Course,
        group: Group,
        *,
        steps: range,
        micro: int,
        plans: Plans | None,
    ) -> None:
        self._samples, self._order, self._course, self._group = samples, order, course, group
        self._steps, self._micro, self._plans = steps, micro, plans

    def batches(self) -> Generator[StepBatch]:
        """Closed early, it waits for the one that is being made."""
        steps, waiting = enumerate(self._steps), deque[Future[StepBatch]]()
        with ThreadPoolExecutor(1, "feeder") as pool:
            try:
                for _ in self._steps:
                    more = islice(steps, AHEAD + 2 - len(waiting))
                    waiting.extend(pool.submit(self.make, step, index) for index, step in more)
                    yield waiting.popleft().result()
            finally:
                pool.shutdown(cancel_futures=True)

    def make(self, step: int, index: int) -> StepBatch:
        begin, end = self._course.of_step(index)
        share = self._share(step, end - begin)
        ids = self._order.ids(begin + share.begin, begin + share.end)
        made = [self._micro_batch(ids, share, number) for number in range(share.micro_steps)]
        labels = len(ids) * self._samples.context
        if self._samples.chat:
            labels = sum(int((one.targets != IGNORED).sum()) for one in made)
        return StepBatch(step, end - begin, (end - begin) * self._samples.context, labels, tuple(made))

    def _share(self, step: int, samples: int) -> Share:
        group = self._group
        if self._plans is None:
            return split(samples, group.world, group.rank, self._micro, equal_steps=group.strategy == "fsdp")
        plan = self._plans.cut(step)
        return cut(plan.of(samples), group.rank, even_micro(plan.shares[group.rank], self._micro))

    def _micro_batch(self, ids: NDArray[np.int64], share: Share, number: int) -> MicroBatch:
        begin, end = share.rows(number)
        mine = ids[begin - share.begin : end - share.begin]
        pinned = self._group.device.type == "cuda"
        return MicroBatch(tuple(mine.tolist()), *padded(self._samples, mine, share.micro, pinned=pinned))


def padded(
    samples: Rows, ids: NDArray[np.int64], rows: int, device: torch.device = HOST, *, pinned: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(inputs, targets, segments), `rows` of each, padded behind those of `ids`. Segments stay on the host."""

    def table(array: NDArray[Any], filling: int) -> Tensor:
        found = torch.full((rows, array.shape[1]), filling, dtype=torch.from_numpy(array).dtype, pin_memory=pinned)
        found[: len(array)] = torch.from_numpy(array)
        return found

    batch = samples.batch(ids if len(ids) else np.zeros(1, dtype=np.int64))
    targets = table(batch.targets, IGNORED)
    if not len(ids):
        targets.fill_(IGNORED)
    segments = table(batch.segments, 0) if batch.segments is not None else None
    return table(batch.inputs, 0).to(device), targets.to(device), segments
