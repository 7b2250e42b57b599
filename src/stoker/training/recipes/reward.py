"""The reward model: which of two answers is the better, learned from pairs (prompt, chosen, rejected).

    stoker train reward --model.load runs/latest/hf --reward.pairs pairs.jsonl --reward.held_out pairs-held-out.jsonl

data.context_length must hold both answers of a pair with their prompt. Ends with the share of held-out pairs in the right order, by kind, and how far
the model's own probabilities can be trusted (calibration).
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from typing import Any

from stoker.training.config.check import check_ranks
from stoker.training.evaluate.confidence import wilson
from stoker.training.loop.material import Material
from stoker.training.loop.say import Voice
from stoker.training.loop.speed import Startup
from stoker.training.model import ready
from stoker.training.model.attention import kernels
from stoker.training.parallel.group import Group
from stoker.training.recipes import stage, supervised
from stoker.training.reward.model import held_out_margins, learner
from stoker.training.reward.pairs import Pair, PairRows, pairs_of
from stoker.training.tokenizer import chat

# Whether a probability means what it says: pairs are put in bins by σ(margin) of the likelier answer, and counted.


BINS = 10


def calibration(margins: Sequence[float], bins: int = BINS) -> list[dict[str, Any]]:
    """From one half to one: how sure the model was, and how often it was right then."""
    counted = [[0, 0.0, 0.0] for _ in range(bins)]
    for margin in margins:
        sure = 1 / (1 + math.exp(-abs(margin))) if abs(margin) < 700 else 1.0
        one = counted[min(int((sure - 0.5) * 2 * bins), bins - 1)]
        one[0] += 1
        one[1] += sure
        one[2] += 0.5 if margin == 0 else margin > 0  # no order at all: a coin's
    return [
        {
            "low": 0.5 + place / (2 * bins),
            "high": 0.5 + (place + 1) / (2 * bins),
            "predicted": total / count,
            "observed": right / count,
            "count": count,
        }
        for place, (count, total, right) in enumerate(counted)
        if count
    ]


def main(argv: list[str]) -> int:
    startup = Startup()
    startup.done("imports")
    c = stage.settings(argv, "reward")
    check_ranks(c, int(os.environ.get("WORLD_SIZE", "1")))

    # Pairs: read by every rank, before there is a process group.
    tokenizer = stage.tokenizer_of(c)
    pairs, held_out = pairs_of(
        c.reward.pairs, c.reward.held_out, tokenizer, c.data.context_length, "reward", stage.from_rank_0
    )
    train, other = (PairRows(some, c.data.context_length, chat.pad_id(tokenizer)) for some in (pairs, held_out))
    startup.done("data")

    group = Group(c.parallel)
    startup.done("ranks")
    folder = c.tokenizer.path or stage.weights_of(c.model.load)
    material = Material(train.digest(), tokenizer.vocab_size, folder, tokenizer.digest, train, other)
    voice = Voice(group, c.train.log_every)
    with kernels(ready.attention(c.compute, group.device)):
        trained = supervised.train(c, material, learner(c.reward.likelihood), group, voice, startup)
        if trained.whole:
            margins = held_out_margins(trained.parts.wrapped, other, group, trained.parts.micro).tolist()
            if group.first:
                told = measured(held_out, margins)
                voice.say(
                    f"held-out pairs in the right order: {told['accuracy']:.1%} ({told['low']:.1%} –"
                    f" {told['high']:.1%}) of {told['total']}"
                )
                stage.finish(c, "reward", {**trained.metrics, **told}, model="hf")
    voice.close()
    group.close()
    return trained.code


def measured(pairs: list[Pair], margins: list[float]) -> dict[str, Any]:
    by_kind: dict[str, list[bool]] = {}
    for pair, margin in zip(pairs, margins, strict=True):
        by_kind.setdefault(pair.kind, []).append(margin > 0)
    every = [one for some in by_kind.values() for one in some]
    return {
        **_share(every),
        "by_kind": {kind: _share(some) for kind, some in sorted(by_kind.items())},
        "calibration": calibration(margins),
    }


def _share(right: list[bool]) -> dict[str, Any]:
    sure = wilson(sum(right), len(right))
    return {"accuracy": sum(right) / len(right), "low": sure.low, "high": sure.high, "total": len(right)}


if __name__ == "__main__":
    sys.exit(stage.run(main))
