"""Evaluation: questions that have answers, and held-out text.

    stoker train evaluate --model.load runs/latest/hf --evaluate.tasks questions.jsonl --evaluate.draws 4
    stoker train evaluate --model.load base/hf --evaluate.chat false --evaluate.shots 4 --evaluate.tasks gsm8k/test.jsonl --evaluate.texts held-out.jsonl

Reads top to bottom: settings, questions, model, answers, numbers. Writes completions.jsonl (every answer) and result.json (the numbers).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import stoker
from stoker.contract.names import EX_USAGE, Refusal
from stoker.contract.shape import replace
from stoker.training.config.schema import Config
from stoker.training.evaluate import scores
from stoker.training.evaluate.answering import Asked, Marker, Outcome, choose, put, sample, write
from stoker.training.evaluate.asking import Manner
from stoker.training.evaluate.likelihood import measure
from stoker.training.evaluate.tasks import read_tasks
from stoker.training.generate.engine import Engine
from stoker.training.model import ready
from stoker.training.model.attention import kernels
from stoker.training.model.decoder import Decoder
from stoker.training.parallel.group import Group
from stoker.training.recipes import stage
from stoker.training.tokenizer.tokenizer import Tokenizer

COMPLETIONS = "completions.jsonl"


def main(argv: list[str]) -> int:
    c = stage.settings(argv, "evaluate")
    if not c.evaluate.tasks and not c.evaluate.texts:
        raise Refusal(
            "nothing to evaluate: name files of questions with evaluate.tasks, or text with evaluate.texts", EX_USAGE
        )
    folder = stage.weights_of(c.model.load)
    tokenizer = stage.tokenizer_of(c)
    manner = Manner(c.evaluate.chat, c.evaluate.shots, c.generate.system)
    tasks = [
        put(task, tokenizer, manner, c.data.context_length, c.generate.new_tokens)
        for task in read_tasks(c.evaluate.tasks, c.evaluate.most)
    ]
    for asked in tasks:
        _announce(asked)

    group = Group(c.parallel)
    with kernels(ready.attention(c.compute, group.device)), torch.no_grad():
        stoker.phase("eval")
        model = stage.open_model(c, folder, group.device).eval()
        engine = _engine(c, tasks, model, tokenizer)
        mine = [one for asked in tasks for one in _answers(c, asked, model, engine, tokenizer, manner, group)]
        texts, tokens = c.evaluate.texts, c.train.eval_tokens
        per_byte = measure(texts, c.data, tokens, model, tokenizer, group, stage.from_rank_0) if texts else None

    together = [one for part in group.all(mine) for one in part]
    if group.first:
        names = [asked.task.name for asked in tasks]
        _report(c, sorted(together, key=lambda one: (names.index(one.task), one.index)), per_byte)
    group.close()
    return 0


def _announce(asked: Asked) -> None:
    if asked.task.skipped:
        stage.from_rank_0(asked.task.skipped)
    left = len(asked.prompts) - len(asked.places)
    long = f"; {left} are too long for the context and left out" if left else ""
    stage.from_rank_0(
        f"task {asked.task.name}: {len(asked.open)} open questions, {len(asked.closed)} with choices{long}"
    )


def _engine(c: Config, tasks: Sequence[Asked], model: Decoder, tokenizer: Tokenizer) -> Engine | None:
    """One for all tasks: on a GPU its shapes are captured once."""
    lengths = [len(asked.prompts[place]) for asked in tasks for place in asked.open]
    if not lengths:
        return None
    length = max(lengths) + c.generate.new_tokens
    return Engine(model, rows=c.generate.rows, length=length, vocab=tokenizer.vocab_size)


def _answers(
    c: Config, asked: Asked, model: Decoder, engine: Engine | None, tokenizer: Tokenizer, manner: Manner, group: Group
) -> list[Outcome]:
    """This rank's: greedy ones by question, sampled ones by block, as they depend on their place in a call."""
    chosen = choose(asked, asked.closed[group.rank :: group.world], model, tokenizer, manner)
    if engine is None or not asked.open:
        return chosen
    if not c.evaluate.draws:
        return chosen + write(asked, asked.open[group.rank :: group.world], engine, tokenizer, manner, c.generate)
    prompts = [asked.prompts[place] for place in asked.open]
    sampled = sample(
        prompts,
        c.evaluate.draws,
        engine,
        tokenizer,
        manner,
        c.generate,
        c.train.seed,
        lambda block: block % group.world == group.rank,
    )
    answers = {asked.open[number]: written for number, written in sampled.items()}
    marker = Marker(asked.task)
    greedy = write(asked, list(answers), engine, tokenizer, manner, c.generate)
    return chosen + [
        replace(one, sampled=tuple(marker(written, one.index) for written in answers[one.index])) for one in greedy
    ]


def _report(c: Config, outcomes: list[Outcome], per_byte: float | None) -> None:
    scored = scores.metrics(outcomes, per_byte)
    for line in scores.table(scored):
        stage.from_rank_0(line)
    for line in _about_cut(scored["all"], c.generate.new_tokens):
        stage.from_rank_0(line)
    stage.write_rows(c, COMPLETIONS, map(scores.row, outcomes))
    stage.finish(
        c, "evaluate", {**scored, "new_tokens": c.generate.new_tokens}, more={"samples": scores.samples(outcomes)}
    )


def _about_cut(share: dict[str, Any], limit: int) -> Iterator[str]:
    for prefix, which in (("cut_", "greedy"), ("sampled_cut_", "sampled")):
        cut, total = share[f"{prefix}correct"], share[f"{prefix}total"]
        if total and cut / total >= scores.MANY_CUT:
            yield f"{cut} of {total} {which} answers were cut at {limit} tokens: raise generate.new_tokens"


if __name__ == "__main__":
    sys.exit(stage.run(main))
