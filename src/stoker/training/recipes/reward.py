"""The reward model: which of two answers is the better, learned from pairs (prompt, chosen, rejected).

    stoker train reward --model.load runs/latest/hf --reward.pairs pairs.jsonl --reward.held_out pairs-held-out.jsonl

data.context_length must hold both answers of a pair with their prompt. Ends with the share of held-out pairs in the right order, by kind, and how far
the model's own probabilities can be trusted (calibration).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from stoker.training.config.schema import Config
from stoker.training.loop.step import Parts
from stoker.training.recipes import stage
from stoker.training.recipes.supervised import PairStage, learn_pairs
from stoker.training.reward.model import held_out_margins, learner
from stoker.training.reward.pairs import PairRows

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


def measure(c: Config, parts: Parts, held_out: PairRows) -> tuple[list[bool], dict[str, Any]]:
    margins = held_out_margins(parts.wrapped, held_out, parts.group, parts.micro).tolist()
    return [margin > 0 for margin in margins], {"calibration": calibration(margins)}


def main(argv: list[str]) -> int:
    line = "held-out pairs in the right order"
    kind = PairStage("reward", line, lambda c, *rest: learner(c.reward.likelihood), measure)
    return learn_pairs(argv, kind)


if __name__ == "__main__":
    sys.exit(stage.run(main))
