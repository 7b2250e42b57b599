"""GRPO: its formulas against plain autograd, its draws against their weights, its breaker by a table; then real runs of a tiny model on CPUs."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import test_guide  # noqa: E402
from conftest import Stoker, at_length, at_length_but, wait_for  # noqa: E402
from forked_ranks import Server, program, server  # noqa: E402
from stoker.contract.errors import EX_CONFIG, EX_DATAERR, EX_NOINPUT, EX_SOFTWARE, EX_USAGE, Refusal  # noqa: E402
from stoker.contract.frozen import replace  # noqa: E402
from stoker.control.record.rollouts_log import read_rollouts  # noqa: E402
from stoker.training.checkpoint.reading import open_checkpoint  # noqa: E402
from stoker.training.data.learn import train  # noqa: E402
from stoker.training.generate import exporting  # noqa: E402
from stoker.training.generate.finding import Found  # noqa: E402
from stoker.training.loop.learner import Beside  # noqa: E402
from stoker.training.model import hf  # noqa: E402
from stoker.training.model import loss as chunked  # noqa: E402
from stoker.training.model.config import ModelConfig  # noqa: E402
from stoker.training.model.decoder import Decoder  # noqa: E402
from stoker.training.optim.config import OptimConfig  # noqa: E402
from stoker.training.optim.loss_scale import LossScale  # noqa: E402
from stoker.training.optim.optimizer import Optimizer  # noqa: E402
from stoker.training.parallel.config import ParallelConfig  # noqa: E402
from stoker.training.parallel.group import Group  # noqa: E402
from stoker.training.rl import rollout as asking  # noqa: E402
from stoker.training.rl.config import GrpoConfig  # noqa: E402
from stoker.training.rl.parts import parts_of  # noqa: E402
from stoker.training.rl.rollout import Answer, Paid  # noqa: E402
from stoker.training.rl.scoring import Judged, Rewards, Scorer  # noqa: E402
from stoker.training.rl.task import FIRST, NOTHING_LEFT, History, Seen, judge  # noqa: E402
from stoker.training.rl.update import Policy, Row, Updater, advantages, arrange  # noqa: E402
from stoker.training.tokenizer import chat  # noqa: E402
from stoker.training.tokenizer.tokenizer import bytes_tokenizer  # noqa: E402

CPU = torch.device("cpu")
SHAPE = ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, ff=64, vocab_size=260)

# ---- formulas ----


def test_advantages_are_normalised_within_their_group_and_constant_groups_give_zero() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.1, 0.1, 0.1, 0.1], [0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    scaled = advantages(rewards, True)
    torch.testing.assert_close(
        scaled[0], torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64) * 0.5 / (0.5 + 1e-4)
    )
    assert scaled[1].tolist() == [0.0] * 4, "not even the rounding of their mean is learned from"
    assert scaled[2, 3] == pytest.approx(0.75 / (0.1875**0.5 + 1e-4)) and float(scaled[2].sum()) == pytest.approx(
        0, abs=1e-12
    )
    assert advantages(rewards, False)[2].tolist() == [-0.25, -0.25, -0.25, 0.75]
    assert advantages(torch.zeros(0, 4, dtype=torch.float64), True).shape == (0, 4), "a rank may have no prompts"


@pytest.mark.parametrize(
    ("temperature", "tied", "high", "cap"), [(1.0, True, 0.0, 0.0), (0.7, False, 0.0, 0.0), (1.0, False, 0.5, 1.3)]
)
def test_the_loss_and_its_gradient_are_those_of_the_plain_formula(
    temperature: float, tied: bool, high: float, cap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right-padded micro-batches, answers only, chunks of three tokens, against whole logits row by row."""
    monkeypatch.setattr(chunked, "chunk_rows", lambda tokens, vocabulary, itemsize: min(tokens, 3))
    model = Decoder(replace(SHAPE, tied=tied), 64)
    model.start(1)
    draw = np.random.default_rng(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(int(one) for one in draw.integers(0, 260, count))

    rows = [
        Row(ids(before), ids(after), float(draw.normal()))
        for before, after in ((5, 3), (17, 1), (2, 20), (9, 9), (30, 4))
    ]
    batches = []
    for batch in arrange(rows, 2, 64, CPU):
        with torch.no_grad():
            far = [
                torch.randn(len(batch.targets), generator=torch.Generator().manual_seed(n)) * 0.4 - 5.5
                for n in (1, 2, 3)
            ]
        batches.append(replace(batch, old=far[0], reference=far[1], sampled=far[2]))
    assert [tuple(batch.inputs.shape) for batch in batches] == [(2, 32), (2, 32), (1, 48)], (
        "sorted by length, padded to multiples of 16"
    )
    policy = Policy(model, temperature=temperature, clip_ratio=0.2, kl=0.3, clip_high=high, importance_cap=cap)
    tokens = sum(len(row.answer) for row in rows)
    loss = sum(policy(batch, 1 / tokens)[0] for batch in batches)
    seen = sum(policy(batch, 1.0)[1] for batch in batches)
    loss.backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    model.zero_grad()
    capped = 0
    total, divergence, entropy = torch.zeros(()), torch.zeros(()), torch.zeros(())
    ordered = sorted(rows, key=lambda row: len(row.prompt) + len(row.answer))
    at = {
        id(row): (number // 2, sum(len(before.answer) for before in ordered[number // 2 * 2 : number]))
        for number, row in enumerate(ordered)
    }
    for row in ordered:
        number, begin = at[id(row)]
        fixed = slice(begin, begin + len(row.answer))
        logits = model(torch.tensor([row.prompt + row.answer]))[0, len(row.prompt) - 1 : -1] / temperature
        whole = torch.log_softmax(logits, -1)
        logp = whole[range(len(row.answer)), list(row.answer)]
        ratio = torch.exp(logp - batches[number].old[fixed])
        surrogate = torch.min(ratio * row.advantage, torch.clamp(ratio, 0.8, 1 + (high or 0.2)) * row.advantage)
        if cap:
            apart = batches[number].old[fixed] - batches[number].sampled[fixed]
            capped += int((apart.exp() > cap).sum())
            surrogate = surrogate * torch.clamp(apart.exp(), max=cap)
        apart = batches[number].reference[fixed] - logp
        k3 = apart.exp() - apart - 1
        total = total + (0.3 * k3 - surrogate).sum()
        divergence, entropy = divergence + k3.sum(), entropy - (whole.exp() * whole).sum()
    assert 0 < capped < tokens or not cap, "some weigh more than they may"
    (total / tokens).backward()
    assert loss.item() == pytest.approx(total.item() / tokens, rel=1e-5)
    assert seen[:2].tolist() == pytest.approx([divergence.item(), entropy.item()], rel=1e-5)
    assert len(seen) == 2 or seen[2].item() == pytest.approx(
        sum((b.sampled - b.old).sum().item() for b in batches), rel=1e-5
    )
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            ours[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_rank_without_answers_has_a_gradient_of_zero_for_every_parameter() -> None:
    model = Decoder(replace(SHAPE, tied=False), 64)
    model.start(1)
    (batch,) = arrange([], 8, 64, CPU)
    loss, seen = Policy(model, temperature=1.0, clip_ratio=0.2, kl=0.0)(batch, 2.0)
    loss.backward()
    assert loss.item() == 0 and seen.tolist() == [0, 0]
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def reward(answers: list[Answer], scorer: Scorer | None, weight: float) -> Judged:
    parts = parts_of(GrpoConfig(reward_model="folder" if scorer else "", reward_weight=weight))
    return Rewards(parts, rows_of(answers), 8, None, scorer)(answers)


def rows_of(answers: list[Answer]) -> list[dict[str, Any]]:
    """The prompts' file, as far as these answers need it."""
    prompts = {answer.prompt.row: answer.prompt for answer in answers}
    return [{"prompt": prompts[row].asked, "answer": prompts[row].answer} for row in sorted(prompts)]


def test_an_answer_is_worth_one_if_it_is_right_and_a_share_of_its_score() -> None:
    prompt = asking.Prompt(0, "6 + 1?", (1, 2), "It is 6 + 1 = 7.\n#### 7")
    answers = [Answer(place, prompt, (1,), text, True) for place, text in enumerate(("7", "The answer is 7.", "8", ""))]
    found = reward(answers, None, 0.5)
    assert (found.rewards, found.correct) == ([1.0, 1.0, 0.0, 0.0], [True, True, False, False])
    found = reward(answers, lambda rows: [0.0, 800.0, -800.0, 0.0 * len(rows)], 0.5)
    assert found.rewards == pytest.approx([1.25, 1.5, 0.0, 0.25]) and found.correct == [True, True, False, False]


def test_a_steps_answers_are_told_identical_only_where_every_prompts_are() -> None:
    rows = [{"prompt": "?", "answer": "7"}] * 2
    ranks, rewards = Group(ParallelConfig(device="cpu")), Rewards(parts_of(GrpoConfig()), rows, 8, None, None)
    prompts = [asking.Prompt(row, "?", (1,), "7") for row in range(2)]

    def told(*ids: tuple[int, ...]) -> asking.Outcome:
        answers = [Answer(place, prompts[place // 2], one, "7", True) for place, one in enumerate(ids)]
        return asking.outcome(answers, rewards, 4, 2, ranks)[1]

    assert told((1, 2), (1, 2), (3,), (3,)).identical and not told((1, 2), (1, 2), (3,), (4,)).identical
    assert [told((1, 2), (1, 2), *rest).alike(2) for rest in (((3,), (3,)), ((3,), (4,)))] == [1.0, 0.5]


def test_a_step_tells_what_right_and_wrong_answers_were_given() -> None:
    ranks = Group(ParallelConfig(device="cpu"))
    file = [{"prompt": "?", "answer": "7"}, {"prompt": "?"}]
    rewards = Rewards(parts_of(GrpoConfig(reward=("length",))), file, 8, None, None)
    rows = [asking.Prompt(0, "?", (1,), "7"), asking.Prompt(1, "?", (1,), None)]
    answers = [Answer(n, rows[n // 2], (1,) * (n + 1), "78"[n % 2], True) for n in range(4)]
    _, outcome = asking.outcome(answers, rewards, 4, 2, ranks)
    given = outcome.rewards.tolist()
    assert outcome.paid(True) == asking.Paid(1, given[0]) and outcome.paid(False) == asking.Paid(1, given[1])
    assert len({*given}) == 4, "a row without an answer to compare with is in neither"


def test_an_update_that_is_no_number_changes_nothing_and_is_not_counted() -> None:
    model = Decoder(SHAPE, 64)
    model.start(1)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer = Optimizer(model, OptimConfig())
    updater = Updater(
        model,
        None,
        optimizer,
        Group(ParallelConfig(device="cpu")),
        GrpoConfig(),
        temperature=1.0,
        micro=2,
        attention="auto",
    )
    answers = [Answer(place, asking.Prompt(0, "?", (1, 2, 3), "7"), (55, 258), "7", True) for place in range(3)]
    bad = updater.learn(answers, [1.0, math.nan, -1.0], [2, 2, 2], 1.0)
    assert (
        not bad.finite
        and updater.done == 0
        and all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    )
    good = updater.learn(answers, [1.0, 0.5, -1.0], [2, 2, 2], 1.0)
    assert good.finite and updater.done == 1 and not torch.equal(model.embed.weight, before["embed.weight"])


def test_a_gradient_that_overflows_in_fp16_skips_updates_until_the_scale_is_small_enough() -> None:
    model = Decoder(SHAPE, 64, torch.float16)
    model.start(1)
    scale = LossScale(CPU)
    scale.value.fill_(2.0**24)
    group = Group(ParallelConfig(device="cpu"))
    updater = Updater(
        model, None, Optimizer(model, OptimConfig()), group, GrpoConfig(), temperature=1.0, micro=2, attention="auto",
        loss_scale=scale,
    )  # fmt: skip
    before = model.embed.weight.clone()
    answers = [Answer(place, asking.Prompt(0, "?", (1, 2, 3), "7"), (55, 258), "7", True) for place in range(3)]
    told = [updater.learn(answers, [1.0, 0.5, -1.0], [2, 2, 2], 1.0)]
    assert told[0].skipped and torch.equal(model.embed.weight, before)
    while told[-1].skipped:
        told.append(updater.learn(answers, [1.0, 0.5, -1.0], [2, 2, 2], 1.0))
    assert all(one.finite for one in told) and updater.done == 1 and not torch.equal(model.embed.weight, before)
    assert float(scale.value) == 2.0 ** (24 - len(told) + 1)
    assert not updater.learn(answers, [1.0, math.nan, -1.0], [2, 2, 2], 1.0).finite, "a loss that is no number"


# ---- prompts and draws ----


def test_prompts_are_drawn_as_often_as_their_weights_say_and_not_twice_in_a_step() -> None:
    weights = np.array([1.0, 2.0, 3.0, 0.0, 4.0, 10.0, 0.5, 0.5, 1.0, 2.0])
    draw, rounds = partial(asking.draw, weights), 4000
    steps = [draw(step, 7, 3) for step in range(rounds)]
    assert all(len(set(step)) == 3 for step in steps)
    seen = Counter(one for step in steps for one in step)
    wanted = asking.expected(weights, 3)
    assert wanted[5] == 1 and wanted.sum() == pytest.approx(3), "the heaviest is in every step, and no more than that"
    assert seen[3] == 0 and [seen[n] / rounds for n in range(10)] == pytest.approx(list(wanted), abs=0.03)
    assert wanted[4] / wanted[0] == pytest.approx(4) and wanted[2] / wanted[6] == pytest.approx(6)
    assert [draw(step, 7, 3) for step in range(5)] == steps[:5] and draw(0, 8, 3) != steps[0] and steps[0] != steps[1]


def test_all_alike_every_prompt_is_drawn_equally_often_also_where_a_step_has_more_than_there_are() -> None:
    draw = partial(asking.draw, np.ones(6))
    assert sorted(draw(0, 0, 6)) == list(range(6)) and draw(0, 0, 6) != draw(1, 0, 6)
    assert set(Counter(draw(3, 0, 15)).values()) == {2, 3} and Counter(Counter(draw(3, 0, 15)).values()) == {2: 3, 3: 3}


def test_prompts_come_as_text_messages_or_gsm8k_and_few_bad_ones_are_named_and_left_out() -> None:
    tokenizer = bytes_tokenizer()
    good = [
        {"prompt": "What is 2 + 3?", "answer": "5"},
        {"prompt": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 3?"}], "answer": 5},
        {"question": "How many?", "answer": "5 of them\n#### 5"},
    ]
    rows = [*(good * 200)[:598], {"prompt": "x" * 200, "answer": "5"}, {"prompt": "no answer"}]
    found, lines = asking.read(rows, tokenizer, 100, "p.jsonl")
    assert (
        len(found) == 598
        and found[1].answer == "5"
        and tokenizer.decode(found[0].ids) == "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (
        len(lines) == 2
        and "1 of 600 rows longer than" in lines[0]
        and "(row 599): left out" in lines[0]
        and "without an answer (row 600)" in lines[1]
    )
    with pytest.raises(Refusal) as refused:
        asking.read([*good, *[{"prompt": "x" * 200, "answer": "5"}] * 5], tokenizer, 100, "p.jsonl")
    assert (
        refused.value.code == EX_DATAERR
        and "5 of 8 rows" in refused.value.line
        and "rows 4, 5, 6, …" in refused.value.line
        and "100 tokens fit" in refused.value.line
    )
    for bad, words in (
        ([{"role": "robot", "content": "?"}], "a role other than"),
        ([{"role": "assistant", "content": "?"}], "last message"),
        ([], "without a prompt"),
    ):
        with pytest.raises(Refusal, match=words):
            asking.read([{"prompt": bad, "answer": "5"}], tokenizer, 100, "p.jsonl")


def test_a_system_message_is_said_before_prompts_that_have_none() -> None:
    tokenizer = bytes_tokenizer()
    own = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 3?"}]
    found, _ = asking.read(
        [{"prompt": "2 + 3?", "answer": "5"}, {"prompt": own, "answer": "5"}],
        tokenizer,
        200,
        "p.jsonl",
        "End with ####.",
    )
    shown = [tokenizer.decode(one.ids) for one in found]
    assert (
        shown[0].startswith("<|im_start|>system\nEnd with ####.<|im_end|>\n<|im_start|>user\n2 + 3?")
        and "####" not in shown[1]
        and "Be short." in shown[1]
    )


def test_a_reward_models_scores_count_within_a_prompt_whatever_their_level() -> None:
    """Scores of long answers lie far below 0: as they are, all of them would be worth nothing."""
    prompts = [asking.Prompt(row, "?", (1,), "5") for row in range(2)]
    answers = [Answer(place, prompts[place // 3], (1,), "5" if place == 1 else "6", True) for place in range(6)]
    scores = [-50.0, -52.0, -54.0, 7.0, 7.0, 7.0]
    found = reward(answers, lambda asked: scores, 0.1)
    assert found.correct == [False, True, False, False, False, False]
    assert found.rewards == pytest.approx(
        [0.1 / (1 + math.exp(-2)), 1 + 0.05, 0.1 / (1 + math.exp(2)), 0.05, 0.05, 0.05]
    )


def test_weights_of_another_file_are_refused() -> None:
    right = [{"index": 1, "weight": 0.5}, {"index": 0, "weight": 1.5}]
    assert asking.weights(right, 2, "w.jsonl").tolist() == [1.5, 0.5]
    for rows, count, words in (
        (right, 3, "weights of 2 prompts and grpo.prompts 3 rows"),
        ([*right, right[0]], 2, "3 prompts"),
        ([right[0], right[0]], 2, "belong together"),
        ([{"index": 0, "weight": -1}], 1, "row 1: a row needs an index and a weight"),
        ([{"index": 0, "weight": float("nan")}], 1, "row 1"),
        ([{"weight": 1}], 1, "row 1"),
    ):
        with pytest.raises(Refusal, match=words) as refused:
            asking.weights(rows, count, "w.jsonl")
        assert refused.value.code == EX_DATAERR
    prompt = asking.Prompt(0, "?", (1,), "5")
    with pytest.raises(Refusal, match="every weight is 0"):
        asking.draw_of([{"index": 0, "weight": 0}, {"index": 1, "weight": 1}], [prompt], 2, "w.jsonl")


# ---- the breaker ----


def steps(count: int, first: int = 20, **told: Any) -> list[Seen]:
    sound = {"reward": 0.4, "spread": 0.3, "correct": 0.4, "kl": 0.1, "entropy": 1.0, "length": 20.0, "cut": 0.1}
    sound["matched"] = told.get("correct", sound["correct"])
    return [Seen(step=first + n, **{**sound, **told}) for n in range(count)]


SOUND = steps(20)
# Measured: right answers got 0.5 (68 of 68), wrong ones 0 (60) or 0.5 (32, cut, their last number right).
PAID_BY_RIGHT = [
    *steps(5, 40, reward=0.3, spread=0.25, correct=0.4, entropy=0.006, cut=0.5, unlike=False, alike=1.0, right=Paid(6, 3.0), wrong=Paid(10, 1.5)),
    *steps(5, 45, reward=0.32, spread=0.25, correct=0.45, entropy=0.006, cut=0.5, unlike=False, alike=0.875, right=Paid(8, 4.0), wrong=Paid(8, 1.5)),
]  # fmt: skip
BREAKS: list[tuple[str, list[Seen], GrpoConfig, tuple[str, ...] | None]] = [
    ("all is well", SOUND, GrpoConfig(), None),
    ("no right answer", SOUND + steps(10, 40, reward=0.0, spread=0.0, correct=0.0), GrpoConfig(), ("exactly 0 for every answer for 10 steps (since step 40)", "sft longer")),
    ("a reward that is blind", SOUND + steps(10, 40, reward=0.0, spread=0.0, correct=0.5), GrpoConfig(reward=("mine.py:score",)),
     ("exactly 0", "so nothing is learned: mine.py:score gives 0 to answers that are right (50% were", "look at that first")),
    ("a reward that sees right answers, but the texts are the same", SOUND + PAID_BY_RIGHT, GrpoConfig(reward=("mine.py:score",), group=4),
     ("all answers to a prompt had the same reward", "nothing is learned: for 93% of the prompts all 4 answers were the same text (entropy per token 0.006): raise generate.temperature",
      "; 50% of the answers were cut at generate.new_tokens: raise it")),
    ("a reward that prefers wrong answers", SOUND + steps(10, 40, spread=0.2, unlike=False, right=Paid(4, 0.4), wrong=Paid(12, 3.6)), GrpoConfig(reward=("mine.py:score",)),
     ("nothing is learned: mine.py:score gave right answers 0.1 on average, wrong ones 0.3 (40% were right", "look at that first")),
    ("a model that is sure of itself", SOUND + steps(10, 40, spread=0.2, unlike=False, entropy=0.01, right=Paid(4, 4.0), wrong=Paid(12, 0.0)), GrpoConfig(reward=("mine.py:score",)),
     ("nothing is learned: the entropy per token was 0.01, so the model is nearly certain",)),
    ("a reward that sees right answers", SOUND + steps(10, 40, spread=0.2, unlike=False, right=Paid(4, 4.0), wrong=Paid(12, 0.0)), GrpoConfig(reward=("mine.py:score",)),
     ("nothing is learned: give prompts that the model sometimes answers correctly",)),
    ("all cut, nothing right", SOUND + steps(10, 40, reward=0.0, spread=0.0, correct=0.0, cut=1.0), GrpoConfig(), ("exactly 0", "100% of the answers were cut at generate.new_tokens: raise it")),
    ("blind, and the answers are wrong", SOUND + steps(10, 40, reward=0.0, spread=0.0, correct=0.0), GrpoConfig(reward=("mine.py:score",)), ("exactly 0", "sft longer")),
    ("nine steps are not ten", SOUND + steps(9, 40, reward=0.0, spread=0.0, correct=0.0), GrpoConfig(), None),
    ("a constant that moves", SOUND + steps(9, 40, reward=0.0, spread=0.0) + steps(1, 49, reward=0.1, spread=0.0), GrpoConfig(), None),
    ("constant but not nothing", SOUND + steps(3, 40, reward=0.1, spread=0.0, correct=0.0), GrpoConfig(breaker_steps=3), ("exactly 0.1", "for 3 steps")),
    ("constant and never asked", SOUND + steps(90, 40, reward=0.0, spread=0.0), GrpoConfig(breaker_steps=0), None),
    ("every answer right", SOUND + steps(10, 40, reward=1.0, spread=0.0, correct=1.0), GrpoConfig(), ("every answer was right", "harder")),
    ("every answer right, and scored", SOUND + steps(10, 40, reward=1.05, spread=0.02, correct=1.0), GrpoConfig(), ("every answer was right", "harder")),
    ("alike within each prompt", SOUND + steps(10, 40, reward=0.5, spread=0.5, unlike=False), GrpoConfig(), ("same reward, for every prompt for 10 steps",)),
    ("wrong, and scored", SOUND + steps(10, 40, reward=0.05, spread=0.02, correct=0.0), GrpoConfig(), ("no answer was right for 10 steps", "breaker_steps 0")),
    ("wrong because cut", SOUND + steps(10, 40, reward=0.05, spread=0.02, correct=0.0, cut=1.0), GrpoConfig(), ("cut at generate.new_tokens",)),
    ("far away", SOUND + steps(3, 40, kl=12.5), GrpoConfig(), ("stayed above 10 for 3 steps (since step 40), now 12.5", "optim.learning_rate")),
    ("far away, and back", SOUND + steps(2, 40, kl=12.5) + steps(1, 42), GrpoConfig(), None),
    ("far away, unmeasured", SOUND + steps(5, 40, kl=None), GrpoConfig(), None),
    ("no entropy", SOUND + steps(5, 40, entropy=0.0001), GrpoConfig(), ("entropy per token stayed below 0.001 for 5 steps (since step 40)",)),
    ("no length", SOUND + steps(5, 40, length=1.5), GrpoConfig(), ("shrank to 1.5 tokens", "the 20.0 of the first 5 steps", "since step 40")),
    ("short from the beginning", steps(20, 0, length=1.5), GrpoConfig(), None),
    ("endless", SOUND + steps(10, 40, cut=1.0, length=64.0), GrpoConfig(), ("cut at generate.new_tokens for 10 steps", "64.0")),
    ("nearly endless", SOUND + steps(10, 40, cut=0.97), GrpoConfig(), ("97% of the answers were cut at generate.new_tokens for 10 steps",)),
    ("nearly endless, but fewer and fewer", SOUND + steps(9, 40, cut=0.99) + steps(1, 49, cut=0.96), GrpoConfig(), None),
    ("nearly endless, and meant so", SOUND + steps(10, 40, cut=0.97), GrpoConfig(breaker_cut=1.0), None),
    ("endless, and meant so", SOUND + steps(10, 40, cut=1.0), GrpoConfig(breaker_cut=0.0), None),
    ("many are cut", SOUND + steps(10, 40, cut=0.9), GrpoConfig(), None),
    ("the same text", SOUND + steps(10, 40, spread=0.2, unlike=False, identical=True), GrpoConfig(), ("were the same text, for every prompt for 10 steps (since step 40)",)),
    ("the same text, nothing right", SOUND + steps(10, 40, reward=0.0, spread=0.0, correct=0.0, unlike=False, identical=True), GrpoConfig(), ("the same text",)),
    ("every answer right, and the same text", SOUND + steps(10, 40, reward=1.0, spread=0.0, correct=1.0, unlike=False, identical=True), GrpoConfig(), ("every answer was right",)),
    ("right, but another reward counts", SOUND + steps(10, 40, correct=1.0), GrpoConfig(reward=("length",)), None),
    ("every answer right, and another reward too", SOUND + steps(10, 40, correct=1.0, unlike=False), GrpoConfig(reward=("length",)), ("every answer was right",)),
    ("never right, but another reward counts", SOUND + steps(10, 40, correct=0.0, matched=None), GrpoConfig(reward=("length",)), None),
    ("never right, and two rewards", SOUND + steps(10, 40, correct=0.0), GrpoConfig(reward=("exact", "length")), ("no answer was right", "only what length rewards is learned")),
    ("without answers", SOUND + steps(10, 40, correct=None), GrpoConfig(reward=("length",)), None),
    ("correct in another form", SOUND + steps(10, 40, reward=0.0, spread=0.0, correct=0.75, matched=0.0), GrpoConfig(), ("exactly 0", "75% were correct, but not in the form that exact pays for")),
    ("every answer right by content alone, scored", SOUND + steps(10, 40, reward=0.05, spread=0.02, correct=1.0, matched=0.0), GrpoConfig(), ("exact paid for no answer for 10 steps",)),
    ("all correct, and the reward pays nothing", SOUND + steps(10, 40, reward=0.0, spread=0.0, correct=1.0, unlike=False), GrpoConfig(reward=("mine.py:score",)),
     ("mine.py:score gives 0 to answers that are right",)),
    ("near the maximum, without signal", SOUND + steps(10, 40, reward=0.97, spread=0.17, correct=0.97, unlike=False), GrpoConfig(), ("0.97 of at most 1", NOTHING_LEFT)),
    ("near the maximum, the same text", SOUND + steps(10, 40, reward=0.96, spread=0.2, unlike=False, identical=True), GrpoConfig(), ("0.96 of at most 1", NOTHING_LEFT)),
    ("near the maximum, and certain", SOUND + steps(5, 40, reward=0.99, entropy=0.0001), GrpoConfig(), ("0.99 of at most 1", NOTHING_LEFT)),
    ("near the maximum, and short", SOUND + steps(5, 40, reward=0.99, length=1.5), GrpoConfig(), ("0.99 of at most 1", NOTHING_LEFT)),
    ("near the maximum of two rewards", SOUND + steps(10, 40, reward=1.95, unlike=False), GrpoConfig(reward=("number", "format:boxed")), ("1.95 of at most 2", NOTHING_LEFT)),
    ("one of two rewards", SOUND + steps(10, 40, reward=1.0, matched=0.5, unlike=False), GrpoConfig(reward=("number", "format:boxed")), ("nothing is learned",)),
    ("near the maximum, but far away", SOUND + steps(3, 40, reward=1.0, kl=12.5), GrpoConfig(), ("stayed above 10",)),
    ("nearly all correct, by a reward of one's own", SOUND + steps(10, 40, reward=1.94, correct=0.97, unlike=False, right=Paid(31, 62.0), wrong=Paid(1, 0.0)),
     GrpoConfig(reward=("mine.py:score",)), (NOTHING_LEFT,)),
    ("a constant of one's own reward, half of them correct", SOUND + steps(10, 40, reward=1.0, spread=0.0, correct=0.5, unlike=False), GrpoConfig(reward=("mine.py:score",)), ("gives 1 to answers",)),
    ("no number", SOUND + steps(3, 40, finite=False, entropy=None, kl=None), GrpoConfig(), ("not finite for 3 steps (since step 40)",)),
    ("no number twice", SOUND + steps(2, 40, finite=False), GrpoConfig(), None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "seen", "c", "words"), BREAKS, ids=[one[0] for one in BREAKS])
def test_the_breaker(name: str, seen: list[Seen], c: GrpoConfig, words: tuple[str, ...] | None) -> None:
    history = History(c)
    for number, one in enumerate(seen):
        history.add(one)
        assert number == len(seen) - 1 or history.finding() is None, "not before its time"
        history = History.from_json(c, json.loads(json.dumps(history.to_json())))  # as a resumed run has it
    found = history.finding()
    assert (found is None) == (words is None) and found == judge(seen[:FIRST], seen, c), found
    if found is not None and words is not None:
        assert all(word in found.line for word in words) and "\n" not in found.line, found.line
        assert found.solved == ("every answer was right" in found.line or NOTHING_LEFT in words)


def test_a_step_that_looks_broken_is_not_worth_a_checkpoint() -> None:
    for told, troubled in (
        ({}, False),
        ({"kl": 11.0}, True),
        ({"entropy": 0.0}, True),
        ({"length": 1.0}, True),
        ({"finite": False}, True),
        ({"reward": 0.0, "spread": 0.0}, False),
    ):
        assert History(GrpoConfig(), SOUND[:FIRST], [*SOUND[-9:], *steps(1, **told)]).troubled() == troubled, told


# ---- real runs: ranks as torchrun would start them, forked from one process that has torch already ----

FORKS = program("""
import torch, torch._dynamo
from stoker.training.recipes import grpo, stage

torch.set_num_threads(1)

def work(job, rank):
    os.environ["STOKER_RUN_DIR"] = os.path.join(job["folder"], "run")
    return stage.run(grpo.main, job["words"])
""")
TIMES = ("time", "tokens_per_s", "answers_s", "learn_s")  # what no two runs share


class Job:
    def __init__(self, folder: Path, codes: list[int]) -> None:
        self.run, self.codes, self._folder = folder / "run", codes, folder

    @property
    def metrics(self) -> list[dict[str, Any]]:
        lines = map(json.loads, (self.run / "metrics.jsonl").read_text().splitlines())
        return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.run / "result.json").read_text())

    def said(self, rank: int = 0) -> str:
        return (self._folder / f"rank-{rank}.log").read_text()


def model_that_answers_with_a_digit(folder: Path) -> None:
    """Any of the ten, alike: a little supervised training of two layers."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer = bytes_tokenizer()
    tokenizer.save(str(folder / "tokenizer"))
    model = Decoder(SHAPE, 48)
    model.start(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(120):
        rows = []
        for _ in range(16):
            asked, digit = torch.randint(10, 100, (1,)), int(torch.randint(0, 10, (1,)))
            rows.append(
                chat.chat(tokenizer, [("user", str(int(asked)).encode()), ("assistant", str(digit).encode())])[0][
                    :-1
                ].astype(np.int64)
            )
        ids = torch.from_numpy(np.stack(rows))
        targets = ids[:, 1:].clone()
        targets[:, :-2] = -100
        loss = model(ids[:, :-1], targets) / 32
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    hf.save(model, str(folder / "hf"), tokenizer_folder=str(folder / "tokenizer"), say=lambda line: None)
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": str(number), "answer": "7", "kind": "seven"}) + "\n" for number in range(10, 50))
    )


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    model_that_answers_with_a_digit(folder)
    return folder


class Forks:
    def __init__(self, ranks: Server, given: Path) -> None:
        self._ranks, self._given = ranks, given

    def words(self, *more: str) -> list[str]:
        return [
            "--preset",
            "small",
            "--model.load",
            str(self._given / "hf"),
            "--grpo.prompts",
            str(self._given / "prompts.jsonl"),
            "--context_length",
            "48",
            "--generate.new_tokens",
            "4",
            "--generate.rows",
            "16",
            "--grpo.prompts_per_step",
            "6",
            "--grpo.group",
            "8",
            "--learning_rate",
            "3e-3",
            "--warmup_ratio",
            "0",
            "--schedule",
            "constant",
            "--weight_decay",
            "0",
            "--log_every",
            "1",
            "--batch.micro",
            "16",
            "--batch.tokens",
            "0",
            "--timeout",
            "60s",
            "--cache",
            str(self._given / "cache"),
            *more,
        ]

    def __call__(
        self, ranks: int, folder: Path, *more: str, stop_after: int | None = None, by: int = signal.SIGTERM
    ) -> Job:
        """`stop_after`: a signal to all ranks once that step's line is written."""
        pids = self._ranks.begin(ranks, folder, words=self.words(*more))
        if stop_after is not None:
            path = folder / "run" / "metrics.jsonl"
            reached = wait_for(
                lambda: True if path.exists() and path.read_text().count("\n") > stop_after else None, 60
            )
            for pid in pids:
                os.kill(pid, by)
            assert reached, (folder / "rank-0.log").read_text()
        return Job(folder, self._ranks.codes())


@pytest.fixture(scope="module")
def forks(given: Path) -> Iterator[Forks]:
    with server(FORKS) as ranks:
        yield Forks(ranks, given)


STEPS = 20


@pytest.fixture(scope="module")
def whole(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = forks(1, tmp_path_factory.mktemp("whole"), "--max-steps", str(STEPS))
    assert job.codes == [0], job.said()
    return job


def test_metrics_have_every_step_and_the_log_every_nth(forks: Forks, tmp_path: Path) -> None:
    job = forks(1, tmp_path, "--max-steps", "6", "--log_every", "4")
    assert job.codes == [0], job.said()
    assert [line["step"] for line in job.metrics] == [0, 1, 2, 3, 4, 5]
    assert [line.partition("/")[0] for line in job.said().split("Step [")[1:]] == ["0", "4", "5"]


def test_the_reward_rises_and_the_result_tells_it(whole: Job, given: Path) -> None:
    rewards = [line["reward"] for line in whole.metrics]
    assert len(rewards) == STEPS and sum(rewards[:3]) / 3 < 0.25 and sum(rewards[-3:]) / 3 > 0.5, rewards
    assert {
        "step",
        "loss",
        "reward",
        "correct",
        "reward_std",
        "kl",
        "entropy",
        "length",
        "cut",
        "tokens",
        "grad_norm",
        "lr",
    } <= whole.metrics[0].keys()
    (last,) = (whole.run / "checkpoints").glob(f"step-{STEPS:08d}")
    exporting.export(Found(str(last), True), str(whole.run / "exported"), None, None, lambda line: None)
    saved, exported = (load_file(whole.run / name / "model.safetensors") for name in ("hf", "exported"))
    assert saved.keys() == exported.keys() and all(
        torch.equal(saved[name].float(), exported[name].float()) for name in saved
    ), "a checkpoint is a model, too"
    found = whole.result
    assert (found["stage"], found["model"], found["metrics"]["steps"], found["metrics"]["stopped"]) == (
        "grpo",
        "hf",
        STEPS,
        None,
    )
    kept = list(read_rollouts(str(whole.run)))
    for step, line in enumerate(whole.metrics):
        mine = [one for one in kept if one.step == step]
        assert len(mine) == 48 and {one.weights for one in mine} == {step} and sum(one.tokens for one in mine) > 0
        assert sum(one.reward for one in mine) / 48 == pytest.approx(line["reward"])
    assert kept[0].parts == {"exact": kept[0].reward} and kept[0].correct >= bool(kept[0].reward) and kept[0].prompt
    cut = [row["cut"] for row in whole.metrics]
    assert found["metrics"]["cut_first"] == pytest.approx(sum(cut[:5]) / 5) and found["metrics"][
        "cut_last"
    ] == pytest.approx(sum(cut[-5:]) / 5)
    assert found["metrics"]["reward_first"] == pytest.approx(sum(rewards[:5]) / 5) and found["metrics"][
        "reward_last"
    ] == pytest.approx(sum(rewards[-5:]) / 5)
    assert (
        found["metrics"]["kl_last"] > 0 and found["metrics"]["entropy_last"] > 0 and found["metrics"]["length_last"] > 1
    )
    assert (
        f"Step [3/{STEPS}] | Reward: " in whole.said() and " | Right: " in whole.said() and " | ETA: " in whole.said()
    )
    assert (whole.run / "hf" / "tokenizer.json").read_bytes() == (given / "hf" / "tokenizer.json").read_bytes()
    model = Decoder(hf.shape_of(str(whole.run / "hf")), 48)
    hf.load(model, str(whole.run / "hf"), lambda line: None)
    asked = torch.tensor([chat.prompt(bytes_tokenizer(), [("user", b"97")])])
    chance = torch.softmax(model(asked)[0, -1], -1)[ord("7")].item()
    assert chance > 0.5, "the exported weights are the learned ones, and hold for a prompt that was not asked"


@pytest.mark.parametrize("ranks", at_length_but([3], [2, 3]))
def test_any_number_of_ranks_gives_the_same_curve(forks: Forks, whole: Job, tmp_path: Path, ranks: int) -> None:
    """6 prompts in calls of 2: uneven over 2 ranks; and in other micro-batches."""
    job = forks(ranks, tmp_path, "--max-steps", "8", "--export", "false", "--batch.micro", "7")
    assert job.codes == [0] * ranks, job.said()
    for mine, theirs in zip(job.metrics, whole.metrics[:8], strict=True):
        assert mine == pytest.approx({**theirs, "total_steps": 8}, rel=1e-4, abs=1e-6), f"step {mine['step']}"


def test_a_rank_without_prompts_takes_part(forks: Forks, tmp_path: Path) -> None:
    few = ("--max-steps", "3", "--grpo.prompts_per_step", "1", "--export", "false")
    one, two = forks(1, tmp_path / "1", *few), forks(2, tmp_path / "2", *few)
    assert one.codes == [0] and two.codes == [0, 0], two.said(1)
    assert [line["loss"] for line in two.metrics] == pytest.approx(
        [line["loss"] for line in one.metrics], rel=1e-4, abs=1e-7
    )


BY_CODES = ("--qlora", "--generate.bits", "4")


@pytest.mark.parametrize(
    "more", at_length_but([()], [(), ("--lora",), ("--qlora",), BY_CODES, ("--grpo.updates", "2")]), ids=str
)
@pytest.mark.parametrize("number", at_length_but([2], [2, 3, 4]))
def test_ranks_with_a_model_in_shards_give_the_curve_of_one(
    forks: Forks, tmp_path: Path, number: int, more: tuple[str, ...]
) -> None:
    """Answers are written by a copy of all weights, and learned from in shards: 6 prompts are uneven over 4 calls, too."""
    words = ("--max-steps", "4", "--batch.micro", "7", *more)
    one = forks(1, tmp_path / "1", *words)
    two = forks(number, tmp_path / "2", *words, "--strategy", "fsdp")
    assert one.codes == [0] and two.codes == [0] * number, two.said()
    for name in ("loss", "reward", "kl", "entropy", "grad_norm"):
        ours, theirs = ([line[name] for line in job.metrics] for job in (two, one))
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), name
    assert sorted(os.listdir(tmp_path / "2" / "run" / "hf")) == sorted(os.listdir(tmp_path / "1" / "run" / "hf"))


@at_length
@pytest.mark.parametrize("method", [(), ("--lora",), ("--qlora",)], ids=str)
def test_a_run_goes_on_by_ddp_and_in_shards_of_any_number(
    forks: Forks, tmp_path: Path, method: tuple[str, ...]
) -> None:
    """Two ranks that hold copies, then 4 and 3 that hold shards, then one."""
    words = ("--batch.micro", "7", "--export", "false", "--schedule", "constant", "--warmup_steps", "1", *method)
    kept, shards, losses = ("--checkpoint.folder", str(tmp_path / "kept")), ("--strategy", "fsdp"), list[float]()
    one = forks(1, tmp_path / "alone", *words, "--max-steps", "4")
    for steps, (number, more) in enumerate(((2, ()), (4, shards), (3, shards), (1, ())), start=1):
        job = forks(number, tmp_path / f"to-{steps}", *words, *kept, *more, "--max-steps", str(steps))
        assert job.codes == [0] * number, job.said()
        losses += [line["loss"] for line in job.metrics]
    assert losses == pytest.approx([line["loss"] for line in one.metrics], rel=1e-4, abs=1e-6) and len(losses) == 4


def test_several_updates_a_step_learn_too_and_do_not_depend_on_the_ranks(forks: Forks, tmp_path: Path) -> None:
    more = ("--max-steps", "12", "--grpo.updates", "3", "--export", "false", "--learning_rate", "1e-3")
    one, two = forks(1, tmp_path / "1", *more), forks(2, tmp_path / "2", *more)
    assert one.codes == [0] and two.codes == [0, 0], one.said()
    # 18 updates. After 24 and more, what is rounded otherwise on two ranks has grown to 0.1 to 0.5 % for some first models.
    for mine, theirs in zip(two.metrics[:6], one.metrics[:6], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=5e-5), mine["step"]
    rewards = [line["reward"] for line in one.metrics]
    assert sum(rewards[-4:]) > sum(rewards[:4]), rewards  # steps ask different prompts: a single one says little


def test_stopped_by_sigterm_and_started_again_it_gives_the_metrics_of_an_uninterrupted_run(
    forks: Forks, whole: Job, tmp_path: Path
) -> None:
    more = ("--max-steps", str(STEPS), "--every_steps", "4")
    first = forks(1, tmp_path, *more, stop_after=5)
    assert (
        first.codes == [0]
        and 5 < len(first.metrics) < STEPS
        and not (first.run / "result.json").exists()
        and "stopped: " in first.said()
    )
    second = forks(1, tmp_path, *more)
    assert second.codes == [0] and "resumes at step" in second.said()
    assert second.metrics == whole.metrics and second.result["metrics"] == whole.result["metrics"]
    assert (second.run / "rollouts.jsonl").read_text() == (whole.run / "rollouts.jsonl").read_text()
    again = forks(1, tmp_path, *more)
    assert again.codes == [0] and again.result == second.result, "nothing was left to do"


def test_two_ranks_killed_in_the_middle_go_on_bit_for_bit(forks: Forks, tmp_path: Path) -> None:
    more = ("--max-steps", "9", "--export", "false")
    alone = forks(2, tmp_path / "alone", *more)
    part = forks(2, tmp_path / "cut", *more, "--every_steps", "2", stop_after=4, by=signal.SIGKILL)
    assert part.codes == [-signal.SIGKILL] * 2
    rest = forks(2, tmp_path / "cut", *more, "--every_steps", "2")
    assert rest.codes == alone.codes == [0, 0] and rest.metrics == alone.metrics


def test_the_breaker_stops_with_its_line_a_code_a_result_and_the_last_good_checkpoint(
    forks: Forks, given: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "never.jsonl"
    prompts.write_text('{"prompt": "11", "answer": "no model says this"}\n')
    job = forks(
        2,
        tmp_path / "job",
        "--grpo.prompts",
        str(prompts),
        "--grpo.breaker_steps",
        "3",
        "--max-steps",
        "9",
        "--grpo.prompts_per_step",
        "4",
    )
    assert job.codes == [EX_SOFTWARE] * 2
    for rank in (0, 1):
        assert "GRPO stopped itself: the reward was exactly 0 for every answer for 3 steps (since step 0)" in job.said(
            rank
        ) and "Traceback" not in job.said(rank)
    assert (
        job.result["model"] is None
        and job.result["metrics"]["steps"] == 3
        and "exactly 0" in job.result["metrics"]["stopped"]
    )
    assert (
        "the last good checkpoint is" in job.result["metrics"]["stopped"]
        and (job.run / "checkpoints" / "step-00000003").is_dir()
        and not (job.run / "hf").exists()
    )


def test_a_stop_rule_that_fires_at_the_last_step_leaves_a_complete_run(
    forks: Forks, given: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "never.jsonl"
    prompts.write_text('{"prompt": "11", "answer": "no model says this"}\n')
    never = ("--grpo.prompts", str(prompts), "--grpo.breaker_steps", "3", "--grpo.prompts_per_step", "4")
    job = forks(2, tmp_path / "job", *never, "--max-steps", "3")
    assert job.codes == [0, 0], job.said()
    assert job.result["model"] == "hf" and (job.run / "hf" / "model.safetensors").is_file()
    assert job.result["metrics"]["stopped"] is None and job.result["metrics"]["steps"] == 3
    assert "the reward was exactly 0 for every answer for 3 steps" in job.said(), "it is still said"
    assert "GRPO stopped itself" not in job.said() and "Traceback" not in job.said()


def test_a_reward_at_its_maximum_ends_the_run_as_done(forks: Forks, tmp_path: Path) -> None:
    paid = ("--grpo.reward", "length:100", "--grpo.breaker_steps", "7")
    job = forks(1, tmp_path, *paid, "--max-steps", "20")
    assert job.codes == [0], job.said()
    metrics = job.result["metrics"]
    assert (job.result["model"], metrics["steps"], metrics["stopped"]) == ("hf", 7, None)
    assert "1 of at most 1" in metrics["solved"] and NOTHING_LEFT in metrics["solved"]
    beginning = job.said().partition("Step [5/20]")[0]
    assert "the reward of the first 5 steps is already 1 of at most 1" in beginning, job.said()


def test_solved_prompts_end_the_run_early_and_well(forks: Forks, tmp_path: Path) -> None:
    more = ("--max-steps", "120", "--grpo.breaker_steps", "2", "--grpo.kl", "0", "--learning-rate", "1.5e-3")
    job = forks(1, tmp_path, *more)
    found = job.result
    assert job.codes == [0], job.said()
    assert found["model"] == "hf" and found["metrics"]["steps"] < 120 and found["metrics"]["stopped"] is None
    assert "every answer was right" in found["metrics"]["solved"] and found["metrics"]["kl_last"] is None


def test_weights_of_the_density_stage_choose_the_prompts(forks: Forks, tmp_path: Path) -> None:
    weights = tmp_path / "weights.jsonl"
    weights.write_text(
        "".join(
            json.dumps({"index": n, "weight": 40.0 if n == 3 else 0.0, "density": 1.0, "cluster": 0}) + "\n"
            for n in range(40)
        )
    )
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(
            json.dumps({"prompt": f"{n + 10}", "answer": "7" if n == 3 else "no model says this"}) + "\n"
            for n in range(40)
        )
    )
    more = ("--max-steps", "2", "--grpo.weights", str(weights), "--export", "false")
    job = forks(1, tmp_path, *more, "--grpo.prompts", str(prompts))
    same = forks(1, tmp_path / "same", *more, "--grpo.prompts", str(prompts))
    assert job.codes == [0] and sum(line["correct"] for line in job.metrics) > 0 and job.metrics == same.metrics, (
        "only the one that can be answered was asked"
    )
    weights.write_text(weights.read_text().splitlines()[0] + "\n")
    short = forks(1, tmp_path / "short", "--max-steps", "2", "--grpo.weights", str(weights))
    assert (
        short.codes == [EX_DATAERR]
        and "weights of 1 prompt and grpo.prompts 40 rows" in short.said()
        and "Traceback" not in short.said()
    )


def test_a_reward_model_adds_its_share(forks: Forks, given: Path, tmp_path: Path) -> None:
    from stoker.training.reward.model import RewardModel, save

    judge = RewardModel(SHAPE, 48)
    judge.start(0)
    with torch.no_grad():
        judge.score.normal_(generator=torch.Generator().manual_seed(0))
    save(judge, str(tmp_path / "reward"), Beside(str(given / "tokenizer"), False), lambda line: None, True)
    job = forks(
        1,
        tmp_path,
        "--max-steps",
        "2",
        "--grpo.reward_model",
        str(tmp_path / "reward"),
        "--grpo.reward_weight",
        "0.5",
        "--export",
        "false",
    )
    assert job.codes == [0], job.said()
    assert all(0 < line["reward"] - line["correct"] < 0.5 for line in job.metrics)
    none = forks(1, tmp_path / "none", "--max-steps", "2", "--grpo.reward_model", str(given / "hf"))
    assert none.codes == [EX_NOINPUT] and "is not a reward model" in none.said()
    train(["other words " * 50], 300, str(tmp_path / "words"))
    save(judge, str(tmp_path / "other"), Beside(str(tmp_path / "words"), False), lambda line: None, True)
    other = forks(1, tmp_path / "apart", "--max-steps", "2", "--grpo.reward_model", str(tmp_path / "other"))
    assert other.codes == [EX_CONFIG] and "has another tokenizer" in other.said()


def test_a_reward_of_ones_own_that_is_the_built_in_one_gives_the_identical_run(
    forks: Forks, whole: Job, tmp_path: Path
) -> None:
    """In two ranks, too: each has its own process. The file has no torch in it, and prints."""
    (tmp_path / "rewards.py").write_text(
        "from stoker.training.evaluate.marking import right_in_form\n"
        "def score(completion, answer, kind):\n    assert kind == 'seven'\n    return right_in_form(completion, answer)\n"
    )
    own = ("--max-steps", "8", "--export", "false", "--grpo.reward", f"{tmp_path}/rewards.py:score")
    job = forks(1, tmp_path / "1", *own)
    assert job.codes == [0], job.said()
    for mine, theirs in zip(job.metrics, whole.metrics[:8], strict=True):
        assert mine == {**theirs, "total_steps": 8, "reward_score": theirs["reward"]}, mine["step"]
    two = forks(2, tmp_path / "2", *own)
    assert two.codes == [0, 0] and [line["reward"] for line in two.metrics] == [line["reward"] for line in job.metrics]


@pytest.mark.parametrize("paid", ["7", "never said"])
def test_a_reward_is_blamed_only_where_right_answers_get_no_more_than_wrong_ones(
    forks: Forks, tmp_path: Path, paid: str
) -> None:
    """It pays by the row alone, so all answers to a prompt get the same. What the stop tells is checked against the record."""
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": str(n), "answer": "7" if n % 2 else "never said"} for n in range(10, 50)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(f"def score(completion, answer):\n    return answer == {paid!r}\n")
    own = ("--grpo.reward", f"{tmp_path}/rewards.py:score", "--grpo.breaker_steps", "4", "--max-steps", "9")
    job = forks(1, tmp_path / "job", "--grpo.prompts", str(prompts), *own)
    assert job.codes == [EX_SOFTWARE], job.said()
    answers = [json.loads(line) for line in (job.run / "rollouts.jsonl").read_text().splitlines()]
    given = {kind: [row["reward"] for row in answers if row["right"] is kind] for kind in (True, False)}
    right, wrong = (sum(given[kind]) / len(given[kind]) for kind in (True, False))
    assert (right > wrong) == (paid == "7"), "the two cases differ in that alone"
    blame = f"gave right answers {right:.3g} on average, wrong ones {wrong:.3g}"
    assert "had the same reward, for every prompt for 4 steps" in job.said(), job.said()
    assert ("look at that first" in job.said(), blame in job.said()) == (right <= wrong,) * 2, job.said()


def test_rows_without_answers_learn_from_a_reward_of_ones_own(forks: Forks, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": str(n), "wanted": "7"}) + "\n" for n in range(10, 50)))
    (tmp_path / "rewards.py").write_text(
        "async def score(completions, wanted):\n    return [text.count(w) for text, w in zip(completions, wanted)]\n"
    )
    given = ("--grpo.prompts", str(prompts), "--max-steps", "15", "--export", "false")
    job = forks(
        1, tmp_path / "own", *given, "--grpo.reward", f"{tmp_path}/rewards.py:score", "--grpo.reward", "length:2=0.5"
    )
    assert job.codes == [0] and "Right: " not in job.said(), job.said()  # its own idea of right
    first, last = job.metrics[0], job.metrics[-1]
    assert first["correct"] is None and last["reward_score"] > first["reward_score"] + 0.2
    assert last["reward"] == pytest.approx(last["reward_score"] + 0.5 * last["reward_length"])
    refused = forks(1, tmp_path / "none", *given)
    assert refused.codes == [EX_DATAERR] and "40 of 40 rows without an answer" in refused.said()


def test_a_reward_that_fails_ends_all_ranks_with_its_line_and_a_checkpoint(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "import os\ncalls = 0\ndef score(completions):\n    global calls\n    calls += 1\n"
        "    if calls == 3 and os.environ['RANK'] == '0':\n        return [1.0, 2.0]\n"
        "    return [len(text) + 0.1 * n for n, text in enumerate(completions)]\n"
    )
    own = ("--max-steps", "8", "--grpo.reward", f"{tmp_path}/rewards.py:score")
    job = forks(2, tmp_path / "two", *own)
    assert job.codes == [EX_SOFTWARE] * 2, job.said()
    for rank in (0, 1):
        line = "GRPO stopped: reward rewards.py:score returned 2 numbers for 24 answers; it must return one for each (step 2); the last good checkpoint is"
        assert line in job.said(rank) and "Traceback" not in job.said(rank), job.said(rank)
    assert (job.run / "checkpoints" / "step-00000002").is_dir() and len(job.metrics) == 2


@at_length
def test_gsm8ks_file_as_published_learns_from_a_reward_of_ones_own(stoker: Stoker, given: Path, tmp_path: Path) -> None:
    """By the command and the reward file of docs/grpo.md."""
    rows = [
        {"question": f"{n} clips and 3?", "answer": f"{n}+3=<<{n}+3={n + 3}>>{n + 3}.\n#### {n + 3}"} for n in range(64)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(test_guide.FILES["rewards.py"])
    told = test_guide.COMMANDS[0].split()[3:]
    assert told[:4] == ["--config", "gsm8k_2000samples_4GPUs", "--grpo.prompts", "gsm8k/train.jsonl"]
    files = ("--grpo.prompts", "train.jsonl", *told[4:])
    small = (
        "--preset",
        "small",
        "--context_length",
        "96",
        "--generate.new_tokens",
        "4",
        "--grpo.prompts_per_step",
        "8",
    )
    more = ("--max-steps", "3", "--no-preflight", "--nproc-per-node", "1")
    done = stoker.torch("train", "grpo", "--model.load", str(given / "hf"), *files, *small, *more)
    assert done.code == 0, done.out[-3000:] + done.err[-2000:]
    shown = stoker("rollouts", "--json")
    told = json.loads(shown.out)
    assert told["answers"] == 3 * 64 and {"score", "length"} == set(told["best"][0]["parts"]), shown.out
    (without_gpu,) = [line for line in test_guide.COMMANDS if "--model.load runs/latest/hf --grpo.prompts" in line]
    words = without_gpu.replace("gsm8k/train.jsonl", "train.jsonl").split()[1:]
    done = stoker.torch(*words, "--no-preflight", "--nproc-per-node", "1")
    assert done.code == 0, done.out[-3000:] + done.err[-2000:]
    assert json.loads(stoker("rollouts", "--json").out)["answers"] == 3 * 4 * 4


def test_a_reward_that_never_returns_a_number_ends_the_run(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def score(completion):\n    completion == '7'\n")
    job = forks(2, tmp_path / "job", "--max-steps", "2", "--grpo.reward", f"{tmp_path}/rewards.py:score")
    line = "GRPO stopped: reward rewards.py:score returned None for every answer of the step: is there a return in every branch?"
    assert job.codes == [EX_SOFTWARE] * 2 and line in job.said(1) and "Traceback" not in job.said(), job.said()


def test_a_reward_that_does_not_apply_to_some_prompts_leaves_them_out(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "def score(prompt, completion):\n    return None if int(prompt) % 2 else float(len(completion))\n"
    )
    own = ("--max-steps", "3", "--grpo.reward", f"{tmp_path}/rewards.py:score", "--export", "false")
    one, two = (forks(ranks, tmp_path / str(ranks), *own) for ranks in (1, 2))
    assert one.codes == [0] and two.codes == [0, 0], one.said()
    assert [line["reward"] for line in one.metrics] == [line["reward"] for line in two.metrics]
    kept = list(read_rollouts(str(one.run)))
    assert kept and not any(int(rollout.prompt) % 2 for rollout in kept)
    of_step = [rollout.reward for rollout in kept if rollout.step == 0]
    assert one.metrics[0]["reward"] == pytest.approx(sum(of_step) / len(of_step))


def test_a_reward_file_that_cant_be_loaded_is_one_line_and_a_code(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("import nothing_like_this\ndef score(completion): return 1\n")
    job = forks(2, tmp_path / "job", "--max-steps", "2", "--grpo.reward", f"{tmp_path}/rewards.py:score")
    assert job.codes == [EX_DATAERR] * 2 and "Traceback" not in job.said()
    assert "stoker: grpo.reward rewards.py:score failed: rewards.py, line 1: ModuleNotFoundError" in job.said()


def test_once_through_asks_every_prompt_once_and_weights_change_that() -> None:
    """2,000 prompts, 32 a step: drawing anew in each step asked 1,297 of them in 63 steps."""
    asked = [asking.Prompt(row, "", (), "") for row in range(2000)]
    choose = asking.draw_of(None, asked, 2000, "")
    first = [place for step in range(62) for place in choose(step, 7, 32)]
    assert len(set(first)) == len(first) == 1984
    two = [place for step in range(125) for place in choose(step, 7, 32)]
    assert sorted(two[:2000]) == sorted(two[2000:4000]) == list(range(2000)) and two[:2000] != two[2000:4000]
    assert choose(5, 7, 32) == choose(5, 7, 32) != choose(5, 8, 32), "a function of seed and step"
    few = asking.in_epochs(3, 0, 1, 9)
    assert sorted(few[:3]) == sorted(few[3:6]) == sorted(few[6:]) == [0, 1, 2], "more than there are: in epochs, too"
    rows = [{"index": row, "weight": 1.0 if row < 50 else 0.0} for row in range(2000)]
    weighted = asking.draw_of(rows, asked, 2000, "weights.jsonl")
    assert set(weighted(0, 7, 32)) <= set(range(50))


def test_max_samples_are_the_first_prompts(forks: Forks, tmp_path: Path) -> None:
    job = forks(
        1,
        tmp_path / "job",
        "--max-steps",
        "1",
        "--data.max_samples",
        "5",
        "--grpo.prompts_per_step",
        "4",
        "--export",
        "false",
    )
    assert job.codes == [0] and "prompts: 5, 4 a step" in job.said()


def test_bad_input_is_one_line_and_a_code(forks: Forks, given: Path, tmp_path: Path) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "x" * 60, "answer": "7"}) + "\n")
    for number, (words, code, line) in enumerate(
        (
            (("--grpo.prompts", str(tmp_path / "none.jsonl")), EX_NOINPUT, "none.jsonl can't be read"),
            (("--grpo.prompts", str(long)), EX_DATAERR, "1 of 1 rows longer than"),
            (("--generate.temperature", "0"), EX_USAGE, "generate.temperature 0"),
            (("--generate.top_p", "0.9"), EX_USAGE, "generate.top_p 0.9"),
            (("--generate.top_k", "20"), EX_USAGE, "generate.top_k 20"),
            (("--strategy", "fsdp", "--offload", "all"), EX_USAGE, "use parallel.offload optimizer"),
            (("--generate.new_tokens", "48"), EX_USAGE, "leaves no tokens"),
            (("--grpo.updates", "49"), EX_USAGE, "more than the 48 answers"),
            (("--grpo.importance_cap", "0.5"), EX_USAGE, "0 switches it off, else from 1 up"),
        )
    ):
        job = forks(1, tmp_path / str(number), "--max-steps", "2", *words)
        assert job.codes == [code] and line in job.said() and "Traceback" not in job.said(), job.said()


def test_under_the_launcher_the_verdict_is_the_breakers_line(stoker: Stoker, forks: Forks, tmp_path: Path) -> None:
    prompts = tmp_path / "never.jsonl"
    prompts.write_text('{"prompt": "11", "answer": "no model says this"}\n')
    words = forks.words(
        "--grpo.prompts", str(prompts), "--grpo.breaker_steps", "2", "--max-steps", "9", "--grpo.prompts_per_step", "4"
    )
    done = stoker.torch("run", "--nproc-per-node", "1", "--no-preflight", "-m", "stoker.training.recipes.grpo", *words)
    assert (done.code, done.verdict["cause"], done.verdict["retryable"]) == (EX_SOFTWARE, "grpo.no-signal", False), (
        done.out[-3000:] + done.err[-2000:]
    )
    assert "the reward was exactly 0 for every answer for 2 steps" in done.verdict["summary"]


def test_the_same_command_after_a_stop_rule_repeats_the_verdict_and_starts_nothing(
    stoker: Stoker, forks: Forks
) -> None:
    stoker.script("rewards.py", "def score(completion):\n    return 0.0\n")
    words = forks.words("--max-steps", "4", "--grpo.reward", "rewards.py:score", "--grpo.breaker_steps", "2")
    command = ("train", "grpo", "--name", "zero", "--every_steps", "1", *words)
    env = {"OMP_NUM_THREADS": "1"}
    first = stoker(*command, env=env)
    assert (first.code, first.verdict["cause"]) == (EX_SOFTWARE, "grpo.no-signal"), first.err
    (run_dir,) = stoker.cwd.glob("runs/2*")
    before = sorted(run_dir.rglob("*"))

    same = stoker(*command, env=env)
    assert same.code == EX_SOFTWARE and first.verdict["summary"] in same.err, same.err
    assert sorted(run_dir.rglob("*")) == before and list(stoker.cwd.glob("runs/2*")) == [run_dir]
    resume = same.err.partition("to continue: stoker ")[2].strip()
    assert first.err.endswith(f"to continue: stoker {resume}\n") and f"--name {run_dir.name}" in resume, first.err
    assert f"stoker {resume}   # to continue" in stoker("why", "zero").out

    again = stoker(*command, "--again", env=env)
    assert again.code == EX_SOFTWARE and len(list(stoker.cwd.glob("runs/2*"))) == 2, again.err

    stoker.script("rewards.py", "def score(completion):\n    return float('7' in completion)\n")
    resumed = stoker(*shlex.split(resume), env=env)
    assert resumed.code == 0 and "resumes at step 2" in resumed.out + resumed.err, resumed.out + resumed.err
    assert json.loads((run_dir / "verdict.json").read_text())["status"] == "completed"


JUDGE = """
import http.server, json, os, signal, time
if os.path.exists("killed"): time.sleep(600)  # a large model loads for longer than ten steps take
calls = 0
class Judge(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.reply({})
    def do_POST(self):
        global calls
        calls += 1
        texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if calls == 4:
            open("killed", "w")
            os.kill(os.getpid(), signal.SIGKILL)
        self.reply([text.count("7") for text in texts])
    def reply(self, data):
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(os.environ["STOKER_PORT"])), Judge).serve_forever()
"""


@at_length
def test_a_role_whose_reward_is_zero_since_its_server_died_stops_after_ten_steps_with_that_cause(
    stoker: Stoker, forks: Forks
) -> None:
    """As a reward of one's own often is: a lost connection is worth 0. The server is started again and not ready in time."""
    stoker.script("judge.py", JUDGE)
    stoker.script(
        "rewards.py",
        "import json, os, urllib.request\ndef score(completions):\n    try:\n"
        "        told = json.dumps(completions).encode()\n"
        "        return json.load(urllib.request.urlopen(f'http://{os.environ[\"STOKER_ROLE_JUDGE\"]}/', told))\n"
        "    except OSError:\n        return [0.0] * len(completions)\n",
    )
    words = shlex.join(forks.words("--grpo.reward", "rewards.py:score", "--max-steps", "500"))
    roles = {
        "judge": {"command": "judge.py", "ready": {"http": "/"}, "restart": "always"},
        "trainer": {"command": f"stoker train grpo {words}"},
    }
    done = stoker.torch("run", "--roles", stoker.script("job.yaml", json.dumps({"roles": roles})))
    assert (done.code, done.verdict["cause"]) == (137, "rank.killed"), done.out[-3000:] + done.err[-2000:]
    assert done.verdict["summary"].startswith("role judge: rank 0 (CPU 0) was killed")
    echo = "then role trainer: the reward was exactly 0 for every answer for 10 steps (since step 3)"
    assert any(line.startswith(echo) for line in done.verdict["evidence"]), done.verdict
    (metrics,) = done.run_dir.glob("roles/*-trainer/metrics.jsonl")
    assert [json.loads(line)["reward"] > 0 for line in metrics.read_text().splitlines()] == [True] * 3 + [False] * 10
    own = json.loads(stoker("why", f"{done.run_dir.name}/trainer", "--json").out)
    assert (own["cause"], own["exit_code"], own["retryable"]) == ("grpo.no-signal", EX_SOFTWARE, False)
    assert stoker("rollouts").out.startswith("624 completions of 13 steps"), "of the role that has some"


def prompts_of_two_kinds(path: Path) -> str:
    """Of half of them every answer is worth the same."""
    rows = [{"prompt": str(n), "answer": "7" if n % 2 else "no model says this"} for n in range(10, 50)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_groups_without_signal_are_replaced_the_same_on_any_number_of_ranks(forks: Forks, tmp_path: Path) -> None:
    given = (
        "--grpo.prompts",
        prompts_of_two_kinds(tmp_path / "prompts.jsonl"),
        "--max-steps",
        "4",
        "--export",
        "false",
    )
    more = (*given, "--grpo.resample", "3")
    plain, one, two = forks(1, tmp_path / "0", *given), forks(1, tmp_path / "1", *more), forks(2, tmp_path / "2", *more)
    assert plain.codes == one.codes == [0] and two.codes == [0, 0], one.said() + two.said(1)
    for mine, theirs in zip(two.metrics, one.metrics, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5), mine["step"]
    assert all("replaced" not in line for line in plain.metrics) and sum(line["replaced"] for line in one.metrics) > 8

    def taught(job: Job, step: int) -> int:
        kept: dict[int, set[float]] = {}
        for one in read_rollouts(str(job.run)):
            if one.step == step:
                kept.setdefault(one.row, set()).add(one.reward)
        return sum(len(rewards) > 1 for rewards in kept.values())

    assert sum(taught(one, n) for n in range(4)) > 1.4 * sum(taught(plain, n) for n in range(4))


def test_prompts_are_replaced_by_others_as_long_as_there_are_others() -> None:
    prompts = [asking.Prompt(row, "?", (1,), "7") for row in range(10)]
    asked: list[tuple[tuple[int, ...], frozenset[int] | None]] = []

    def rollout(told: list[asking.Prompt], *seeds: int, only: frozenset[int] | None = None) -> list[Answer]:
        asked.append((tuple(prompt.row for prompt in told), only))
        places = [n for n in range(len(told)) if only is None or n in only]
        # Row 9 alone has a right answer among its two.
        return [
            Answer(2 * n + k, told[n], (k,), "7" if told[n].row == 9 and k else "8", True)
            for n in places
            for k in (0, 1)
        ]

    c = GrpoConfig(prompts_per_step=4, group=2, resample=5)
    draw = asking.draw_of(None, prompts, 10, "")
    rows = [{"prompt": "?", "answer": "7"}] * 10
    ranks, rewards = Group(ParallelConfig(device="cpu")), Rewards(parts_of(c), rows, 8, None, None)
    step = asking.Asking(prompts, draw, rollout, rewards, c, ranks)(0, 3)  # type: ignore[arg-type]
    assert len(asked) == 6 and set().union(*(rows for rows, _ in asked)) == set(range(10)), "all of them were asked"
    found = next(n for n, (rows, _) in enumerate(asked) if 9 in rows)
    place = asked[found][0].index(9)
    assert all(rows[place] == 9 for rows, _ in asked[found:]) and place not in (asked[-1][1] or ()), (
        "and that one stayed"
    )
    assert step.outcome.rewards.sum() == 1 and sum(step.judged.rewards) == 1 and step.judged.rewards[2 * place + 1] == 1
    assert [answer.place for answer in step.answers] == list(range(8)) and step.outcome.without_signal(2) == [
        n for n in range(4) if n != place
    ]


def test_several_updates_with_a_capped_importance_weight_and_a_higher_clip_learn_with_lora(
    forks: Forks, tmp_path: Path
) -> None:
    more = (
        "--lora",
        "--lora_rank",
        "8",
        "--learning_rate",
        "3e-3",
        "--also_train",
        "embed_tokens",
        "--export",
        "false",
    )
    better = (
        "--grpo.updates",
        "2",
        "--grpo.clip_ratio_high",
        "0.28",
        "--grpo.importance_cap",
        "2",
        "--grpo.resample",
        "1",
    )
    job = forks(1, tmp_path, "--max-steps", "14", *more, *better)
    assert job.codes == [0], job.said()
    rewards = [line["reward"] for line in job.metrics]
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 0.4 and job.metrics[0]["kl"] < 0.1, rewards
    plain = forks(1, tmp_path / "plain", "--max-steps", "1", *more)
    weighted = forks(1, tmp_path / "weighted", "--max-steps", "1", *more, "--grpo.importance_cap", "2")
    # Sampler and trainer agree but for rounding: the weights are all but 1.
    assert abs(weighted.metrics[0]["sampler_kl"]) < 1e-5 and "sampler_kl" not in plain.metrics[0]
    (mine,) = ({key: value for key, value in line.items() if key != "sampler_kl"} for line in weighted.metrics)
    assert mine == pytest.approx(plain.metrics[0], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("method", at_length_but(["--qlora"], ["--lora", "--qlora"]))
def test_adapters_learn_and_the_model_under_them_is_the_reference(method: str, forks: Forks, tmp_path: Path) -> None:
    # The digits' rows of the embedding are almost the same: without these to learn nothing tells a 7 from a 3.
    more = (method, "--lora_rank", "8", "--learning_rate", "3e-3", "--also_train", "embed_tokens")
    one = forks(1, tmp_path / "one", "--max-steps", str(STEPS), *more)
    assert one.codes == [0], one.said()
    rewards = [line["reward"] for line in one.metrics]
    assert sum(rewards[:3]) / 3 < 0.25 and sum(rewards[-3:]) / 3 > 0.5, rewards
    assert one.metrics[0]["kl"] < 1e-6 < one.metrics[-1]["kl"]
    assert "merged into it" in one.said() and not (one.run / "hf" / "model.safetensors").exists()
    (saved,) = (one.run / "checkpoints").glob(f"step-{STEPS:08d}")
    held = open_checkpoint(str(saved)).tensors
    frozen = [name for name in held if ".adapter." not in name and "embed.weight" not in name]
    assert held and not frozen, "what learns, and nothing else"
    model = Decoder(hf.shape_of(str(one.run / "hf")), 48)
    hf.load(model, str(one.run / "hf"), lambda line: None)
    asked = torch.tensor([chat.prompt(bytes_tokenizer(), [("user", b"97")])])
    assert torch.softmax(model(asked)[0, -1], -1)[ord("7")].item() > 0.5, "the adapter has what was learned"

    on = forks(1, tmp_path / "on", "--max-steps", "3", *more, "--model.load", str(one.run / "hf"))
    assert on.codes == [0], on.said()
    assert on.metrics[0]["reward"] > 0.5 and on.metrics[0]["kl"] < 1e-6, "it began with the loaded adapter"

    two = forks(2, tmp_path / "two", "--max-steps", "5", *more, "--batch.micro", "7")
    assert two.codes == [0, 0], two.said()
    for line, wanted in zip(two.metrics, one.metrics, strict=False):
        assert line["loss"] == pytest.approx(wanted["loss"], abs=1e-3)


def test_a_stopped_run_of_adapters_resumes_with_equal_numbers(forks: Forks, tmp_path: Path) -> None:
    more = ("--max-steps", "8", "--qlora", "--lora_rank", "4", "--learning_rate", "4e-3")
    whole = forks(1, tmp_path / "whole", *more)
    forks(1, tmp_path / "stopped", *more, stop_after=3)
    again = forks(1, tmp_path / "stopped", *more)
    assert again.codes == [0] and "resumes at step" in again.said(), again.said()
    assert again.metrics == whole.metrics
    other = forks(1, tmp_path / "stopped", "--max-steps", "9", "--qlora", "--lora_rank", "2")
    assert other.codes != [0] and "adapter.lora_rank is 4 there and 2 here" in other.said(), other.said()


def test_the_ids_of_prompts_take_four_bytes_each() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("tokenizers")
    from stoker.training.rl import rollout
    from stoker.training.tokenizer.tokenizer import bytes_tokenizer

    lines = [{"prompt": "a" * 1000, "answer": "b"}] * 10
    found, _ = rollout.read(lines, bytes_tokenizer(), 2000, "p.jsonl")
    assert len(found) == 10 and memoryview(found[0].ids).nbytes == 4 * len(found[0].ids)  # type: ignore[arg-type]
