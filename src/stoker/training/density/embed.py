"""Texts as points: the mean of a model's last hidden states over a text's tokens, of length 1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from stoker.training.density.points import Vectors, unit
from stoker.training.evaluate.likelihood import batches, padded
from stoker.training.model.decoder import Decoder
from stoker.training.parallel.group import Group


@torch.no_grad()
def embed(model: Decoder, rows: Sequence[Sequence[int]]) -> Vectors:
    """[rows, width]. A row longer than the context counts by its beginning; equal rows are computed once and are
    exactly equal.
    """
    room = model.context_length
    different = list(dict.fromkeys(tuple(row[:room]) for row in rows))
    device = model.embed.weight.device
    found = torch.zeros(len(different), model.config.dim)
    for batch in batches([len(row) for row in different]):
        picked = [different[place] for place in batch]
        hidden = model.hidden(padded(picked, device)).float()
        lengths = torch.tensor([len(row) for row in picked], device=device)
        within = torch.arange(hidden.shape[1], device=device) < lengths[:, None]
        found[batch] = ((hidden * within[:, :, None]).sum(1) / lengths[:, None]).cpu()
    place = {row: number for number, row in enumerate(different)}
    return unit(found.numpy()[[place[tuple(row[:room])] for row in rows]])


def embed_shared(model: Decoder, rows: Sequence[Sequence[int]], group: Group) -> Vectors:
    """Ranks share the rows; all get all."""
    mine = range(group.rank, len(rows), group.world)
    parts = group.all(embed(model, [rows[place] for place in mine]) if mine else None)
    whole = np.zeros((len(rows), model.config.dim), dtype=np.float32)
    for rank, part in enumerate(parts):
        if part is not None:
            whole[rank :: group.world] = part
    return whole
