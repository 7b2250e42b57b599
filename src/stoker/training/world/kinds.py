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

# Copying a name out of a story is what a small model needs longest for; a prompt of GRPO's is mostly one where showing
# the steps pays, and some kinds are rare.
SHARES = {
    "base": {"story": 32, "fact": 14, "sum": 16, "steps": 12, "dialogue": 14, "order": 12},
    "midtrain": {"story": 26, "fact": 12, "sum": 12, "steps": 20, "dialogue": 16, "order": 14},
    "sft": {"story": 24, "fact": 12, "sum": 10, "steps": 26, "dialogue": 12, "order": 16},
    "pairs": {"story": 16, "fact": 10, "sum": 24, "steps": 20, "dialogue": 14, "order": 16},
    "prompts": {"steps": 60, "sum": 12, "order": 14, "story": 8, "fact": 4, "dialogue": 2},
}


def table(shares: dict[str, int]) -> list[str]:
    """A kind drawn from it comes as often as its share says."""
    return [kind for kind, share in shares.items() for _ in range(share)]
