"""What no GRPO run can be made of, and the numbers that follow from the settings. Pure but for the variable that halves
micro-batches.
"""

from __future__ import annotations

import os

from stoker.contract import names
from stoker.contract.names import EX_USAGE, Refusal
from stoker.training.config.schema import Config

MICRO = 16  # answers a rank learns from at once, where batch.micro is auto


def check(c: Config) -> None:
    if c.parallel.strategy == "fsdp":
        raise Refusal(
            "stage grpo writes its answers with whole weights and parallel.strategy fsdp shards them: use ddp", EX_USAGE
        )
    if c.parallel.balance != "off" or c.parallel.comm != "full":
        raise Refusal(
            "stage grpo shares answers, not samples: parallel.balance and parallel.comm are for pretrain, midtrain, sft"
            " and reward",
            EX_USAGE,
        )
    if c.generate.temperature == 0:
        raise Refusal(
            "generate.temperature 0 makes all answers of a group the same, and nothing could be learned: give one"
            " above 0",
            EX_USAGE,
        )
    if c.generate.new_tokens >= c.data.context_length:
        room = (
            f"generate.new_tokens {c.generate.new_tokens} leaves no room for a prompt in data.context_length"
            f" {c.data.context_length}"
        )
        raise Refusal(f"{room}: lower the one or raise the other", EX_USAGE)
    answers = c.grpo.prompts_per_step * c.grpo.group
    if c.grpo.updates > answers:
        raise Refusal(
            f"grpo.updates {c.grpo.updates} is more than the {answers} answers of a step (grpo.prompts_per_step ×"
            " grpo.group)",
            EX_USAGE,
        )


def micro_batch(c: Config) -> int:
    return max((c.batch.micro or MICRO) >> int(os.environ.get(names.MICRO_BATCH_HALVINGS, "0")), 1)


def steps_of(c: Config, prompts: int) -> int:
    """train.epochs counts prompts that were sampled."""
    return c.train.max_steps or max(-(-round(c.train.epochs * prompts) // c.grpo.prompts_per_step), 1)
