"""What a tokenizer.json says, checked: byte-level BPE that gives every byte back."""

from __future__ import annotations

from typing import Any

from stoker.contract.names import EX_DATAERR, Refusal
from stoker.contract.shape import shape
from stoker.contract.untrusted import parse_json
from stoker.training.tokenizer import alphabet

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # which of its special tokens ends a document, best first
MOST_IDS = 1 << 24  # a table of all ids is made
KEEPS_TEXT = ("NFC", "NFD", "NFKC", "NFKD")  # normalizers that are left out: text comes back as it was
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
_QWEN = _GPT4.replace(r"\p{N}{1,3}", r"\p{N}")
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+SHORT|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*SHORT|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r""" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
# Patterns that take about the same time for every text. "": no pattern.
KNOWN_PATTERNS = frozenset(
    (
        *("", GPT2, OURS, _GPT4, _QWEN),  # _GPT4 is Llama 3's, too
        _QWEN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"),  # Qwen 3.5
        _CASED.replace("SHORT", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"),  # GPT-4o, Llama 4
        _CASED.replace("SHORT", "").replace(r"\p{N}{1,3}", r"\p{N}"),  # Mistral's tekken
        *(_DEEPSEEK, r"\p{N}{1,3}", r"\p{N}", "[一-龥\u3040-ゟ゠-ヿ]+"),
    )
)
MOST_PARTS = 4  # of a known way to split: DeepSeek's has four
LONGEST_KNOWN, MOST_ADDED = 1024, 20_000  # characters of a token, added tokens; published ones have 128 and 1,300
LONGEST_TOKEN = 1 << 16  # characters: a text is cut into parts of so many bytes before it is encoded


@shape
class Definition:
    vocabulary: dict[str, int]  # the model's own tokens, as written in the byte-level alphabet
    merges: tuple[tuple[str, str], ...]
    whole_words_first: bool  # a word that is a token is taken whole, whatever the merges say
    pattern: str | None  # splits text into words; "" not at all; None: in a way that only `tokenizers` knows
    special: dict[str, int]
    added: dict[str, int]  # found in ordinary text, though no special tokens: <think> and its like
    plain_added: bool  # these need no look at the characters around them
    end: str
    vocab_size: int
    normalizer: str | None
    is_known: bool  # it takes about the same time for every text


def define(data: bytes, where: str, eos: str | None = None) -> Definition:
    """`eos`: what tokenizer_config.json calls so."""

    def refuse(text: str) -> Refusal:
        return Refusal(f"tokenizer {where}: {text}", EX_DATAERR)

    try:
        told = parse_json(data)
        model = told["model"]
        kind = model.get("type") or "BPE"
        if kind != "BPE" or not isinstance(model["vocab"], dict):
            raise refuse(f"its model is {kind}, not byte-level BPE: the bytes of a text would not come back")
        vocabulary: dict[str, int] = model["vocab"]
        merges = tuple(_pair(one) for one in model["merges"])
        added = told.get("added_tokens") or []
        special = {_text(one["content"]): one["id"] for one in added if one["special"]}
        ordinary = {_text(one["content"]): one["id"] for one in added if not one["special"]}
        size = 1 + max(map(_id, (*vocabulary.values(), *special.values(), *ordinary.values())), default=0)
        normalizer = (told.get("normalizer") or {}).get("type")
        splitter = told.get("pre_tokenizer") or {}
        prefix_space, pattern = _any(splitter, "add_prefix_space"), _pattern(splitter)
        known_splitter = _is_known(splitter)
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise refuse(
            f"tokenizer.json is not in the format of `tokenizers`: {type(problem).__name__} {problem}"
        ) from problem
    longest = max(map(len, (*vocabulary, *special, *ordinary)), default=0)
    if longest > LONGEST_TOKEN:
        raise refuse(f"a token has {longest:,} characters; {LONGEST_TOKEN:,} is the most that could be used")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise refuse(f"its model has {name}: the same text would not always come back")
    missing = [byte for byte, character in enumerate(alphabet.CHARACTERS) if character not in vocabulary]
    if missing:
        raise refuse(
            f"{len(missing)} of the 256 bytes have no token (the first: 0x{missing[0]:02x}): it is no byte-level BPE,"
            " text would be lost"
        )
    if normalizer not in (None, *KEEPS_TEXT):
        raise refuse(f"its normalizer {normalizer} changes the text: bytes would not come back")
    if prefix_space:
        raise refuse("it puts a space before each text (add_prefix_space): bytes would not come back")
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
        vocabulary=vocabulary,
        merges=merges,
        whole_words_first=bool(model.get("ignore_merges")),
        pattern=pattern,
        special=special,
        added=ordinary,
        plain_added=plain,
        end=end,
        vocab_size=size,
        normalizer=normalizer,
        is_known=known_splitter and longest <= LONGEST_KNOWN and len(added) <= MOST_ADDED,
    )


def _pair(merge: Any) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return _text(left), _text(right)


def _text(found: Any) -> str:
    if not isinstance(found, str):
        raise ValueError(f"{str(found)[:40]!r} stands where a text should")
    return found


def _id(found: Any) -> int:
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < MOST_IDS:
        raise ValueError(f"the token id {str(found)[:40]}: ids go from 0 to {MOST_IDS - 1}")
    return found


def _any(splitter: dict[str, Any], flag: str) -> bool:
    return bool(splitter.get(flag)) or any(_any(one, flag) for one in splitter.get("pretokenizers", ()))


def _is_known(splitter: dict[str, Any]) -> bool:
    """Each ByteLevel may double a text: a row of them takes any amount of memory."""
    parts = splitter["pretokenizers"] if splitter.get("type") == "Sequence" else [splitter]
    kinds = [part.get("type") for part in parts]
    patterns = [part["pattern"].get("Regex") for part in parts if part.get("type") == "Split"]
    return (
        len(parts) <= MOST_PARTS
        and kinds.count("ByteLevel") <= 1
        and all(kind in ("ByteLevel", "Digits", "Split") for kind in kinds)
        and all(pattern in KNOWN_PATTERNS for pattern in patterns)
    )


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


def token_bytes(told: Definition) -> list[bytes]:
    """Id -> its bytes; ids nobody uses are empty."""
    table = [b""] * told.vocab_size
    for token, number in told.vocabulary.items():
        table[number] = alphabet.read(token) or token.encode()
    for token, number in (*told.special.items(), *told.added.items()):
        table[number] = token.encode()
    return table
