"""Constrained decoding: which tokens may come next so that a completion matches a JSON schema. No torch.

llguidance follows the grammar. It is imported when the first request asks for it.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.contract.text import escape
from stoker.training.tokenizer.tokenizer import Tokenizer

# Free whitespace would let a model write blanks without end.
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


_POSITION = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")


class Unconstrainable(Exception):
    """Why a grammar can't be used, in one line."""


class GrammarMatcher:
    """Where one completion is in its grammar."""

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher, self._vocab = matcher, vocab

    def copy(self) -> GrammarMatcher:
        return GrammarMatcher(self._matcher.deep_copy(), self._vocab)

    def allowed(self) -> NDArray[np.bool_]:
        """Return which token ids may come next: at the end of the grammar only those that end the text."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._vocab].astype(np.bool_)

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)

    @property
    def is_complete(self) -> bool:
        """Nothing may follow but the end."""
        return bool(self._matcher.is_stopped()) and not self.has_failed

    @property
    def has_failed(self) -> bool:
        """The grammar can't be followed any further, for example since it became too complex."""
        return bool(self._matcher.is_error())


class Grammars:
    """Compiles grammars for a tokenizer. Used by one thread at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._lock = tokenizer, threading.Lock()
        self._compiled: Any = None  # llguidance's view of the tokenizer: 0.3 s for 150,000 tokens

    def json_schema(self, schema: Mapping[str, Any]) -> GrammarMatcher:
        """Compile a JSON schema. Raises Unconstrainable."""
        return self.lark(f"start: %json {json.dumps({**schema, 'x-guidance': JSON_STYLE})}")

    def lark(self, grammar: str) -> GrammarMatcher:
        """Compile a grammar in llguidance's Lark. Raises Unconstrainable."""
        try:
            import llguidance
        except ModuleNotFoundError as problem:
            raise Unconstrainable("the server lacks the package llguidance: pip install llguidance") from problem
        try:
            matcher = llguidance.LLMatcher(self._vocabulary(llguidance), grammar, log_level=0)
        except ValueError as problem:
            raise Unconstrainable(_line(str(problem))) from problem
        if matcher.is_error():
            raise Unconstrainable(_line(matcher.get_error()))
        return GrammarMatcher(matcher, self._tokenizer.vocab_size)

    def _vocabulary(self, llguidance: Any) -> Any:
        with self._lock:
            if self._compiled is None:
                wrapper = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer))
                ends = list(dict.fromkeys([*self._tokenizer.stop_ids, self._tokenizer.end_id]))
                self._compiled = llguidance.LLTokenizer(wrapper, eos_token=ends)
        return self._compiled


class _Vocabulary:
    """A tokenizer as llguidance reads it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.eos_token_id = tokenizer, tokenizer.end_id
        self.tokens = [tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special.values())

    def __call__(self, text: bytes) -> list[int]:
        """Encode text in the middle of a completion: no blank is put in front of it."""
        return self._tokenizer.continued(text.decode("utf-8", "replace"))


def _line(text: str) -> str:
    """Return llguidance's message without the positions in our grammar, which the client has never seen."""
    first, *more = _POSITION.sub("", text.strip()).splitlines() or [""]
    if first.startswith("oneOf constraints are not supported"):
        first = "oneOf is supported only where no value can match two of its schemas: use anyOf"
    reasons = [first, *(line for line in more if line.startswith("error: "))]  # that of a regular expression
    return escape(f"the schema can't be compiled: {' '.join(reasons)}", 300)
