"""Formats whose rows are conversations. A new one: a function and an entry in FORMATS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.training.data.formats.format import Format, Row, Turn, Unusable, text_of, tools_of, turns_of
from stoker.training.tokenizer.roles import LEARNED, Conversation

_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant", "bing": "assistant",
    "bard": "assistant", "model": "assistant", "function_call": "assistant", "system": "system", "tool": "tool",
    "observation": "tool", "function_response": "tool",
}  # fmt: skip


def _first(row: Row, column: str) -> Any:
    value = row.get(column)
    return value[0] if isinstance(value, (list, tuple)) and value else None


def _is_messages(row: Row) -> bool:
    first = _first(row, "conversations")
    return "messages" in row or (isinstance(first, Mapping) and "role" in first)


def _messages(row: Row) -> list[Turn]:
    column = "messages" if "messages" in row else "conversations"
    turns = Conversation(turns_of(row.get(column), repr(column)))
    turns.tools = tools_of(row.get("tools"))
    return turns


def _sharegpt(row: Row) -> list[Turn]:
    turns = turns_of(row.get("conversations"), "'conversations'", "from", "value", _SHAREGPT_ROLES)
    system = row.get("system") or row.get("system_prompt")
    return [("system", system), *turns] if isinstance(system, str) and turns and turns[0][0] != "system" else turns


def _alpaca(row: Row) -> list[Turn]:
    asked, more = text_of(row.get("instruction"), "instruction"), row.get("input")
    if isinstance(more, str) and more.strip():
        asked = f"{asked}\n\n{more}"
    if not asked.strip():
        raise Unusable("instruction is empty")
    turns = [("user", asked), (LEARNED, text_of(row.get("output"), "output"))]
    system = row.get("system")
    return [("system", system), *turns] if isinstance(system, str) and system else turns


def _completion(row: Row) -> list[Turn]:
    answer = row["completion"] if "completion" in row else row.get("response")
    asked = row.get("prompt")
    before = turns_of(asked, "prompt") if isinstance(asked, (list, tuple)) else [("user", text_of(asked, "prompt"))]
    after = turns_of(answer, "completion") if isinstance(answer, (list, tuple)) else None
    return [*before, *(after if after is not None else [(LEARNED, text_of(answer, "completion"))])]


FORMATS = (
    Format("messages", "messages of role and content", ("messages", "conversations", "tools"), _is_messages, _messages),
    Format(
        "sharegpt",
        "conversations of from and value",
        ("conversations", "system", "system_prompt"),
        lambda row: "conversations" in row,
        _sharegpt,
    ),
    Format(
        "alpaca",
        "instruction, input and output",
        ("instruction", "input", "output", "system"),
        lambda row: "instruction" in row and "output" in row,
        _alpaca,
    ),
    Format(
        "prompt-completion",
        "prompt and completion",
        ("prompt", "completion", "response"),
        lambda row: "prompt" in row and ("completion" in row or "response" in row),
        _completion,
    ),
)
