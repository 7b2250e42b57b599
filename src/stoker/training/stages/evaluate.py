"""Questions with answers, and held-out text."""

from __future__ import annotations

from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.units import finite_number
from stoker.training.config.schema import Config
from stoker.training.stages import estimate
from stoker.training.stages.stage import From, Link, Metrics, Rows, Stage, Words, joined, keys_of

QUESTIONS, PROMPTS = "questions", "prompts-held-out"
TASKS = {QUESTIONS: "questions of all kinds", PROMPTS: "prompts like GRPO's"}  # as the report calls them


def lengths(c: Config, words: Words) -> list[tuple[str, list[int]]]:
    from stoker.training.evaluate.asking import Manner, as_asked
    from stoker.training.evaluate.tasks import read_tasks

    manner = Manner(c.evaluate.chat, c.evaluate.shots, c.generate.system)
    return [
        (
            f"questions of {task.name} with their answers",
            [length for _, length in as_asked(task.questions, words, manner, c.generate.new_tokens)],
        )
        for task in read_tasks(c.evaluate.tasks, c.evaluate.most)
    ]


def lengths_of_prompts(c: Config, words: Words, path: str, key: str, *, chat: bool) -> list[tuple[str, list[int]]]:
    from stoker.training.evaluate.asking import Manner, as_asked
    from stoker.training.evaluate.tasks import prompts_of

    questions = prompts_of(path, key).questions
    asked = as_asked(questions, words, Manner(chat, system=c.generate.system), c.generate.new_tokens)
    return [(f"prompts of {path} with their answers", [length for _, length in asked])]


def check(c: Config) -> None:
    if c.parallel.strategy != "fsdp":
        return
    for key, asked in {
        "parallel.offload": c.parallel.offload != "off",
        "generate.bits 4": c.generate.bits == "4",
    }.items():
        if asked:
            raise Refusal(
                f"stage evaluate of a model in shards does not support {key}: leave it out, or use ddp", EX_USAGE
            )


def headline(metrics: Metrics) -> str:
    """As the report has it: a chain asks two sets of questions, and each has a share of its own."""
    shares = [(TASKS[name], finite_number(metrics, "tasks", name, "accuracy"), name) for name in TASKS]
    cut = (
        "{:.1%} cut at the token limit",
        finite_number(metrics, "all", "cut_accuracy") or None,
    )  # 0: nothing to report
    if any(share is None for _, share, _ in shares):
        return joined(
            ("{:.1%} of held-out questions right", finite_number(metrics, "all", "accuracy")),
            ("{:.1%} of sampled answers", finite_number(metrics, "all", "sampled_accuracy")),
            cut,
        )
    counts = [finite_number(metrics, "tasks", name, "total") or 0 for _, _, name in shares]
    words = [f"{{:.1%}} of {int(count):,} {what}" for (what, _, _), count in zip(shares, counts, strict=True)]
    return joined((f"right: {words[0]}", shares[0][1]), (words[1], shares[1][1]), cut)


def _link(model: str) -> Link:
    asked = {
        "model.load": From(model, "hf"),
        "evaluate.tasks": (Rows("questions", many=True), Rows(PROMPTS, many=True, task=PROMPTS)),
        "evaluate.texts": Rows("base-held-out"),
    }
    return Link(f"eval-{model}", asked, model)


STAGE = Stage(
    name="evaluate",
    about="questions with answers",
    sections=frozenset(("generate", "evaluate")),
    inputs=("model.load",),
    outputs=("completions.jsonl",),
    measures=True,
    common=(
        *keys_of("evaluate", "tasks texts chat shots draws most"),
        *keys_of("generate", "new_tokens temperature system rows"),
        "data.context_length",
    ),
    links=tuple(_link(model) for model in ("base", "midtrain", "sft", "grpo-uniform", "grpo-density")),
    estimate=estimate.evaluate,
    headline=headline,
    lengths=lengths,
    check=check,
)
