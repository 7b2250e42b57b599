"""Who speaks in a conversation, and whose words are learned."""

from __future__ import annotations

ROLES = ("system", "user", "assistant", "tool")
LEARNED = "assistant"
