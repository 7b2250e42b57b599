"""Supervised fine-tuning: the model learns to answer. Whole conversations, best-fit packed; only the assistant's words
are learned, each token alike.

stoker train sft --model.load runs/latest/hf --data chats.jsonl
"""

from __future__ import annotations

import sys
from functools import partial

from stoker.training.recipes import stage
from stoker.training.recipes.pretrain import learn

main = partial(learn, "sft")

if __name__ == "__main__":
    sys.exit(stage.run(main))
