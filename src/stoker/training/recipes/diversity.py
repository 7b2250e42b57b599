"""Diversity: are one model's answers more varied than another's?

    stoker train diversity --model.load sft/hf --diversity.prompts prompts.jsonl --diversity.baseline uniform/hf --diversity.compared density/hf

Reads top to bottom: settings, prompts, both models' answers, embeddings by a third model, comparison.
Writes completions.jsonl, diversity_report.md and result.json.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch

import stoker
from stoker.contract.errors import EX_CONFIG, EX_DATAERR, Refusal
from stoker.contract.safe_io import write_atomic
from stoker.contract.units import plural
from stoker.training.config.schema import Config
from stoker.training.data.formats.questions import Question
from stoker.training.density.points import Vectors, centred, clusters
from stoker.training.diversity.metrics import Counted, compare, report, told
from stoker.training.evaluate.answering import Answerer
from stoker.training.evaluate.asking import Manner, prompt_ids, refuse_long
from stoker.training.evaluate.likelihood import embed_shared
from stoker.training.evaluate.tasks import prompts_of, spread
from stoker.training.generate.bits import coded
from stoker.training.model import hf_config, ready
from stoker.training.model.attention import kernels
from stoker.training.parallel.group import Group
from stoker.training.recipes import stage
from stoker.training.serve.batch import BatchEngine
from stoker.training.tokenizer.tokenizer import load as load_tokenizer

COMPLETIONS, REPORT = "completions.jsonl", "diversity_report.md"
LEAST = 2  # prompts: fewer have no spread to measure by

Answers = list[list[str]]


def main(argv: list[str]) -> int:
    c = stage.settings(argv, "diversity")
    given = {f"diversity.{name}": getattr(c.diversity, name) for name in ("baseline", "compared")}
    for key in (key for key, folder in given.items() if not folder):
        raise Refusal(f"{key} is empty: name a model's folder", EX_CONFIG)
    folders = [stage.weights_of(folder) for folder in given.values()]
    embedder = stage.weights_of(c.model.load)
    questions = _questions(c, folders)

    group = Group(c.parallel)
    with kernels(ready.attention(c.compute, group.device)), torch.no_grad():
        stoker.phase("eval")
        baseline, compared = (_answers(c, folder, questions, group) for folder in folders)
        vectors = _embedded(
            c, embedder, [text for answers in (baseline, compared) for one in answers for text in one], group
        )
    if group.first:
        _compare(c, [question.text for question in questions], baseline, compared, vectors)
    group.close()
    return 0


def _questions(c: Config, folders: Sequence[str]) -> list[Question]:
    """Those that fit in both models' contexts, spread over the file."""
    prompts = prompts_of(c.diversity.prompts, "diversity.prompts")
    if prompts.skipped:
        stage.from_rank_0(prompts.skipped)
    room, fit = c.data.context_length - c.generate.new_tokens, set(range(len(prompts.questions)))
    for folder in folders:
        words = load_tokenizer(hf_config.tokenizer_in(folder))
        lengths = [
            len(prompt_ids(words, question, Manner(c.evaluate.chat, system=c.generate.system)))
            for question in prompts.questions
        ]
        fit &= set(refuse_long(lengths, room, f"diversity.prompts for {folder}"))
    if len(fit) < len(prompts.questions):
        stage.from_rank_0(
            f"diversity.prompts: {len(prompts.questions) - len(fit)} of {len(prompts.questions)} are longer than {room}"
            " tokens and are left out"
        )
    places = sorted(fit)
    chosen = [prompts.questions[places[place]] for place in spread(len(places), c.diversity.most)]
    if len(chosen) < LEAST:
        raise Refusal(
            f"diversity.prompts {c.diversity.prompts}: {plural(len(chosen), 'prompt')}; a comparison needs at least {LEAST}",
            EX_DATAERR,
        )
    return chosen


def _answers(c: Config, folder: str, questions: Sequence[Question], group: Group) -> Answers:
    """All of them, on every rank. Both models get the same prompts and seeds: equal ones write the same."""
    tokenizer, manner = (
        load_tokenizer(hf_config.tokenizer_in(folder)),
        Manner(c.evaluate.chat, system=c.generate.system),
    )
    prompts = [prompt_ids(tokenizer, question, manner) for question in questions]
    model = stage.open_to_ask(c, folder, group, c.generate.bits)
    length = max(map(len, prompts)) + c.generate.new_tokens
    rows, vocab = c.generate.rows, tokenizer.vocab_size
    sharded = group.strategy == "fsdp" and group.world > 1
    engine = BatchEngine(model, rows=rows, length=length, vocab=vocab, codes=coded(model), streamed=sharded)
    answerer = Answerer(engine, tokenizer, manner, c.generate)
    blocks = group.turns(len(prompts))  # of blocks there are fewer
    mine = answerer.sample(prompts, c.diversity.answers, c.train.seed, blocks.__contains__)
    together = {place: answers for part in group.all(mine) for place, answers in part.items()}
    cut = sum(answer.cut for answers in together.values() for answer in answers)
    about_cut = f", {cut} cut at {c.generate.new_tokens} tokens" if cut else ""
    stage.from_rank_0(f"{folder}: {c.diversity.answers} answers to each of {len(prompts)} prompts{about_cut}")
    return [[answer.text for answer in together[place]] for place in range(len(prompts))]


def _embedded(c: Config, folder: str, texts: Sequence[str], group: Group) -> Vectors:
    tokenizer = stage.tokenizer_of(c)
    rows = [[tokenizer.end_id, *tokenizer.encode(text)] for text in texts]  # an empty answer has a place, too
    return centred(embed_shared(stage.open_to_ask(c, folder, group), rows, group))


def _compare(c: Config, prompts: list[str], baseline: Answers, compared: Answers, vectors: Vectors) -> None:
    k = min(c.diversity.clusters, len(vectors))
    shaped = vectors.reshape(2, len(prompts), c.diversity.answers, -1)
    labels = clusters(vectors, k, c.train.seed).reshape(2, len(prompts), -1)
    ours, theirs = (
        Counted(answers, list(shaped[which]), list(labels[which]), k, c.train.seed)
        for which, answers in enumerate((baseline, compared))
    )
    found = told(compare(ours, theirs, c.diversity.rounds, c.train.seed))
    stage.from_rank_0(found["verdict"])

    lines = [
        {"model": name, "index": index, "prompt": prompt, "answers": texts}
        for name, answers in (("baseline", baseline), ("compared", compared))
        for index, (prompt, texts) in enumerate(zip(prompts, answers, strict=True))
    ]
    where = stage.write_rows(c, COMPLETIONS, lines)
    text = report(found, prompts, baseline, compared, (c.diversity.baseline, c.diversity.compared), c.diversity.rounds)
    write_atomic(os.path.join(where, REPORT), text.encode())
    stage.finish(c, "diversity", found)


if __name__ == "__main__":
    sys.exit(stage.run(main))
