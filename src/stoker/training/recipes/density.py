"""Density: how crowded each prompt's surroundings are, and how often it should be sampled for it. Sparse prompts get more weight.

    stoker train density --model.load sft/hf --density.prompts prompts.jsonl

Reads top to bottom: settings, prompts, embeddings, neighbours, weights. Writes weights.jsonl, a line per row of the prompts' file, and result.json.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

import stoker
from stoker.training.config.schema import Config
from stoker.training.data.formats.questions import Question
from stoker.training.density.points import Vectors, centred, clusters, evenness, gini
from stoker.training.evaluate.asking import Manner, prompt_ids
from stoker.training.evaluate.likelihood import embed_shared
from stoker.training.evaluate.tasks import Prompts, prompts_of, spread
from stoker.training.model import ready
from stoker.training.model.attention import kernels
from stoker.training.parallel.group import Group
from stoker.training.recipes import stage
from stoker.training.tokenizer.tokenizer import Tokenizer

# How often a prompt should be sampled. Where prompts are sparse each counts for more: w ∝ (1 / density)^power. Pure.


def weights(density: NDArray[np.float64], power: float, most: float) -> NDArray[np.float64]:
    """Mean 1, none above `most`."""
    logs = -power * np.log(density)
    return capped(np.exp(np.maximum(logs - logs.max(), -600.0)), most)


def capped(raw: NDArray[np.float64], most: float) -> NDArray[np.float64]:
    """Water-filling: cut at the cap, the rest raised in proportion, until the mean is 1 with nothing above."""
    count = len(raw)
    if most <= 1 or count == 0:
        return np.ones(count)
    full = np.zeros(count, dtype=bool)
    while True:
        left = max(count - most * full.sum(), 0.0)
        scaled = np.where(full, most, raw * (left / raw[~full].sum()))
        above = ~full & (scaled > most)
        if not above.any():
            return np.asarray(scaled)
        full |= above


# How crowded each point's surroundings are, by its nearest neighbours: exact ones up to MOST_OTHERS prompts.


MOST_OTHERS = 1 << 16  # of more, so many are looked at for each, spread evenly: not all pairs
CHUNK = 1 << 24  # similarities that exist at once: 64 MB
FLOOR = 0.1  # of the median distance: copies of one prompt are dense, not infinitely so, and keep a weight


def distances(vectors: Vectors, k: int) -> NDArray[np.float64]:
    """The mean cosine distance of each to its k nearest others, chunk by chunk of the whole table of similarities."""
    count = len(vectors)
    others = np.array(spread(count, MOST_OTHERS))
    k = min(k, len(others) - 1)
    found = np.zeros(count)
    if k < 1:
        return found
    step = max(CHUNK // len(others), 1)
    looked_at = vectors[others].T
    for begin in range(0, count, step):
        similar = vectors[begin : begin + step] @ looked_at
        own = np.flatnonzero((others >= begin) & (others < begin + step))
        similar[others[own] - begin, own] = -np.inf  # a point is no neighbour of its own
        nearest = np.partition(similar, len(others) - k, axis=1)[:, len(others) - k :]
        found[begin : begin + step] = 1.0 - nearest.mean(1, dtype=np.float64)
    return np.maximum(found, 0.0)


def densities(vectors: Vectors, k: int) -> NDArray[np.float64]:
    """1 / mean distance: it needs no bandwidth, as a kernel would, and an outlier's is small but not exponentially so."""
    far = distances(vectors, k)
    typical = float(np.median(far)) or float(far.mean())
    if typical <= 0:
        return np.ones(len(vectors))  # all the same point
    return np.asarray(1.0 / (far + FLOOR * typical))


WEIGHTS = "weights.jsonl"


def shortened(questions: Sequence[Question], tokenizer: Tokenizer, manner: Manner, longest: int) -> list[Sequence[int]]:
    """Their ids, as far as the model reads them, in 4 bytes each."""
    return [array("i", prompt_ids(tokenizer, question, manner)[:longest]) for question in questions]


def main(argv: list[str]) -> int:
    c = stage.settings(argv, "density")
    prompts = prompts_of(c.density.prompts, "density.prompts")
    if prompts.skipped:
        stage.from_rank_0(prompts.skipped)
    folder = stage.weights_of(c.model.load)
    tokenizer = stage.tokenizer_of(c)
    manner = Manner(c.evaluate.chat, system=c.generate.system)
    rows = shortened(prompts.questions, tokenizer, manner, c.data.context_length)

    group = Group(c.parallel)
    with kernels(ready.attention(c.compute, group.device)):
        stoker.phase("eval")
        vectors = embed_shared(stage.open_to_ask(c, folder, group), rows, group)
    if group.first:
        _weigh(c, prompts, centred(vectors))
    group.close()
    return 0


def _weigh(c: Config, prompts: Prompts, vectors: Vectors) -> None:
    density = densities(vectors, c.density.neighbours)
    weight = weights(density, c.density.power, c.density.most)
    label = clusters(vectors, c.density.clusters, c.train.seed)
    k = min(c.density.clusters, len(vectors))
    counts, weighted = np.bincount(label, minlength=k), np.bincount(label, weights=weight, minlength=k)
    found = {
        "prompts": len(vectors),
        "clusters": int((counts > 0).sum()),
        "gini": gini(counts.tolist()),
        "gini_weighted": gini(weighted.tolist()),
        "entropy": evenness(counts.tolist()),
        "entropy_weighted": evenness(weighted.tolist()),
        "weight_min": float(weight.min()),
        "weight_max": float(weight.max()),
    }

    # A row that can't be asked is not sampled: it has its line, and the weight 0.
    lines = [{"index": index, "weight": 0.0, "density": None, "cluster": None} for index in range(prompts.rows)]
    for number, index in enumerate(prompts.places):
        lines[index] = {
            "index": index,
            "weight": float(weight[number]),
            "density": float(density[number]),
            "cluster": int(label[number]),
        }
    stage.write_rows(c, WEIGHTS, lines)
    stage.from_rank_0(
        f"{found['prompts']} prompts in {found['clusters']} clusters: Gini {found['gini']:.3f}, sampled by weight"
        f" {found['gini_weighted']:.3f}; weights {found['weight_min']:.2f} to {found['weight_max']:.2f}"
    )
    stage.finish(c, "density", found)


if __name__ == "__main__":
    sys.exit(stage.run(main))
