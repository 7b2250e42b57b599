"""Conversations and pairs as ids, each with a mask of the learned ones."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from stoker.training.data.formats.format import Preference, Turn, Unusable, in_bytes
from stoker.training.tokenizer import chat
from stoker.training.tokenizer.roles import LEARNED
from stoker.training.tokenizer.tokenizer import Tokenizer

Encoded = tuple[NDArray[np.int32], NDArray[np.bool_]]


def conversation_ids(turns: Iterable[Turn], tokenizer: Tokenizer) -> Encoded:
    """As it is learned. Raises Unusable."""
    try:
        found = chat.encoded(tokenizer, in_bytes(turns))
    except chat.Unfit as problem:
        raise Unusable(problem.line) from problem
    return found.ids.astype(np.int32), found.mask.astype(bool)


def pair_ids(pair: Preference, tokenizer: Tokenizer) -> tuple[Encoded, Encoded]:
    """Better and worse, each up to the mark that ends its answer. Learned: the assistant's words after the prompt."""
    sides = []
    for answer in (pair.chosen, pair.rejected):
        ids, learned = conversation_ids((*pair.prompt, *answer), tokenizer)
        learned[: _begun(pair, ids, tokenizer)] = False
        if not learned.any():
            raise Unusable("the chat template writes no answer that can be learned")
        end = int(np.flatnonzero(learned)[-1]) + 1  # without the newline behind the mark
        sides.append((ids[:end], learned[:end]))
    return sides[0], sides[1]


def _begun(pair: Preference, ids: NDArray[np.int32], tokenizer: Tokenizer) -> int:
    """Tokens up to which answers in the prompt reach. A template may write something else before a new answer."""
    if not any(role == LEARNED for role, _ in pair.prompt):
        return 0
    try:
        prompt = np.array(chat.prompt(tokenizer, in_bytes(pair.prompt)), dtype=np.int32)
    except chat.Unfit as problem:
        raise Unusable(problem.line) from problem
    same = min(len(prompt), len(ids))
    unlike = np.flatnonzero(prompt[:same] != ids[:same])
    return int(unlike[0]) if len(unlike) else same
