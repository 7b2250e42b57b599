"""A step's answers: which rank writes which, and with which random numbers. The same answers for any number of ranks that share the calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from stoker.contract.shape import shape
from stoker.training.config.schema import Config
from stoker.training.generate.config import GenerateConfig
from stoker.training.generate.engine import Engine
from stoker.training.model.decoder import Decoder
from stoker.training.parallel.group import Group
from stoker.training.parallel.split import split
from stoker.training.rl.prompts import Prompt, number_from
from stoker.training.tokenizer.chat import STOP
from stoker.training.tokenizer.tokenizer import Tokenizer


@shape
class Answer:
    place: int  # among all of the step, of all ranks
    prompt: Prompt
    ids: tuple[int, ...]  # the stop token is the last, where there is one
    text: str  # without it
    whole: bool  # it ended by itself


@shape
class Calls:
    """The engine is called for `size` prompts at a time. An answer depends on its call's seed and its place in the call, so calls are cut alike for
    every number of ranks, and a rank takes whole ones; only where there are more ranks than full calls they become smaller."""

    prompts: int  # of a step
    size: int

    def of_rank(self, ranks: int, rank: int) -> list[range]:
        count = -(-self.prompts // self.size)
        share = split(count, ranks, rank, 1, False)
        return [range(number * self.size, min((number + 1) * self.size, self.prompts)) for number in range(share.begin, share.end)]


def calls_of(prompts: int, group: int, rows: int, ranks: int) -> Calls:
    """As many prompts a call as fill the engine's rows, `group` answers each."""
    return Calls(prompts, max(min(rows // group, -(-prompts // ranks)), 1))


class Rollout:
    def __init__(self, engine: Engine, tokenizer: Tokenizer, stop: Collection[int], c: GenerateConfig, calls: Calls, group: int, ranks: Group) -> None:
        self._engine, self._tokenizer, self._stop, self._c, self._group = engine, tokenizer, frozenset(stop), c, group
        self._calls = calls.of_rank(ranks.world, ranks.rank)
        self.refresh = engine.refresh  # after the weights changed

    def __call__(self, prompts: Sequence[Prompt], *seeds: int) -> list[Answer]:
        """This rank's answers to the step's prompts, `group` in a row to each."""
        found: list[Answer] = []
        for call in self._calls:
            asked = [(number, prompts[number]) for number in call for _ in range(self._group)]
            written = self._engine.generate(
                [prompt.ids for _, prompt in asked], new_tokens=self._c.new_tokens, stop=self._stop, temperature=self._c.temperature, top_k=self._c.top_k,
                top_p=self._c.top_p, seed=number_from("answers", *seeds, call.start),
            )  # fmt: skip
            for offset, ((_, prompt), ids) in enumerate(zip(asked, written, strict=True)):
                whole = ids[-1] in self._stop
                text = self._tokenizer.decode(ids[:-1] if whole else ids)
                found.append(Answer(call.start * self._group + offset, prompt, tuple(ids), text, whole))
        return found


def rollout_of(model: Decoder, tokenizer: Tokenizer, longest: int, c: Config, ranks: Group) -> Rollout:
    """`longest`: tokens of the longest prompt: the cache need not be larger."""
    calls = calls_of(c.grpo.prompts_per_step, c.grpo.group, c.generate.rows, ranks.world)
    rows = min(c.generate.rows, calls.size * c.grpo.group)
    engine = Engine(model, rows=rows, length=longest + c.generate.new_tokens, vocab=tokenizer.vocab_size)
    return Rollout(engine, tokenizer, {tokenizer.special[STOP], tokenizer.end_id}, c.generate, calls, c.grpo.group, ranks)


@shape
class Outcome:
    """Of all answers of a step, on every rank. Each [answers], float64 on the host."""

    rewards: Tensor
    correct: Tensor
    lengths: Tensor
    whole: Tensor

    @property
    def constant(self) -> bool:
        return bool((self.rewards == self.rewards[0]).all())

    @property
    def reward(self) -> float:
        return float(self.rewards[0] if self.constant else self.rewards.mean())  # the value itself: a mean of equals may differ in its last bit

    @property
    def spread(self) -> float:
        return 0.0 if self.constant else float(self.rewards.std(unbiased=False))


def outcome(answers: Sequence[Answer], rewards: Sequence[float], correct: Sequence[bool], count: int, ranks: Group) -> Outcome:
    """Each rank fills in its own places, and the sum is everybody's: one small exchange a step, and the same numbers on all."""
    table = torch.zeros(4, count, dtype=torch.float64)
    for answer, reward, right in zip(answers, rewards, correct, strict=True):
        table[:, answer.place] = torch.tensor([reward, float(right), float(len(answer.ids)), float(answer.whole)], dtype=torch.float64)
    return Outcome(*ranks.sum(table.to(ranks.device)).cpu())
