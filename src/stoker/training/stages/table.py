"""The table of defaults in docs/pipeline.md, made from the rules themselves:   python -m stoker.training.stages.table"""

from __future__ import annotations

from stoker.contract.frozen import frozen
from stoker.training.config.amount import Amount
from stoker.training.config.derived import Situation, samples_a_step, settled, steps_and_passes
from stoker.training.config.keys import config_of
from stoker.training.config.resolve import combine
from stoker.training.model.config import ModelConfig, parameters, with_rows
from stoker.training.stages.registry import learning

BEGIN, END = "<!-- defaults: begin -->", "<!-- defaults: end -->"
_CPU = ModelConfig(
    load="hf", layers=4, dim=96, heads=3, kv_heads=3, head_dim=32, ff=256, vocab_size=768
)  # what the speedrun trains on a CPU
_DENSE_06 = ModelConfig(
    load="hf", layers=28, dim=1024, heads=16, kv_heads=8, head_dim=128, ff=3072, vocab_size=151_936, qk_norm=True
)
_DENSE_8 = ModelConfig(
    load="hf", layers=32, dim=4096, heads=32, kv_heads=8, head_dim=128, ff=14_336, vocab_size=128_256, tied=False
)
_CHAT, _SHORT_CHAT, _PAIR, _SHORT_PAIR = 300, 45, 600, 90  # tokens: of real ones, and of the built-in data set's


@frozen
class Case:
    stage: str
    preset: str
    count: int  # tokens, conversations, pairs or prompts
    each: int = 1  # tokens that one of them has
    model: ModelConfig | None = None  # None: the preset's own, made anew
    ranks: int = 1


CASES = (
    *(Case("pretrain", "small", tokens) for tokens in (30_000, 1_000_000, 100_000_000)),
    *(Case("pretrain", "stable", tokens) for tokens in (1_000_000, 1_000_000_000)),
    *(Case("pretrain", "production", tokens, ranks=8) for tokens in (1_000_000, 100_000_000, 10_000_000_000)),
    *(Case("midtrain", "small", chats, _SHORT_CHAT, _CPU) for chats in (200, 20_000)),
    *(Case("midtrain", "production", chats, _CHAT, _DENSE_06) for chats in (10_000, 1_000_000)),
    *(Case("sft", "small", chats, _SHORT_CHAT, _CPU) for chats in (200, 12_000)),
    *(Case("sft", "production", chats, _CHAT, _DENSE_06) for chats in (200, 10_000, 1_000_000)),
    *(Case("sft", "production", chats, _CHAT, _DENSE_8, ranks=8) for chats in (200, 10_000)),
    Case("sft", "stable", 10_000, _CHAT, _DENSE_06),
    Case("sft", "debug", 200, _SHORT_CHAT, _CPU),
    *(Case("reward", "small", pairs, _SHORT_PAIR, _CPU) for pairs in (200, 8_000)),
    *(Case("reward", "production", pairs, _PAIR, _DENSE_06) for pairs in (1_000, 100_000)),
    *(Case("dpo", "production", pairs, _PAIR, _DENSE_06) for pairs in (1_000, 100_000)),
    Case("dpo", "production", 60_000, _PAIR, _DENSE_8, ranks=8),
    *(Case("grpo", "small", prompts, model=_CPU) for prompts in (100, 4_000)),
    *(Case("grpo", "production", prompts, model=_DENSE_06) for prompts in (100, 7_473, 100_000)),
)
_UNITS = dict(pretrain="tokens", midtrain="chats", sft="chats", reward="pairs", dpo="pairs", grpo="prompts")


def table() -> str:
    lines = [
        "| stage | parameters | preset | ranks | data | learning rate | tokens a step | steps | passes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_row(case) for case in CASES)]) + "\n"


def _row(case: Case) -> str:
    rules = learning()[case.stage]
    config = config_of(case.preset, combine(case.preset, [{"model.load": "hf"} if case.model else {}]))
    context = config.data.context_length
    samples = case.count if rules.prompts else max(case.count * case.each // context, 1)
    model = case.model or with_rows(config.model, config.tokenizer.vocab_size)
    at = Situation(model, Amount(samples, case.count, _UNITS[case.stage]), case.ranks)
    config, _ = settled(rules, config, (), at)
    steps, passes = steps_and_passes(rules, config, at)
    batch = (
        f"{config.grpo.prompts_per_step} prompts × {config.grpo.group}"
        if rules.prompts
        else f"{samples_a_step(config, case.ranks) * context:,}"
    )
    count = parameters(model)
    size = f"{count / 1e9:.1f} B" if count >= 1e8 else f"{count / 1e6:.1f} M"
    about = f"{case.stage} | {size} | {case.preset} | {case.ranks} | {case.count:,} {_UNITS[case.stage]}"
    return f"| {about} | {config.optim.learning_rate:.1e} | {batch} | {steps:,} | {passes:.2g} |"


if __name__ == "__main__":
    print(table(), end="")
