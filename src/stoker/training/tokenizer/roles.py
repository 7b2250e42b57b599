"""Who speaks in a conversation, whose words are learned, and what a message may have besides a role and a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

ROLES = ("system", "user", "assistant", "tool")
LEARNED = "assistant"
MORE = ("tool_calls", "tool_call_id", "name", "reasoning_content", "thinking", "reasoning")  # that templates read
Text = TypeVar("Text")


class Turn(tuple[str, Text], Generic[Text]):
    """A message that has more than a role and a text: tool calls, thinking. Only a template can write that."""

    more: Mapping[str, Any]

    def __new__(cls, role: str, content: Text, more: Mapping[str, Any]) -> Self:
        made = super().__new__(cls, (role, content))
        made.more = more
        return made

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, other) is True and self.more == getattr(other, "more", {})

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__


class Conversation(list[tuple[str, Text]], Generic[Text]):
    """Messages, and the tools that the assistant may call."""

    tools: Sequence[Any] = ()
