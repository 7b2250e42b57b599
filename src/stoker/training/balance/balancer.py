"""Hears every step's seconds, the same on all ranks at the same step, and acts: another plan, a word about the network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from stoker.training.balance.plan import Plan, Plans
from stoker.training.balance.rule import NetworkRule, Proposal, Rule

HELPS = (
    "comm: bf16 halves it, powersgd or local:8 nearly end it (`stoker docs balance`: what they do to the loss), and a larger"
    " batch pays it less often"
)


class Tell(Protocol):
    def __call__(self, step: int, plan: Plan, imbalance: float) -> None: ...


class Balancer:
    """`plans`: None where shares stay equal: then it only says what balance would gain. `ahead`: steps that may have
    been cut already.

    `lag`: how many steps old the seconds are that a step carries. `tell`: writes down that a step decided on a plan.
    """

    def __init__(
        self,
        batch: int,
        ranks: int,
        plans: Plans | None,
        *,
        ahead: int,
        lag: int,
        comm: str,
        say: Callable[[str], None],
        tell: Tell,
    ) -> None:
        self._plans, self._equal = plans, Plans(batch, ranks)
        self._rule, self._network = Rule(batch), NetworkRule()
        self._batch, self._ahead, self._lag, self._comm, self._say, self._tell = batch, ahead, lag, comm, say, tell
        self._advised = False

    def hear(self, step: int, samples: int, compute: Sequence[float], waiting: Sequence[float]) -> None:
        """`samples` of this step: an epoch's last, smaller one measures nothing."""
        measured = step - self._lag
        if measured < 0 or samples != self._batch or not compute:
            return
        found = self._rule.hear((self._plans or self._equal).at(measured).shares, compute)
        if found is not None:
            self._act(step, found)
        network = self._network.hear(compute, waiting)
        if network is not None:
            self._say(
                f"the network is the limit, not the ranks: {network.share:.0%} of a step ({network.waiting:.3f} of"
                f" {network.step:.3f} s) is the exchange of"
                f" gradients{'' if self._comm == 'full' else f', with comm {self._comm}'}. What helps: {HELPS}"
            )

    def _act(self, step: int, found: Proposal) -> None:
        speeds = ", ".join(f"{1 / one:.1f}" for one in found.seconds)
        if self._plans is None:
            if not self._advised:
                self._advised = True
                self._say(
                    f"unlike ranks ({speeds} samples/s): --balance auto would compute {1 + found.gain:.2f} times as"
                    " fast"
                )
            return
        plan = Plan(step + self._ahead, found.shares)
        self._plans.add(plan)
        self._say(
            f"balance: from step {plan.step} on the ranks take {', '.join(map(str, plan.shares))} of {self._batch}"
            f" samples ({speeds} samples/s; the slowest took {found.imbalance:.0%} longer than the mean)"
        )
        self._tell(step, plan, found.imbalance)
