"""Supervised fine-tuning: the model learns to answer. Whole conversations, best-fit packed; only the assistant's words
are learned, each token alike.

stoker train sft --model.load runs/latest/hf --data chats.jsonl
"""

from __future__ import annotations

import sys

from stoker.training.recipes import stage
from stoker.training.recipes.pretrain import learn


def main(argv: list[str]) -> int:
    return stage.guarded(lambda: learn("sft", argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
