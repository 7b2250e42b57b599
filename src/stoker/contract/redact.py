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

from stoker.contract.escapes import Unescaped
from stoker.contract.secretnames import NO, holds_any, rate, word_set
from stoker.contract.secretvalues import (
    HIDDEN,
    Span,
    commands,
    compiled,
    elements,
    named,
    opaque,
    pairs,
    plain,
    secret_value,
    word_spans,
)

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
    return shown if len(shown) <= LONGEST else shown[:LONGEST] + f"... ({len(shown)} characters)"


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
        return {key: item if key in keep else _entry(str(key), item, keep, depth) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [data(item, keep, depth - 1) for item in value] if depth else HIDDEN
    return value


def learn(variables: Mapping[str, str], argv: Iterable[str] = ()) -> None:
    """Secrets among these are hidden from now on wherever they turn up."""
    global _known
    found = set(_known if _known is not None else _own())
    for name, value in variables.items():
        found.update(value[begin:end] for begin, end in _value_spans(name, value))
    words = list(argv)
    for word, hidden in zip(words, _argument_spans(words), strict=True):
        found.update(word[begin:end] for begin, end in hidden or spans(word))
    _known = sorted({form for value in found if _is_telling(value) for form in _forms(value)}, key=len, reverse=True)


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
        if flag and not word.startswith("-") and secret_value(rate(flag), word):
            found.append([(0, len(word))])
        else:
            found.append(_assignment(word, 0))
        flag = word.lstrip("-+~") if word.startswith("-") and "=" not in word and len(word) > 2 else ""
    starts = list(accumulate((len(word) + 1 for word in words), initial=0))[:-1]
    # `curl -u`, and what a shell without quotes took apart.
    across = [*spans(" ".join(words)), *word_spans(list(zip(words, starts, strict=True)))]
    for begin, end in across:
        for number in range(bisect_right(starts, begin) - 1, bisect_left(starts, end)):
            first, last = max(0, begin - starts[number]), min(len(words[number]), end - starts[number])
            if first < last:
                found[number].append((first, last))
    return [merged(hidden) for hidden in found]


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


def _entry(key: str, value: Any, keep: frozenset[str], depth: int) -> Any:
    if not depth:
        return HIDDEN
    rating = rate(key)
    if rating != NO:
        if isinstance(value, (str, int, float)) and not isinstance(value, bool) and secret_value(rating, str(value)):
            return HIDDEN
        if isinstance(value, (list, tuple)):
            return [_entry(key, item, keep, depth - 1) for item in value]
    return data(value, keep, depth - 1)


# ---- by shape: where secrets stand in a text. Each detector gives the spans to hide; a new shape is one more line ----
#
# Texts may be hostile and long. Each detector reads a text once: what follows a beginning is taken as a whole (so that no
# position is tried twice) or has a bounded length, and no pattern can fail after an unbounded run and begin again within
# it.

_SHORTEST_TOKEN = 16
# What a text must hold for the pattern to be tried -> the pattern.
_TOKENS = {
    ("hf_", "api_org_"): r"(?:hf|api_org)_[A-Za-z0-9]{16,}",  # Hugging Face
    # OpenAI, Anthropic and others
    ("sk-", "xai-", "pplx-", "gsk_", "r8_", "nvapi-", "tskey-"): r"(?:sk-|xai-|pplx-|gsk_|r8_|nvapi-|tskey-)[\w-]{16,}",
    ("k_live_", "k_test_", "whsec_"): r"(?:[sr]k_(?:live|test)|whsec)_[A-Za-z0-9]{10,}",  # Stripe
    ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"): r"(?:gh[pousr]|github_pat)_\w{16,}",
    ("glpat-", "glptt-", "gldt-", "glrt-", "glcbt-", "glsoat-"): r"gl(?:pat|ptt|dt|rt|cbt|soat)-[\w-]{16,}",
    ("AKIA", "ASIA", "ABIA", "ACCA"): r"A(?:KI|SI|BI|CC)A[A-Z0-9]{12,}",  # AWS
    ("AIza", "ya29.", "GOCSPX-"): r"(?:AIza|ya29\.|GOCSPX-)[\w-]{16,}",  # Google
    ("xox", "xapp-"): r"(?:xox[abeoprs]|xapp)-[\w-]{10,}",  # Slack
    ("eyJ",): r"eyJ[\w-]*(?:\.[\w-]*)*",  # JWT
    ("npm_",): r"npm_[A-Za-z0-9]{30,}",
    ("pypi-", "rubygems_", "dckr_pat_", "_v1_", "shpat_", "shpss_", "shpca_", "lin_api_", "sbp_"):
        r"(?:pypi-|rubygems_|dckr_pat_|(?:do[oprt]|wandb)_v1_|shp(?:at|ss|ca)_|lin_api_|sbp_)[\w-]{16,}",
    ("SG.", "hvs.", "hvb.", "hvr."): r"(?:SG|hv[sbr])\.[\w-]{16,}(?:\.[\w-]+)?",  # SendGrid, Vault
    ("dapi", "key-"): r"(?:dapi|key-)[0-9a-f]{32}",  # Databricks, Mailgun
    ("rpa_", "KGAT_", "pcsk_", "lsv2_", "tgp_v1_", "ntn_", "figd_", "nfp_", "pscale_tkn_", "dckr_oat_", "glsa_", "glc_"):
        r"(?:rpa|KGAT|pcsk|lsv2|tgp_v1|ntn|figd|nfp|pscale_tkn|dckr_oat|glsa|glc)_[\w-]{24,}",  # RunPod, Kaggle, Pinecone …
    ("PMAK-", "NRAK-", "HRKU-", "ATATT3", "ATBB", "sq0"): r"(?:PMAK-|NRAK-|HRKU-|ATATT3|ATBB|sq0(?:csp|atp)-)[\w-]{20,}",
    ("AGE-SECRET-KEY-",): r"AGE-SECRET-KEY-[A-Z0-9]{16,}",
    # Discord's bots
    tuple(first + second for first in "MNO" for second in "DTjz"): r"[MNO][DTjz][\w-]{22,26}\.[\w-]{6}\.[\w-]{27,40}",
    (":AA", "/bot"): r"(?:bot)?\d{6,12}:[\w-]{30,64}",  # Telegram's bots
}  # fmt: skip


def _tokens(text: str) -> Iterator[Span]:
    if len(text) < _SHORTEST_TOKEN:
        return
    for marks, pattern in _TOKENS.items():
        if not holds_any(text, marks):
            continue
        for found in compiled(rf"(?<![A-Za-z0-9])(?:{pattern})").finditer(text):
            word = found[0]
            if word.startswith("eyJ") and word.count(".") < 2:  # JSON in base64, and not three parts of it
                continue
            if "sk-" in marks and not any(sign.isdigit() for sign in word[3:]):  # sk-learn-contrib-lightning
                continue
            yield found.start() + (3 if word.startswith("bot") else 0), found.end()


def _private_keys(text: str) -> Iterator[Span]:
    """From the BEGIN line to the END line; where one of them was cut off, as far as the key's letters go."""
    if "PRIVATE KEY" not in text:
        return
    begun: int | None = None
    after = 0
    for found in compiled(r"-----(BEGIN|END) [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,20}-----").finditer(text):
        if found[1] == "BEGIN":
            if begun is not None:
                yield begun, _cut_body(text, begun, found.start())
            begun = found.start()
        else:
            yield _back(text, found.start(), after) if begun is None else begun, found.end()
            begun, after = None, found.end()
    if begun is not None:
        yield begun, _cut_body(text, begun, len(text))


_BEFORE_LINE = 60  # characters that logs put before each line: [rank0], a time, >


def _cut_body(text: str, begun: int, limit: int) -> int:
    """The end of the base64 lines (and headers) behind a BEGIN line. `limit`: where the next key begins."""
    gap = r"""(?:\\{1,8}[nrt]|[\s"',])"""
    begins = rf"(?:\\{{1,8}}r|\r)?(?:\\{{1,8}}n|\n)[^\r\n\\]{{1,{_BEFORE_LINE}}}?[ >|\]:]"
    line = rf"""(?:{gap}*[A-Za-z0-9+/=]{{16,}}|{begins}[A-Za-z0-9+/=]{{16,100}}(?=[\s"',)\\<]|$))"""
    body = (
        rf"-----[A-Z0-9 ]+-----(?:{gap}+[A-Za-z-]{{1,40}}:"
        rf" [^\r\n\\]{{0,200}})*{line}*(?:{gap}*[A-Za-z0-9+/]{{1,15}}=+)?"
    )
    found = compiled(body).match(text, begun, limit)
    return found.end() if found else limit


def _back(text: str, at: int, limit: int) -> int:
    """The beginning of the lines of base64 that end here; something may stand before each."""
    while at > limit and (text[at - 1].isalnum() or text[at - 1] in "+/=\r\n\\ \t"):
        at -= 1
    begin = text.rfind("\n", limit, at) + 1 or limit
    while begin > limit and at - begin <= 200:  # lines that end in base64, whatever they begin with
        before = text.rfind("\n", limit, begin - 1) + 1 or limit
        if not compiled(rf"[^\r\n]{{0,{_BEFORE_LINE}}}?[A-Za-z0-9+/=]{{16,100}}\s*").fullmatch(text, before, begin):
            break
        at = begin = before
    return at


_HEADER = (
    r"""(?i)(?:authorization|cookie)\\{0,8}["'`]?\s{0,3}[:=]\s{0,3}(?:\\{0,8}["'`])?"""
    r"""(?:(?:bearer|basic|token|apikey)\s{1,3}([^\s"'`\\]*)|(?:(?:digest|oauth|aws4-hmac-sha256)\s{1,3}((?:[\w\-]{1,40}=(?:\\{0,8}"[^"\\\r\n]*\\{0,8}"|[^\s,"'`\\]*),?\s{0,3})+))"""
    r"""|(?:(?:digest|negotiate|oauth|sharedkey|aws4-hmac-sha256)\s{1,3})?([^\r\n"'`\\]*))"""
)


def _headers(text: str) -> Iterator[Span]:
    """Authorization: SCHEME VALUE, Cookie: VALUE; and a scheme with its value alone."""
    small = text.lower()
    if not holds_any(small, ("authorization", "cookie", "bearer", "basic")):
        return
    if "authorization" in small or "cookie" in small:
        for found in compiled(_HEADER).finditer(text):
            group = next((number for number in (1, 2, 3) if found[number]), 3)
            if not plain((found[group] or "").strip()):
                yield found.span(group)
    if "bearer" in small or "basic" in small:
        for found in compiled(r"(?i)\b(bearer|basic)\s{1,3}([\w.~+/=:%\-]{8,})").finditer(text):
            if opaque(found[2]) if found[1].lower() == "bearer" else _is_user_and_password(found[2]):
                yield found.span(2)


def _is_user_and_password(word: str) -> bool:
    """HTTP's Basic: base64 of user:password."""
    import binascii

    word = word[:400].rstrip("=")
    try:
        decoded = binascii.a2b_base64(word + "=" * (-len(word) % 4)).decode()
    except ValueError:
        return False
    return ":" in decoded and decoded.isprintable()


_HOOK_HOSTS = ("hooks.slack.com", "discord.com", "discordapp.com", "webhook.office.com", "outlook.office.com", "outlook.office365.com", "hooks.zapier.com",
               "make.com", "maker.ifttt.com", "feishu.cn", "larksuite.com")  # fmt: skip
_HOOKS = word_set("services workflows triggers webhook webhooks webhookb2 hook hooks catch key incomingwebhook")


def _urls(text: str) -> Iterator[Span]:
    """scheme://user:PASSWORD@host, https://TOKEN@host, and paths that let anybody post: hooks.slack.com/services/..."""
    at = text.find("://")
    while at >= 0:
        begin = at + 3
        end = compiled(r"""[^\s/?#"'`<>\\]*""").match(text, begin).end()  # type: ignore[union-attr]
        user, sign, host = text[begin:end].rpartition("@")
        if sign:
            yield from _user(text[max(0, at - 12) : at], user, begin)
        else:
            yield from _password_with_slash(text, begin, end)
        yield from _hook(text, host.partition(":")[0].lower(), end)
        yield from _topic(text, at, end, host.partition(":")[0].lower())
        at = text.find("://", begin)
    if "@" in text:  # a proxy without a scheme: user:PASSWORD@host:3128
        proxy = compiled(r"""(?<![\w/.:\-])[\w.\-]{1,64}:([^\s:/@"'`<>]{6,200})@[\w.\-]{1,253}:\d{2,5}\b""")
        for found in proxy.finditer(text):
            if opaque(found[1]):
                yield found.span(1)


def _user(before: str, user: str, begin: int) -> Iterator[Span]:
    name, colon, password = user.partition(":")
    if colon and not plain(password):
        yield begin + len(name) + 1, begin + len(user)
    web = before.lower().endswith(("http", "https", "ftp", "ws", "wss"))
    if (len(name) >= 16 or opaque(name)) and (web or colon) and not plain(name):
        yield begin, begin + len(name)


def _password_with_slash(text: str, begin: int, end: int) -> Iterator[Span]:
    """redis://:pa/ss@host, or another sign that ends a host: what follows the colon is no port."""
    name, colon, rest = text[begin:end].partition(":")
    if not colon or rest.isdigit() or not rest or text[end : end + 1] not in ("/", "?", "#"):
        return
    found = compiled(r"""[^\s"'`<>@\\]{0,200}@""").match(text, end)
    if found:
        yield begin + len(name) + 1, found.end() - 1


def _topic(text: str, at: int, end: int, host: str) -> Iterator[Span]:
    """ntfy://TOPIC, ntfy://host/TOPIC and https://ntfy.sh/TOPIC: who knows the topic can read and write it."""
    own = text[max(0, at - 12) : at].lower().endswith("ntfy")
    begin = end + 1
    if own and text[end : end + 1] != "/":
        begin = at + 3
    elif not own and host != "ntfy.sh" and not host.startswith("ntfy."):
        return
    found = compiled(r"""[^\s"'`<>\\,;)]{0,500}""").match(text, begin)
    topic = found[0] if found else ""
    if not plain(topic) and not topic.isupper():  # in capitals: documentation's
        yield begin, begin + len(topic)


def _hook(text: str, host: str, at: int) -> Iterator[Span]:
    path = compiled(r"""/[^\s?#"'`<>\\,;:)]{0,500}""").match(text, at)
    if path is None:
        return
    known = host.endswith(_HOOK_HOSTS)
    armed = False
    place = at
    for segment in path[0].split("/")[1:]:
        place += 1
        if armed and known:
            if not plain(segment):
                yield place, path.end()
            return
        if armed and opaque(segment) and not plain(segment):
            yield place, place + len(segment)
        armed = armed or segment.lower() in _HOOKS
        place += len(segment)


_Detector = Callable[[str], Iterator[Span]]
_DETECTORS: tuple[_Detector, ...] = (_private_keys, _urls, _headers, _tokens, pairs, named, elements, commands)

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
    unescaped = Unescaped(text)
    if unescaped.text is not text:
        found += [unescaped.before(span) for detector in _DETECTORS for span in detector(unescaped.text)]
    return merged(span for span in found if span[0] < span[1])


def merged(found: Iterable[Span]) -> list[Span]:
    joined: list[Span] = []
    for begin, end in sorted(found):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined
