"""Learning from rewards: group-relative policy optimisation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.units import finite_number
from stoker.training.config.derived import Learning
from stoker.training.config.schema import Config
from stoker.training.rl import parts
from stoker.training.stages import estimate
from stoker.training.stages.blocks import Block, Text
from stoker.training.stages.evaluate import lengths_of_prompts
from stoker.training.stages.significance import Row, number, untested_row
from stoker.training.stages.stage import Curves, From, Link, Metrics, Reported, Rows, Stage, Words, joined, keys_of


def check(c: Config) -> None:
    answers, how = c.grpo.prompts_per_step * c.grpo.group, c.generate
    shared = c.parallel.balance != "off" or c.parallel.comm != "full"
    problems = {
        "parallel.offload all: answers are written by a copy on the GPU, which needs weights there; use parallel.offload"
        " optimizer": c.parallel.offload == "all",
        "stage grpo shares answers, not samples: parallel.balance and parallel.comm are for pretrain, midtrain, sft and"
        " reward": shared,
        "stage grpo writes its answers with the embedding on the GPU: leave compute.embedding host out": (
            c.compute.embedding == "host"
        ),
        "generate.temperature 0 makes all answers of a group the same, and nothing could be learned: give one above 0": (
            how.temperature == 0
        ),
        f"generate.top_k {how.top_k}, generate.top_p {how.top_p:g}: stage grpo learns from the probabilities its answers"
        " were sampled with, and these cut some of them off; leave them at 0 and 1, and lower generate.temperature"
        " instead": how.top_k or how.top_p < 1,
        f"generate.new_tokens {how.new_tokens} leaves no tokens for a prompt in data.context_length"
        f" {c.data.context_length}: lower the one or raise the other": how.new_tokens >= c.data.context_length,
        "generate.bits 4 needs --qlora in stage grpo: other weights learn in more bits, and answers must come from those": (
            how.bits == "4" and c.adapter.method != "qlora"
        ),
        f"grpo.importance_cap {c.grpo.importance_cap:g} would make every token weigh less: 0 switches it off, else from 1 up": (
            0 < c.grpo.importance_cap < 1
        ),
        f"grpo.staleness {c.grpo.staleness} needs grpo.server: trainers that write the answers themselves always use the"
        " newest weights": c.grpo.staleness and not c.grpo.server,
        "grpo.server with --qlora: the server has the weights in 16 bits, and answers must come from those that learn; use"
        " --lora": c.grpo.server and c.adapter.method == "qlora",
        "grpo.server_kind vllm takes new weights as adapters: add --lora": (
            c.grpo.server and c.grpo.server_kind == "vllm" and c.adapter.method != "lora"
        ),
        f"grpo.server_kind sglang with --{c.adapter.method}: it is given whole weights; leave the adapter out, or serve with"
        " `stoker serve`": c.grpo.server and c.grpo.server_kind == "sglang" and c.adapter.method != "off",
        f"grpo.publish {c.grpo.publish} is for `stoker serve`: {c.grpo.server_kind} loads folders": (
            c.grpo.server and c.grpo.server_kind != "stoker" and c.grpo.publish not in ("auto", "folder")
        ),
        f"grpo.updates {c.grpo.updates} is more than the {answers} answers of a step (grpo.prompts_per_step ×"
        " grpo.group)": c.grpo.updates > answers,
    }
    for line in (line for line, bad in problems.items() if bad):
        raise Refusal(line, EX_USAGE)
    parts.check(c.grpo)


def lengths(c: Config, words: Words) -> list[tuple[str, list[int]]]:
    return lengths_of_prompts(c, words, c.grpo.prompts, "grpo.prompts", chat=True)


def headline(metrics: Metrics) -> str:
    return joined(
        ("reward {:.3f} at first", finite_number(metrics, "reward_first")),
        ("{:.3f} at last", finite_number(metrics, "reward_last")),
    )


def effects(link: Reported) -> Iterator[Row]:
    yield from link.answers("questions", "prompts")
    if link.metrics is not None:
        numbers = (finite_number(link.metrics, f"reward_{when}") for when in ("first", "last"))
        yield untested_row(link.title, "reward in training, mean of 5 steps", *numbers, higher_is_better=True)


def about_weights(given: Mapping[str, Metrics]) -> Iterator[Block]:
    """Of a link that has some."""
    weights = given.get("grpo.weights")
    if weights is not None:
        prompts, clusters = (number(finite_number(weights, key)) for key in ("prompts", "clusters"))
        gini, least, most = (number(finite_number(weights, key), 2) for key in ("gini", "weight_min", "weight_max"))
        yield Text(
            f"Density weights: {prompts} prompts in {clusters} clusters (Gini {gini}); weights from {least} to {most}"
            " times the mean. Prompts with few neighbours are sampled more often."
        )


REWARDS = Curves(
    "rewards",
    "GRPO",
    "GRPO: reward, divergence from SFT (KL), length and entropy of the answers{more}. Thin: each step; thick: mean of"
    " 5",
    panels={
        "reward": "reward",
        "kl": "KL to SFT\n(nats/token)",
        "length": "length\n(tokens)",
        "entropy": "entropy\n(nats/token)",
    },
    optional=("cut", "cut at the\nlimit (share)", ", share cut at the token limit"),
    about=about_weights,
)
_GIVEN = {"model.load": From("sft", "hf"), "grpo.prompts": Rows("prompts"), "grpo.reward_model": From("reward", "hf")}
_WEIGHTED = {**_GIVEN, "grpo.weights": From("density", "weights.jsonl")}
STAGE = Stage(
    name="grpo",
    about="learning from rewards",
    sections=frozenset(("generate", "grpo", "adapter")),
    inputs=("model.load", "grpo.prompts"),
    outputs=("hf",),
    common=(
        *keys_of("grpo", "reward weights reward_model prompts_per_step group kl"),
        *keys_of("generate", "new_tokens temperature"),
        "adapter.method",
    ),
    learning=Learning(rate=0.05, passes=1, prompts=True),  # 1e-6 for a billion parameters
    links=(
        Link("grpo-uniform", _GIVEN, "density", "GRPO uniform", "GRPO u"),
        Link(
            "grpo-density",
            _WEIGHTED,
            "grpo-uniform",
            "GRPO density",
            "GRPO d",
            versus=("grpo-uniform", "Density or uniform"),
        ),
    ),
    check=check,
    estimate=estimate.grpo,
    headline=headline,
    effects=effects,
    curves=REWARDS,
    judged_by_prompts=True,
    lengths=lengths,
)
