"""Secrets known by a name beside them: NAME=VALUE, "name": "value", --name VALUE, curl -u NAME:VALUE, .netrc."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator

from stoker.contract import secretnames, valuetext
from stoker.contract.secretnames import MAYBE, SURE, holds_any, word_set
from stoker.contract.valuetext import Span, compiled

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
    """$TOKEN, ${TOKEN}, %TOKEN%, {token} and {self.token!r}, which stand for a value."""
    if value.startswith("{") and value.endswith("}") and len(value) < 100:
        return compiled(r"\{[A-Za-z_]\w*\}|\{[A-Za-z_.]+(?:![rsa])?\}").fullmatch(value) is not None
    for begin, end in (("${", "}"), ("$", ""), ("%", "%")):
        inner = value[len(begin) : len(value) - len(end)]
        named = inner.replace("_", "a").isalnum() and not inner[0].isdigit() and inner.isupper()
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


def is_secret_member(of: str, name: str, value: str) -> bool:
    """Of NAME: VALUE in a mapping under a secret's name."""
    rating = secretnames.rate(name)
    if rating == SURE or plain(value) or secretnames.is_public(name):
        return rating == SURE and secret_value(rating, value)
    digits = value.replace(".", "").replace("-", "")
    return opaque(value) or not (secretnames.is_also_a_word(of) or (digits.isdigit() and len(digits) < 6))


def is_secret_second(name: str, value: str) -> bool:
    """Of ("password", VALUE). Lists have two names too: what is no more than a word stays."""
    if secretnames.rate(name) != SURE or plain(value) or not compiled(r"[\w.\-]{1,100}").fullmatch(name):
        return False
    return opaque(value) or (" " in value.strip() and not secretnames.is_also_a_word(name))


_BLANKS = r"[^\S\r\n]{0,40}"  # tables of settings are padded
_SEPARATOR = (
    # JSON and Python, with a line end where a value may stand on a line of its own
    rf"""(?:(?:\\{{0,8}}["'`])\s{{0,40}}:\s{{0,40}}(?=\\{{0,8}}["'\[\d])"""
    rf"""|(?:\\{{0,8}}["'`]){{0,5}}\]?{_BLANKS}(?:=>|:=|==|=|:(?!:|//))[^\S\r\n]{{0,40}})"""
)
_MOST_MAYBE = 400


def pairs(text: str) -> Iterator[Span]:
    """NAME=VALUE, name: value, "name": "value", ?name=value& and --name=value within a text."""
    if ("=" not in text and ":" not in text) or not holds_any(text.lower(), secretnames.SEEDS):
        return
    done = below_until = 0
    for found in compiled(rf"(?<![\w.\-])([\w.\-]+)({_SEPARATOR})").finditer(text):
        rating = secretnames.rate(found[1])
        if found[1] == "PWD" and text[found.start() - 1 : found.start()] == ";":  # of ODBC, not of a shell
            rating = SURE
        if rating == SURE and found.start() >= below_until:
            inside = valuetext.members(text, found.start(), found.end())
            if inside:
                yield from _members(text, found, *inside)
                below_until = inside[1]
        if (
            rating == secretnames.NO
            or found.start() < done
            or text.startswith(HIDDEN, found.end())
            or _is_of_others(text, found)
            or _is_code(text, found)
        ):
            continue
        most = len(text) if rating == SURE else min(len(text), found.end() + _MOST_MAYBE)
        if compiled(r"""\[|\(\s{0,80}b?\\{0,8}["']""").match(text, found.end()):
            items, done = valuetext.listed(text, found.end(), most)
            yield from (item[:2] for item in items if _is_secret_item(text, found, rating, item))
            continue
        equals = found[2].strip() == "=" and valuetext.is_entry(valuetext.before(text, found.start())[0])
        below = (
            valuetext.below(text, found.start(), found.end(), equals)
            if rating == SURE and (":" in found[2] or equals)
            else None
        )
        if below:
            if _is_secret_below(text, found, below):
                end = below.end if below.quoted else max(below.end, _phrase_end(text, found[1], below.end))
                yield below.begin, end
                done = max(below.after, end)
            continue
        alone = valuetext.alone(text, found.end()) if rating == SURE else None
        if alone:
            if _is_secret_alone(found[1], text[alone[0] : alone[1]]):
                yield alone
                done = alone[1]
            continue
        heredoc = compiled(r"<<[-~]?\s{0,4}[\"']?(\w{1,40})[\"']?[^\S\n]{0,40}\n").match(text, found.end())
        goes_on = compiled(r"\\\r?\n[ \t]{0,80}").match(text, found.end())
        at = (heredoc or goes_on or found).end()
        if heredoc and rating == SURE:
            close = text.find("\n" + heredoc[1], at - 1)
            yield at, close if close >= 0 else _line_end(text, at)
            done = max(close, at)
            continue
        begin, end, after, quoted = valuetext.joined(text, valuetext.value(text, at, most), most)
        if not secret_value(rating, text[begin:end]) or not _meant(text, found, rating, text[begin:end], quoted):
            continue
        if not quoted and found[2].strip() in (":", "=") and _begins_line(text, found.start()):
            if secretnames.is_phrase(found[1]) and found[2] != "=":
                end = after = _line_end(text, end)  # YAML's and INI's `password: several words`
            if ":" in found[2] and rating == SURE:
                end = after = valuetext.more_lines(text, found.start(), end)
        elif not quoted and "=" in found[2]:
            end = after = max(end, _quoted_end(text, found))
        yield begin, end
        done = after


def _phrase_end(text: str, name: str, at: int) -> int:
    """Of an unquoted value that has its line to itself: all of it, where people write phrases."""
    return at + len(text[at : _line_end(text, at)].rstrip()) if secretnames.is_phrase(name.removesuffix("s")) else at


def _quoted_end(text: str, found: re.Match[str]) -> int:
    """Of "NAME=several words", which is quoted as a whole: a word of a command, or of a list of them."""
    opening = compiled(r"""(?:^|(?<=[\s,\[]))\\{0,8}["'](?=-{0,2}\w)""").match
    at = next((at for at in range(found.start() - 1, max(-1, found.start() - 10), -1) if opening(text, at)), -1)
    if at < 0 or not secretnames.is_phrase(found[1]):
        return 0
    whole = valuetext.quoted(text, at, min(len(text), found.end() + _MOST_MAYBE))
    return whole.end if whole and whole.after > whole.end and whole.begin == found.start() else 0


def _members(text: str, of: re.Match[str], begin: int, end: int) -> Iterator[Span]:
    """What the entries of a mapping under a secret's name hold, where their own names say nothing."""
    place = begin
    entry = compiled(r"""(?<![\w.\-])(\\{0,8}["']?)([\w.\-]{1,100})\1\s?[:=](?=\s|\\{0,8}["'])\s{0,8}""")
    before, _ = valuetext.before(text, of.start())
    yaml = ":" in of[2] and (valuetext.is_entry(before) or (of[2].strip() == ":" and text[begin - 1] == "{"))
    block = text[begin - 1] != "{"
    while found := entry.search(text, place, end):
        place = found.end()
        if "\n" in found[0] or text[place : place + 1] in ("{", "|", ">"):
            continue
        if text.startswith("[", place):
            values, place = valuetext.listed(text, place, end)
        else:
            values = [valuetext.value(text, place, end)]
            place = max(place, values[0].after)
        for value in values:
            word = text[value.begin : value.end]
            if is_secret_member(of[1], found[2], word) and (value.quoted or opaque(word) or yaml):
                line_end = _phrase_end(text, of[1], value.end) if block and yaml and not value.quoted else 0
                yield value.begin, max(value.end, line_end)
                place = max(place, line_end)  # what is hidden with it is not looked at again


def _is_secret_item(text: str, found: re.Match[str], rating: int, item: valuetext.Value) -> bool:
    """Of ["VALUE", "VALUE"], and of YAML's [VALUE, VALUE]; source code has names in its lists."""
    word = text[item.begin : item.end]
    if plain(word) or (rating == MAYBE and not secret_value(rating, word)):
        return False
    if item.quoted:
        return rating == SURE or opaque(word)
    if compiled(r"[A-Za-z_.]+\([A-Za-z_.\s]*\)").fullmatch(word) or compiled(r"\s(?:for|if|in|is|or|and)\s").search(
        word
    ):
        return False
    if opaque(word) and " " not in word:
        return True
    return rating == SURE and ":" in found[2] and word.lower() not in _PROSE


def _is_secret_below(text: str, found: re.Match[str], value: valuetext.Value) -> bool:
    """A block and a list are; a value alone is one word, or a phrase where people write them, and not the next key."""
    word = text[value.begin : value.end]
    several = "\n" in word  # of which only the first may be hidden already
    if not several and (plain(word) or word.lower() in _PROSE):
        return False
    if value.quoted or "\n" in text[value.begin : value.after] or text[value.begin - 2 : value.begin] == "- ":
        return True
    rest = text[value.end : _line_end(text, value.end)]
    entry = valuetext.is_entry(valuetext.before(text, found.start())[0])
    if rest.strip(" \t\r,;}])"):
        return entry and secretnames.is_phrase(found[1]) and not rest.strip().startswith((":", "="))
    if not entry and secretnames.is_also_a_word(found[1]) and not (opaque(word) or word.isdigit()):
        return False  # of a sentence
    return len(word) >= 4 and word.rpartition(".")[2] != found[1] and not _is_code(text, found, value.begin)


def _is_secret_alone(name: str, word: str) -> bool:
    """Of a line that is no deeper than the name above it, and may be about anything: made by a machine, by the look of it."""
    if not any(map(str.isdigit, word)) or not any(map(str.isalpha, word)) or plain(word):
        return False
    if "/" in word and (word[0] == "/" or word == word.lower()):  # a path
        return False
    return len(word) >= (16 if secretnames.is_also_a_word(name) else 8)


def _line_end(text: str, at: int) -> int:
    return compiled(r"[^\r\n]*").match(text, at).end()  # type: ignore[union-attr]


def _meant(text: str, found: re.Match[str], rating: int, value: str, quoted: bool) -> bool:
    """Whether the name is a secret's here: sentences and lines of source code have `token` and `key` too."""
    name, separator = found[1], found[2]
    digits = value.lstrip("-").replace(".", "", 1)
    telling = opaque(value) or (rating == SURE and digits.isdigit() and len(digits) >= 4)
    if text[found.start() - 1 : found.start()] in ("?", "&", ";"):
        return True
    if quoted:
        word = secretnames.is_also_a_word(name) and name.lower().endswith("key")  # input_ids_key="tokens"
        return (rating == SURE and not word) or separator[0] in "\"'`\\" or name.isupper() or telling
    if value.lower().strip(".,:;()[]{}") in _PROSE or not value.strip("()[]{}"):
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


def _is_code(text: str, found: re.Match[str], at: int = -1) -> bool:
    """key=int(x), token = draw(a).b[0], token: list[int]. Not what only has brackets in it: ab(1)cd, ab(cd."""
    at = found.end() if at < 0 else at
    before, separator = text[max(0, found.start() - 2) : found.start()], found[2]
    callee = compiled(r"[A-Za-z_][\w.]{0,100}(?=[(\[])").match(text, at)
    if callee is None or (found[1].isupper() and separator[0] not in "\"'") or before[-1:] in ("?", "&", ";"):
        return False
    if secretnames.is_phrase(found[1]):  # of which people make up any kind
        call = text[callee.end()] == "("
        if call and (":" in separator and _begins_line(text, found.start())):
            return False
        first = text[callee.end() + 1 : callee.end() + 2]
        if call and "." not in callee[0] and (first.isdigit() or opaque(callee[0])):
            return False
    argument = separator != "=" or before.rstrip()[-1:] in ("(", ",")  # or a statement; else a shell's word
    if not argument and not compiled(r"[A-Za-z_.]+[(\[][A-Za-z_.,=\s\"']{0,80}[)\]]").match(text, at):
        return False
    return _is_chain(text, callee.end())


def _is_chain(text: str, at: int) -> bool:
    """(...), [...] and .name up to where an expression ends, or cut off at the end of a line."""
    depth = 0
    for sign in compiled(r"[()\[\]\r\n]").finditer(text, at, at + 200):
        if sign[0] in "([":
            depth += 1
        elif sign[0] in "\r\n":
            return text[sign.start() - 1] in "(,["
        else:
            depth -= 1
            if not depth and not compiled(r"[(\[]|\.[A-Za-z_]\w{0,60}[(\[]").match(text, sign.end()):
                return compiled(r"[^\s.,;:)\]}\"'`\\]").match(text, sign.end()) is None
    return False


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
    name = rf"""\b(?:[Nn]ame|[Kk]ey){quote}?\s{{0,8}}[:=]\s{{0,8}}{quote}?([\w.\-]{{1,100}}){quote}?[\s,;]{{1,40}}{quote}?"""
    # Other fields may stand between them.
    name += rf"""(?:(?:#[^\n]{{0,200}}|\w{{1,40}}{quote}?\s?[:=]\s{{0,8}}{quote}?[^\s,;:={{}}"'\\]{{0,100}}{quote}?)[\s,;]{{1,40}}{quote}?){{0,3}}?"""
    done = 0
    first = rf"""\b([Vv]alue{quote}?[^\S\n]{{0,8}}[:=])\s{{0,8}}(?=[^\s{{\[])"""
    for found in compiled(first).finditer(text):
        if found.start() < done:
            continue
        value = valuetext.value(text, found.end(), min(len(text), found.end() + _MOST_MAYBE))
        behind = compiled(
            rf"""[\s,;]{{1,40}}{quote}?(?:[Nn]ame|[Kk]ey){quote}?\s{{0,8}}[:=]\s{{0,8}}{quote}?([\w.\-]{{1,100}})"""
        ).match(text, value.after)
        if behind and secret_value(secretnames.rate(behind[1]), text[value.begin : value.end]):
            yield value[:2]
            done = value.after
    done = 0
    for found in compiled(rf"""{name}([Vv]alue{quote}?[^\S\n]{{0,8}}[:=])\s{{0,8}}""").finditer(text):
        if secretnames.rate(found[1]) == secretnames.NO or found.start() < done:
            continue
        value = valuetext.value(text, found.end(), len(text))
        value = valuetext.below(text, found.start(2), found.end()) or value
        if secret_value(secretnames.rate(found[1]), text[value.begin : value.end]):
            alone = not value.quoted and _begins_line(text, found.start(2))
            end = max(value.end, _phrase_end(text, found[1], value.end) if alone else 0)
            yield value.begin, end
            done = max(value.after, end)
    for found in compiled(rf"""[(\[]b?{quote}([\w.\-]{{1,100}}){quote},\s{{0,8}}(?=b?\\{{0,8}}["'])""").finditer(text):
        if secretnames.rate(found[1]) != SURE or found.start() < done:
            continue
        value = valuetext.value(text, found.end(), len(text))
        if is_secret_second(found[1], text[value.begin : value.end]):
            yield value[:2]
            done = value.after


def elements(text: str) -> Iterator[Span]:
    """<password>value</password>, as XML has it."""
    if "</" not in text:
        return
    element = r"<(?:\w{1,40}:)?([\w.\-]{1,100})(?:\s[^<>]{0,200})?>\s{0,40}(?:<!\[CDATA\[)?([^<]*)(?:<!|</)"
    for found in compiled(element).finditer(text):
        if secret_value(secretnames.rate(found[1]), found[2].strip().removesuffix("]]>")):
            yield found.span(2)


# ---- command lines ----

# Flags that carry a secret under a name that does not say so. "user": NAME:SECRET.
_PROGRAMS = {
    "curl": {"-u": "user", "--user": "user", "-U": "user", "--proxy-user": "user", "-E": "user", "--cert": "user"},
    "http": {"-a": "user", "--auth": "user"}, "https": {"-a": "user", "--auth": "user"},
    "sshpass": {"-p": "value"}, "redis-cli": {"-a": "value"}, "smbclient": {"-U": "user"},
    "mysql": {"-p": "attached"}, "mysqldump": {"-p": "attached"}, "mysqladmin": {"-p": "attached"}, "mariadb": {"-p": "attached"},
    "ldapsearch": {"-w": "value"}, "ldapmodify": {"-w": "value"}, "mosquitto_pub": {"-P": "value"}, "mosquitto_sub": {"-P": "value"},
    "openssl": {"-pass": "user", "-passin": "user", "-passout": "user"}, "mongo": {"-p": "value"}, "mongosh": {"-p": "value"},
    "zip": {"-P": "value"}, "unzip": {"-P": "value"}, "az login": {"-p": "value"}, "wandb login": {"login": "key"}, "vault login": {"login": "key"},
    "docker login": {"-p": "value"}, "podman login": {"-p": "value"}, "helm login": {"-p": "value"},
}  # fmt: skip
_COMMAND_MARKS = ("--", "curl", "http", "sshpass", "redis-cli", "smbclient", "mysql", "mariadb", "ldap", "mosquitto", "docker",
                  "podman", "helm", "login", "openssl", "mongo", "zip")  # fmt: skip


def commands(text: str) -> Iterator[Span]:
    """--password VALUE, curl -u NAME:VALUE and .netrc's `login NAME password VALUE`, word by word."""
    if " " not in text.replace("\n", " ") or not holds_any(text, _COMMAND_MARKS):
        return
    words = []
    for found in compiled(r"\S+").finditer(text):
        if found[0] == "\\":  # the command goes on
            continue
        word = found[0].lstrip("\"'`([{\\")
        # A sentence about `--password`, no command with it.
        named = found[0][0] == "`" and word.rstrip(".,;:)")[-1:] == "`"
        words.append(("" if named else word.rstrip("\"'`)]},\\"), found.end() - len(word)))
    places = [place for _, place in words]
    for begin, end in word_spans(words, _PROSE):
        quote = places[bisect_right(places, begin) - 1] - 1
        several = valuetext.quoted(text, quote, min(len(text), end + _MOST_MAYBE)) if text[quote] in "\"'" else None
        yield begin, max(end, several.end) if several and several.after > several.end else end


def word_spans(words: list[tuple[str, int]], prose: frozenset[str] = frozenset()) -> Iterator[Span]:
    """`words`: each with its place. `prose`: words that are not taken for a flag's value."""
    program = ""
    previous = ["", "", ""]
    for word, place in words:
        flags = _PROGRAMS.get(program, {})
        before = previous[-1]
        if before == "password" and previous[-3] in ("login", "account", "machine"):
            yield from _flag_value("value", word, place)
        elif before in flags and not is_flag(word):
            yield from _flag_value(flags[before], word, place)
        elif program == "curl" and compiled(r"-[a-zA-Z]{1,10}u").fullmatch(before):  # curl -su NAME:SECRET
            yield from _flag_value("user", word, place)
        elif program == "curl" and word.startswith("--user="):
            yield from _flag_value("user", word[7:], place + 7)
        elif before.startswith("-") and "=" not in before and not is_flag(word) and word.lower() not in prose:
            rating = secretnames.rate(before.lstrip("-"))
            if rating == SURE or (rating == MAYBE and opaque(word)):
                yield from _flag_value("value", word, place)
        elif word[:2] in flags and len(word) > 2:
            yield from _flag_value(flags[word[:2]].replace("attached", "value"), word[2:], place + 2)
        program = _program(program, word)
        previous = [*previous[1:], word]


def is_flag(word: str) -> bool:
    """-x, --max-tokens. Not the value -Zx7f00Lk9."""
    if not word.startswith("-"):
        return False
    name = word.partition("=")[0]
    if name.startswith("--"):
        return compiled(r"--[a-z0-9]*(?:[-_.][a-z0-9]+)*|--[A-Z0-9_]+").fullmatch(name[:100]) is not None or not opaque(
            name
        )
    return not opaque(name[1:])


def _program(running: str, word: str) -> str:
    """Whose flags count behind this word."""
    name = compiled(r"""[^=/"'`(\[<>]*$""").search(word[-40:])[0]  # type: ignore[index]  # it matches nothing, too
    if name in _PROGRAMS or f"{name} login" in _PROGRAMS:
        return name
    if word == "login" and f"{running} login" in _PROGRAMS:
        return f"{running} login"
    return "" if word in ("|", "||", "&&", "&") or word.endswith(";") else running


def _flag_value(kind: str, word: str, place: int) -> Iterator[Span]:
    if (kind == "value" or (kind == "key" and opaque(word))) and not plain(word):
        yield place, place + len(word)
    elif kind == "user":
        name, colon, secret = word.partition(":" if ":" in word else "%")  # smbclient's -U NAME%SECRET
        if colon and not plain(secret):
            yield place + len(name) + 1, place + len(word)
