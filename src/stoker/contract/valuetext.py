"""One value as texts write it: in quotes of any kind and depth, bare, several in brackets, on the lines below its name.

Texts may be hostile and long: whatever is read moves `after`, from where a caller goes on, or has a bounded length.
"""

from __future__ import annotations

import re
from typing import NamedTuple

Span = tuple[int, int]


class Value(NamedTuple):
    begin: int
    end: int
    after: int  # behind its closing quote; the same as `end` where there is none
    quoted: bool


_patterns: dict[str, re.Pattern[str]] = {}


def compiled(pattern: str) -> re.Pattern[str]:
    """Once, and only where a text needs it: a launch needs few."""
    made = _patterns.get(pattern)
    if made is None:
        made = _patterns[pattern] = re.compile(pattern)
    return made


# A quote within a shell's quotes: 'it'"'"'s' and 'it'\''s'. Quoted again it has more of the same.
_S, _D = r"\\{0,8}'", r"""\\{0,8}\""""
_SHELL = rf"""(?:{_S}{_D}){{2,64}}{_S}|(?:{_D}{_S}){{2,64}}{_D}|(?<!\\)(?P<outer>\\{{0,8}})'(?P=outer)\\{{1,8}}'(?P=outer)'"""
_OPENING = rf"""(?:[bBrRuUfF]{{1,2}}|\$)?(?:(?P<shell>{_SHELL})|(?P<escape>\\{{0,8}})(?P<quote>["'`“‘«]))"""
_CLOSING = {"“": "”", "‘": "’", "«": "»"}
_MOST_MEMBERS = 4000  # characters in braces
_MESSAGE = 200  # characters of a message that stands before a name
_LATER = 2000  # characters behind the line's end in which a quote may still be closed


def value(text: str, at: int, limit: int) -> Value:
    return quoted(text, at, limit) or bare(text, at, limit)


def quoted(text: str, at: int, limit: int) -> Value | None:
    """To the same quote, escaped as often: one within is escaped once more, doubled or in a shell's quotes.

    One that is closed on no line near: to the line's end.
    """
    opening = compiled(_OPENING).match(text, at, limit)
    if opening is None:
        return None
    if opening["shell"]:
        return _shell_quoted(text, opening["shell"], opening.end(), limit)
    escape, mark = opening["escape"], _CLOSING.get(opening["quote"], opening["quote"])
    begin, depth = opening.end(), len(escape)
    three = 3 * (escape + mark)
    if text.startswith(three, opening.start("escape")):  # Python's, over several lines
        begin = opening.start("escape") + len(three)
        end = text.find(three, begin, limit)
        if end >= 0:
            return Value(begin, end, end + len(three), True)
    place, line_end, most = begin, -1, limit
    # The lookbehind: a run of backslashes is read once.
    later = rf"(?P<shell>{_SHELL})|(?<!\\)(?P<slashes>\\*){mark}"
    marks = compiled(rf"{later}|\n")
    while found := marks.search(text, place, most):
        place = found.end()
        if found["shell"]:
            continue
        if found["slashes"] is None:
            line_end, most, marks = found.start(), min(limit, found.end() + _LATER), compiled(later)
            if text.find(mark, place, most) < 0:
                break
            continue
        # n backslashes before the opening quote: those of the value come in units of 2n + 2, unless a repr escaped the
        # backslash and not the quote.
        more = len(found["slashes"]) - depth
        if more < 0 or more % (2 * depth + 2):
            continue
        if more and not compiled(r"\s{0,40}(?:[,)\]}]|$)").match(text, place, limit):
            continue
        end = place - 1 - depth
        if line_end >= 0:
            if text[end - 1] in " \t([{=,:" or not compiled(r"[\s,;)\]}]|$").match(text, place, limit):
                break  # another's opening quote
            return Value(begin, end, place, True)
        if end == begin or not text.startswith(escape + mark, place):
            return Value(begin, end, place, True)
        place += depth + 1  # doubled
    end = line_end if line_end >= 0 else limit
    return Value(begin, end, end, True)


def _shell_quoted(text: str, quote: str, begin: int, limit: int) -> Value:
    """To the same sequence, on the same line."""
    for found in compiled(rf"{_SHELL}|\n").finditer(text, begin, limit):
        if found[0] in (quote, "\n"):
            return Value(begin, found.start(), found.end() - (found[0] == "\n"), True)
    return Value(begin, limit, limit, True)


_QUOTE_WITHIN = r"""(?<![\w\\])["'`]|["'`](?!\w)"""  # it's: no quote
_BARE_END = (
    rf"""(?<!\\) |[^\S ]|{_QUOTE_WITHIN}|(?<!\w)\\{{1,8}}["']|\\{{1,8}}(?:["'](?!\w)|[nrt])|[,;&](?=\s|$|["']|[\w.\-]{{1,64}}\s?[=:])"""
    r"""|[)\]}](?=[\s,;.:)\]}"'`\\]|$)"""
)
LINE_END = rf"""[\r\n]|(?<!\w)\\|\\(?!\\{{0,7}}["']\w)|{_QUOTE_WITHIN}"""


def bare(text: str, at: int, limit: int, ends: str = _BARE_END) -> Value:
    """To what ends a word (or, with LINE_END, a line). Brackets within it and what is quoted behind a = belong to it."""
    place, counted, opened = at, at, 0
    while found := compiled(ends).search(text, place, limit):
        end = found.start()
        if text[end] in ")]}":
            for sign in text[counted:end]:
                opened = max(0, opened + (sign in "([{") - (sign in ")]}"))
            place = counted = end + 1
            if opened:
                opened -= 1
                continue
        elif text[end] in "\"'`\\" and end > at and text[end - 1] in "=:":
            part = quoted(text, end, limit)
            if part:
                place = part.after
                continue
        return Value(at, end, end, False)
    return Value(at, limit, limit, False)


def listed(text: str, at: int, limit: int) -> tuple[list[Value], int]:
    """What is in the brackets that begin here, and where they end: or where it is no list any more."""
    items: list[Value] = []
    place, depth = at, 0
    while place < limit:
        sign = text[place]
        if sign in "[(":
            depth, place = depth + 1, place + 1
        elif sign in "])":
            depth, place = depth - 1, place + 1
            if not depth:
                break
        elif sign in ", \t\r\n":
            place = compiled(r"[,\s]+").match(text, place, limit).end()  # type: ignore[union-attr]
        else:
            item = quoted(text, place, limit) or _bare_item(text, place, limit, depth)
            if item is None:
                break
            items.append(item)
            place = item.after
            closed = item.after > item.end or not item.quoted
            if not closed or not compiled(r"""\s*(?:[,\])]|\\{0,8}["']|$)""").match(text, place, limit):
                break
    return items, place


def _bare_item(text: str, at: int, limit: int, depth: int) -> Value | None:
    signs = r"""[^,\[\]{}"'`\r\n\\]+""" if depth == 1 else r"""[^,\[\](){}"'`\r\n\\]+"""  # within a tuple ) ends it
    found = compiled(signs).match(text, at, limit)
    if found is None or text[at] == "&" or text[found.end() : found.end() + 1] in ("(", "[", "{"):
        return None
    if found[0].endswith("("):  # a call, of source code
        return None
    return Value(at, at + len(found[0].rstrip()), found.end(), False)


def before(text: str, at: int) -> tuple[str, int]:
    """What stands before a place on its line (the end of it, where it is long), and how deep the line begins: a message's
    lines below begin anew.
    """
    begin = text.rfind("\n", max(0, at - _MESSAGE), at) + 1
    line = text[begin or max(0, at - _MESSAGE) : at]
    told = line.endswith(": ") and line.strip(" \t-")
    return line[-40:], 0 if told else min(40, len(line) - len(line.lstrip(" \t")))


def below(text: str, name_at: int, at: int, behind_equals: bool = False) -> Value | None:
    """What YAML writes on the lines under a name: a block behind | or >, a list; a value alone, which INI has too."""
    line, indent = before(text, name_at)
    head = compiled(
        r"(?:[!&][\w!./:\-]{0,80}[ \t]{1,8}){0,2}([|>][+\-\d]{0,2})?[ \t]{0,40}(?:#[^\r\n]{0,200})?\r?(?=\n)"
    ).match(text, at)
    if head is None:
        return None
    empty = r"[ \t]{0,40}\r?(?=\n)"
    if head[1]:
        rows = rf"(?:\n(?:{empty}|[ \t]{{{indent + 1}}}[^\n]*))+"
        return _rows(text, rows, head.end())
    more = rf"(?:\n[ \t]{{{indent + 2}}}[^\n]*)*"  # lines of an item
    least = indent if indent > 1 else 0  # one blank stands for a colour
    if compiled(rf"(?:\n{empty})*\n[ \t]{{{least},80}}- ").match(text, head.end()):
        if behind_equals or not is_entry(line):  # asked before the list is read: names before it may be many
            return None
        return _rows(text, rf"(?:\n{empty})*(?:\n(?:{empty}|[ \t]{{{least},80}}- [^\n]*{more}))+", head.end())
    # JSON's lines begin where they like, behind a string's or element's first word.
    deeper = 0 if line.strip(" \t-") and line[-1] in "\"'>=" and not behind_equals else indent + 1
    found = compiled(rf"(?:\n{empty}){{0,8}}\n[ \t]{{{deeper},80}}(?=[^\s#])").match(text, head.end())
    if found is None or compiled(r"""- |(["']?)[\w.\-]{1,100}\1\s?:(?:\s|$)""").match(text, found.end()):
        return None
    return value(text, found.end(), len(text))


def is_entry(before: str) -> bool:
    """Whether a name begins its line, a string, or what a message tells: `ValueError: bad settings: NAME:`."""
    if not before.strip(" \t-") or before[-1] in "\"'>=" or before.endswith(": "):
        return True
    return compiled(r"""(?:^|[\sb(\[=,])["'] $""").search(before) is not None  # a colour


def alone(text: str, at: int) -> Span | None:
    """The one word of the next line, where nothing more stands on this one. Calls, entries and names with dots are no values."""
    sign = r"""[^\s.<>(){}\[\]"'`=:,;|\\]"""
    behind = r"""[ \t]{0,40}(?:\r?\n|\\{0,8}["']|$)"""
    found = compiled(rf"""[ \t]{{0,40}}\r?\n[ \t]{{0,80}}(?:\\{{0,8}}["'])?({sign}{{8,400}}={{0,2}}){behind}""").match(
        text, at
    )
    return found.span(1) if found else None


def more_lines(text: str, name_at: int, at: int) -> int:
    """The end of YAML's plain value that goes on below: lines that are deeper than its name, and no entries."""
    line = text[max(0, name_at - 40) : name_at].rpartition("\n")[2]
    if line.strip(" \t-"):
        return at
    entry = r"""(?!- |["']?[\w.\-]{1,100}["']?\s?[:=]|#)"""
    found = compiled(rf"[^\S\n]*(?:\n[ \t]{{{len(line) + 1},80}}{entry}[^\s][^\n]*)+").match(text, at)
    return at + len(found[0].rstrip()) if found else at


def joined(text: str, value: Value, limit: int) -> Value:
    """With the strings that source code joins to it: 'one' + 'two', and one on the next line without a comma."""
    while value.after > value.end:
        between = compiled(r"""\s{0,4}\+\s{0,80}(?=[bfru]?\\{0,8}["'])|[ \t]{0,8}\r?\n[ \t]{0,200}(?=["'])""").match(
            text, value.after
        )
        more = quoted(text, between.end(), limit) if between else None
        if more is None or more.after == more.end or compiled(r"\s?[:=]").match(text, more.after):
            break
        value = Value(value.begin, more.end, more.after, True)
    return value


def members(text: str, name_at: int, at: int) -> Span | None:
    """Where the entries of a mapping under a name stand: in the braces that begin here, or on YAML's deeper lines."""
    if text.startswith("{", at):
        place, depth, limit = at, 0, min(len(text), at + _MOST_MEMBERS)
        while found := compiled(r"""[{}]|\\{0,8}["']""").search(text, place, limit):
            place = found.end()
            if found[0] in "{}":
                depth += 1 if found[0] == "{" else -1
                if not depth:
                    return at + 1, found.start()
            else:
                inner = quoted(text, found.start(), limit)
                place = max(place, inner.after if inner else place)
        return at + 1, limit
    line, indent = before(text, name_at)
    head = compiled(r"""["']?[ \t]{0,40}(?:#[^\r\n]{0,200})?\r?(?=\n)""").match(text, at)
    if head is None or not is_entry(line):
        return None
    deeper = indent + 1 if line.strip(" \t-") else len(line) + 1
    rows = compiled(rf"(?:\n(?:[ \t]{{0,40}}\r?(?=\n)|[ \t]{{{deeper}}}[^\n]*))+").match(text, head.end())
    return rows.span() if rows else None


def _rows(text: str, rows: str, at: int) -> Value | None:
    found = compiled(rows).match(text, at)
    if found is None or not found[0].strip():
        return None
    first = compiled(r"\s*(?:- )?").match(text, at)
    return Value(first.end() if first else at, at + len(found[0].rstrip()), found.end(), False)
