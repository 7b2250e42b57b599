"""How long, how often, and what is said."""

from __future__ import annotations

from stoker.contract import limits
from stoker.contract.shape import option, shape


@shape
class TrainConfig:
    max_steps: int = option("optimizer steps (0: `epochs` counts)", default=0, limit=limits.COUNT)
    epochs: float = option("passes over the data, where max_steps is 0", default=1.0, limit=limits.COUNT)
    seed: int = option("weights and dropout", default=0, limit=limits.SEED)
    log_every: int = option("a step line and a metrics line every so many steps", default=10, limit=limits.FROM_ONE)
    eval_every: int = option("validation every so many steps (0: at the end only)", default=0, limit=limits.COUNT)
    eval_first: bool = option("validation before the first step, too: what a stage began with", default=False)
    eval_tokens: int = option(
        "tokens a validation reads (0: all that are held out)", default=1_000_000, limit=limits.LARGE
    )
    log_to: str = option("also to: tensorboard, wandb, trackio, mlflow, comma-separated", default="", metavar="NAMES")
    profile: bool = option("write a trace of a few steps and print the ten costliest items", default=False)
    profile_steps: int = option("steps that --profile traces, after three of warm-up", default=3, limit=limits.FROM_ONE)
    log_samples: bool = option("write the ids of every step's samples to samples-rank-N.jsonl", default=False)
    debug: bool = option(
        "say where the largest gradient and weight are, at every step (waits for the GPU)", default=False
    )
