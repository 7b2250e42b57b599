"""Reads a config file: YAML, JSON, or JSON with // and /* */ comments."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from stoker.contract.names import EX_DATAERR, EX_NOINPUT, Refusal
from stoker.contract.settings import suggest

_NAMED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "named")
_STRING = r'"(?:\\.|[^"\\])*"'
_COMMENT = re.compile(_STRING + r"|//[^\n]*|/\*.*?\*/", re.DOTALL)
_LAST_COMMA = re.compile(_STRING + r"|,(?=\s*[}\]])", re.DOTALL)


def shipped() -> list[str]:
    """Names of the configs that come with Stoker."""
    return sorted(name.removesuffix(".yaml") for name in os.listdir(_NAMED) if name.endswith(".yaml"))


def load(path: str) -> dict[str, Any]:
    """A file, or the name of a config that comes with Stoker."""
    where = f"config file {path}"
    if path in shipped() and not os.path.exists(path):
        path = os.path.join(_NAMED, f"{path}.yaml")
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError as problem:
        names = ", ".join(shipped())
        raise Refusal(f"{where} is not there{suggest(path, shipped())}; by name there are {names}", EX_NOINPUT) from problem
    except OSError as problem:
        raise Refusal(f"{where} can't be read: {problem.strerror}", EX_NOINPUT) from problem
    except UnicodeDecodeError as problem:
        raise Refusal(f"{where} is not text: {problem}", EX_DATAERR) from problem
    data = _parse(text, path, where)
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise Refusal(f"{where} holds a {type(data).__name__}, not keys and values", EX_DATAERR)
    return data


def _parse(text: str, path: str, where: str) -> Any:
    if path.endswith((".json", ".jsonc")) or text.lstrip().startswith(("{", "//", "/*")):
        try:
            return json.loads(without_comments(text.removeprefix("\ufeff")))
        except ValueError as problem:
            if path.endswith((".json", ".jsonc")):
                at = f" at line {problem.lineno}, column {problem.colno}: {problem.msg}" if isinstance(problem, json.JSONDecodeError) else f": {problem}"
                raise Refusal(f"{where} is not JSON{at}", EX_DATAERR) from problem
            # else YAML, which has {a: 1} too
    import yaml  # 25 ms: only a launch with --config pays for it

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        at = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise Refusal(f"{where} is not YAML{at}: {getattr(problem, 'problem', None) or problem}", EX_DATAERR) from problem


def without_comments(text: str) -> str:
    """Blanks in their place, so that an error's line and column stay true. Strings are left alone: "https://x" is no comment."""

    def blank(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith('"') else re.sub(r"[^\n]", " ", match[0])

    return _LAST_COMMA.sub(blank, _COMMENT.sub(blank, text))
