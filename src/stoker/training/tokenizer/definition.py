"""What a tokenizer.json says, checked. Byte-level BPE without a normalizer gives every byte back: that is the kind we
train. Any other kind that `tokenizers` knows can be loaded, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from stoker.contract.errors import EX_DATAERR, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.text import escape, parse_json
from stoker.training.tokenizer import alphabet

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # which of its special tokens ends a document, best first
MOST_IDS = 1 << 24  # a table of all ids is made: a larger id is an error in the file
KINDS = ("BPE", "Unigram", "WordLevel", "WordPiece")
SPACE = "\u2581"  # how SentencePiece writes a blank
UNNAMED = "without a type"  # `tokenizers` guesses what it is
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # how byte-fallback writes a byte
# what ByteLevel splits by where it is told to
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# GPT-4's way to split, upper and lower case spelled out: engines differ in what (?i:s) matches.
OURS = (
    r"'(?:[sdmtSDMT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGIT_BY_DIGIT = _GPT4.replace(r"\p{N}{1,3}", r"\p{N}")
# What GGUF calls these patterns. Of tokenizers that take a word whole if it is a token, and of the others.
GGUF_BYTE_LEVEL = "gpt2"  # any byte-level BPE
GGUF_SPLITTERS_WHOLE_WORDS = {OURS: "llama-bpe", _GPT4: "llama-bpe"}
GGUF_SPLITTERS = {GPT2: "gpt-2", OURS: "dbrx", _GPT4: "dbrx", _DIGIT_BY_DIGIT: "qwen2"}


@frozen
class Decoding:
    """How tokens become text again."""

    byte_level: bool = False  # a token is bytes in GPT-2's alphabet
    every_byte: bool = False  # each byte has a token
    space: str = ""  # stands for a blank
    byte_fallback: bool = False  # <0x0A> is one byte
    continues: str = ""  # WordPiece: what begins so continues a word, others begin with a blank
    word_end: str = ""  # a token that ends so has a blank behind it
    strips: bool = False  # a blank before the whole text is the tokenizer's own


@frozen
class Definition:
    kind: str  # of the model: BPE, Unigram …
    vocabulary: dict[str, int]  # the model's own tokens, as they are written there
    merges: tuple[tuple[str, str], ...]
    whole_words_first: bool  # a word that is a token is taken whole, whatever the merges say
    pattern: str | None  # splits text into words; "" not at all; None: in a way that only `tokenizers` knows
    special: dict[str, int]
    added: dict[str, int]  # found in ordinary text, though no special tokens: <think> and its like
    plain_added: bool  # these need no look at the characters around them
    end: str
    vocab_size: int
    normalizer: str | None  # its type; None: there is none
    decoding: Decoding
    before: tuple[int, ...] | None  # ids that its post-processor puts before a text; None: it has no say in that

    @property
    def is_exact(self) -> bool:
        """Any bytes come back as they were."""
        return self.decoding.every_byte and self.normalizer is None and not self.decoding.strips


def define(data: bytes, where: str, eos: str | None = None) -> Definition:
    """`eos`: what tokenizer_config.json calls so."""

    def refuse(text: str) -> Refusal:
        return Refusal(f"tokenizer {where}: {text}", EX_DATAERR)

    try:
        told = parse_json(data)
        model = told["model"]
        kind = model.get("type") or "BPE"
        if kind not in KINDS:
            raise refuse(f"its model is {escape(str(kind), 40)}; those that load are {', '.join(KINDS)}")
        vocabulary = _vocabulary(model["vocab"])
        merges = tuple(_pair(one) for one in model.get("merges") or ())
        added = told.get("added_tokens") or []
        special = {_text(one["content"]): one["id"] for one in added if one["special"]}
        ordinary = {_text(one["content"]): one["id"] for one in added if not one["special"]}
        size = 1 + max(map(_id, (*vocabulary.values(), *special.values(), *ordinary.values())), default=0)
        normalizer = told.get("normalizer")
        normalizes = None if normalizer is None else _text(normalizer.get("type") or UNNAMED)
        pattern = _pattern(told.get("pre_tokenizer") or {})
        decoding = _decoding(told, vocabulary)
        before = _before(told.get("post_processor"))
        if before is not None and not all(_id(number) < size for number in before):
            raise ValueError("its post-processor puts an id before texts that belongs to no token")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise refuse(
            f"tokenizer.json is not in the format of `tokenizers`: {type(problem).__name__} {problem}"
        ) from problem
    if model.get("dropout"):
        raise refuse("its model has dropout: the same text would not always be the same tokens")
    end = next((one for one in ENDS if one in special), eos)
    if not isinstance(end, str) or end not in special:
        raise refuse(
            f"no special token that ends a text ({', '.join(ENDS)}, or eos_token in tokenizer_config.json); found"
            f" {', '.join(special) or 'none'}"
        )
    plain = not any(
        one.get(flag) for one in added if not one["special"] for flag in ("lstrip", "rstrip", "single_word")
    )
    return Definition(
        kind=kind,
        vocabulary=vocabulary,
        merges=merges,
        whole_words_first=bool(model.get("ignore_merges")),
        pattern=pattern,
        special=special,
        added=ordinary,
        plain_added=plain,
        end=end,
        vocab_size=size,
        normalizer=normalizes,
        decoding=decoding,
        before=before,
    )


def _vocabulary(told: Any) -> dict[str, int]:
    """Unigram has a list of tokens and scores: a token's place is its id."""
    if isinstance(told, dict):
        return {_text(token): number for token, number in told.items()}
    return {_text(token): number for number, (token, _) in enumerate(told)}


def _parts(told: Any, inside: str) -> list[dict[str, Any]]:
    """Of a normalizer, pre-tokenizer, post-processor or decoder: itself, or those of a sequence."""
    if not told:
        return []
    if told.get("type") != "Sequence":
        return [told]
    return [part for one in told[inside] for part in _parts(one, inside)]


def _before(told: Any) -> tuple[int, ...] | None:
    for part in _parts(told, "processors"):
        if part.get("type") in ("BertProcessing", "RobertaProcessing"):
            return (part["cls"][1],)
        if part.get("type") == "TemplateProcessing":
            found: list[int] = []
            for piece in part["single"]:
                if "SpecialToken" not in piece:
                    break
                found += part["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
            return tuple(found)
    return None


def _decoding(told: dict[str, Any], vocabulary: dict[str, int]) -> Decoding:
    splitters = _parts(told.get("pre_tokenizer"), "pretokenizers")
    prefixed = any(part.get("add_prefix_space") for part in splitters if part.get("type") == "ByteLevel")
    if any(part.get("type") == "ByteLevel" for part in splitters):
        every_byte = all(character in vocabulary for character in alphabet.CHARACTERS)
        return Decoding(True, every_byte and not _marked_words(told["model"]), strips=prefixed)
    by_kind = {part.get("type"): part for part in (*splitters, *_parts(told.get("decoder"), "decoders"))}
    metaspace = by_kind.get("Metaspace", {})
    scheme = metaspace.get("prepend_scheme", "always" if metaspace.get("add_prefix_space", True) else "never")
    continues = by_kind.get("WordPiece", {}).get("prefix", told["model"].get("continuing_subword_prefix"))
    return Decoding(
        space=_text(metaspace.get("replacement", SPACE)),
        byte_fallback=bool(told["model"].get("byte_fallback")),
        continues=_text(continues or "") if told["model"].get("type") == "WordPiece" else "",
        word_end=_text(told["model"].get("end_of_word_suffix") or ""),
        strips="Strip" in by_kind or "WordPiece" in by_kind or (bool(metaspace) and scheme != "never"),
    )


def _marked_words(model: dict[str, Any]) -> bool:
    return bool(model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))


def _pair(merge: Any) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return _text(left), _text(right)


def _text(found: Any) -> str:
    if not isinstance(found, str):
        raise ValueError(f"{str(found)[:40]!r} is not a text")
    return found


def _id(found: Any) -> int:
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < MOST_IDS:
        raise ValueError(f"the token id {str(found)[:40]}: ids go from 0 to {MOST_IDS - 1}")
    return found


def _pattern(splitter: dict[str, Any]) -> str | None:
    parts = splitter["pretokenizers"] if splitter.get("type") == "Sequence" else [splitter]
    if not parts or parts[-1].get("type") != "ByteLevel":
        return None
    if len(parts) == 1:
        return GPT2 if parts[0].get("use_regex", True) else ""
    first = parts[0]
    usual = (
        first.get("type") == "Split"
        and first.get("behavior") == "Isolated"
        and not first.get("invert")
        and "Regex" in first.get("pattern", {})
    )
    return (
        str(first["pattern"]["Regex"]) if len(parts) == 2 and usual and not parts[-1].get("use_regex", True) else None
    )


def any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Finds the longest of the names. Gemma has 6,000: one after another they would take 0.1 ms at each `<`."""
    tree: dict[str, Any] = {}
    for name in filter(None, names):
        node = tree
        for character in name:
            node = node.setdefault(character, {})
        node[""] = {}

    def pattern(node: dict[str, Any]) -> str:
        branches = [re.escape(character) + pattern(below) for character, below in node.items() if character]
        if len(branches) == 1 and "" not in node:
            return branches[0]
        return f"(?:{'|'.join(branches)}){'?' if '' in node else ''}" if branches else ""

    try:
        return re.compile(pattern(tree) or "(?!)")
    except RecursionError:  # of a name with a thousand characters
        return re.compile("|".join(map(re.escape, sorted(filter(None, names), key=len, reverse=True))))


def token_bytes(told: Definition) -> list[bytes]:
    """Id -> its bytes; ids nobody uses are empty."""
    table = [b""] * told.vocab_size
    for token, number in told.vocabulary.items():
        table[number] = _token_bytes(token, told.decoding)
    blank = " " if told.decoding.continues else ""
    for token, number in (*told.special.items(), *told.added.items()):
        table[number] = (blank + token).encode("utf-8", "replace")
    return table


def _token_bytes(token: str, how: Decoding) -> bytes:
    if how.byte_level:
        return alphabet.read(token) or token.encode("utf-8", "replace")
    if how.byte_fallback and (byte := _BYTE.fullmatch(token)):
        return bytes([int(byte[1], 16)])
    text = token.replace(how.space, " ") if how.space else token
    if how.continues:
        text = text.removeprefix(how.continues) if text.startswith(how.continues) else f" {text}"
    if how.word_end and text.endswith(how.word_end):
        text = f"{text.removesuffix(how.word_end)} "
    return text.encode("utf-8", "replace")
