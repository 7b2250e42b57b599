"""The `env:` block of a hosts file, replaced as text: comments, order and quoting of the rest stay as their author
wrote them.
"""

from __future__ import annotations

import json
import os
import re

from stoker.contract.names import EX_CANTCREAT, EX_CONFIG, Refusal
from stoker.contract.untrusted import parse_json, read_text
from stoker.contract.wholefile import WholeFile
from stoker.contract.yamltext import NotYaml, parse_yaml

_NOTE = "measured by `stoker cluster check --tune`"
# From `env:` at the start of a line to the next line that begins with something else than a space or a comment that
# belongs to the block.
_BLOCK = re.compile(r"^env:.*\n?(?:(?:[ \t]+.*|[ \t]*)(?:\n|\Z))*", re.MULTILINE)


def with_env(text: str, env: dict[str, str]) -> str:
    """The file's text with this and no other env; without the block where env is empty."""
    before = parse_yaml(text) or {}
    try:
        parse_json(text)
        return (
            json.dumps(
                {**{key: value for key, value in before.items() if key != "env"}, **({"env": env} if env else {})},
                indent=1,
            )
            + "\n"
        )
    except ValueError:
        pass  # not JSON: YAML, with comments worth keeping
    block = (
        f"env:   # {_NOTE}\n" + "".join(f"  {name}: {json.dumps(value)}\n" for name, value in env.items())
        if env
        else ""
    )
    found = _BLOCK.search(text)
    if found:
        blank = "\n" if found[0].endswith("\n\n") and block else ""
        after = text[: found.start()] + block + blank + text[found.end() :]
    else:
        after = text + ("" if text.endswith("\n") or not text else "\n") + block
    wanted = {**{key: value for key, value in before.items() if key != "env"}, **({"env": env} if env else {})}
    try:
        right = (parse_yaml(after) or {}) == wanted
    except NotYaml:  # a file in one pair of braces
        right = False
    if not right:
        raise ValueError("its env: can't be replaced without touching the rest")
    return after


def keep(path: str, env: dict[str, str]) -> None:
    """Writes it, whole or not at all."""
    try:
        changed = with_env(read_text(path), env)
        with WholeFile(path) as file:
            file.write(changed.encode())
            os.fchmod(file.fileno(), os.stat(path).st_mode & 0o7777)
    except ValueError as problem:
        lines = ", ".join(f"{name}: {value}" for name, value in env.items())
        raise Refusal(f"{path}: {problem}; write it yourself: env: {{{lines}}}", EX_CONFIG) from problem
    except OSError as problem:
        raise Refusal(f"{path} can't be written: {problem.strerror}", EX_CANTCREAT) from problem
