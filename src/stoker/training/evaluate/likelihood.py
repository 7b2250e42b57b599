"""How likely a model finds given words: of choices, and of a whole text in bits per byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from stoker.contract.errors import EX_DATAERR, Refusal
from stoker.contract.progress import Progress
from stoker.training.data.config import DataConfig
from stoker.training.data.ours import own_cache
from stoker.training.data.read import texts
from stoker.training.data.sources import find_sources
from stoker.training.data.units import split
from stoker.training.density.points import Vectors, unit
from stoker.training.model.decoder import Decoder
from stoker.training.model.loss import capped, chunk_rows
from stoker.training.model.pieces import give_back, whole
from stoker.training.parallel.group import Group
from stoker.training.tokenizer.encoders import Ids
from stoker.training.tokenizer.tokenizer import Tokenizer

TOKENS_AT_ONCE = 16_384
Say = Callable[[str], None]
Continuation = tuple[Sequence[int], Sequence[int]]  # what is given, and what is asked about


def batches(lengths: Sequence[int], tokens: int = TOKENS_AT_ONCE) -> Iterator[list[int]]:
    """Places of rows of like length, so that little is padding; each batch has at most `tokens` with it."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > tokens:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _counted(some: Iterable[list[int]], rows: int, what: str) -> Iterator[list[int]]:
    with Progress(what, rows, unit="rows") as progress:
        for batch in some:
            yield batch
            progress.tick(len(batch))


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """On the right: attention is causal, so what comes behind a row's end changes nothing before it."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *([0] * (width - len(row)))] for row in rows], device=device)


@torch.no_grad()
def log_likelihoods(model: Decoder, rows: Sequence[Continuation]) -> list[float]:
    """Σ log p of each row's second part, given its first (at least one token)."""
    found = [0.0] * len(rows)
    device = model.device
    weight = whole(model.head_weight).to(device, model.dtype)
    for batch in _counted(batches([len(given) + len(asked) for given, asked in rows]), len(rows), "evaluation"):
        texts = [[*rows[place][0], *rows[place][1]] for place in batch]
        hidden = model.hidden(padded([one[:-1] for one in texts], device))
        places = [
            (row, at) for row, place in enumerate(batch) for at in range(len(rows[place][0]) - 1, len(texts[row]) - 1)
        ]
        if not places:
            continue
        index = torch.tensor(places, device=device)
        wanted = torch.tensor([texts[row][at + 1] for row, at in places], device=device)
        picked = hidden[index[:, 0], index[:, 1]]
        step = chunk_rows(len(picked), len(weight), 4)
        losses = [
            F.cross_entropy(
                capped(F.linear(picked[begin : begin + step], weight), model.config.final_cap).float(),
                wanted[begin : begin + step],
                reduction="none",
            )
            for begin in range(0, len(picked), step)
        ]
        totals = torch.zeros(len(batch), dtype=torch.float64, device=device).index_add_(
            0, index[:, 0], torch.cat(losses).double()
        )
        for place, total in zip(batch, totals.tolist(), strict=True):
            found[place] = -total
    give_back(model)
    return found


def windows(
    tokenizer: Tokenizer, parts: Iterable[tuple[bytes, bool]], context: int, tokens: int
) -> tuple[list[Continuation], list[int]]:
    """(each window's first token and the rest of it, its bytes): every token once, up to `tokens` (0: all). `parts`: of texts, and
    whether one ends with it. No more of them is encoded than is needed: a text may have any length.
    """
    found: list[Continuation] = []
    sizes: list[int] = []
    count = 0
    ids, lengths = [tokenizer.start[-1]], list[float]()  # of a text, from its last whole window on
    for segment, ends in _segments(tokenizer, parts):
        if segment:
            made = tokenizer.array(segment)
            ids += made.tolist()
            lengths += _sizes(tokenizer, made, len(segment))
        whole = len(lengths) if ends else len(lengths) // context * context
        for begin in range(0, whole, context):
            asked = ids[begin + 1 : min(begin + context, whole) + 1]
            found.append((ids[begin : begin + 1], asked))
            sizes.append(round(sum(lengths[begin : begin + len(asked)])))
            count += len(asked)
            if tokens and count >= tokens:
                return found, sizes
        ids, lengths = ([tokenizer.start[-1]], []) if ends else (ids[whole:], lengths[whole:])
    return found, sizes


def _segments(tokenizer: Tokenizer, parts: Iterable[tuple[bytes, bool]]) -> Iterator[tuple[bytes, bool]]:
    """An empty one ends a text that has no more."""
    for part, ends in parts:
        yield from ((segment, False) for segment in tokenizer.segments(part))
        if ends:
            yield b"", True


def _sizes(tokenizer: Tokenizer, ids: Ids, size: int) -> list[float]:
    """Bytes of each token, of a text of that size: where a tokenizer changes it, those of the text count."""
    lengths = tokenizer.lengths[ids].astype(float)
    if not tokenizer.told.is_exact and lengths.sum():
        lengths *= size / lengths.sum()
    return list(lengths.tolist())


def bits_per_byte(log_likelihood: float, size: float) -> float:
    return -log_likelihood / math.log(2) / size


def documents(path: str, data: DataConfig, say: Say) -> Iterator[tuple[bytes, bool]]:
    """Parts of the texts of jsonl, parquet or text files, and whether a text ends with it."""
    sources = find_sources((path,), own_cache(data.cache, say), say, "evaluate.texts")
    for span in split(sources, 0.0)[0]:
        yield from texts(span, data.text_key)


def measure(
    path: str, data: DataConfig, tokens: int, model: Decoder, tokenizer: Tokenizer, group: Group, say: Say
) -> float:
    """Bits per byte compare models with unlike tokenizers, as nats per token do not. Ranks share the windows."""
    rows, sizes = windows(tokenizer, documents(path, data, say), data.context_length, tokens)
    if not rows:
        raise Refusal(f"evaluate.texts {path} holds no text", EX_DATAERR)
    mine = group.turns(len(rows))
    found = sum(log_likelihoods(model, [rows[place] for place in mine]))
    totals = group.sum(
        torch.tensor([found, float(sum(sizes[place] for place in mine))], dtype=torch.float64, device=group.device)
    ).tolist()
    return bits_per_byte(*totals)


@torch.no_grad()
def embed(model: Decoder, rows: Sequence[Sequence[int]]) -> Vectors:
    """[rows, width]. A row that is too long counts by its beginning; equal rows are computed once."""
    room = model.context_length
    keys = [np.array(row[:room], dtype=np.int32).tobytes() for row in rows]  # Python's integers take nine times as much
    place = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    different = [np.frombuffer(key, dtype=np.int32) for key in place]
    device = model.device
    found = torch.zeros(len(different), model.config.dim)
    for batch in _counted(batches([len(row) for row in different]), len(different), "embedding"):
        picked = [different[number].tolist() for number in batch]
        hidden = model.hidden(padded(picked, device)).float()
        lengths = torch.tensor([len(row) for row in picked], device=device)
        within = torch.arange(hidden.shape[1], device=device) < lengths[:, None]
        found[batch] = ((hidden * within[:, :, None]).sum(1) / lengths[:, None]).cpu()
    give_back(model)
    return unit(found.numpy()[[place[key] for key in keys]])


def embed_shared(model: Decoder, rows: Sequence[Sequence[int]], group: Group) -> Vectors:
    """Ranks share the rows; all get all. Of a model in shards every rank embeds all of them."""
    if group.strategy == "fsdp":
        return embed(model, rows)
    mine = group.turns(len(rows))
    parts = group.all(embed(model, [rows[place] for place in mine]) if mine else None)
    whole = np.zeros((len(rows), model.config.dim), dtype=np.float32)
    for rank, part in enumerate(parts):
        if part is not None:
            whole[rank :: group.world] = part
    return whole
