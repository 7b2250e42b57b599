"""Three ways from text to ids, all with the same result: a table (bytes), tiktoken (8 times as fast as tokenizers on
one core), tokenizers.

tiktoken merges whichever neighbours make a known token; tokenizers only the pairs in its list. They agree on every text
when each token that tiktoken knows is what its own bytes become when tokenizers encodes them alone (tokens for which
that fails are kept from tiktoken), and all merges that make one token stand together in the list: inside a stretch that
will be one token, merging goes on as if it stood alone, and just before the end there is one way only to have two
pieces. That leaves the regex engines: Unicode versions differ, so texts with characters that they class differently go
to tokenizers.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, Final
from unicodedata import category, is_normalized

import numpy as np
from numpy.typing import NDArray

from stoker.contract.frozen import frozen
from stoker.contract.text import parse_json
from stoker.training.tokenizer import alphabet
from stoker.training.tokenizer.definition import Definition

Ids = NDArray[np.uint32]
Encoder = Callable[
    [str], Ids
]  # ordinary text, at most a few 100 KB: above that a run of blanks overflows tiktoken's regex stack
SpanEncoder = Callable[[str], tuple[Ids, Ids]]  # a text's ids, and the first and the last + 1 character of each
NFC: Final = "NFC"


@frozen
class FastPlan:
    """What tiktoken must be told, so that it gives what tokenizers gives."""

    unreachable: tuple[int, ...] = ()  # ids it must not know


def span_encoder(data: bytes) -> SpanEncoder:
    inner = _tokenizers(data)

    def encode(text: str) -> tuple[Ids, Ids]:
        encoding = inner.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32), np.array(encoding.offsets, dtype=np.uint32).reshape(-1, 2)

    return encode


def slow_encoder(data: bytes) -> Encoder:
    inner = _tokenizers(data)

    def encode(text: str) -> Ids:
        # Without places in the text: a fifth faster than `encode`, with the same ids.
        return np.array(inner.encode_batch_fast([text], add_special_tokens=False)[0].ids, dtype=np.uint32)

    return encode


def _tokenizers(data: bytes) -> Any:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would compete with our processes
    # Only the parts that encoding needs: the library compiles whatever stands in the others.
    needed = {**parse_json(data), **dict.fromkeys(("post_processor", "decoder", "truncation", "padding"))}
    if "merges" in needed["model"]:  # GPT-2's has no type, and the library would try one after another
        needed["model"]["type"] = needed["model"].get("type") or "BPE"
    _hide_special(needed)
    inner = import_module("tokenizers").Tokenizer.from_buffer(json.dumps(needed, ensure_ascii=False).encode())
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = True  # data is not trusted: <|im_end|> in a text is text
    return inner


def _hide_special(told: dict[str, Any]) -> None:
    """Some models would make a special token of text that is written like it, the library's setting or not: Unigram takes
    any token of its vocabulary. Such tokens get a name there that no text has.
    """
    model, vocabulary = told["model"], told["model"]["vocab"]
    merges = model.get("merges") or []
    made = {"".join(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges}
    unknown = model.get("unk_token")
    if isinstance(vocabulary, list) and isinstance(model.get("unk_id"), int):
        unknown = vocabulary[model["unk_id"]][0]
    any_token = (model.get("type") or "BPE") != "BPE" or model.get("ignore_merges")
    names = {one["content"] for one in told.get("added_tokens") or () if one["special"]} - {unknown}
    names = {name for name in names if any_token or name in made}
    if isinstance(vocabulary, list):
        names &= {token for token, _ in vocabulary}
        model["vocab"] = [[_hidden(token) if token in names else token, score] for token, score in vocabulary]
    else:
        names &= set(vocabulary)
        model["vocab"] = {_hidden(token) if token in names else token: at for token, at in vocabulary.items()}
    if not names:
        return
    # Those are no longer in the vocabulary, and the library would give them new ids, and later ones others.
    told["added_tokens"] = [one for one in told["added_tokens"] if one["content"] not in names]
    if merges:
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
        model["merges"] = [pair for pair in pairs if not names & {*pair, "".join(pair)}]


_NOBODY_WRITES = os.urandom(16).hex()


def _hidden(token: str) -> str:
    return f"{_NOBODY_WRITES} {token}"


def with_doubles(data: bytes, doubles: Mapping[str, str]) -> bytes:
    """The tokenizer with a second name for each of its special tokens, by which they are found in a text."""
    told = parse_json(data)
    added = told["added_tokens"]
    last = max((one["id"] for one in added), default=0)
    more = [
        {**one, "id": last + place, "content": doubles[one["content"]], "special": False, "normalized": False}
        for place, one in enumerate((one for one in added if one["special"]), 1)
    ]
    return json.dumps({**told, "added_tokens": [*added, *more]}, ensure_ascii=False).encode()


def table_encoder(told: Definition) -> Encoder:
    """A tokenizer of bytes: no merges."""
    table = np.array([told.vocabulary[character] for character in alphabet.CHARACTERS], dtype=np.uint32)

    def encode(text: str) -> Ids:
        found: Ids = table[np.frombuffer(text.encode(), dtype=np.uint8)]
        return found

    return encode


def plan_fast(told: Definition, data: bytes) -> FastPlan | str:
    """The plan, or why tiktoken can't do what this tokenizer does."""
    if not told.pattern or not told.decoding.every_byte or told.decoding.strips:
        return "its way of splitting text is known to tokenizers only"
    if told.normalizer not in (None, NFC):
        return f"its normalizer {told.normalizer} is known to tokenizers only"
    added = list(told.added)
    ordered = sorted(set(added))  # what begins with another stands right behind it, or behind more that do
    if not told.plain_added or any(two.startswith(one) for one, two in itertools.pairwise(ordered)):
        return "its added tokens depend on what stands around them"
    made: dict[str, tuple[int, int]] = {}  # token -> the first and the number of the merges that make it
    for place, (left, right) in enumerate(told.merges):
        first, count = made.get(left + right, (place, 0))
        made[left + right] = (first, count + 1)
        if place != first + count:
            return "merges that make the same token stand apart in its list"
    unreachable = []
    model = _tokenizers(data).model
    model_tokens = (
        token for token in told.vocabulary if len(token) > 1 and token not in told.special and token not in told.added
    )
    for token in model_tokens:
        if alphabet.read(token) is None:
            unreachable.append(told.vocabulary[token])
            continue
        pieces = model.tokenize(token)
        whole = len(pieces) == 1
        if token not in made and whole:
            return f"{token!r} is a token that no merge makes"  # taken whole, whatever the merges say
        if not whole:
            unreachable.append(told.vocabulary[token])
    if unreachable and told.whole_words_first:
        return "it takes words whole that its merges do not make"
    return FastPlan(tuple(unreachable))


def fast_encoder(told: Definition, data: bytes, plan: FastPlan) -> Encoder:
    tiktoken = import_module("tiktoken")
    assert told.pattern is not None
    hidden = set(plan.unreachable)
    tokens = list(alphabet.CHARACTERS)
    seen = set(tokens)
    for left, right in told.merges:
        if left + right not in seen and told.vocabulary.get(left + right) not in hidden:
            seen.add(left + right)
            tokens.append(left + right)
    ranks = {alphabet.read(token): rank for rank, token in enumerate(tokens)}
    extra = {token: len(ranks) + place for place, token in enumerate(told.added)}
    to_id = np.array([told.vocabulary[token] for token in tokens] + list(told.added.values()), dtype=np.uint32)
    # Without any special token tiktoken looks for the empty one at every byte, at half the speed: it gets one that is
    # never allowed.
    special = extra or {"<|never|>": len(to_id)}
    encoding = tiktoken.Encoding("stoker", pat_str=told.pattern, mergeable_ranks=ranks, special_tokens=special)
    allowed = set(extra)
    doubts: list[re.Pattern[str] | None] = []
    slow: list[Encoder] = []

    def doubtful(text: str) -> bool:
        if not doubts:  # a second of work that English text never asks for
            characters = doubtful_characters(told.pattern or "") + (unassigned() if told.normalizer else "")
            doubts.append(re.compile(f"[{characters}]") if characters else None)
        return doubts[0] is not None and doubts[0].search(text) is not None

    def encode(text: str) -> Ids:
        if not text.isascii() and (doubtful(text) or (told.normalizer and not is_normalized(NFC, text))):
            if not slow:
                slow.append(slow_encoder(data))
            return slow[0](text)
        found: Ids = to_id[encoding.encode_to_numpy(text, allowed_special=allowed, disallowed_special=())]
        return found

    return encode


_EVERY_CHARACTER = (
    *range(0x30000 + 0x2400),
    *range(0xE0000, 0xE0200),
)  # planes in use; the rest is private or unassigned, for everybody


@cache
def doubtful_characters(pattern: str) -> str:
    """Asks both engines, class by class, which characters of Unicode they put there."""
    tokenizers, tiktoken = import_module("tokenizers"), import_module("tiktoken")
    every = "".join(chr(code) for code in _EVERY_CHARACTER if not 0xD800 <= code < 0xE000)
    single = {bytes([byte]): byte for byte in range(256)}
    found: set[str] = set()
    for name in sorted(
        {
            one.lower() if one in ("\\S", "\\D", "\\W") else one
            for one in re.findall(r"\\[pP]\{\^?\w+\}|\\[sSdDwW]", pattern)
        }
    ):
        encoding = tiktoken.Encoding("class", pat_str=name, mergeable_ranks=single, special_tokens={})
        theirs = set(
            encoding.encode_to_numpy(every).astype(np.uint8).tobytes().decode()
        )  # what does not match is left out
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(name), "removed")
        ours = set(every).difference("".join(part for part, _ in split.pre_tokenize_str(every)))
        found |= theirs ^ ours
    if "(?i" in pattern:
        found |= {"\u017f", "\u212a"}  # ſ and K: letters that become s and k only in some engines
    return _class(sorted(map(ord, found)))


@cache
def unassigned() -> str:
    """Characters of which Python does not know whether they are in normal form; `tokenizers` may."""
    return _class([code for code in _EVERY_CHARACTER if category(chr(code)) == "Cn"])


def _class(codes: list[int]) -> str:
    """Code points as the inside of a character class: ranges."""
    ranges: list[list[int]] = []
    for code in codes:
        if ranges and code == ranges[-1][1] + 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)
