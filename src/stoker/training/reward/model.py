"""The reward model: a decoder whose head is one vector. Its score is read at the mark that ends an answer:

    s(x, y) = w · h(x, y) + a · log p(y | x)

The second term is what the decoder itself thinks of the answer, with a learned weight: a small model's likelihood tells right from wrong (91 % of the
small world's pairs) long before a vector has learned to. Bradley and Terry: the better of two answers wins with probability σ(s(better) − s(worse)); the
loss is −log of that, summed over pairs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stoker.contract.errors import EX_DATAERR, EX_NOINPUT, Refusal
from stoker.contract.tensor_header import read_header
from stoker.training.data.reader import IGNORED
from stoker.training.evaluate.likelihood import padded as padded_right
from stoker.training.loop.feeder import Rows, padded
from stoker.training.loop.learner import Beside, Learner, Say, Validation
from stoker.training.model import adapters, hf, hf_hub, hf_stream, ready
from stoker.training.model.attention import Documents, begins, documents
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.model.hf_write import SCORE as HEAD
from stoker.training.model.loss import token_logprobs
from stoker.training.model.pieces import give_back, like, whole
from stoker.training.parallel.config import ComputeConfig
from stoker.training.parallel.group import Group
from stoker.training.reward.pairs import Prompt, answered, asked
from stoker.training.tokenizer.tokenizer import Tokenizer

_OWN = ("score", "trust")  # what a decoder does not have
TRUST = 0.2  # at the beginning: two answers differ by tens of nats, and the probability of a win should not begin at 1


class RewardModel(Decoder):
    """`likelihood`: whether the second term counts (reward.likelihood)."""

    likelihood = True
    own: tuple[str, ...] = _OWN

    def __init__(self, c: ModelConfig, context_length: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(c, context_length, dtype)
        # Made on the default device, as the decoder's own weights are, so that `place` moves them with those.
        self.score = nn.Parameter(torch.zeros(c.dim))
        if self.likelihood:
            self.trust = nn.Parameter(torch.full((1,), TRUST))

    @torch.no_grad()
    def start(self, seed: int) -> None:
        super().start(seed)
        self.begin_own("")

    @torch.no_grad()
    def begin_own(self, folder: str) -> None:
        if folder and has_score(folder):
            stored = _head(folder)
            for name in self.own:
                parameter = getattr(self, name)
                if name not in stored or stored[name].shape != parameter.shape:
                    raise Refusal(
                        f"{os.path.join(folder, HEAD)}: {name} of shape {list(parameter.shape)} is not in it",
                        EX_DATAERR,
                    )
                parameter.copy_(like(stored[name].to(parameter.device), parameter))
            return
        self.score.zero_()
        if self.likelihood:
            self.trust.fill_(TRUST)

    def write_own(self, folder: str, own: Mapping[str, Tensor]) -> None:
        save_file({name: tensor.float().cpu().contiguous() for name, tensor in own.items()}, os.path.join(folder, HEAD))

    def parts(self, inputs: Tensor, packed: Documents | None) -> tuple[Tensor, Tensor | None]:
        """[B, T] each: w · h of an answer that ends there, and log p of its segment up to there."""
        x = self.hidden(inputs, packed)
        read = x.float() @ self.score.float()
        return read, self._told(x, inputs, packed) if self.likelihood else None

    def _told(self, x: Tensor, inputs: Tensor, packed: Documents | None) -> Tensor:
        rows, length = inputs.shape
        x, cap = x[:, :-1].flatten(0, 1), self.config.final_cap
        found, _ = token_logprobs(x, self.head_weight, inputs[:, 1:].flatten(), 1.0, cap)
        told = F.pad(found.view(rows, length - 1), (1, 0))
        if packed is None:
            return told.cumsum(1)
        new = begins(packed.segments)
        running = told.masked_fill(new, 0.0).cumsum(1)
        place = torch.arange(length, device=inputs.device).expand_as(packed.segments)
        return running - running.gather(1, torch.where(new, place, 0).cummax(dim=1).values)

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor | None = None,
        scale: Tensor | None = None,
        packed: Documents | None = None,
    ) -> Tensor:
        """Scores; with targets the pairs' losses × `scale`. The prompt's likelihood is the same in both answers."""
        read, told = self.parts(inputs, packed)
        scores = read if told is None else read + self.trust * told
        if targets is None:
            return scores
        loss = (F.softplus(-margins(scores, targets)) * (targets != IGNORED)).sum()
        return loss if scale is None else loss * scale


def margins(scores: Tensor, targets: Tensor) -> Tensor:
    """[B, T]: better minus worse where a better answer ends, anything elsewhere: no shape depends on the data."""
    return scores - scores.gather(1, targets.clamp(min=0))


def measure(model: nn.Module, samples: Rows, group: Group, *, tokens: int, micro: int) -> Validation:
    """Loss per pair and the share of pairs in the right order."""
    found = held_out_margins(model, samples, group, micro)
    loss = F.softplus(-found).mean().item()
    return Validation(loss, None, len(found), (found > 0).double().mean().item())


def held_out_margins(model: nn.Module, samples: Rows, group: Group, micro: int) -> Tensor:
    return held_out(model, samples, group, micro, lambda scores, targets: margins(scores, targets)[None])[0]


@torch.no_grad()
def held_out(
    model: nn.Module, samples: Rows, group: Group, micro: int, values: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """[kinds, pairs] on every rank, in the order of the rows. `values`: [kinds, B, T] from what the model gives and the
    targets; what stands where a better answer ends counts. The wrapped module is called, as FSDP2 needs.
    """
    count, training = len(samples), model.training
    model.eval()
    mine: list[tuple[int, list[list[float]]]] = []
    for begin in range(0, -(-count // group.world), micro):
        ids = np.arange(group.rank, count, group.world, dtype=np.int64)[begin : begin + micro]
        inputs, targets, segments = padded(samples, ids, micro, group.device)
        found = values(model(inputs, None, None, documents(segments, group.device)), targets)
        for row, number in enumerate(ids.tolist()):
            mine.append((number, found[:, row, targets[row] != IGNORED].tolist()))
    model.train(training)
    rows = [row for _, row in sorted(pair for part in group.all(mine) for pair in part)]
    kinds = zip(*rows, strict=True)
    return torch.tensor([[value for row in kind for value in row] for kind in kinds], dtype=torch.float64)


def load(model: Decoder, folder: str, say: Say) -> None:
    """A reward model's folder, or a decoder's: the head then stays as it is."""
    assert isinstance(model, RewardModel)
    hf.load(model, folder, say)
    if has_score(folder):
        model.begin_own(folder)


def has_score(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, HEAD)) or adapters.score_in(folder) is not None


def _head(folder: str) -> dict[str, Tensor]:
    """Of a folder of ours, or the score alone of an adapter's that peft wrote."""
    path = os.path.join(folder, HEAD)
    if not os.path.exists(path):
        score = adapters.score_in(folder)
        assert score is not None
        return {"score": hf_stream.read_stored(score)[0].float()}
    try:
        read_header(path)
        return load_file(path)
    except (OSError, ValueError, SafetensorError) as problem:
        raise Refusal(f"{path} can't be read: {getattr(problem, 'strerror', None) or problem}", EX_DATAERR) from problem


def save(model: Decoder, folder: str, beside: Beside, say: Say, write: bool) -> None:
    assert isinstance(model, RewardModel)
    give_back(model)  # else these are gathered ones, which it takes away
    own = {name: whole(getattr(model, name)) for name in model.own}

    def head(where: str) -> None:
        model.write_own(where, own)
        beside.write(where)

    hf.save(model, folder, tokenizer_folder=beside.tokenizer, say=say, write=write, without=_OWN, more=head)


class _Plain(RewardModel):
    likelihood = False
    own = _OWN[:1]

    def __init__(self, c: ModelConfig, context_length: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(c, context_length, dtype)
        if self.head is not None:  # nothing reads it
            self.head.requires_grad_(False)


def learner(likelihood: bool) -> Learner:
    return Learner(RewardModel if likelihood else _Plain, None, load, save, measure, examples=None)


def open_reward(folder: str, context_length: int, compute: ComputeConfig, device: torch.device) -> RewardModel:
    folder = hf_hub.folder_of(folder, lambda line: None)
    if not has_score(folder):
        raise Refusal(f"{folder} is not a reward model: it has no {HEAD}; `stoker train reward` makes one", EX_NOINPUT)
    kind = RewardModel if "trust" in _head(folder) else _Plain
    dtype = ready.dtype_of(compute, device)
    model = hf.opened(folder, context_length, dtype, device, lambda line: None, kind, load)
    assert isinstance(model, RewardModel)
    return model.eval()


def scores(
    model: RewardModel, tokenizer: Tokenizer, rows: Sequence[tuple[Prompt, str]], device: torch.device, micro: int = 64
) -> list[float]:
    """Of each prompt's answer; what is too long for the model loses its beginning."""
    found = []
    for prompt, answer in rows:
        begun, whole = asked(tokenizer, prompt), answered(tokenizer, prompt, answer)
        cut = max(len(whole) - model.context_length, 0)
        found.append((whole[cut:], max(len(begun) - cut, 1)))
    return score_ids(model, found, device, micro)


@torch.no_grad()
def score_ids(
    model: RewardModel, rows: Sequence[tuple[Sequence[int], int]], device: torch.device, micro: int = 64
) -> list[float]:
    """Of each (conversation, where its answer begins), read at its last token. Like lengths go together."""
    order = sorted(range(len(rows)), key=lambda one: len(rows[one][0]))
    found = [0.0] * len(rows)
    for begin in range(0, len(order), micro):
        some = order[begin : begin + micro]
        inputs = padded_right([rows[one][0] for one in some], device)
        ends = torch.tensor([[len(rows[one][0]) - 1] for one in some], device=device)
        starts = torch.tensor([[rows[one][1] - 1] for one in some], device=device)
        read, told = model.parts(inputs, None)
        values = read.gather(1, ends)
        if told is not None:
            values = values + model.trust * (told.gather(1, ends) - told.gather(1, starts))
        for one, value in zip(some, values[:, 0].tolist(), strict=True):
            found[one] = value
    return found
