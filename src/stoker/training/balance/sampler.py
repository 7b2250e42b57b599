"""The drop-in's batches: each step's samples are the same for every number of ranks and every plan; a plan cuts them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.contract.shape import shape
from stoker.training.balance.plan import Plans, apportion


@shape
class Given:
    """A step's batch on its way through the loader."""

    step: int
    shares: tuple[int, ...]


class Sampler:
    """A DataLoader's batch_sampler, in place of batch_size and DistributedSampler. `batch`: samples a step, of all
    ranks together.

    `most`: the largest batch that fits into this rank's memory. Each epoch has its own order, drawn from (seed, epoch).
    """

    def __init__(
        self,
        dataset: Sized | int,
        batch: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        most: int | None = None,
    ) -> None:
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._samples = dataset if isinstance(dataset, int) else len(dataset)
        self.batch, self._seed, self._shuffle = batch, seed, shuffle
        if batch < self.world or self._samples < self.world:
            raise ValueError(
                f"a batch of {batch} from {self._samples} samples can't be split over {self.world} ranks: each"
                " needs one"
            )
        self.most = self._mosts(most)
        self.plans = Plans(batch, self.world, apportion(batch, [1.0] * self.world, self.most))
        self.epoch = 0
        self.done = 0  # steps whose gradients were exchanged
        self._first = 0
        self._begun = False  # an epoch that was not read to its end
        self._given: deque[Given] = deque()
        self._count: int | Tensor | None = None
        left = self._samples % batch
        self._steps = self._samples // batch + (
            left >= self.world and not drop_last
        )  # the rest has one for each rank, or is left out

    def _mosts(self, most: int | None) -> list[int] | None:
        found: list[int | None] = [most]
        if self.world > 1:
            found = [None] * self.world
            dist.all_gather_object(found, most)
        return None if all(one is None for one in found) else [self.batch if one is None else one for one in found]

    def __len__(self) -> int:
        return self._steps

    def set_epoch(self, epoch: int) -> None:
        """Epochs count themselves; this is for a loop that begins elsewhere. The epoch a checkpoint stands in goes on
        where that left it.
        """
        if epoch != self.epoch:
            self._first = 0
        self.epoch, self._begun = epoch, False

    def __iter__(self) -> Iterator[list[int]]:
        if self._begun:
            self.epoch += 1
        self._begun = True
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.epoch)
        order = (
            torch.randperm(self._samples, generator=generator).tolist() if self._shuffle else list(range(self._samples))
        )
        self._given.clear()  # of an epoch that was left early
        first, self._first = self._first, 0
        for number in range(first, self._steps):
            step = self.epoch * self._steps + number
            part = order[number * self.batch : (number + 1) * self.batch]
            shares = self.plans.cut(step).of(len(part))
            begin = sum(shares[: self.rank])
            self._given.append(Given(step, shares))
            yield part[begin : begin + shares[self.rank]]
        self.epoch, self._begun = self.epoch + 1, False

    def count(self, learned: int | Tensor) -> None:
        """Before backward, where the loss is a mean over something else than samples: how many this rank's batch has
        (label tokens, say).
        """
        self._count = learned

    def coming(self) -> Given | None:
        return self._given[0] if self._given else None

    def take(self) -> tuple[Given, int | Tensor]:
        """The batch whose gradients are about to be exchanged, and what its mean was taken over."""
        if not self._given:
            raise RuntimeError(
                "a backward without a batch of balance.Sampler: each of its batches has one backward (accumulate under"
                " no_sync() elsewhere)"
            )
        given, count = self._given.popleft(), self._count
        self._count, self.done = None, given.step + 1
        return given, given.shares[self.rank] if count is None else count

    def state_dict(self) -> dict[str, Any]:
        """For the user's own checkpoint: with it a run goes on at the next batch, with the plan in force."""
        return {
            "step": self.done,
            "steps": self._steps,
            "samples": self._samples,
            "balance": self.plans.told(self.done),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        told = state["balance"]["batch"], state.get("samples", self._samples)
        if told != (self.batch, self._samples):
            words = f"a batch of {told[0]} from {told[1]} samples, and this is {self.batch} from {self._samples}"
            raise ValueError(
                f"balance.Sampler: this state is of {words}: its step {state['step']} is another place here; begin with"
                " set_epoch instead"
            )
        self.epoch, self._first = divmod(int(state["step"]), int(state.get("steps", self._steps)))
        if self._first >= self._steps:  # other ranks: the epoch's last, smaller batch is left out here
            self.epoch, self._first = self.epoch + 1, 0
        self.done, self._begun = self.epoch * self._steps + self._first, False
        self.plans.go_on(state["balance"])
