"""The tokenizer: a byte-level BPE learned from the data, measured on what was held out.

    stoker train tokenizer --data texts/ --tokenizer.vocab_size 32768

Writes tokenizer/ into the run directory; later stages take it with --tokenizer.path. One process's work: no ranks, no GPU. The data is tokenized on the
way, which a pretraining with the same data finds in the cache.
"""

from __future__ import annotations

import os
import re
import sys

import numpy as np

from stoker.contract.errors import EX_DATAERR, EX_USAGE, Refusal
from stoker.training.data.prepare import prepare
from stoker.training.data.reader import Samples
from stoker.training.data.shards import Prepared
from stoker.training.recipes import stage
from stoker.training.tokenizer.tokenizer import Tokenizer, load

WORD = re.compile(rb"\s*\S+")
MOST = 1_000_000  # tokens that are measured


def main(argv: list[str]) -> int:
    c = stage.settings(argv, "tokenizer")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise Refusal("a tokenizer is trained by one process: --nproc-per-node 1", EX_USAGE)
    prepared = prepare(c.data, c.tokenizer, stage.of_data)
    words = load(prepared.tokenizer)
    text, tokens = held_out(prepared, words)
    told = {
        "vocab_size": words.vocab_size,
        "bytes_per_token": len(text) / tokens,
        "words_bytes_per_token": len(text) / len(WORD.findall(text)),
    }
    os.makedirs(stage.where_runs_go(c), 0o700, exist_ok=True)
    folder = os.path.join(stage.where_runs_go(c), "tokenizer")
    os.makedirs(folder, exist_ok=True)
    words.save(folder)
    stage.from_rank_0(
        f"tokenizer of {words.vocab_size} tokens: {told['bytes_per_token']:.3f} bytes a token on {len(text):,} held-out"
        f" bytes; a token per word would have {told['words_bytes_per_token']:.3f}, a token per byte 1"
    )
    stage.finish(c, "tokenizer", told)
    return 0


def held_out(prepared: Prepared, words: Tokenizer) -> tuple[bytes, int]:
    """(text, how many tokens it took)."""
    if prepared.validation_tokens < 2:
        raise Refusal(
            "nothing is held out to measure the tokenizer by: data.validation is a share of the data, or a path",
            EX_DATAERR,
        )
    samples = Samples(prepared, "validation", prepared.context or 1024)
    count = min(len(samples), max(MOST // samples.context, 1))
    ids = samples.batch(np.arange(count, dtype=np.int64)).inputs.reshape(-1)[: prepared.validation_tokens]
    inked = ids[~np.isin(ids, list(words.special.values()))]
    return words.decode_bytes(inked.tolist()), len(inked)


if __name__ == "__main__":
    sys.exit(stage.run(main))
