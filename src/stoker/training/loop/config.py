"""How long, how often, and what is reported."""

from __future__ import annotations

import importlib.util

from stoker.contract import limits
from stoker.contract.errors import EX_UNAVAILABLE, Refusal
from stoker.contract.frozen import frozen, option
from stoker.contract.limits import text_option

ANSWERED = 64  # tokens of an answer to a held-out prompt, at most


@frozen
class TrainConfig:
    max_steps: int = limits.COUNT("optimizer steps (0: `epochs` counts)", 0)
    epochs: float = limits.COUNT("passes over the data, where max_steps is 0", 1.0)
    seed: int = limits.SEED("seed of weights and dropout", 0)
    log_every: int = limits.FROM_ONE(
        "print a step line and write a metrics line every this many steps; stage grpo writes metrics for every step", 10
    )
    eval_every: int = limits.COUNT("validate every this many steps (0: at the end only)", 0)
    eval_first: bool = option("validate before the first step, too", default=False)
    eval_tokens: int = limits.LARGE("tokens that a validation reads (0: all held-out ones)", 1_000_000)
    patience: int = limits.COUNT(
        "stop after this many validations in a row without a lower loss, and export the best checkpoint (0: never)", 0
    )
    samples: int = limits.COUNT(
        "held-out prompts that a loaded model answers before training, at validations and after, if it learns chats or pairs"
        " (0: none)",
        3,
    )
    log_to: str = text_option("NAMES")("write metrics also to tensorboard, wandb, trackio, mlflow, comma-separated")
    profile: bool = option("write a trace of a few steps and print the ten costliest items", default=False)
    profile_steps: int = limits.FROM_ONE("steps that --profile traces, after three of warm-up", 3)
    log_samples: bool = option("write the ids of every step's samples to samples-rank-N.jsonl", default=False)
    debug: bool = option(
        "print where the largest gradient and weight are, at every step (waits for the GPU)", default=False
    )


def check_loggers(log_to: str) -> list[str]:
    wanted = [word for word in log_to.replace(" ", "").split(",") if word]
    for word in wanted:
        if importlib.util.find_spec(word) is None:
            raise Refusal(f"train.log_to {word} is not installed: pip install {word}, or leave it out", EX_UNAVAILABLE)
    return wanted
