"""The drop-in for anybody's DDP loop: a hook in DDP's exchange weighs a rank's gradients by its part of the batch.

Exact: a rank's loss is a mean over its own samples, so its gradient times its count, summed over ranks, divided by the
count of all, is the gradient of one process. One small all-reduce a step carries the counts, everybody's seconds and
how far everybody's loader is ahead; it is launched before the first bucket and nobody waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import stoker
from stoker.contract.frozen import frozen
from stoker.contract.text import escape
from stoker.contract.units import plural
from stoker.training.balance.comm import now, to_host
from stoker.training.balance.plan import Plan, Plans, Rule, apportion

MARGIN = 3  # steps a loader may have run ahead since that was told
# steps between a rank's time and the step that carries it, and again until it is read: by then a GPU has long done them
LAG = 2


@frozen
class Given:
    """A step's batch on its way through the loader."""

    step: int
    shares: tuple[int, ...]


class Sampler:
    """A DataLoader's batch_sampler, in place of batch_size and DistributedSampler. `batch`: samples a step, of all ranks.
    `most`: the largest batch that fits here. Each epoch has its own order, drawn from (seed, epoch).
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
                f"a batch of {batch} from {self._samples} samples can't be split over {plural(self.world, 'rank')}: each"
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
        # The rest has one for each rank, or is left out.
        self._steps = self._samples // batch + (left >= self.world and not drop_last)

    def _mosts(self, most: int | None) -> list[int] | None:
        found: list[int | None] = [most]
        if self.world > 1:
            found = [None] * self.world
            dist.all_gather_object(found, most)
        return None if all(one is None for one in found) else [self.batch if one is None else one for one in found]

    def __len__(self) -> int:
        return self._steps

    def set_epoch(self, epoch: int) -> None:
        """For a loop that begins elsewhere: epochs count themselves, and a checkpoint's goes on where it stood."""
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
        """Before backward, where the loss is no mean over samples: how many (label tokens, say) the batch has."""
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


def _said(line: str) -> None:
    print(f"stoker balance: {escape(line)}", flush=True)


def attach(model: nn.Module, loader: Any, *, rows: bool = True, say: Callable[[str], None] = _said) -> Any:
    """`loader`: a DataLoader whose batch_sampler is a balance.Sampler, or that Sampler. Gives the model back.

    `rows`: the model's first argument has a row per sample, and is checked for it. One rank has nothing to balance.
    """
    sampler = loader if isinstance(loader, Sampler) else getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, Sampler):
        raise TypeError("balance.attach needs a DataLoader with batch_sampler=balance.Sampler(...), or that Sampler")
    if sampler.world == 1:
        return model
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        raise TypeError(f"balance.attach needs a DistributedDataParallel, not a {type(model).__name__}")
    exchange = _Exchange(sampler, next(model.parameters()).device, rows, say)
    model.register_forward_pre_hook(exchange.begin)
    model.register_comm_hook(None, exchange.hook)
    return model


class _Exchange:
    def __init__(self, sampler: Sampler, device: torch.device, rows: bool, say: Callable[[str], None]) -> None:
        self._sampler, self._device, self._rows, self._say = sampler, device, rows, say
        self._ahead = 0  # how many steps loaders have been seen to cut batches ahead, on any rank
        self._rule = Rule(sampler.batch, sampler.most)
        self._begin: Any = None
        self._given = Given(-1, ())  # the batch whose gradients are being exchanged
        self._weight: Tensor | float = 1.0
        self._total: Any = None  # the small all-reduce of this step, under way
        self._times: deque[tuple[Given, Any, Any]] = deque(maxlen=LAG)  # this rank's, of the steps before
        # Whose seconds the step before carried, and what came of it; and of the step before that, on its way to the host.
        self._carried: tuple[Given | None, Tensor] | None = None
        self._copy: tuple[Given | None, Tensor, Any] | None = None

    def begin(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled() or not model.training:
            return
        self._begin = now(self._device)
        given = self._sampler.coming()
        if self._rows and given is not None and args and isinstance(args[0], Tensor) and args[0].dim():
            share = given.shares[self._sampler.rank]
            if args[0].shape[0] != share:
                found = f"a batch of {args[0].shape[0]} rows where this rank's share of step {given.step} is {share}"
                raise RuntimeError(
                    f"balance: {found}: each batch of the Sampler needs one forward and one backward (rows=False: rows"
                    " are not samples)"
                )

    def hook(self, state, bucket):  # type: ignore[no-untyped-def]  # DDP reads the annotations, and refuses them as text
        if self._total is None:
            self._open()
        buffer = bucket.buffer()
        buffer.mul_(self._weight)
        summed, total = dist.all_reduce(buffer, async_op=True).get_future(), self._total
        if bucket.is_last():
            self._times.append((self._given, self._begin, now(self._device)))
            self._begin = self._total = None
        # Gloo's operations end in any order; NCCL's in that of their stream.
        both = torch.futures.collect_all([total[0], summed]) if buffer.device.type == "cpu" else summed

        def mean(done):  # type: ignore[no-untyped-def]
            done.wait()  # raises what went wrong in the exchange
            return buffer.div_(total[1][0].to(buffer.dtype))

        return both.then(mean)

    def _open(self) -> None:
        """The first bucket of a step: counts and seconds are sent, those of steps before are heard."""
        sampler = self._sampler
        self._given, count = sampler.take()
        # No larger than 1 for samples, so that half-precision gradients stay in their range.
        self._weight = (count.double() if isinstance(count, Tensor) else count) / sum(self._given.shares)
        seconds, ahead = [0.0] * sampler.world, [0.0] * sampler.world
        ahead[sampler.rank] = sampler.plans.last_cut - self._given.step
        measured: Given | None = None
        if len(self._times) == LAG:
            measured, begin, end = self._times[0]
            seconds[sampler.rank] = self._between(begin, end)
        small = torch.tensor([0.0, *seconds, *ahead], dtype=torch.float64, pin_memory=self._device.type == "cuda").to(
            self._device, non_blocking=True
        )
        small[0] = self._weight
        self._hear()
        if self._carried is not None:
            self._copy = (self._carried[0], *to_host(self._carried[1]))
        self._total = (dist.all_reduce(small, async_op=True).get_future(), small)
        self._carried = (measured, small)

    def _hear(self) -> None:
        """All ranks hear the same at the same step."""
        if self._copy is None:
            return
        measured, numbers, event = self._copy
        if measured is None:
            return
        if event is not None:
            event.synchronize()
        sampler = self._sampler
        _, *told = numbers.tolist()
        self._ahead = max(self._ahead, *map(int, told[sampler.world :]))
        if sum(measured.shares) != sampler.batch:
            return
        found = self._rule.hear(measured.shares, told[: sampler.world])
        if found is None:
            return
        plan = Plan(self._given.step + self._ahead + MARGIN, found.shares)
        sampler.plans.add(plan)
        if sampler.rank == 0:
            speeds = ", ".join(f"{1 / one:.1f}" for one in found.seconds)
            self._say(
                f"from step {plan.step} on the ranks take {', '.join(map(str, plan.shares))} of {sampler.batch} samples"
                f" ({speeds} samples/s)"
            )
            stoker.mark(f"BALANCE {plan.step}: {','.join(map(str, plan.shares))}")

    def _between(self, begin: Any, end: Any) -> float:
        if self._device.type != "cuda":
            return float(end - begin)
        end.synchronize()  # two steps old: it holds back only a host that is further ahead than that
        return float(begin.elapsed_time(end)) / 1000
