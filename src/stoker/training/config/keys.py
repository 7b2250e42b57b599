"""Every key of the configuration by its dotted name: how its value is read from text, YAML or JSON, and written back."""

from __future__ import annotations

import json
from collections.abc import Collection
from decimal import Decimal
from typing import Any

from stoker.contract import options
from stoker.contract.frozen import Option, frozen, options_of
from stoker.training.config.schema import SECTIONS, Config


@frozen
class Key:
    section: str
    name: str
    spec: Option
    kind: str  # bool, int, float or str; of many: tuple[str, ...]

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def default(self) -> Any:
        return self.spec.default

    def read(self, value: Any) -> Any:
        """Raises ValueError, in words, for what can't be this key's value."""
        return options.read_setting(self.spec, self.kind, value)

    def text(self, value: Any) -> str:
        """What `read` reads back as this value; one item of a key that has many."""
        if self.dotted == "batch.micro" and value == 0:
            return "auto"
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, float):
            return format(Decimal(repr(value)), "f") if self.spec.parse else repr(value)  # a duration has no exponent
        return str(value)


KEYS: dict[str, Key] = {
    f"{section}.{name}": Key(section, name, spec, str(part.__annotations__[name]))
    for section, part in SECTIONS.items()
    for name, spec in options_of(part).items()
}


LEAVES: dict[str, tuple[str, ...]] = {}
for _key in KEYS.values():
    # `--gpus` is an option of `stoker run`; `--debug` is the preset of that name.
    if _key.section != "needs" and _key.name != "debug":
        LEAVES[_key.name] = (*LEAVES.get(_key.name, ()), _key.dotted)
# Names that say which key they mean without their section.
BARE = {name: dotted[0] for name, dotted in LEAVES.items() if len(dotted) == 1}
DEFAULTS = {dotted: key.default for dotted, key in KEYS.items()}


def values_of(config: Config) -> dict[str, Any]:
    return {dotted: getattr(getattr(config, key.section), key.name) for dotted, key in KEYS.items()}


def config_of(preset: str, values: dict[str, Any]) -> Config:
    parts = {
        section: part(**{name: values[f"{section}.{name}"] for name in options_of(part)})
        for section, part in SECTIONS.items()
    }
    return Config(preset=preset, **parts)


def as_yaml(config: Config, keys: Collection[str] = ()) -> str:
    """All of it, which `--config` reads back as exactly this configuration, or these keys. Without the library: the ranks write it."""
    lines = [f"preset: {config.preset}"]
    section = ""
    for name, value in values_of(config).items():
        key = KEYS[name]
        if keys and name not in keys:
            continue
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
