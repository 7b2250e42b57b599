"""A conversation with a model: its turns, what of them fits into the context, and the answer's text as it comes."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import Any, Protocol

import torch

from stoker.contract.errors import EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.units import plural
from stoker.training.generate import bits
from stoker.training.model import hf, outside, ready
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.model.hf_config import shape_for, tokenizer_in
from stoker.training.parallel.config import ComputeConfig
from stoker.training.tokenizer import chat
from stoker.training.tokenizer.tokenizer import Tokenizer
from stoker.training.tokenizer.tokenizer import load as load_tokenizer

Say = Callable[[str], None]
CONTEXT = 4096  # at most, unless more is asked for: a cache of 40,960 tokens of a 0.6 B model is 4.7 GB


def device_of(told: str) -> torch.device:
    if told == "cuda" and not torch.cuda.is_available():
        raise Refusal(
            "--device cuda: this machine has no GPU that torch can use; --device cpu works anywhere", EX_UNAVAILABLE
        )
    return torch.device("cuda" if told == "cuda" or (told == "auto" and torch.cuda.is_available()) else "cpu")


def context_of(folder: str, asked: int, trust: bool = False) -> int:
    """How many tokens a conversation may have: what the model was trained for, or less."""
    most = shape_for(ModelConfig(trust_remote_code=trust), folder).longest
    trained = most if most > 1 else CONTEXT
    if asked > trained:
        raise Refusal(
            f"--context {asked} is too long: the model in {folder} was trained for {trained} tokens", EX_USAGE
        )
    return asked or min(trained, CONTEXT)


def opened(
    folder: str, context: int, device: torch.device, say: Say, trust: bool = False, asked_bits: str = "16"
) -> tuple[Decoder | outside.Outside, Tokenizer]:
    """The folder's model and tokenizer, ready to answer on this machine. `trust`: code of the folder may run; `asked_bits`:
    auto, 16 or 4.
    """
    shape = shape_for(ModelConfig(trust_remote_code=trust), folder)
    rows = shape.vocab_size
    compute = ComputeConfig()
    dtype = ready.dtype_of(compute, device)
    ready.arithmetic(compute, dtype)
    words = load_tokenizer(tokenizer_in(folder))
    words.renders_in_child = True  # the model's template may loop: chat and serve answer with a line after RENDER_S
    if rows < words.vocab_size:
        line = f"{folder}: the tokenizer has {words.vocab_size} tokens and the model only {rows}: they don't belong together"
        raise Refusal(line, EX_USAGE)
    if shape.engine == "transformers":
        bits.refuse_outside(asked_bits)
        say(outside.notice(shape))
        return outside.opened(shape, context, dtype, device, _quiet).eval(), words
    narrow = bits.four(asked_bits, shape, 1, context, device, say)
    return (hf.opened_in_4_bits if narrow else hf.opened)(folder, context, dtype, device, _quiet).eval(), words


def _quiet(line: str) -> None:
    """How much was read from where: not what somebody who wants to talk asked for."""


@frozen
class Manner:
    temperature: float
    top_p: float
    max_tokens: int
    raw: bool = False  # a text goes on: no roles, no marks, no memory


class Writer(Protocol):
    """serve/batch.py's BatchEngine."""

    length: int  # tokens of a prompt and its answer

    def stream(
        self, prompt: Sequence[int], *, new_tokens: int, stop: Collection[int], seed: int = 0, **sampling: Any
    ) -> Iterator[int]: ...


class Conversation:
    def __init__(
        self,
        engine: Writer,
        tokenizer: Tokenizer,
        manner: Manner,
        system: str = "",
        seed: int = 0,
        say: Say = print,
    ) -> None:
        if not manner.raw:
            try:
                chat.check(tokenizer)
            except Refusal as refusal:
                raise Refusal(f"{refusal.line}; --raw continues plain text", refusal.code) from refusal
        self._engine, self._tokenizer, self._manner, self._say, self._seed = engine, tokenizer, manner, say, seed
        self._system = [("system", system.encode())] if system else []
        self._turns: list[tuple[str, bytes]] = []
        self._dropped = False
        self._marks = frozenset(tokenizer.special.values())
        self._stop = {tokenizer.end_id} if manner.raw else set(tokenizer.stop_ids)

    def forget(self) -> None:
        self._turns.clear()
        self._dropped = False

    def answer(self, text: str) -> Generator[str, None, None]:
        """Piece by piece. Whoever stops listening keeps what was said as the answer."""
        self._turns.append(("user", text.encode("utf-8", "surrogateescape")))
        try:
            ids = self._prompt(text)
        except Refusal:
            self._turns.pop()
            raise
        length = min(self._manner.max_tokens, self._engine.length - len(ids))
        tokens = self._engine.stream(
            ids,
            new_tokens=length,
            stop=self._stop,
            temperature=self._manner.temperature,
            top_p=self._manner.top_p,
            seed=self._seed + len(self._turns),
        )
        decoder, said = codecs.getincrementaldecoder("utf-8")("replace"), b""  # a character may be several tokens
        try:
            for token in tokens:
                if token in self._marks:
                    continue
                data = self._tokenizer.decode_bytes([token])
                if not said and self._tokenizer.told.decoding.strips and not self._manner.raw:
                    data = data.removeprefix(b" ")
                said += data
                yield decoder.decode(data)
            yield decoder.decode(b"", final=True)
        finally:
            self._turns.append(("assistant", said))

    def _prompt(self, text: str) -> list[int]:
        room = self._engine.length - min(self._manner.max_tokens, self._engine.length // 2)
        if self._manner.raw:
            ids = [*self._tokenizer.start, *self._tokenizer.encode(text)]
        else:
            ids = self._chat()
            while len(ids) > room and len(self._turns) > 2:
                del self._turns[:2]  # a question and its answer
                if not self._dropped:
                    self._say("the conversation is longer than the context: its oldest turns are forgotten")
                    self._dropped = True
                ids = self._chat()
        if len(ids) > room:
            raise Refusal(
                f"this has {plural(len(ids), 'token')}, and only {room} fit in the context with the answer: shorten it, or"
                " lower --max-tokens",
                EX_USAGE,
            )
        return ids

    def _chat(self) -> list[int]:
        return chat.prompt(self._tokenizer, [*self._system, *self._turns])
