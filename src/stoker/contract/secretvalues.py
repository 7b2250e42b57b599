"""Secrets known by a name beside them: NAME=VALUE, "name": "value", --name VALUE, curl -u NAME:VALUE, .netrc."""

from __future__ import annotations

import re
from collections.abc import Iterator

from stoker.contract import secretnames
from stoker.contract.secretnames import MAYBE, SURE, holds_any, word_set

Span = tuple[int, int]

HIDDEN = "<redacted>"
_SWITCHES = word_set("0 1 true false yes no on off none null nil *** ****")
# What stands behind a secret's name in messages and in source code, and is none.
_PROSE = word_set(
    "a an and any are as at bool but by bytes can default dict empty expected float for from has if in int invalid is"
    " it list may missing must needs not number object of optional or required self should str string tensor that the"
    " to tuple undefined unset was when with ... …"
)


def plain(value: str) -> bool:
    """No secret under whatever name: nothing, a switch, a variable's name, or what has been hidden already."""
    return not value or value.lower() in _SWITCHES or value.startswith(HIDDEN) or _variable(value)


def _variable(value: str) -> bool:
    """$TOKEN, ${TOKEN}, %TOKEN% and {token}, which stand for a value."""
    for begin, end in (("${", "}"), ("$", ""), ("%", "%"), ("{", "}")):
        inner = value[len(begin) : len(value) - len(end)]
        named = inner.replace("_", "a").isalnum() and not inner[0].isdigit() and (inner.isupper() or begin == "{")
        if named and value.startswith(begin) and value.endswith(end):
            return True
    return False


def opaque(value: str) -> bool:
    """Made by a machine, by the look of it: letters and digits mixed, or very long."""
    return len(value) >= 20 or (
        len(value) >= 8 and any(sign.isdigit() for sign in value) and any(sign.isalpha() for sign in value)
    )


def secret_value(rating: int, value: str) -> bool:
    """Of a value that is known to be one as a whole: of a variable, an argument, an entry of JSON."""
    if plain(value):
        return False
    return rating == SURE or (rating == MAYBE and not value.replace(".", "").replace("-", "").isdigit())


_BLANKS = r"[^\S\r\n]{0,40}"  # tables of settings are padded
_SEPARATOR = (
    # JSON and Python, with a line end where a value may stand on a line of its own
    rf"""(?:(?:\\{{0,8}}["'`])\s{{0,40}}:\s{{0,40}}(?=\\{{0,8}}["'\[\d])"""
    rf"""|(?:\\{{0,8}}["'`]){{0,5}}\]?{_BLANKS}(?:=>|:=|==|=|:(?!:|//))[^\S\r\n]{{0,40}})"""
)
_VALUE_END = r"""[\s"'`]|\\{1,8}["'nrt]|[,;&](?=\s|$|["']|[\w.\-]{1,64}\s?[=:])|[)\]}](?=[\s,;.:)\]}"'`\\]|$)|$"""
_MOST_MAYBE = 400


def pairs(text: str) -> Iterator[Span]:
    """NAME=VALUE, name: value, "name": "value", ?name=value& and --name=value within a text."""
    if ("=" not in text and ":" not in text) or not holds_any(text.lower(), secretnames.SEEDS):
        return
    done = 0
    for found in compiled(rf"(?<![\w.\-])([\w.\-]+)({_SEPARATOR})").finditer(text):
        rating = secretnames.rate(found[1])
        if (
            rating == secretnames.NO
            or found.start() < done
            or text.startswith(HIDDEN, found.end())
            or _is_of_others(text, found)
            or _is_call(text, found)
        ):
            continue
        several = list(_listed(text, found, rating))
        if several:
            yield from several
            done = several[-1][1]
            continue
        if rating == SURE and compiled(r"""\[\s{0,40}\\{0,8}["']""").match(text, found.end()):
            continue  # a list with nothing to hide
        most = len(text) if rating == SURE else min(len(text), found.end() + _MOST_MAYBE)
        begin, end, quoted = _value(text, found.end(), most)
        if not secret_value(rating, text[begin:end]) or not _meant(text, found, rating, text[begin:end], quoted):
            continue
        if not quoted and ":" in found[2] and _begins_line(text, found.start()) and secretnames.is_phrase(found[1]):
            end = compiled(r"[^\r\n]*").match(text, end).end()  # type: ignore[union-attr]  # YAML's `password: several words`
        yield begin, end
        done = end


def _listed(text: str, found: re.Match[str], rating: int) -> Iterator[Span]:
    """["VALUE", "VALUE"], and what YAML writes on lines of their own: a block behind | or >, a list."""
    if rating != SURE:
        return
    if text.startswith("[", found.end()):
        items = compiled(r"""\[(?:\s{0,40}(?:\\{0,8}["'])[^"'\\\r\n]{0,4096}(?:\\{0,8}["'])\s{0,40},?){1,1000}""")
        several = items.match(text, found.end())
        for item in compiled(r"""["']([^"'\\\r\n]+)\\{0,8}["']""").finditer(several[0]) if several else ():
            if not plain(item[1]):
                yield found.end() + item.start(1), found.end() + item.end(1)
        if several is None and ":" in found[2]:
            flow = compiled(r"\[([^\[\]{}()\"'\r\n]{1,4096})\]").match(text, found.end())
            for item in compiled(r"[^\s,]+").finditer(flow[1]) if flow else ():
                if not plain(item[0]) and opaque(item[0]):
                    yield found.end() + 1 + item.start(), found.end() + 1 + item.end()
    elif ":" in found[2]:
        line = text[max(0, found.start() - 40) : found.start()].rpartition("\n")[2]
        indent = len(line) - len(line.lstrip(" \t"))
        deeper = rf"\n[ \t]{{{indent + 1},80}}[^\r\n]+\r?"
        block = compiled(rf"[|>][+\-\d]{{0,2}}[ \t]{{0,8}}\r?((?:{deeper})+)").match(text, found.end())
        if not block and not line.strip(" \t-\"'"):
            block = compiled(rf"\r?((?:\n[ \t]{{{indent},80}}- [^\r\n]+\r?)+)").match(text, found.end())
        if not block and not line.strip(" \t-"):  # YAML's value on the next line, deeper; no mapping
            alone = compiled(rf"[ \t]{{0,8}}\r?\n[ \t]{{{indent + 1},80}}([^\s:#\-][^\s:]{{3,}})[ \t]*(?:\r|\n|$)")
            below = alone.match(text, found.end())
            if below and not plain(below[1]):
                yield below.span(1)
        if block:
            first = compiled(r"\s*(?:- )?").match(text, block.start(1))
            yield first.end() if first else block.start(1), block.end(1)


def _meant(text: str, found: re.Match[str], rating: int, value: str, quoted: bool) -> bool:
    """Whether the name is a secret's here: sentences and lines of source code have `token` and `key` too."""
    name, separator = found[1], found[2]
    telling = opaque(value) or (rating == SURE and value.isdigit() and len(value) >= 4)
    if text[found.start() - 1 : found.start()] in ("?", "&", ";"):
        return True
    if quoted:
        word = secretnames.is_also_a_word(name) and name.lower().endswith("key")  # input_ids_key="tokens"
        return (rating == SURE and not word) or separator[0] in "\"'`\\" or name.isupper() or telling
    if value.lower().rstrip(".,:;)") in _PROSE:
        return False
    if not name.isupper() and len(value) <= _MOST_MAYBE and value.rpartition(".")[2] == name:  # token=self.token.
        return False
    if separator[0] in "\"'`\\":  # JSON has nothing without quotes but numbers
        return telling
    if (
        secretnames.is_also_a_word(name)
        and not name.isupper()
        and not (":" in separator and _begins_line(text, found.start()))
    ):
        return telling
    return rating == SURE or telling


def _is_call(text: str, found: re.Match[str]) -> bool:
    """key=int(x), of source code. Seen before its end is looked for, which may be far: a text may hold many."""
    if found[1].isupper() or text[found.start() - 1 : found.start()] in ("?", "&", ";"):
        return False
    return compiled(r"[A-Za-z_][\w.]*[(\[]").match(text, found.end()) is not None


def _value(text: str, at: int, limit: int) -> tuple[int, int, bool]:
    """(begin, end, was it in quotes)."""
    quote = compiled(r"""[bBrRuUfF]{0,2}((\\{0,8})(["'`])(?:\\{0,8}["'`])*)""").match(text, at)
    if quote is None:
        found = compiled(_VALUE_END).search(text, at, limit)
        return at, found.start() if found else limit, False
    escape, mark = quote[2], quote[3]
    begin = quote.end()
    if quote[1] in (2 * mark, 2 * (escape + mark)):
        return begin, begin, True  # nothing in it
    if len(quote[1]) > len(escape) + 1:  # quotes within a shell's quotes: '"'"'VALUE'"'"'
        found = compiled(r"""[^"'`\r\n\\]*""").match(text, begin, limit)
        return begin, found.end() if found else limit, True
    # Up to the same quote, escaped as often, on the same line; one that is never closed: to the line's end.
    inner = rf"[^\r\n]*?(?={re.escape(escape + mark)}|[\r\n]|$)" if escape else rf"(?:[^{mark}\\\r\n]|\\.)*"
    found = compiled(inner).match(text, begin, limit)
    return begin, found.end() if found else limit, True


def _is_of_others(text: str, found: re.Match[str]) -> bool:
    """auth.example.com:8080/path; headers and a URL's user, which redact reads."""
    if found[1].lower().endswith(("authorization", "cookie")) or text[found.start() - 2 : found.start()] == "//":
        return True
    return (
        found[2] == ":"
        and "." in found[1]
        and compiled(r"\d{1,5}(?=[/\s,;)\"']|$)").match(text, found.end()) is not None
    )


def _begins_line(text: str, at: int) -> bool:
    before = text[max(0, at - 40) : at]
    return before.rpartition("\n")[2].strip() in ("", "-") and ("\n" in before or at <= 40)


def named(text: str) -> Iterator[Span]:
    """{"name": "HF_TOKEN", "value": VALUE}, as Kubernetes has it, and ("password", VALUE)."""
    if not holds_any(text.lower(), secretnames.SEEDS):
        return
    quote = r"""(?:\\{0,32}["'])"""
    between = (
        rf"""{quote}?[\s,;]{{1,40}}{quote}?[Vv]alue{quote}?\s{{0,8}}[:=]\s{{0,8}}(?:[|>][+\-]?\s{{1,80}})?{quote}?"""
    )
    value = r"""([^\s"'\\,;}]{1,4096})"""
    for found in compiled(
        rf"""\b(?:[Nn]ame|[Kk]ey){quote}?\s{{0,8}}[:=]\s{{0,8}}{quote}?([\w.\-]{{1,100}}){between}{value}"""
    ).finditer(text):
        if secret_value(secretnames.rate(found[1]), found[2]):
            yield found.span(2)
    for found in compiled(rf"""[(\[]b?{quote}([\w.\-]{{1,100}}){quote},\s{{0,8}}b?{quote}{value}{quote}""").finditer(
        text
    ):
        if secretnames.rate(found[1]) == SURE and opaque(found[2]):
            yield found.span(2)


def elements(text: str) -> Iterator[Span]:
    """<password>value</password>, as XML has it."""
    if "</" not in text:
        return
    for found in compiled(r"<([\w.\-]{1,100})>([^<]*)</").finditer(text):
        if secret_value(secretnames.rate(found[1]), found[2].strip()):
            yield found.span(2)


# ---- command lines ----

# Flags that carry a secret under a name that does not say so. "user": NAME:SECRET.
_PROGRAMS = {
    "curl": {"-u": "user", "--user": "user", "-U": "user", "--proxy-user": "user"},
    "http": {"-a": "user", "--auth": "user"}, "https": {"-a": "user", "--auth": "user"},
    "sshpass": {"-p": "value"}, "redis-cli": {"-a": "value"}, "smbclient": {"-U": "user"},
    "mysql": {"-p": "attached"}, "mysqldump": {"-p": "attached"}, "mysqladmin": {"-p": "attached"}, "mariadb": {"-p": "attached"},
    "ldapsearch": {"-w": "value"}, "ldapmodify": {"-w": "value"}, "mosquitto_pub": {"-P": "value"}, "mosquitto_sub": {"-P": "value"},
    "docker login": {"-p": "value"}, "podman login": {"-p": "value"}, "helm login": {"-p": "value"},
}  # fmt: skip
_COMMAND_MARKS = ("--", "curl", "http", "sshpass", "redis-cli", "smbclient", "mysql", "mariadb", "ldap", "mosquitto", "docker",
                  "podman", "helm", "login")  # fmt: skip


def commands(text: str) -> Iterator[Span]:
    """--password VALUE, curl -u NAME:VALUE and .netrc's `login NAME password VALUE`, word by word."""
    if " " not in text.replace("\n", " ") or not holds_any(text, _COMMAND_MARKS):
        return
    words = []
    for found in compiled(r"\S+").finditer(text):
        word = found[0].lstrip("\"'`([{\\")
        # A sentence about `--password`, no command with it.
        named = found[0][0] == "`" and word.rstrip(".,;:)")[-1:] == "`"
        words.append(("" if named else word.rstrip("\"'`)]},\\"), found.end() - len(word)))
    for begin, end in word_spans(words, _PROSE):
        quote = text[begin - 1 : begin]
        closing = text.find(quote, end, end + 400) if quote in ('"', "'") else -1
        yield begin, closing if closing > 0 else end  # several words in quotes


def word_spans(words: list[tuple[str, int]], prose: frozenset[str] = frozenset()) -> Iterator[Span]:
    """`words`: each with its place. `prose`: words that are not taken for a flag's value."""
    program = ""
    previous = ["", "", ""]
    for word, place in words:
        flags = _PROGRAMS.get(program, {})
        before = previous[-1]
        if before == "password" and previous[-3] in ("login", "account", "machine"):
            yield from _flag_value("value", word, place)
        elif before in flags and not word.startswith("-"):
            yield from _flag_value(flags[before], word, place)
        elif program == "curl" and compiled(r"-[a-zA-Z]{1,10}u").fullmatch(before):  # curl -su NAME:SECRET
            yield from _flag_value("user", word, place)
        elif program == "curl" and word.startswith("--user="):
            yield from _flag_value("user", word[7:], place + 7)
        elif before.startswith("-") and "=" not in before and not word.startswith("-") and word.lower() not in prose:
            rating = secretnames.rate(before.lstrip("-"))
            if rating == SURE or (rating == MAYBE and opaque(word)):
                yield from _flag_value("value", word, place)
        elif word[:2] in flags and len(word) > 2:
            yield from _flag_value(flags[word[:2]].replace("attached", "value"), word[2:], place + 2)
        program = _program(program, word)
        previous = [*previous[1:], word]


def _program(running: str, word: str) -> str:
    """Whose flags count behind this word."""
    name = compiled(r"""[^=/"'`(\[]*$""").search(word[-40:])[0]  # type: ignore[index]  # it matches nothing, too
    if name in _PROGRAMS or f"{name} login" in _PROGRAMS:
        return name
    if word == "login" and f"{running} login" in _PROGRAMS:
        return f"{running} login"
    return "" if word in ("|", "||", "&&", "&") or word.endswith(";") else running


def _flag_value(kind: str, word: str, place: int) -> Iterator[Span]:
    if kind == "value" and not plain(word):
        yield place, place + len(word)
    elif kind == "user":
        name, colon, secret = word.partition(":" if ":" in word else "%")  # smbclient's -U NAME%SECRET
        if colon and not plain(secret):
            yield place + len(name) + 1, place + len(word)


_patterns: dict[str, re.Pattern[str]] = {}


def compiled(pattern: str) -> re.Pattern[str]:
    """Once, and only where a text needs it: a launch needs few."""
    made = _patterns.get(pattern)
    if made is None:
        made = _patterns[pattern] = re.compile(pattern)
    return made
