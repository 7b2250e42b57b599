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
from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.frozen import as_json, pick_fields, replace
from stoker.training.config.schema import Config
from stoker.training.evaluate.answering import Answerer, Asked, Outcome, choose, mark, put
from stoker.training.evaluate.asking import Manner
from stoker.training.evaluate.confidence import Interval, wilson, wilson_of_draws
from stoker.training.evaluate.likelihood import measure
from stoker.training.evaluate.tasks import read_tasks
from stoker.training.generate.bits import coded
from stoker.training.model import ready
from stoker.training.model.attention import kernels
from stoker.training.model.decoder import Decoder
from stoker.training.parallel.group import Group
from stoker.training.recipes import stage
from stoker.training.serve.batch import BatchEngine
from stoker.training.tokenizer.tokenizer import Tokenizer

SHOWN = 3  # samples per kind
MANY_CUT = 0.02  # a share of cut answers from which the token limit is too low to measure by
_SHARE = ("correct", "total", "accuracy", "low", "high")


def score(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Right by content; `strict`: right in form; `form`: in form; `cut`: at the token limit, of written answers."""
    greedy = [outcome.greedy for outcome in outcomes]
    sampled = [outcome.sampled for outcome in outcomes if outcome.sampled]
    return {
        **_share("", [mark.correct for mark in greedy]),
        **_share("strict_", [mark.strict for mark in greedy]),
        **_share("form_", [mark.in_form for mark in greedy]),
        **_share("cut_", [outcome.greedy.cut for outcome in outcomes if outcome.open]),
        **_share_of_samples("sampled_", [[mark.correct for mark in some] for some in sampled]),
        **_share_of_samples("sampled_cut_", [[mark.cut for mark in some] for some in sampled]),
    }


def _share(prefix: str, hits: Sequence[bool]) -> dict[str, Any]:
    return _keys(prefix, sum(hits), len(hits), wilson(sum(hits), len(hits)))


def _share_of_samples(prefix: str, hits: Sequence[Sequence[bool]]) -> dict[str, Any]:
    """Of so many answers to each question."""
    within = wilson_of_draws([sum(some) for some in hits], len(hits[0]) if hits else 0)
    return _keys(prefix, sum(map(sum, hits)), sum(map(len, hits)), within)


def _keys(prefix: str, correct: int, total: int, within: Interval) -> dict[str, Any]:
    values = (correct, total, correct / total, *within) if total else (0, 0, None, None, None)
    return {prefix + key: value for key, value in zip(_SHARE, values, strict=True)}


def metrics(outcomes: Sequence[Outcome], bits_per_byte: float | None) -> dict[str, Any]:
    by_task = {name: score(some) for name, some in _by(outcomes, "task").items()}
    by_kind = {name: score(some) for name, some in _by(outcomes, "kind").items()}
    return {"tasks": by_task, "kinds": by_kind, "all": score(outcomes), "bits_per_byte": bits_per_byte}


def _by(outcomes: Sequence[Outcome], field: str) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(getattr(outcome, field), []).append(outcome)
    return found


def samples(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """The first few of each kind: the same questions for every stage's model."""
    return [
        {"prompt": one.prompt, "answer": one.answer, **as_json(one.greedy), "kind": kind}
        for kind, some in _by(outcomes, "kind").items()
        for one in some[:SHOWN]
    ]


def row(outcome: Outcome) -> dict[str, Any]:
    """A line of completions.jsonl."""
    asked = pick_fields(outcome, "task", "index", "kind", "prompt", "answer")
    return {**asked, **as_json(outcome.greedy), "sampled": as_json(outcome.sampled)}


def table(scored: dict[str, Any]) -> list[str]:
    """Lines for the console."""
    sampled = scored["all"]["sampled_accuracy"] is not None
    title = f"{'sampled':>7}  {'95 %':<15} " if sampled else ""
    lines = [f"{'':24} {'right':>11}  {'greedy':>7}  {'95 %':<15} {title}{'in form':>7} {'cut':>6}"]
    several = len(scored["tasks"]) > 1
    kinds = scored["kinds"].items() if len(scored["kinds"]) > 1 or not several else ()
    for name, share in (*(scored["tasks"].items() if several else ()), *kinds, ("all", scored["all"])):
        more = f"{_with_interval(share, 'sampled_')} " if sampled else ""
        shares = f"{_with_interval(share, '')} {more}{_percent(share, 'form_')} {_percent(share, 'cut_'):>6}"
        lines.append(f"{name[:24]:24} {share['correct']:>5}/{share['total']:<5}  {shares}")
    lines.append('in form: the answer stands alone or after a mark such as "The answer is", right or wrong')
    lines.append("cut: the answer was not finished after generate.new_tokens")
    if scored["bits_per_byte"] is not None:
        lines.append(f"bits per byte {scored['bits_per_byte']:.4f}")
    return lines


def _with_interval(share: dict[str, Any], prefix: str) -> str:
    if share[f"{prefix}accuracy"] is None:
        return f"{'n/a':>7}  {'':<15}"
    within = f"{share[f'{prefix}low']:.1%} to {share[f'{prefix}high']:.1%}"
    return f"{share[f'{prefix}accuracy']:>7.1%}  {within:<15}"


def _percent(share: dict[str, Any], prefix: str) -> str:
    value = share[f"{prefix}accuracy"]
    return f"{'n/a' if value is None else f'{value:.1%}':>7}"


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
        sharded = group.strategy == "fsdp" and group.world > 1
        model = stage.open_to_ask(c, folder, group, c.generate.bits)
        answerer = _answerer(c, tasks, model, tokenizer, manner, sharded)
        mine: list[Outcome] = []
        for asked in tasks:
            closed = [asked.closed[at] for at in group.turns(len(asked.closed))]
            mine += choose(asked, closed, model, tokenizer, manner)
            mine += _answers(c, asked, answerer, group) if answerer is not None and asked.open else []
        texts, tokens = c.evaluate.texts, c.train.eval_tokens
        per_byte = measure(texts, c.data, tokens, model, tokenizer, group, stage.from_rank_0) if texts else None

    together = [one for part in group.all(mine if group.first or not sharded else []) for one in part]
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


def _answerer(
    c: Config, tasks: Sequence[Asked], model: Decoder, tokenizer: Tokenizer, manner: Manner, sharded: bool
) -> Answerer | None:
    """One for all tasks: on a GPU its shapes are captured once."""
    lengths = [len(asked.prompts[place]) for asked in tasks for place in asked.open]
    if not lengths:
        return None
    length = max(lengths) + c.generate.new_tokens
    rows, vocab = c.generate.rows, tokenizer.vocab_size
    engine = BatchEngine(model, rows=rows, length=length, vocab=vocab, codes=coded(model), streamed=sharded)
    return Answerer(engine, tokenizer, manner, c.generate)


def _answers(c: Config, asked: Asked, answerer: Answerer, group: Group) -> list[Outcome]:
    """This rank's: greedy ones by question, sampled ones by block, as they depend on their place in a call."""
    if not c.evaluate.draws:
        return answerer.write(asked, [asked.open[at] for at in group.turns(len(asked.open))])
    prompts = [asked.prompts[place] for place in asked.open]
    mine = group.turns(len(prompts))  # of blocks there are fewer
    sampled = answerer.sample(prompts, c.evaluate.draws, c.train.seed, mine.__contains__)
    answers = {asked.open[number]: written for number, written in sampled.items()}
    return [
        replace(one, sampled=tuple(mark(asked.task, written, one.index) for written in answers[one.index]))
        for one in answerer.write(asked, list(answers))
    ]


def _report(c: Config, outcomes: list[Outcome], per_byte: float | None) -> None:
    scored = metrics(outcomes, per_byte)
    for line in table(scored):
        stage.from_rank_0(line)
    for line in _about_cut(scored["all"], c.generate.new_tokens):
        stage.from_rank_0(line)
    stage.write_rows(c, COMPLETIONS, map(row, outcomes))
    stage.finish(c, "evaluate", {**scored, "new_tokens": c.generate.new_tokens}, more={"samples": samples(outcomes)})


def _about_cut(share: dict[str, Any], limit: int) -> Iterator[str]:
    for prefix, which in (("cut_", "greedy"), ("sampled_cut_", "sampled")):
        cut, total = share[f"{prefix}correct"], share[f"{prefix}total"]
        if total and cut / total >= MANY_CUT:
            yield f"{cut} of {total} {which} answers were cut at {limit} tokens: raise generate.new_tokens"


if __name__ == "__main__":
    sys.exit(stage.run(main))
