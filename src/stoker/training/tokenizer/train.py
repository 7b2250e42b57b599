"""Trains a byte-level BPE: the same texts give the same tokenizer."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import import_module

from stoker.contract.names import EX_CONFIG, EX_DATAERR, Refusal
from stoker.training.tokenizer.definition import OURS, SPECIAL
from stoker.training.tokenizer.tokenizer import Tokenizer

VERSION = 1


def check_size(vocab_size: int) -> None:
    least = 256 + len(SPECIAL)
    if vocab_size < least:
        raise Refusal(
            f"tokenizer.vocab_size is {vocab_size}: a vocabulary holds 256 bytes and {len(SPECIAL)} special tokens,"
            f" {least} at least",
            EX_CONFIG,
        )


def train(texts: Iterable[str], vocab_size: int, folder: str) -> Tokenizer:
    """A small text may give fewer tokens than asked for: `vocab_size` of the result says how many."""
    check_size(vocab_size)
    os.environ["TOKENIZERS_PARALLELISM"] = (
        "true"  # asked for: without it, a process that once forked trains on one core
    )
    tokenizers = import_module("tokenizers")
    pre, decoders = tokenizers.pre_tokenizers, tokenizers.decoders
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    words = pre.Split(tokenizers.Regex(OURS), "isolated")
    made.pre_tokenizer = pre.Sequence([words, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL),
        min_frequency=2,
        special_tokens=[],
        initial_alphabet=sorted(pre.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    if made.get_vocab_size() <= 256 < vocab_size - len(SPECIAL):
        raise Refusal(
            "there is too little text to train a tokenizer on: no two bytes stand together twice; tokenizer.path=bytes"
            " needs no training",
            EX_DATAERR,
        )
    made.add_special_tokens(
        [tokenizers.AddedToken(name, special=True, normalized=False) for name in SPECIAL]
    )  # the highest ids
    found = Tokenizer(made.to_str().encode(), {"eos_token": SPECIAL[0], "pad_token": SPECIAL[-1]}, folder)
    found.save(folder)
    return found
