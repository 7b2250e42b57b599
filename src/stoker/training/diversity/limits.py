"""What no comparison can be made of. Pure."""

from __future__ import annotations

from stoker.contract.names import EX_CONFIG, Refusal
from stoker.training.config.schema import Config

LEAST_ROUNDS = 50  # a standard error from fewer is off by more than a tenth


def check(c: Config) -> None:
    if not c.generate.temperature:
        raise Refusal(
            "generate.temperature 0 writes the same answer every time: there is no variety to measure; give 1.0",
            EX_CONFIG,
        )
    if c.diversity.rounds < LEAST_ROUNDS:
        raise Refusal(
            f"diversity.rounds {c.diversity.rounds} are too few to tell a difference from chance: at least"
            f" {LEAST_ROUNDS}",
            EX_CONFIG,
        )
