"""A conversation as ids, and which of them are learned: the assistant's words and the mark that ends them. By the
model's own template where it has one (template.py), else ChatML.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.contract.errors import EX_DATAERR, Refusal
from stoker.contract.safe_io import write_atomic
from stoker.training.tokenizer.encoders import Ids
from stoker.training.tokenizer.place import FILES
from stoker.training.tokenizer.roles import LEARNED, MORE, ROLES, Conversation, Turn
from stoker.training.tokenizer.template import CHATML, Encoded, Unfit
from stoker.training.tokenizer.tokenizer import Tokenizer, segments

START, STOP, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
__all__ = ["LEARNED", "MORE", "PAD", "ROLES", "START", "STOP", "Conversation", "Encoded", "Turn", "Unfit"]


def encoded(tokenizer: Tokenizer, messages: Sequence[tuple[str, bytes]]) -> Encoded:
    """As it is learned. Raises Unfit."""
    if not any(role == LEARNED for role, _ in messages):
        raise Unfit(f"no message is the {LEARNED}'s" if messages else "an empty conversation")
    tools = getattr(messages, "tools", ())
    if tokenizer.template is not None:
        return tokenizer.template.conversation([_message(one) for one in messages], tools)
    if tools or any(getattr(one, "more", None) for one in messages):
        raise Unfit(
            f"it has tools, tool calls or thinking, and tokenizer {tokenizer.where} has no chat template for them"
        )
    ids, mask = chat(tokenizer, messages)
    mine = ids[mask != 0]
    return Encoded(ids, mask, int(tokenizer.lengths[mine[mine != tokenizer.special[STOP]]].sum()))


def _message(message: tuple[str, bytes]) -> dict[str, Any]:
    role, content = message
    return {"role": role, "content": content.decode("utf-8", "replace"), **getattr(message, "more", {})}


def answered(tokenizer: Tokenizer, messages: Sequence[tuple[str, bytes]], answer: str) -> list[int]:
    """A conversation with an answer to it, up to the token that ends the answer."""
    if tokenizer.template is None:
        return [*prompt(tokenizer, messages), *tokenizer.array(answer.encode()).tolist(), tokenizer.special[STOP]]
    whole = encoded(tokenizer, [*messages, (LEARNED, answer.encode())])
    learned = np.flatnonzero(whole.mask)
    return list(map(int, whole.ids[: int(learned[-1]) + 1 if len(learned) else None]))


def check(tokenizer: Tokenizer) -> None:
    """Refuses a tokenizer that no conversation can be written with."""
    if tokenizer.template is not None:
        return
    missing = [name for name in (START, STOP) if name not in tokenizer.special]
    if missing:
        found = ", ".join(tokenizer.special)
        raise Refusal(
            f"tokenizer {tokenizer.where} has no chat template, and no {' and no '.join(missing)}, which a chat is else"
            f" written with; it has {found}",
            EX_DATAERR,
        )


def write_template(folder: str, tokenizer: Tokenizer) -> str:
    """The template by which it was taught, into a folder that `transformers` opens. Its own stays. What was done."""
    if tokenizer.config.get("chat_template") == CHATML:
        return ""  # training wrote it there: the model's folder may have had none
    if tokenizer.template is not None or tokenizer.config.get("chat_template"):
        return "the tokenizer has a chat template of its own: it stays"
    if START not in tokenizer.special or STOP not in tokenizer.special:
        return f"no chat template: the tokenizer has no {START} and {STOP}"
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.told.end,
        "clean_up_tokenization_spaces": False,
        **tokenizer.config,
        "chat_template": CHATML,
    }
    text = json.dumps(told, indent=1, ensure_ascii=False) + "\n"
    write_atomic(os.path.join(folder, FILES[1]), text.encode("utf-8", "backslashreplace"))
    return ""


def pad_id(tokenizer: Tokenizer) -> int:
    return tokenizer.special.get(PAD, tokenizer.end_id)


def chat(tokenizer: Tokenizer, messages: Sequence[tuple[str, bytes]]) -> tuple[Ids, NDArray[np.uint8]]:
    """As ChatML: (role, content) to ids and a mask of the learned ones. Marks go in by id: a content is text."""
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


def prompt(
    tokenizer: Tokenizer,
    messages: Sequence[tuple[str, bytes]],
    variables: Mapping[str, Any] | None = None,
    *,
    opens_turn: bool = True,
    continues: bool = False,
) -> list[int]:
    """Return the ids of the conversation so far and of the beginning of the assistant's turn.

    `variables`: what a chat template may read, too; `opens_turn`: False leaves the beginning of the turn out; `continues`: the
    last message stays open, and its text is continued.
    """
    if tokenizer.template is not None:
        turns = [_message(one) for one in messages]
        tools = getattr(messages, "tools", ())
        return tokenizer.template.prompt(turns, tools, variables, opens_turn=opens_turn, continues=continues)
    ended = messages[:-1] if continues else messages
    ids = chat(tokenizer, ended)[0].tolist() if ended else []
    if continues or opens_turn:
        role = messages[-1][0] if continues else LEARNED
        ids += [tokenizer.special[START], *tokenizer.encode(f"{role}\n")]
    if continues:
        ids += tokenizer.encode_bytes(messages[-1][1])
    return ids
