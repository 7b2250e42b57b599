"""What an answer is worth: 1 if it is right in the expected form, and a share of what the reward model thinks of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stoker.contract.names import EX_CONFIG, Refusal
from stoker.training.evaluate.marking import right_in_form
from stoker.training.model import hf_hub
from stoker.training.parallel.config import ComputeConfig
from stoker.training.reward.model import open_reward, scores
from stoker.training.rl.rollout import Answer
from stoker.training.tokenizer.tokenizer import Tokenizer
from stoker.training.tokenizer.tokenizer import load as load_tokenizer

Scorer = Callable[[Sequence[tuple[Any, str]]], list[float]]


def scorer_of(
    folder: str, context_length: int, compute: ComputeConfig, tokenizer: Tokenizer, device: torch.device, micro: int
) -> Scorer | None:
    """The reward model, where one is given."""
    if not folder:
        return None
    if load_tokenizer(hf_hub.folder_of(folder, lambda line: None)).digest != tokenizer.digest:
        raise Refusal(
            f"grpo.reward_model {folder} has another tokenizer than model.load: its scores would be of other words",
            EX_CONFIG,
        )
    model = open_reward(folder, context_length, compute, device)
    return functools.partial(scores, model, tokenizer, device=device, micro=micro)


def reward(answers: Sequence[Answer], scorer: Scorer | None, weight: float) -> tuple[list[float], list[bool]]:
    """(rewards, which are right). `scorer`: the reward model's score of each (prompt, answer).

    Only differences between answers to one prompt mean anything in it: a score counts by how far it is above the mean
    of its prompt's.
    """
    correct = [right_in_form(answer.text, answer.prompt.answer) for answer in answers]
    rewards = [float(one) for one in correct]
    if scorer is not None and answers:
        scores = scorer([(answer.prompt.asked, answer.text) for answer in answers])
        of_prompt: dict[int, list[float]] = {}
        for answer, score in zip(answers, scores, strict=True):
            of_prompt.setdefault(answer.prompt.row, []).append(score)
        means = {row: sum(some) / len(some) for row, some in of_prompt.items()}
        rewards = [
            one + weight * _sigmoid(score - means[answer.prompt.row])
            for one, score, answer in zip(rewards, scores, answers, strict=True)
        ]
    return rewards, correct


def _sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))
