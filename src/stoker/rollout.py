"""Types for `grpo.rollout`: a file of your own that says how one rollout comes about. Standard library only.

    from stoker.rollout import Client, Rollout

    async def rollout(client: Client, row: dict, seed: int) -> Rollout:
        chat = client.conversation(row["prompt"])
        first = await chat.sample(max_tokens=64)
        chat.add({"role": "user", "content": "Are you sure?"})  # not learned
        second = await chat.sample(max_tokens=64)
        return chat.rollout(reward=float(row["answer"] in second.text))

A rollout is one sequence of token ids, cut into turns. Only tokens that the client sampled for this rollout, behind exactly
the tokens they were sampled behind, may be learned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["Client", "Completion", "ContextFull", "Conversation", "Message", "Rollout", "Turn"]

Message = Mapping[str, Any]  # role and content; a chat template may read more keys, such as tool_calls


class ContextFull(Exception):
    """Raised by `sample` where the prompt leaves no room for another token in data.context_length."""


@dataclass(frozen=True)
class Completion:
    """What the policy sampled behind a prompt."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # the stop token is the last one, if there is one
    logprobs: tuple[float, ...]  # of each token, at generate.temperature
    text: str  # without the stop token, and without the stop text and what follows it
    finish_reason: str  # "stop", or "length" where max_tokens or the context ended it
    weight_versions: tuple[int, ...] = ()  # steps behind the weights that sampled each token; empty: the newest


@dataclass(frozen=True)
class Turn:
    """A part of a rollout's token sequence."""

    token_ids: Sequence[int]
    learn: bool | Sequence[bool] = False  # True: all of its tokens; or one value for each token
    logprobs: Sequence[float] = ()  # of sampled tokens; for your own use: training takes those that the client recorded
    text: str | None = None  # shown in rollouts.jsonl; None: the decoded tokens
    role: str = ""  # "assistant", "user", "tool" ...: shown before the text

    @classmethod
    def sampled(cls, completion: Completion) -> Turn:
        """Return a turn that learns all tokens of a completion."""
        return cls(completion.token_ids, True, completion.logprobs, completion.text, "assistant")


@dataclass(frozen=True)
class Rollout:
    """The turns in their order, and what they are worth."""

    turns: Sequence[Turn]
    reward: float | None = None  # None: the rewards of grpo.reward alone; where none applies it is not learned from
    parts: Mapping[str, float] = field(default_factory=dict)  # named numbers for metrics.jsonl and rollouts.jsonl


class Client(Protocol):
    """Samples from the current policy, inside the trainer or from its servers. One client per rollout."""

    context_length: int  # tokens that a rollout may have

    async def sample(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        *,
        seed: int | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> Completion:
        """Sample one completion at generate.temperature.

        `prompt`: token ids, messages, or a text that becomes a user's message. `seed`: the same seed and prompt give the
        same completion; None: another one for each call of this rollout. `max_tokens`: generate.new_tokens by default; cut
        where the context ends. `stop`: texts that end the completion. Raises ContextFull.
        """
        ...

    def render(self, messages: str | Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        """Return the token ids of messages and of the beginning of the assistant's turn, by the chat template."""
        ...

    def follow(self, token_ids: Sequence[int], messages: str | Sequence[Message]) -> list[int]:
        """Return the token ids that follow a sampled turn: its end if it was cut, messages, the assistant's next turn.

        `token_ids`, the sequence so far, is not tokenized again; append the result to it.
        """
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def conversation(self, messages: str | Sequence[Message], tools: Sequence[Any] = ()) -> Conversation:
        """Return a conversation that begins with these messages."""
        ...


class Conversation:
    """A rollout in the making: messages are rendered, completions are appended as they were sampled."""

    def __init__(self, client: Client, messages: str | Sequence[Message], tools: Sequence[Any] = ()) -> None:
        self._client = client
        self.turns: list[Turn] = [Turn(client.render(messages, tools), role="prompt")]

    @property
    def token_ids(self) -> list[int]:
        """The whole sequence so far."""
        return [token for turn in self.turns for token in turn.token_ids]

    async def sample(
        self, *, seed: int | None = None, max_tokens: int | None = None, stop: str | Sequence[str] = ()
    ) -> Completion:
        """Sample the assistant's next turn and append it; all of its tokens are learned."""
        completion = await self._client.sample(self.token_ids, seed=seed, max_tokens=max_tokens, stop=stop)
        self.turns.append(Turn.sampled(completion))
        return completion

    def add(self, *messages: Message) -> None:
        """Append messages of the user, a tool or the environment; none of their tokens are learned."""
        role = ", ".join(str(message.get("role")) for message in messages)
        text = "\n".join(str(message.get("content")) for message in messages)
        self.turns.append(Turn(self._client.follow(self.token_ids, messages), text=text, role=role))

    def rollout(self, reward: float | None = None, parts: Mapping[str, float] | None = None) -> Rollout:
        """Return the finished rollout."""
        return Rollout(tuple(self.turns), reward, dict(parts or {}))
