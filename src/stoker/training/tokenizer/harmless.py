"""Whether a tokenizer.json is of a form that needs about the same time and memory for every text. Only such a tokenizer
encodes in this process; every other one encodes in a process with limits (confined.py).

The form is byte-level BPE that splits by published patterns. The whole file must match, key by key and type by type:
a key, a type or a size that is not listed here makes it another form.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

Fits = Callable[[Any], bool]
LONGEST_KNOWN = 1024  # characters of a token; published ones have 128
LONGEST_ADDED, MOST_ADDED = 256, 20_000  # characters of an added token, and how many; published: 40 and 6,400
# Characters of all added tokens together, and of the whole vocabulary: loading takes 0.5 s and 3 s of CPU time at most.
# 6,000 reserved tokens of 12 characters, and 250,000 tokens of 8, are far below.
MOST_IN_ADDED, MOST_IN_VOCABULARY = 1 << 17, 1 << 23
MOST_MERGES = 1 << 20  # published ones have 450,000


def is_harmless(definition: Any, patterns: Collection[str], most_parts: int) -> bool:
    """`patterns`: those to split by that take about the same time for every text; `most_parts`: of a way to split."""
    form = {
        "version": _text,
        "added_tokens": lambda value: value is None or (isinstance(value, list) and are_few(value)),
        "normalizer": _is_plain_normalizer,
        "pre_tokenizer": lambda value: _is_published_splitter(value, patterns, most_parts),
        "model": _is_plain_bpe,
        **dict.fromkeys(("post_processor", "decoder", "truncation", "padding"), _anything),  # these are not loaded
    }
    return _object(form, needed=("pre_tokenizer", "model"))(definition)


def are_few(added: list[Any]) -> bool:
    """Added tokens that a text can be searched for within bounds."""
    return (
        len(added) <= MOST_ADDED
        and all(map(_added_token, added))
        and sum(len(token["content"]) for token in added) <= MOST_IN_ADDED
        and all(len(token["content"]) <= LONGEST_ADDED for token in added)
    )


def _anything(value: Any) -> bool:
    return True


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _one_of(*values: Any) -> Fits:
    return lambda value: any(type(value) is type(known) and value == known for known in values)


def _object(form: Mapping[str, Fits], needed: Collection[str] = ("type",)) -> Fits:
    """With no other keys than these, and at least the needed ones."""

    def fits(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and all(key in value for key in needed)
            and all(key in form and form[key](item) for key, item in value.items())
        )

    return fits


_added_token = _object(
    {
        "id": lambda value: type(value) is int,
        "content": _text,
        **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), _flag),
    },
    needed=("id", "content", "special"),
)
_nfc = _object({"type": _one_of("NFC")})
_byte_level = _object(
    {"type": _one_of("ByteLevel"), **dict.fromkeys(("add_prefix_space", "trim_offsets", "use_regex"), _flag)}
)
_digits = _object({"type": _one_of("Digits"), "individual_digits": _flag})


def _is_plain_normalizer(value: Any) -> bool:
    none = _object({"type": _one_of("Sequence"), "normalizers": _one_of([])}, needed=("type", "normalizers"))
    return value is None or _nfc(value) or none(value)


def _is_published_splitter(value: Any, patterns: Collection[str], most_parts: int) -> bool:
    """One ByteLevel, and that the last: each may double a text."""
    regex = _object({"Regex": lambda pattern: _text(pattern) and pattern in patterns}, needed=("Regex",))
    split = _object(
        {"type": _one_of("Split"), "pattern": regex, "behavior": _one_of("Isolated", "Removed"), "invert": _flag},
        needed=("type", "pattern", "behavior"),
    )
    several = _object(
        {"type": _one_of("Sequence"), "pretokenizers": lambda parts: isinstance(parts, list) and bool(parts)},
        needed=("type", "pretokenizers"),
    )
    *first, last = value["pretokenizers"] if several(value) else [value]
    return len(first) < most_parts and _byte_level(last) and all(split(part) or _digits(part) for part in first)


def _is_plain_bpe(value: Any) -> bool:
    """GPT-2's file has no type here; it is loaded as BPE, because it has merges (encoders.py)."""
    form = {
        "type": _one_of("BPE"),
        "dropout": _one_of(None),
        "unk_token": lambda token: token is None or _text(token),
        **dict.fromkeys(("continuing_subword_prefix", "end_of_word_suffix"), _one_of(None, "")),
        "byte_fallback": _one_of(False),
        **dict.fromkeys(("fuse_unk", "ignore_merges"), _flag),
        "vocab": lambda vocabulary: isinstance(vocabulary, dict) and _is_small(vocabulary),
        "merges": lambda merges: isinstance(merges, list) and len(merges) <= MOST_MERGES,
    }
    return _object(form, needed=("vocab", "merges"))(value)


def _is_small(vocabulary: dict[str, Any]) -> bool:
    lengths = [len(token) for token in vocabulary]
    return max(lengths, default=0) <= LONGEST_KNOWN and sum(lengths) <= MOST_IN_VOCABULARY
