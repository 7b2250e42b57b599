"""Midtraining: a base model learns what a conversation is, from chats of all kinds.

stoker train midtrain --model.load runs/latest/hf --data chats.jsonl
"""

from __future__ import annotations

import sys
from functools import partial

from stoker.training.recipes import stage
from stoker.training.recipes.pretrain import learn

main = partial(learn, "midtrain")

if __name__ == "__main__":
    sys.exit(stage.run(main))
