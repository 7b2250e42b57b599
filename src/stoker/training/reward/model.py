"""The reward model: a decoder whose head is one vector. Its score is read at the mark that ends an answer.

Bradley and Terry: the better of two answers wins with probability σ(score(better) − score(worse)); the loss is −log of that, summed over pairs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stoker.contract.names import EX_NOINPUT, Refusal
from stoker.training.config.schema import Config
from stoker.training.data.reader import IGNORED
from stoker.training.loop.evaluate import Validation, padded
from stoker.training.loop.learner import Learner, Say
from stoker.training.loop.material import Rows
from stoker.training.model import hf, hf_config, hf_hub, ready
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder, like
from stoker.training.model.hf_write import SCORE as HEAD
from stoker.training.parallel.group import Group
from stoker.training.reward.pairs import Prompt, answered
from stoker.training.tokenizer.tokenizer import Tokenizer

_NAME = "score"


class RewardModel(Decoder):
    def __init__(self, c: ModelConfig, context_length: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(c, context_length, dtype)
        self.score = nn.Parameter(torch.zeros(c.dim, device=self.embed.weight.device))

    @torch.no_grad()
    def start(self, seed: int) -> None:
        super().start(seed)
        self.score.zero_()  # all answers alike at the beginning: the loss is log 2

    def scores(self, inputs: Tensor, segments: Tensor | None) -> Tensor:
        """[B, T]: the score that an answer ending there has."""
        return self.hidden(inputs, segments).float() @ self.score.float()

    def forward(self, inputs: Tensor, targets: Tensor | None = None, scale: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """With targets the sum of the pairs' losses times `scale`; without, the scores."""
        scores = self.scores(inputs, segments)
        if targets is None:
            return scores
        loss = (F.softplus(-margins(scores, targets)) * (targets != IGNORED)).sum()
        return loss if scale is None else loss * scale


def margins(scores: Tensor, targets: Tensor) -> Tensor:
    """[B, T]: better minus worse where a better answer ends, anything elsewhere: no shape depends on the data."""
    return scores - scores.gather(1, targets.clamp(min=0))


@torch.no_grad()
def measure(model: nn.Module, samples: Rows, group: Group, *, tokens: int, micro: int) -> Validation:
    """Loss per pair and the share of pairs in the right order."""
    found = held_out_margins(model, samples, group, micro)
    loss = F.softplus(-found).mean().item()
    return Validation(loss, None, len(found), (found > 0).double().mean().item())


@torch.no_grad()
def held_out_margins(model: nn.Module, samples: Rows, group: Group, micro: int) -> Tensor:
    """Of all pairs, on every rank, in the order of the rows. The wrapped module is called, as FSDP2 needs."""
    count = len(samples)
    most = -(-count // group.world)
    training = model.training
    model.eval()
    mine: list[tuple[int, list[float]]] = []
    for begin in range(0, most, micro):
        ids = np.arange(group.rank, count, group.world, dtype=np.int64)[begin : begin + micro]
        inputs, targets, segments = padded(samples, ids, micro, group.device)
        found, marks = margins(model(inputs, None, None, segments), targets), targets != IGNORED
        for row, number in enumerate(ids.tolist()):
            mine.append((number, found[row][marks[row]].tolist()))
    model.train(training)
    rows = sorted(pair for part in group.all(mine) for pair in part)
    return torch.tensor([margin for _, row in rows for margin in row], dtype=torch.float64)


def load(model: Decoder, folder: str, say: Say) -> None:
    """A reward model's folder, or a decoder's: the head then stays as it is."""
    assert isinstance(model, RewardModel)
    hf.load_named(model, ((name, p) for name, p in hf.named(model) if name != _NAME), folder, say)
    path = os.path.join(folder, HEAD)
    if os.path.exists(path):
        with torch.no_grad():
            model.score.copy_(like(load_file(path)[_NAME].to(model.score.device), model.score))


def save(model: Decoder, folder: str, tokenizer: str, say: Say, write: bool) -> None:
    assert isinstance(model, RewardModel)
    whole = model.score.detach()
    whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole

    def head(where: str) -> None:
        save_file({_NAME: whole.float().cpu().contiguous()}, os.path.join(where, HEAD))

    hf.save(model, folder, tokenizer_folder=tokenizer, say=say, write=write, without=(_NAME,), more=head)


LEARNER = Learner(RewardModel, load, save, measure)


def open_reward(c: Config, folder: str, device: torch.device) -> RewardModel:
    folder = hf_hub.folder_of(folder, lambda line: None)
    if not os.path.exists(os.path.join(folder, HEAD)):
        raise Refusal(f"{folder} is no reward model: it has no {HEAD}; `stoker train reward` makes one", EX_NOINPUT)
    with torch.device(device):
        model = RewardModel(hf_config.shape_of(folder), c.data.context_length, ready.dtype_of(c.compute, device))
    model.place(device)
    load(model, folder, lambda line: None)
    model.eval()
    return model


@torch.no_grad()
def scores(model: RewardModel, tokenizer: Tokenizer, rows: Sequence[tuple[Prompt, str]], device: torch.device, micro: int = 64) -> list[float]:
    """Of each prompt's answer. Rows of like length go together; each is read at its last token."""
    ids = [answered(tokenizer, prompt, answer)[-model.context_length :] for prompt, answer in rows]
    return score_ids(model, ids, device, micro)


@torch.no_grad()
def score_ids(model: RewardModel, ids: Sequence[Sequence[int]], device: torch.device, micro: int = 64) -> list[float]:
    order = sorted(range(len(ids)), key=lambda one: len(ids[one]))
    found = [0.0] * len(ids)
    for begin in range(0, len(order), micro):
        some = order[begin : begin + micro]
        longest = max(len(ids[one]) for one in some)
        inputs = torch.zeros(len(some), longest, dtype=torch.int64)
        for row, one in enumerate(some):
            inputs[row, : len(ids[one])] = torch.tensor(ids[one], dtype=torch.int64)
        ends = torch.tensor([len(ids[one]) - 1 for one in some], device=device)
        values = model.scores(inputs.to(device), None).gather(1, ends[:, None])[:, 0].tolist()
        for one, value in zip(some, values, strict=True):
            found[one] = value
    return found


Scorer = Callable[[Sequence[tuple[Prompt, str]]], list[float]]
