"""A step's answers: which rank writes which, and with which random numbers. The same answers for any number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from stoker.contract.shape import shape
from stoker.training.generate.config import GenerateConfig
from stoker.training.generate.engine import Engine
from stoker.training.model.decoder import Decoder
from stoker.training.parallel.group import Group, split
from stoker.training.rl.config import GrpoConfig
from stoker.training.rl.prompts import Prompt, number_from
from stoker.training.tokenizer.tokenizer import Tokenizer


@shape
class Answer:
    place: int  # among all of the step, of all ranks
    prompt: Prompt
    ids: tuple[int, ...]  # the stop token is the last, where there is one
    text: str  # without it
    whole: bool  # it ended by itself


class Rollout:
    """An answer depends on the seeds and its own place in the step: on no number of ranks or rows."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, stop: Collection[int], c: GenerateConfig, group: int, ranks: Group
    ) -> None:
        self._engine, self._tokenizer, self._stop = engine, tokenizer, frozenset(stop)
        self._c, self._group, self._ranks = c, group, ranks
        self.refresh = engine.refresh  # after the weights changed

    def __call__(self, prompts: Sequence[Prompt], *seeds: int) -> list[Answer]:
        """This rank's answers to the step's prompts, `group` in a row to each."""
        share = split(len(prompts), self._ranks.world, self._ranks.rank, 1, False)
        places = range(share.begin * self._group, share.end * self._group)
        asked = [prompts[place // self._group] for place in places]
        written = self._engine.generate(
            [prompt.ids for prompt in asked],
            new_tokens=self._c.new_tokens,
            stop=self._stop,
            **self._c.sampling,
            seed=number_from("answers", *seeds),
            indexes=places,
        )
        found: list[Answer] = []
        for place, prompt, ids in zip(places, asked, written, strict=True):
            whole = ids[-1] in self._stop
            text = self._tokenizer.decode(ids[:-1] if whole else ids)
            found.append(Answer(place, prompt, tuple(ids), text, whole))
        return found


def rollout_of(
    model: Decoder, tokenizer: Tokenizer, longest: int, c: GenerateConfig, grpo: GrpoConfig, ranks: Group
) -> Rollout:
    """`longest`: tokens of the longest prompt: the cache need not be larger."""
    share = -(-grpo.prompts_per_step // ranks.world)
    rows, length = min(c.rows, share * grpo.group), longest + c.new_tokens
    engine = Engine(model, rows=rows, length=length, vocab=tokenizer.vocab_size)
    return Rollout(engine, tokenizer, tokenizer.stop_ids, c, grpo.group, ranks)


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

    def unlike(self, group: int) -> bool:
        """Whether a prompt's answers differ in reward: else no advantage is other than 0, and nothing is taught."""
        table = self.rewards.view(-1, group)
        return bool((table != table[:, :1]).any())

    @property
    def reward(self) -> float:
        # The value itself: a mean of equals may differ in its last bit.
        return float(self.rewards[0] if self.constant else self.rewards.mean())

    @property
    def spread(self) -> float:
        return 0.0 if self.constant else float(self.rewards.std(unbiased=False))


def outcome(
    answers: Sequence[Answer], rewards: Sequence[float], correct: Sequence[bool], count: int, ranks: Group
) -> Outcome:
    """Each rank fills in its own places, and the sum is everybody's: one small exchange a step."""
    table = torch.zeros(4, count, dtype=torch.float64)
    for answer, reward, right in zip(answers, rewards, correct, strict=True):
        numbers = [reward, float(right), float(len(answer.ids)), float(answer.whole)]
        table[:, answer.place] = torch.tensor(numbers, dtype=torch.float64)
    return Outcome(*ranks.sum(table.to(ranks.device)).cpu())
