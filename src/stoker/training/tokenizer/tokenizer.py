"""A tokenizer: text or any bytes to ids and back. From a folder, from the hub, or one token per byte."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any, TypeVar

import numpy as np

from stoker.contract.errors import EX_DATAERR, EX_NOINPUT, EX_UNAVAILABLE, Refusal, parsing
from stoker.contract.safe_io import read_bytes, read_json, write_atomic
from stoker.contract.text import parse_json
from stoker.training.tokenizer import alphabet
from stoker.training.tokenizer.definition import ENDS, SPECIAL, Definition, define, token_bytes
from stoker.training.tokenizer.encoders import (
    Encoder,
    FastPlan,
    Ids,
    SpanEncoder,
    fast_encoder,
    plan_fast,
    slow_encoder,
    span_encoder,
    table_encoder,
    with_doubles,
)
from stoker.training.tokenizer.place import BYTES, FILES, folder_here
from stoker.training.tokenizer.template import CHATML, DEFAULT, JINJA, NAMES, OLD_JSON, ChatTemplate, templates_of

SEGMENT = (
    1 << 16
)  # bytes encoded at once: 20 MB/s; with 1 MB tiktoken has 14, and a run of blanks overflows its regex stack
LONG_SEGMENT = 1 << 20
SPECIAL_MAP, GENERATION = "special_tokens_map.json", "generation_config.json"
BESIDE = (JINJA, OLD_JSON, SPECIAL_MAP, GENERATION)  # in a tokenizer's folder, besides FILES
STOP = "<|im_end|>"
T = TypeVar("T")
_PLAIN = [re.compile(rb'"%s":\s*null' % key) for key in (b"normalizer", b"post_processor")]  # asked without parsing
_NOT_UTF8 = re.compile("[\udc80-\udcff]+")


class Tokenizer:
    """Parsed and loaded when first used: the digest alone is what a second `stoker prepare` asks for."""

    def __init__(
        self, data: bytes, config: dict[str, Any], where: str, files: Mapping[str, bytes] | None = None
    ) -> None:
        """`files`: what else lies in its folder, of BESIDE."""
        self.data = data
        self.config = config
        self.where = where
        self.files = dict(files or {})
        self.renders_in_child = False  # set it before the template is used: see template.py

    @cached_property
    def told(self) -> Definition:
        with parsing(f"tokenizer {self.where}"):
            return define(self.data, self.where, self._eos)

    @property
    def _eos(self) -> str | None:
        return self.names.get("eos_token")

    @cached_property
    def names(self) -> dict[str, str]:
        """What it calls bos_token, eos_token and so on."""
        told = {**self._json(SPECIAL_MAP), **self.config}
        texts = {
            name: told[name].get("content") if isinstance(told.get(name), dict) else told.get(name) for name in NAMES
        }
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    def _json(self, name: str) -> dict[str, Any]:
        """Of one of its files; empty where there is none."""
        try:
            told = parse_json(self.files[name]) if name in self.files else {}
        except ValueError as problem:
            raise Refusal(f"tokenizer {self.where}: {name} is not JSON: {problem}", EX_DATAERR) from problem
        return told if isinstance(told, dict) else {}

    @property
    def begin(self) -> tuple[int, ...]:
        """Ids that stand before each text, as its post-processor says, or add_bos_token in tokenizer_config.json."""
        if self.told.before is not None:
            return self.told.before
        bos = self.told.special.get(self.names.get("bos_token", ""))
        return (bos,) if bos is not None and self.config.get("add_bos_token") is True else ()

    @property
    def start(self) -> list[int]:
        """Where a text begins that a model continues: as in training, where another ended if nothing else says it."""
        return list(self.begin) or [self.end_id]

    @cached_property
    def template(self) -> ChatTemplate | None:
        """Its own. None: ChatML (chat.py)."""
        sources = templates_of(self.config, self.files, self.where)
        if not sources or sources.get(DEFAULT) == CHATML:
            return None
        return ChatTemplate(
            sources, self.names, self.special, self._span_encoder, self.where, in_child=self.renders_in_child
        )

    def besides_digest(self, chat: bool) -> dict[str, Any]:
        """What else decides which ids a text or a conversation becomes. Empty for tokenizers that we train."""
        found: dict[str, Any] = {}
        sources = templates_of(self.config, self.files, self.where) if chat else {}
        if sources and sources.get(DEFAULT) != CHATML:
            found["template"] = [sources, self.names]
        if self.config.get("add_bos_token") or not all(pattern.search(self.data) for pattern in _PLAIN):
            found |= {"begin": self.begin, "normalizer": self.told.normalizer}
        return {key: value for key, value in found.items() if value}

    def _span_encoder(self, doubles: Mapping[str, str]) -> SpanEncoder:
        """Return the encoder of this tokenizer with a second name for each of its special tokens."""
        encode = self.guard_library(lambda: span_encoder(with_doubles(self.data, doubles)))
        return lambda text: self.guard_library(lambda: encode(text))

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """At which a chat's answer ends: the template's own, those of generation_config.json, and the end of a text."""
        if self.template is None:
            chatml = self.special.get(STOP)
            return tuple(dict.fromkeys(([] if chatml is None else [chatml]) + [self.end_id]))
        listed = self._json(GENERATION).get("eos_token_id")
        ids = [self.template.end_id, *(listed if isinstance(listed, list) else [listed])]
        ids += [self.special.get(self.names.get("eos_token", "")), self.end_id]
        return tuple(dict.fromkeys(one for one in ids if type(one) is int and 0 <= one < self.vocab_size))

    @cached_property
    def digest(self) -> str:
        """Of the bytes that define it; eos_token decides in some how a document ends."""
        return self._digest(self.config.get("eos_token"))

    def _digest(self, eos: Any) -> str:
        return hashlib.sha256(self.data + b"\0" + json.dumps(eos).encode()).hexdigest()

    def has_digest(self, digest: object) -> bool:
        """Also that of a tokenizer without an eos_token: the one that `save` adds changes nothing."""
        return digest == self.digest or (
            digest == self._digest(None) and any(name in self.special for name in ENDS) and self.told.end == self._eos
        )

    @property
    def vocab_size(self) -> int:
        return self.told.vocab_size

    @property
    def special(self) -> dict[str, int]:
        return self.told.special

    @property
    def end_id(self) -> int:
        return self.told.special[self.told.end]

    @cached_property
    def plan(self) -> FastPlan | str:
        return self.guard_library(lambda: plan_fast(self.told, self.data))

    @cached_property
    def encoder(self) -> Encoder:
        if self.is_bytes:
            return table_encoder(self.told)
        return self.encoder_by(None if isinstance(self.plan, str) else self.plan)

    def use(self, plan: FastPlan | None) -> None:
        """How to encode: tiktoken by a plan that was probed elsewhere, or tokenizers. The ids are the same."""
        if not self.is_bytes:
            self.__dict__["encoder"] = self.encoder_by(plan)

    def encoder_by(self, plan: FastPlan | None) -> Encoder:
        return self.guard_library(
            lambda: slow_encoder(self.data) if plan is None else fast_encoder(self.told, self.data, plan)
        )

    def guard_library(self, make: Callable[[], T]) -> T:
        """Call tokenizers or tiktoken. Raises Refusal for whatever they raise, a panic of their Rust code included."""
        try:
            return make()
        except (ImportError, Refusal):
            raise
        except BaseException as problem:
            if (
                not isinstance(problem, Exception) and type(problem).__name__ != "PanicException"
            ):  # a panic of Rust's, which is no Exception
                raise
            raise Refusal(
                f"tokenizer {self.where}: {FILES[0]} can't be used: {type(problem).__name__}: {problem}", EX_DATAERR
            ) from problem

    @property
    def is_bytes(self) -> bool:
        told = self.told
        return told.kind == "BPE" and told.is_exact and told.pattern == "" and not told.merges and not told.added

    @cached_property
    def _bytes(self) -> list[bytes]:
        return token_bytes(self.told)

    @cached_property
    def lengths(self) -> Ids:
        """Bytes per id."""
        return np.array([len(one) for one in self._bytes], dtype=np.uint32)

    def encode(self, text: str) -> list[int]:
        return self.encode_bytes(text.encode("utf-8", "surrogatepass"))

    def encode_bytes(self, data: bytes) -> list[int]:
        """Bytes that are no UTF-8 become one token each. Special tokens in ordinary text are text."""
        parts = [self.array(segment) for segment in self.segments(data)]
        return [] if not parts else list(map(int, np.concatenate(parts)))

    def continued(self, text: str) -> list[int]:
        """Text that follows other text: where its beginning would get a blank, it gets none."""
        if not self.told.decoding.strips:
            return self.encode(text)
        newline, whole = self.encode("\n"), self.encode(f"\n{text}")
        return whole[len(newline) :] if whole[: len(newline)] == newline else self.encode(text)

    def segments(self, data: bytes) -> Iterable[bytes]:
        """A tokenizer that puts a blank before a text would put one at each cut: there are few."""
        return segments(data, SEGMENT if self.told.decoding.byte_level else LONG_SEGMENT)

    def array(self, data: bytes) -> Ids:
        """One segment; a long text is cut into `segments` first."""
        text = data.decode("utf-8", "surrogateescape")
        found, place = [], 0
        if not text.isascii():
            for match in _NOT_UTF8.finditer(text):
                found += [
                    self._encode(text[place : match.start()]),
                    self._single(match[0].encode("utf-8", "surrogateescape")),
                ]
                place = match.end()
        ids = self._encode(text) if not found else np.concatenate([*found, self._encode(text[place:])])
        if len(ids) and int(ids.max()) >= self.vocab_size:
            raise Refusal(
                f"tokenizer {self.where}: it gives the id {ids.max()}, which is not in {FILES[0]}", EX_DATAERR
            )
        # A regex that matches not every character.
        if self.told.is_exact and int(self.lengths[ids].sum()) != len(data):
            raise Refusal(
                f"tokenizer {self.where}: its pattern leaves out parts of a text that begins {data[:40]!r}: bytes would"
                " not come back",
                EX_DATAERR,
            )
        return ids

    def _encode(self, text: str) -> Ids:
        return self.guard_library(
            lambda: self.encoder(text)
        )  # a pattern that backtracks without end makes the library panic only here

    def _single(self, data: bytes) -> Ids:
        """Bytes that are no text: a token each, or else what stands for such bytes everywhere."""
        how = self.told.decoding
        written = alphabet.CHARACTERS if how.byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
        ids = [self.told.vocabulary.get(written[byte]) for byte in data]
        if (how.every_byte or how.byte_fallback) and None not in ids:
            return np.array(ids, dtype=np.uint32)
        return self._encode("\ufffd")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Some kinds write a blank before a whole text; it stays."""
        return b"".join([self._bytes[number] for number in ids])

    def decode(self, ids: Sequence[int]) -> str:
        text = self.decode_bytes(ids).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.told.decoding.strips else text

    def save(self, folder: str) -> None:
        """A folder that `transformers` opens."""
        os.makedirs(folder, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.names.get("eos_token", self.told.end),
            "clean_up_tokenization_spaces": False,
            **self.config,
        }
        for name, data in zip(
            FILES,
            (self.data, (json.dumps(config, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")),
            strict=True,
        ):
            write_atomic(os.path.join(folder, name), data)
        for name, data in self.files.items():
            if name != GENERATION:  # of a model, not of its tokenizer
                write_atomic(os.path.join(folder, name), data)


def load(path: str) -> Tokenizer:
    """A folder with tokenizer.json, a hub id, or `bytes`."""
    if path == BYTES:
        return bytes_tokenizer()
    return _read(folder_here(path) or _fetch(path), path)


def differs(known: Tokenizer, used: Tokenizer) -> str:
    """Why weights that learned with `known` would not understand `used`, which may have more tokens; or empty."""
    if known.digest == used.digest:
        return ""
    for token, number in known.told.vocabulary.items():
        found = used.told.vocabulary.get(token)
        if found != number:
            return f"{token!r} is token {number} there and {'none' if found is None else f'token {found}'} here"
    return ""


def _read(folder: str, where: str) -> Tokenizer:
    try:
        data = read_bytes(os.path.join(folder, FILES[0]), inside=True)
    except OSError as problem:
        raise Refusal(f"tokenizer {where}: {FILES[0]} can't be read: {problem.strerror}", EX_NOINPUT) from problem
    config: Any = {}
    beside = os.path.join(folder, FILES[1])
    if os.path.exists(beside):
        try:
            config = read_json(beside, inside=True)
        except OSError as problem:
            raise Refusal(f"{beside} can't be read: {problem.strerror}", EX_NOINPUT) from problem
        except ValueError as problem:
            raise Refusal(f"{beside} is not JSON: {problem}", EX_DATAERR) from problem
    if not isinstance(config, dict):
        raise Refusal(f"{beside} holds a {type(config).__name__}, not keys and values", EX_DATAERR)
    files = {name: os.path.join(folder, name) for name in BESIDE}
    try:
        more = {name: read_bytes(path, inside=True) for name, path in files.items() if os.path.isfile(path)}
    except OSError as problem:
        raise Refusal(
            f"tokenizer {where}: {problem.filename} can't be read: {problem.strerror}", EX_NOINPUT
        ) from problem
    return Tokenizer(data, config, where, more)


def _fetch(name: str) -> str:
    hub = import_module("huggingface_hub")
    try:
        path = str(hub.hf_hub_download(name, FILES[0]))
        for other in (*FILES[1:], *BESIDE):
            try:
                hub.hf_hub_download(name, other)
            except hub.errors.EntryNotFoundError:
                continue  # it has none: eos_token is then one of the usual names
    except (
        OSError,
        ValueError,
        hub.errors.HfHubHTTPError,
        hub.errors.LocalEntryNotFoundError,
        ConnectionError,
        RuntimeError,
    ) as problem:
        first = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        raise Refusal(
            f"tokenizer {name}: no such folder here, and it can't be fetched from the hub: {first[:200]}",
            EX_UNAVAILABLE,
        ) from problem
    return os.path.dirname(path)


def bytes_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are the bytes themselves, then the special tokens."""
    special = [
        {
            "id": 256 + place,
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for place, name in enumerate(SPECIAL)
    ]
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {character: byte for byte, character in enumerate(alphabet.CHARACTERS)},
        "merges": [],
    }
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": plain,
        "post_processor": None,
        "decoder": plain,
        "model": model,
    }
    return Tokenizer(json.dumps(whole, ensure_ascii=False).encode(), {}, BYTES)


def segments(data: bytes, most: int = SEGMENT) -> Iterable[bytes]:
    """Cut at line ends where no blank follows, as patterns of GPT-4's kind do; else before a blank, or anywhere."""
    place = 0
    while len(data) - place > most:
        limit = place + most
        cut = _cut(data, place, limit)
        yield data[place:cut]
        place = cut
    if place < len(data):
        yield data[place:]


_LINE = re.compile(rb"\n(?=\S)")


def _cut(data: bytes, place: int, limit: int) -> int:
    for back in (4096, SEGMENT - 1):
        ends = [match.end() for match in _LINE.finditer(data, limit - back, limit)]
        if ends:
            return ends[-1]
    blank = data.rfind(b" ", place + 1, limit)
    if blank > 0:
        return blank
    least = limit - 4
    while limit > least and data[limit] & 0xC0 == 0x80:  # inside a character
        limit -= 1
    return limit
