"""Reads a config file: YAML, JSON, or JSON with // and /* */ comments."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from stoker.contract.errors import EX_DATAERR, EX_NOINPUT, Refusal
from stoker.contract.options import suggest
from stoker.contract.safe_io import read_text
from stoker.contract.text import parse_json
from stoker.contract.yaml_text import YamlError, parse_yaml

_NAMED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "named")
# A string or comment that does not end goes to the end of the text: looking for each of them again from the next sign
# on would be quadratic.
_STRING = r'"(?:\\.|[^"\\])*(?:"|\Z)'
_COMMENT = re.compile(_STRING + r"|//[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
_LAST_COMMA = re.compile(_STRING + r"|,(?=\s*[}\]])", re.DOTALL)


def shipped() -> list[str]:
    """Names of the configs that come with Stoker."""
    return sorted(name.removesuffix(".yaml") for name in os.listdir(_NAMED) if name.endswith(".yaml"))


def load(path: str) -> dict[str, Any]:
    """A file, or the name of a config that comes with Stoker."""
    where = f"config file {path}"
    if path in shipped():  # a file of that name, which anybody may have put here, is ./NAME
        path = os.path.join(_NAMED, f"{path}.yaml")
    try:
        text = read_text(path)
    except FileNotFoundError as problem:
        names = ", ".join(shipped())
        raise Refusal(
            f"{where} does not exist{suggest(path, shipped())}; shipped settings: {names}", EX_NOINPUT
        ) from problem
    except OSError as problem:
        raise Refusal(f"{where} can't be read: {problem.strerror}", EX_NOINPUT) from problem
    except ValueError as problem:  # not UTF-8, or a path with a NUL in it
        raise Refusal(f"{where} is not text: {problem}", EX_DATAERR) from problem
    data = _parse(text, path, where)
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise Refusal(f"{where} holds a {type(data).__name__}, not keys and values", EX_DATAERR)
    bad = _no_name(data)
    if bad is not None:
        raise Refusal(
            f"{where}: {bad!r} holds a NUL character or half of a surrogate pair, which no path and no name has",
            EX_DATAERR,
        )
    return data


def _no_name(value: Any) -> str | None:
    """Return a text in `value` that no path and no name can hold, or None."""
    if isinstance(value, str):
        return value if any(sign == "\0" or "\ud800" <= sign <= "\udfff" for sign in value) else None
    inside = value if isinstance(value, list) else ()
    if isinstance(value, dict):
        inside = [*value.keys(), *value.values()]
    return next((bad for one in inside if (bad := _no_name(one)) is not None), None)


def _parse(text: str, path: str, where: str) -> Any:
    as_json = path.endswith((".json", ".jsonc"))
    if as_json or text.lstrip("\ufeff \t\r\n").startswith(("{", "//", "/*")):
        try:
            return parse_json(without_comments(text.removeprefix("\ufeff")), unique=True)
        except ValueError as problem:
            if as_json:
                at = f": {problem}"
                if isinstance(problem, json.JSONDecodeError):
                    at = f" at line {problem.lineno}, column {problem.colno}: {problem.msg}"
                raise Refusal(f"{where} is not JSON{at}", EX_DATAERR) from problem
            # else YAML, which has {a: 1} too
    try:
        return parse_yaml(text)
    except YamlError as problem:
        raise Refusal(f"{where} is not YAML{problem.where}: {problem.problem}", EX_DATAERR) from problem


def without_comments(text: str) -> str:
    """Blanks in their place, so that an error's line and column stay true. Strings are left alone."""

    def blank(match: re.Match[str]) -> str:
        endless = match[0].startswith("/*") and (len(match[0]) < 4 or not match[0].endswith("*/"))
        return match[0] if match[0].startswith('"') or endless else re.sub(r"[^\n]", " ", match[0])

    return _LAST_COMMA.sub(blank, _COMMENT.sub(blank, text))
