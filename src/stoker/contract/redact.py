"""No secret in what Stoker writes or sends.

A secret is known in three ways: by the name beside it (secretnames), by its shape, or because this
process was given it: each value that is hidden in the environment or in the arguments is hidden wherever it turns up
later, whatever stands around it.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from stoker.contract.escapes import readings
from stoker.contract.quantities import counted
from stoker.contract.secretnames import NO, SURE, rate
from stoker.contract.secretshapes import headers, private_keys, tokens, urls
from stoker.contract.secretvalues import (
    HIDDEN,
    commands,
    elements,
    is_flag,
    is_secret_member,
    is_secret_second,
    named,
    pairs,
    plain,
    secret_value,
    word_spans,
)
from stoker.contract.valuetext import Span, quoted

__all__ = ["HIDDEN", "arguments", "command", "data", "environment", "learn", "text", "whole"]

LONGEST = 8192  # of one value: a record is no place for more
_SHORTEST_KNOWN = 8  # shorter values turn up by chance
_SHORTEST_NUMBER = 12  # dates and times have up to 10 digits
_SHORTEST_LINE = 16
_DEPTH = 64

_known: list[str] | None = None  # values to hide wherever they turn up, longest first


def text(value: str) -> str:
    """Without its secrets, and cut where it is long: for one value of many."""
    shown = whole(value)
    return shown if len(shown) <= LONGEST else shown[:LONGEST] + f"... ({counted(len(shown), 'character')})"


def whole(value: str) -> str:
    """The same of a text of any length."""
    if len(value) < 4:
        return value
    for known in _known if _known is not None else _own():
        if known in value:
            value = value.replace(known, HIDDEN)
    return _without(value, spans(value))


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: _value(name, value) for name, value in sorted(variables.items())}


def arguments(argv: Iterable[str]) -> list[str]:
    """A command line: the value after a flag, or in NAME=VALUE, goes where the name stands for a secret."""
    words = list(argv)
    return [text(_without(word, found)) for word, found in zip(words, _argument_spans(words), strict=True)]


def command(line: str) -> str:
    """A command line as one string, as `ps` shows it."""
    return " ".join(arguments(line.split(" ")))


def data(value: Any, keep: frozenset[str] = frozenset(), depth: int = _DEPTH) -> Any:
    """The same for what becomes JSON: names and values. `keep`: keys whose values stay as they are."""
    if isinstance(value, str):
        return whole(value)
    if isinstance(value, Mapping):
        names = _names(value)
        return {
            _key(key): item if key in keep else _entry(names.get(key, str(key)), item, keep, depth)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        if depth and len(value) > 1 and all(isinstance(item, str) for item in value):
            return _several(list(value))
        return [data(item, keep, depth - 1) for item in value] if depth else HIDDEN
    return value


def _key(key: Any) -> Any:
    return whole(key) if isinstance(key, str) else key


def _several(texts: list[str]) -> list[str]:
    """Lines of a log, words of a command, a name and its value: what one begins, another may hold."""
    found: list[list[Span]] = [[] for _ in texts]
    starts = _starts(texts)
    _share(spans("\n".join(texts)), texts, starts, found)
    if any(text.startswith("-") for text in texts):
        _share(word_spans(list(zip(texts, starts, strict=True))), texts, starts, found)
    if len(texts) == 2 and is_secret_second(*texts):
        found[1].append((0, len(texts[1])))
    return [whole(_without(text, merged(hidden))) for text, hidden in zip(texts, found, strict=True)]


def learn(variables: Mapping[str, str], argv: Iterable[str] = ()) -> None:
    """Secrets among these are hidden from now on wherever they turn up."""
    global _known
    before = _known if _known is not None else _own()
    found = set[str]()
    for name, value in variables.items():
        found.update(value[begin:end] for begin, end in _value_spans(name, value))
    words = list(argv)
    for word, hidden in zip(words, _argument_spans(words), strict=True):
        found.update(word[begin:end] for begin, end in hidden or spans(word))
    # Forms of what is new alone: a form of a form has twice its backslashes, and a run's agent learns at every attempt.
    forms = {form for value in found if _is_telling(value) for form in _forms(value)}
    _known = sorted(forms.union(before), key=len, reverse=True)


def _own() -> list[str]:
    """Learned at the first use: what this process was started with."""
    global _known
    _known = []
    learn(os.environ, sys.argv)
    return _known


def _is_telling(value: str) -> bool:
    """Long enough not to turn up by chance; no path to a file that holds the secret."""
    if plain(value) or len(value) < (_SHORTEST_NUMBER if value.isdigit() else _SHORTEST_KNOWN) or len(set(value)) < 4:
        return False
    return not (value.startswith(("/", "~", "./")) and os.path.exists(os.path.expanduser(value)))


def _forms(value: str) -> set[str]:
    """As it is, as Python and JSON quote it, as a URL has it in its three ways, as HTML has it, and each of its lines."""
    raw = value.encode("utf-8", "surrogateescape")
    in_url = {_in_url(raw, safe, form) for safe in (b"-_.~", b"-_.~/") for form in ("%{:02X}", "%{:02x}")}
    in_url |= {form.replace("%20", "+") for form in in_url}
    html = value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    html = html.replace('"', "&quot;").replace("'", "&#x27;")
    lines = value.splitlines() if "\n" in value else []
    long = (line for line in lines if len(line) >= _SHORTEST_LINE and not line.startswith("-----"))
    as_json = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    in_ascii = "".join(sign if sign.isascii() else _escape(sign) for sign in as_json)
    in_shell = value.replace("'", "'\"'\"'")
    as_python = {repr(value)[1:-1], ascii(value)[1:-1], repr(raw)[2:-1]}
    in_html = {html, html.replace("&#x27;", "&#39;")}
    return {value, *as_python, as_json, in_ascii, *in_url, *in_html, in_shell, *long}


def _in_url(raw: bytes, safe: bytes, form: str) -> str:
    return "".join(
        chr(byte) if byte < 128 and (chr(byte).isalnum() or byte in safe) else form.format(byte) for byte in raw
    )


def _escape(sign: str) -> str:
    """As JSON writes it where it keeps to ASCII."""
    units = sign.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at] << 8 | units[at + 1]:04x}" for at in range(0, len(units), 2))


def _without(value: str, hidden: list[Span]) -> str:
    if not hidden:
        return value
    pieces: list[str] = []
    at = 0
    for begin, end in hidden:
        pieces += (value[at:begin], HIDDEN)
        at = end
    return "".join(pieces) + value[at:]


def _value(name: str, value: str) -> str:
    return HIDDEN if secret_value(rate(name), value) else text(_without(value, _value_spans(name, value)))


def _value_spans(name: str, value: str) -> list[Span]:
    if secret_value(rate(name), value):
        return [(0, len(value))]
    if name.lower().endswith("proxy") and "@" in value and "://" not in value:  # user:password@proxy:3128
        return [(begin - 3, end - 3) for begin, end in spans("://" + value)]
    return spans(value)


def _argument_spans(words: list[str]) -> list[list[Span]]:
    """Of each word, what its own name or the words before it make a secret."""
    found: list[list[Span]] = []
    flag = ""
    for word in words:
        if flag and not is_flag(word) and secret_value(rate(flag), word):
            found.append([(0, len(word))])
        else:
            found.append(_assignment(word, 0))
        flag = word.lstrip("-+~") if word.startswith("-") and "=" not in word and len(word) > 2 else ""
    starts = _starts(words)
    # `curl -u`, and what a shell without quotes took apart.
    line = " ".join(words)
    across = [*spans(line), *word_spans(list(zip(words, starts, strict=True)))]
    for hidden, start in zip(found, starts, strict=True):
        several = quoted(line, start + hidden[0][0], len(line)) if hidden else None
        if several and several.after > several.end:
            across.append(several[:2])
    _share(across, words, starts, found)
    return [merged(hidden) for hidden in found]


def _starts(texts: list[str]) -> list[int]:
    """Where each begins when one character stands between them."""
    return list(accumulate((len(text) + 1 for text in texts), initial=0))[:-1]


def _share(across: Iterable[Span], texts: list[str], starts: list[int], found: list[list[Span]]) -> None:
    """Adds to `found` what each text has of these spans."""
    for begin, end in across:
        for number in range(bisect_right(starts, begin) - 1, bisect_left(starts, end)):
            first, last = max(0, begin - starts[number]), min(len(texts[number]), end - starts[number])
            if first < last:
                found[number].append((first, last))


def _assignment(word: str, at: int) -> list[Span]:
    """NAME=VALUE, --name=VALUE, --env=NAME=VALUE."""
    for _ in range(3):
        equals = word.find("=", at)
        if equals < 0 or equals - at > 200:
            break
        name, value = word[at:equals].lstrip("-+~"), word[equals + 1 :]
        if rate(name) != NO and secret_value(rate(name), value) and "?" not in name:  # a URL's query has its own rules
            return [(equals + 1, len(word))]
        at = equals + 1
    return []


def _names(entries: Mapping[Any, Any]) -> dict[Any, str]:
    """{"name": "HF_TOKEN", "value": VALUE}, as Kubernetes has it: the keys that stand for others."""
    small = {key.lower(): key for key in entries if isinstance(key, str) and len(key) < 6}
    for key in ("name", "key"):
        name = entries.get(small.get(key))
        if "value" in small and isinstance(name, str) and rate(name) != NO:
            return {small["value"]: name, small[key]: ""}
    return {}


def _entry(key: str, value: Any, keep: frozenset[str], depth: int) -> Any:
    if not depth:
        return HIDDEN
    rating = rate(key)
    if rating != NO:
        if isinstance(value, (str, int, float)) and not isinstance(value, bool) and secret_value(rating, str(value)):
            return HIDDEN
        if isinstance(value, (list, tuple)):
            return [_entry(key, item, keep, depth - 1) for item in value]
        if isinstance(value, Mapping) and rating == SURE:
            return {_key(name): _member(key, str(name), item, keep, depth - 1) for name, item in value.items()}
    return data(value, keep, depth - 1)


def _member(of: str, name: str, value: Any, keep: frozenset[str], depth: int) -> Any:
    """passwords: {db: VALUE}, api_key: {value: VALUE}: names that say nothing have the outer one's meaning."""
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        if is_secret_member(of, name, str(value)):
            return HIDDEN
    elif isinstance(value, (list, tuple)) and depth:
        return [_member(of, name, item, keep, depth - 1) for item in value]
    elif isinstance(value, Mapping) and depth and rate(name) == NO:
        return {_key(inner): _member(of, str(inner), item, keep, depth - 1) for inner, item in value.items()}
    return _entry(name, value, keep, depth)


_Detector = Callable[[str], Iterator[Span]]
_DETECTORS: tuple[_Detector, ...] = (private_keys, urls, headers, tokens, pairs, named, elements, commands)

# A variable's value is looked at when secrets are learned, when it is described and when it is written.
_looked: dict[str, list[Span]] = {}
_SHORT, _MANY = 1024, 512


def spans(text: str) -> list[Span]:
    """What to hide, in order and without overlaps."""
    known = _looked.get(text)
    if known is None:
        known = _found(text)
        if len(text) <= _SHORT:
            if len(_looked) >= _MANY:
                _looked.clear()
            _looked[text] = known
    return known


def _found(text: str) -> list[Span]:
    """In the text as it is, and in what its escapes stand for."""
    found = [span for detector in _DETECTORS for span in detector(text)]
    for reading in readings(text):
        found += [reading.before(span) for detector in _DETECTORS for span in detector(reading.text)]
    return merged(span for span in found if span[0] < span[1])


def merged(found: Iterable[Span]) -> list[Span]:
    joined: list[Span] = []
    for begin, end in sorted(found):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined
