"""Midtraining: a base model learns what a conversation is, from chats of all kinds.

stoker train midtrain --model.load runs/latest/hf --data chats.jsonl
"""

from __future__ import annotations

import sys

from stoker.training.recipes import stage
from stoker.training.recipes.pretrain import learn


def main(argv: list[str]) -> int:
    return stage.guarded(lambda: learn("midtrain", argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
