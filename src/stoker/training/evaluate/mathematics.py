"""Do two mathematical answers have the same value? No torch, no algebra system: exact fractions, and text behind them.

½ = 0.5 = \\frac{1}{2} = 50\\%; \\sqrt{8} = 2\\sqrt{2} is not seen: what has no rational value is compared as text, without
what only changes its looks. Rather a right answer is called wrong than a wrong one right.
"""

from __future__ import annotations

import re
from fractions import Fraction

from stoker.training.evaluate.marking import first_line, marked_part, without_thousands

LONGEST = 400  # characters of a value: a longer one is compared as text
_DIGITS, _POWER, _DEPTH = 60, 64, 40
_SPACES = re.compile(r"\\[,;:! ]|~|\s+")
_LOOKS = re.compile(r"\\(?:left|right|displaystyle|limits|mathrm|textbf|mathbf|big|Big)(?![A-Za-z])|\\[()\[\]]|\$")
_UNIT = re.compile(r"\\(?:text|mbox|textrm)\{[^{}]*\}(?:\^\{?\d\}?)?|\^?\{?\\circ\}?|°")
_SHORT_FRACTION = re.compile(r"\\frac(\d)(\d)")
_BRACED = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
_FRACTION = re.compile(r"\\frac" + _BRACED + _BRACED)
_MIXED = re.compile(r"^(-?\d+)\(\((\d+)\)/\((\d+)\)\)$")
_NAMED = re.compile(r"^[A-Za-z](?:\([A-Za-z]\))?(?:=|\\in)")
_OPERATORS = {
    "\\cdot": "*",
    "\\times": "*",
    "\\div": "/",
    "×": "*",
    "÷": "/",
    "−": "-",
    "–": "-",
    "**": "^",
    "½": "1/2",
}
_TOKEN = re.compile(r"(\d+(?:\.\d*)?|\.\d+)|([-+*/^()])", re.ASCII)


def same_value(completion: str, answer: str, *, cut: bool = False) -> bool:
    """The completion's stated value (in \\boxed{}, behind a mark, or its last line) is the answer's."""
    part = marked_part(completion)
    if part is None and cut:
        return False  # the end is missing, and with it the value
    lines = [line for line in completion.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    said = plain(last if part is None else part)
    expected = marked_part(answer)
    wanted = plain(answer if expected is None else expected)
    if not said or not wanted:
        return False
    if said == wanted:
        return True
    ours, theirs = _items(said), _items(wanted)
    if ours is None or theirs is None:
        return _value(said) is not None and _value(said) == _value(wanted)
    return (
        (ours[0], ours[2]) == (theirs[0], theirs[2])
        and len(ours[1]) == len(theirs[1])
        and all(one == other or (_value(one) is not None and _value(one) == _value(other)) for one, other in zip(ours[1], theirs[1], strict=True))
    )  # fmt: skip


def plain(text: str) -> str:
    """One line without spaces, dollars and other looks; fractions as (a)/(b)."""
    text = first_line(text)[: LONGEST + 1].strip().rstrip(".,;!?").strip("*`\"' ")
    text = without_thousands(text)
    text = _UNIT.sub("", _LOOKS.sub("", text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")))
    text = _SPACES.sub("", text).replace("\\%", "%")
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    for _ in range(8):
        made = _FRACTION.sub(r"((\1)/(\2))", text)
        if made == text:
            break
        text = made
    for sign, ours in _OPERATORS.items():
        text = text.replace(sign, ours)
    text = _NAMED.sub("", text)
    mixed = _MIXED.match(text)
    return f"{mixed[1]}{'-' if mixed[1].startswith('-') else '+'}({mixed[2]}/{mixed[3]})" if mixed else text


def _items(text: str) -> tuple[str, list[str], str] | None:
    """Of a pair, an interval or a list: its brackets and what is between the commas; None: a single value."""
    opened, closed = text[:1], text[-1:]
    inner = text[1:-1] if opened in "([{" and closed in ")]}" else text
    bare = inner == text
    depth, items, item = 0, [], ""
    for sign in inner:
        depth += (sign in "([{") - (sign in ")]}")
        if depth < 0:
            return None
        if sign == "," and depth == 0:
            items.append(item)
            item = ""
        else:
            item += sign
    return None if not items else ("" if bare else opened, [*items, item], "" if bare else closed)


def _value(text: str) -> Fraction | None:
    """Of an expression of numbers; None: it is more than that."""
    percent = text.endswith("%")
    text = text.removesuffix("%")
    if len(text) > LONGEST:
        return None
    tokens: list[str] = []
    place = 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None or len(found[0]) > _DIGITS:
            return None
        tokens.append(found[0])
        place = found.end()
    try:
        value, rest = _sum(tokens, _DEPTH)
    except (ValueError, ZeroDivisionError, IndexError):
        return None
    if rest:
        return None
    return value / 100 if percent else value


def _sum(tokens: list[str], depth: int) -> tuple[Fraction, list[str]]:
    value, tokens = _product(tokens, depth)
    while tokens and tokens[0] in "+-":
        sign = tokens[0]
        other, tokens = _product(tokens[1:], depth)
        value = value + other if sign == "+" else value - other
    return value, tokens


def _product(tokens: list[str], depth: int) -> tuple[Fraction, list[str]]:
    if tokens[0] in "+-":
        value, rest = _product(tokens[1:], depth - 1) if depth else _refuse()
        return (value if tokens[0] == "+" else -value), rest
    value, tokens = _power(tokens, depth)
    while tokens and tokens[0] in "*/":
        sign = tokens[0]
        other, tokens = _power(tokens[1:], depth)
        value = value * other if sign == "*" else value / other
    return value, tokens


def _power(tokens: list[str], depth: int) -> tuple[Fraction, list[str]]:
    value, tokens = _atom(tokens, depth)
    if tokens and tokens[0] == "^":
        power, tokens = _atom(tokens[1:], depth)
        if power.denominator != 1 or abs(power) > _POWER or max(abs(value.numerator), value.denominator) > 10**9:
            raise ValueError("too large")
        value = value ** int(power)
    return value, tokens


def _atom(tokens: list[str], depth: int) -> tuple[Fraction, list[str]]:
    if tokens[0] == "(":
        value, tokens = _sum(tokens[1:], depth - 1) if depth else _refuse()
        if tokens[0] != ")":
            raise ValueError("not closed")
        return value, tokens[1:]
    if tokens[0] == "-":
        value, tokens = _atom(tokens[1:], depth - 1) if depth else _refuse()
        return -value, tokens
    return Fraction(tokens[0].rstrip(".") if tokens[0] != "." else "0"), tokens[1:]


def _refuse() -> tuple[Fraction, list[str]]:
    raise ValueError("nested too deeply")
