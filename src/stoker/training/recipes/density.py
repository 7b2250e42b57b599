"""Density: how crowded each prompt's surroundings are, and how often it should be sampled for it. Sparse prompts get more weight.

    stoker train density --model.load sft/hf --density.prompts prompts.jsonl

Reads top to bottom: settings, prompts, embeddings, neighbours, weights. Writes weights.jsonl, a line per row of the prompts' file, and result.json.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np

import stoker
from stoker.contract.wholefile import write_whole
from stoker.training.config.schema import Config
from stoker.training.density.clusters import clusters
from stoker.training.density.embed import embed_shared
from stoker.training.density.gini import evenness, gini
from stoker.training.density.neighbours import densities
from stoker.training.density.points import Vectors, centred
from stoker.training.density.weights import weights
from stoker.training.evaluate.asking import Manner, prompt_ids
from stoker.training.evaluate.tasks import Prompts, prompts_of
from stoker.training.model import ready
from stoker.training.model.attention import kernels
from stoker.training.parallel.group import Group
from stoker.training.recipes.stage import (
    finish,
    from_rank_0,
    open_model,
    run,
    settings,
    tokenizer_of,
    weights_of,
    where_runs_go,
)

WEIGHTS = "weights.jsonl"


def main(argv: list[str]) -> int:
    c = settings(argv, "density")
    prompts = prompts_of(c.density.prompts, "density.prompts")
    if prompts.skipped:
        from_rank_0(prompts.skipped)
    folder = weights_of(c.model.load)
    tokenizer = tokenizer_of(c)
    rows = [
        prompt_ids(tokenizer, question, Manner(c.evaluate.chat, system=c.generate.system))
        for question in prompts.questions
    ]

    group = Group(c.parallel)
    with kernels(ready.attention(c.compute, group.device)):
        stoker.phase("eval")
        vectors = embed_shared(open_model(c, folder, group.device).eval(), rows, group)
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
    where = where_runs_go(c)
    os.makedirs(where, 0o700, exist_ok=True)
    write_whole(os.path.join(where, WEIGHTS), "".join(json.dumps(line) + "\n" for line in lines).encode())
    from_rank_0(
        f"{found['prompts']} prompts in {found['clusters']} clusters: Gini {found['gini']:.3f}, sampled by weight"
        f" {found['gini_weighted']:.3f}; weights {found['weight_min']:.2f} to {found['weight_max']:.2f}"
    )
    finish(c, "density", found)


if __name__ == "__main__":
    sys.exit(run(main))
