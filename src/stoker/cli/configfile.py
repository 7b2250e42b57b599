"""Reads a YAML or JSON file of settings."""

from __future__ import annotations

from typing import Any

from stoker.contract.names import EX_DATAERR, EX_NOINPUT, Refusal
from stoker.contract.settings import from_mapping


def read(settings: type[Any], path: str) -> dict[str, Any]:
    where = f"config file {path}"
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError as problem:
        raise Refusal(f"{where} is not there", EX_NOINPUT) from problem
    except OSError as problem:
        raise Refusal(f"{where} can't be read: {problem.strerror}", EX_NOINPUT) from problem
    except UnicodeDecodeError as problem:
        raise Refusal(f"{where} is not text: {problem}", EX_DATAERR) from problem
    import yaml  # 25 ms: only a launch with --config pays for it

    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        at = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise Refusal(f"{where} is not YAML{at}: {getattr(problem, 'problem', None) or problem}", EX_DATAERR) from problem
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise Refusal(f"{where} holds a {type(data).__name__}, not keys and values", EX_DATAERR)
    return from_mapping(settings, data, where)
