"""The kinds of question there are, and how much of each a file has."""

from __future__ import annotations

from collections.abc import Callable

from stoker.training.world import arithmetic, dialogues, facts, order, steps, stories
from stoker.training.world.case import Case
from stoker.training.world.dice import Dice
from stoker.training.world.world import World

CASES: dict[str, Callable[[World, Dice, bool], Case]] = {
    "story": stories.case, "fact": facts.case, "sum": arithmetic.case, "steps": steps.case, "dialogue": dialogues.case, "order": order.case,
}  # fmt: skip
TEXTS: dict[str, Callable[[World, Dice, bool], str]] = {
    "story": stories.text, "fact": facts.text, "sum": arithmetic.text, "steps": steps.text, "dialogue": dialogues.text, "order": order.text,
}  # fmt: skip

# Sums are what a small model needs longest for; a prompt of GRPO's is mostly one where showing the steps pays, and some kinds are rare.
SHARES = {
    "base": {"story": 19, "fact": 19, "sum": 28, "steps": 16, "dialogue": 8, "order": 10},
    "midtrain": {"story": 20, "fact": 14, "sum": 20, "steps": 20, "dialogue": 12, "order": 14},
    "sft": {"story": 18, "fact": 14, "sum": 18, "steps": 26, "dialogue": 10, "order": 14},
    "pairs": {"story": 24, "fact": 18, "sum": 10, "steps": 10, "dialogue": 20, "order": 18},
    "prompts": {"steps": 60, "sum": 20, "order": 10, "story": 6, "fact": 3, "dialogue": 1},
}


def table(shares: dict[str, int]) -> list[str]:
    """A kind drawn from it comes as often as its share says."""
    return [kind for kind, share in shares.items() for _ in range(share)]
