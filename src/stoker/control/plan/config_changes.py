"""What differs between a run's record and a new request for it, in words."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from stoker.contract.frozen import as_json
from stoker.contract.masking import mask_argv
from stoker.contract.text import escape
from stoker.control.plan.options import RunOptions
from stoker.control.plan.request import Request

_NAMED = 4
_SHOWN = 80  # characters of a value
DEFAULT = "its default"


def differences(record: Mapping[str, Any], request: Request, passing: frozenset[str]) -> str:
    """What was, and what is asked for now; empty: nothing that a record tells. `passing`: options that make no other run."""
    usual, asked = as_json(RunOptions()), as_json(request.options)
    then = {**usual, **(record.get("request") or {})}
    pairs = [
        (f"--{name.replace('_', '-')}", _option(then[name]), _option(asked[name]))
        for name in sorted({*usual} - passing)
    ]
    if record.get("script") != request.script:
        pairs.append(("program", str(record.get("script")), request.script))
    pairs += _of_program(record, request)
    lines = [f"{name}: {_shown(old)} then, {_shown(new)} now" for name, old, new in pairs if old != new]
    more = f"; and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
    return "; ".join(lines[:_NAMED]) + more


def keys_in(words: Any) -> dict[str, str]:
    """A recipe's settings, as its command line in a record has them."""
    found: dict[str, list[str]] = {}
    rest = iter(texts(words))
    for word in rest:
        name, equals, value = word.removeprefix("--").partition("=")
        found.setdefault(name, []).append(value if equals else next(rest, ""))
    return {name: shlex.join(values) if len(values) > 1 else values[0] for name, values in found.items()}


def texts(words: Any) -> list[str]:
    return [word for word in words if isinstance(word, str)] if isinstance(words, list) else []


def _of_program(record: Mapping[str, Any], request: Request) -> list[tuple[str, str, str]]:
    args = mask_argv(request.args)
    if request.identity is None:
        return [("arguments", shlex.join(texts(record.get("args"))), shlex.join(args))]
    then, now = keys_in(record.get("args")), keys_in(args)
    lasting = {*keys_in(record.get("identity")), *keys_in(mask_argv(request.identity))}
    return [(name, then.get(name, DEFAULT), now.get(name, DEFAULT)) for name in sorted(lasting)]


def _option(value: Any) -> str:
    if isinstance(value, list):
        return shlex.join(mask_argv(map(str, value)))
    return "not given" if value is None else str(value)


def _shown(value: str) -> str:
    return escape(value, _SHOWN) or "empty"
