"""Conversations and pairs as ids, each with a mask of the learned ones."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from stoker.training.data.formats.format import Preference, Turn
from stoker.training.data.jsonl import utf8
from stoker.training.tokenizer import chat
from stoker.training.tokenizer.tokenizer import Tokenizer

Encoded = tuple[NDArray[np.int32], NDArray[np.bool_]]


def conversation_ids(turns: Iterable[Turn], tokenizer: Tokenizer) -> Encoded:
    ids, mask = chat.chat(tokenizer, [(role, utf8(text)) for role, text in turns])
    return ids.astype(np.int32), mask.astype(bool)


def pair_ids(pair: Preference, tokenizer: Tokenizer) -> tuple[Encoded, Encoded]:
    """Better and worse, each up to the mark that ends its answer. Learned: the assistant's words after the prompt."""
    begun = len(conversation_ids(pair.prompt, tokenizer)[0])
    sides = []
    for answer in (pair.chosen, pair.rejected):
        ids, learned = conversation_ids((*pair.prompt, *answer), tokenizer)
        learned[:begun] = False
        end = int(np.flatnonzero(learned)[-1]) + 1  # without the newline behind the mark
        sides.append((ids[:end], learned[:end]))
    return sides[0], sides[1]
