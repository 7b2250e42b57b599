"""Learning from rewards: group-relative policy optimisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.contract.names import EX_USAGE, Refusal
from stoker.contract.quantities import number_at
from stoker.training.config.derived import Learning
from stoker.training.config.schema import Config
from stoker.training.stages import estimate
from stoker.training.stages.evaluate import lengths_of_prompts
from stoker.training.stages.stage import LEARN_KEYS, LEARNS, RUN_KEYS, From, Link, Metrics, Rows, Stage, joined

if TYPE_CHECKING:
    from stoker.training.tokenizer.tokenizer import Tokenizer


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
    if c.generate.top_k or c.generate.top_p < 1:
        raise Refusal(
            f"generate.top_k {c.generate.top_k}, generate.top_p {c.generate.top_p:g}: stage grpo learns from the"
            " probabilities its answers were sampled with, and these cut some of them off; leave them at 0 and 1, and"
            " lower generate.temperature instead",
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


def lengths(c: Config, words: Tokenizer) -> list[tuple[str, list[int]]]:
    return lengths_of_prompts(c, words, c.grpo.prompts, "grpo.prompts", chat=True)


def headline(metrics: Metrics) -> str:
    return joined(
        ("reward {:.3f} at first", number_at(metrics, "reward_first")),
        ("{:.3f} at last", number_at(metrics, "reward_last")),
    )


_GIVEN = {
    "model.load": From("sft", "hf"),
    "grpo.prompts": Rows("prompts"),
    "grpo.reward_model": From("reward", "hf"),
}
_WEIGHTED = {**_GIVEN, "grpo.weights": From("density", "weights.jsonl")}
STAGE = Stage(
    name="grpo",
    about="learning from rewards",
    recipe="stoker.training.recipes.grpo",
    sections=LEARNS | {"generate", "grpo"},
    inputs=("model.load", "grpo.prompts"),
    outputs=("hf",),
    common=(
        "model.load",
        "grpo.prompts",
        "grpo.weights",
        "grpo.reward_model",
        "grpo.prompts_per_step",
        "grpo.group",
        "grpo.kl",
        "generate.new_tokens",
        "generate.temperature",
        "generate.system",
        *(key for key in LEARN_KEYS if key != "batch.tokens"),
        *RUN_KEYS,
    ),
    learning=Learning(rate=0.05, passes=1, prompts=True),  # 1e-6 for a billion parameters
    links=(
        Link("grpo-uniform", _GIVEN, "density", "GRPO uniform"),
        Link("grpo-density", _WEIGHTED, "grpo-uniform", "GRPO density"),
    ),
    check=check,
    estimate=estimate.grpo,
    headline=headline,
    lengths=lengths,
)
