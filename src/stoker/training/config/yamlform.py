"""A configuration as YAML, without the library: the ranks write it, and the generated docs are made of it."""

from __future__ import annotations

import json
from typing import Any

from stoker.training.config.keys import KEYS, values_of
from stoker.training.config.schema import Config


def as_yaml(config: Config) -> str:
    """All of it; `--config` reads it back as exactly this configuration."""
    lines = [f"preset: {config.preset}"]
    section = ""
    for name, value in values_of(config).items():
        key = KEYS[name]
        if key.section != section:
            section = key.section
            lines.append(f"{section}:")
        lines.append(f"  {key.name}: {scalar(name, value)}")
    return "\n".join(lines) + "\n"


def scalar(name: str, value: Any) -> str:
    """One key's value."""
    key = KEYS[name]
    if isinstance(value, tuple):
        return "[" + ", ".join(_quoted(item) for item in value) + "]"
    if isinstance(value, str):
        return _quoted(value) if _needs_quotes(value) else value
    text = key.text(value)
    mantissa, e, exponent = text.partition("e")
    if key.kind == "float" and e and "." not in mantissa:
        return f"{mantissa}.0e{exponent}"  # YAML takes 1e-05 for a text
    return text


def _needs_quotes(text: str) -> bool:
    """A plain word that YAML reads as itself: letters first, and none of its words for true, false and null."""
    plain = text.isascii() and text.isalnum() and text[:1].isalpha()
    return not plain or text.lower() in ["true", "false", "yes", "no", "on", "off", "null", "y", "n"]


def _quoted(text: str) -> str:
    """As JSON has it; what can't be printed in the form YAML reads."""
    return "".join(
        char if char.isprintable() else f"\\U{ord(char):08x}" for char in json.dumps(text, ensure_ascii=False)
    )
