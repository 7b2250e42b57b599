"""A conversation as ChatML ids, and which of them are learned: the assistant's words and the mark that ends them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stoker.contract.names import EX_DATAERR, Refusal
from stoker.training.tokenizer import roles
from stoker.training.tokenizer.encoders import Ids
from stoker.training.tokenizer.tokenizer import Tokenizer, segments

START, STOP, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
ROLES, LEARNED = roles.ROLES, roles.LEARNED


def check(tokenizer: Tokenizer) -> None:
    missing = [name for name in (START, STOP) if name not in tokenizer.special]
    if missing:
        found = ", ".join(tokenizer.special)
        raise Refusal(
            f"tokenizer {tokenizer.where} has no {' and no '.join(missing)}, which a chat is written with; it has"
            f" {found}",
            EX_DATAERR,
        )


def pad_id(tokenizer: Tokenizer) -> int:
    return tokenizer.special.get(PAD, tokenizer.end_id)


def chat(tokenizer: Tokenizer, messages: Sequence[tuple[str, bytes]]) -> tuple[Ids, NDArray[np.uint8]]:
    """(role, content) pairs to ids and a mask of the learned ones. The marks are put in by id: what stands in a content
    is text.
    """
    ids: list[Ids] = []
    mask: list[NDArray[np.uint8]] = []

    def put(part: Ids, learned: bool) -> None:
        ids.append(part)
        mask.append(np.full(len(part), learned, dtype=np.uint8))

    def mark(name: str) -> Ids:
        return np.array([tokenizer.special[name]], dtype=np.uint32)

    newline = tokenizer.array(b"\n")
    for role, content in messages:
        learned = role == LEARNED
        put(mark(START), False)
        put(tokenizer.array(role.encode() + b"\n"), False)
        for segment in segments(content):
            put(tokenizer.array(segment), learned)
        put(mark(STOP), learned)
        put(newline, False)
    return np.concatenate(ids), np.concatenate(mask)


def prompt(tokenizer: Tokenizer, messages: Sequence[tuple[str, bytes]]) -> list[int]:
    """The conversation so far and the beginning of the assistant's turn."""
    begun = chat(tokenizer, messages)[0].tolist() if messages else []
    return [*begun, tokenizer.special[START], *tokenizer.encode(f"{LEARNED}\n")]
