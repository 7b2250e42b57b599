"""Every key of the configuration by its dotted name: how its value is read from text, YAML or JSON, and written back."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from stoker.contract.shape import Option, options_of, shape
from stoker.training.config.schema import SECTIONS, Config


@shape
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
        if self.spec.many:
            items = value if isinstance(value, (list, tuple)) else [value]
            if any(isinstance(item, (dict, list, tuple, bool)) or item is None for item in items):
                raise ValueError(f"{value!r} is not a list of texts")
            return tuple(str(item) for item in items)
        if isinstance(value, (dict, list, tuple)):
            raise ValueError(f"{value!r} is not a single value")
        if self.kind == "bool":
            return truth(value)
        text = str(value)
        if isinstance(value, bool):  # YAML reads a bare on or off so
            text = ("on" if value else "off") if self.spec.choices else str(value).lower()
            if self.kind == "str" and not self.spec.choices:
                raise ValueError(f"{text} is not a text here; in quotes it is one")
        found = self._number_or_text(text)
        if self.spec.choices and found not in self.spec.choices:
            raise ValueError(f"{text!r} is not one of {', '.join(self.spec.choices)}")
        return found

    def _number_or_text(self, text: str) -> Any:
        try:
            if self.spec.parse:
                return self.spec.parse(text)
            if self.kind == "int":
                return whole(text)
            return float(text) if self.kind == "float" else text
        except ValueError as problem:
            said = str(problem)
            if said.startswith(("invalid literal", "could not convert")):  # Python's own words
                said = f"{text!r} is not a {'whole ' if self.kind == 'int' else ''}number" + (
                    " or auto" if self.dotted == "batch.micro" else ""
                )
            raise ValueError(said) from problem

    def text(self, value: Any) -> str:
        """What `read` reads back as this value; one item of a key that has many."""
        if self.dotted == "batch.micro" and value == 0:
            return "auto"
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, float):
            return format(Decimal(repr(value)), "f") if self.spec.parse else repr(value)  # a duration has no exponent
        return str(value)


def truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("1", "true", "yes", "on"):
        return True
    if str(value).lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{value!r} is not true or false")


def whole(text: str) -> int:
    """Also 1e6 and 1000000.0: a number of tokens is written like that."""
    try:
        return int(text)
    except ValueError:
        value = float(text)
        if value != value or value in (float("inf"), float("-inf")) or value != int(value):
            raise ValueError(f"{text!r} is not a whole number") from None
        return int(value)


KEYS: dict[str, Key] = {
    f"{section}.{name}": Key(section, name, spec, str(part.__annotations__[name]))
    for section, part in SECTIONS.items()
    for name, spec in options_of(part).items()
}


def _leaves() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for key in KEYS.values():
        # `--gpus` is an option of `stoker run`; `--debug` is the preset of that name.
        if key.section != "needs" and key.name != "debug":
            found[key.name] = (*found.get(key.name, ()), key.dotted)
    return found


LEAVES = _leaves()
BARE = {
    name: dotted[0] for name, dotted in LEAVES.items() if len(dotted) == 1
}  # names that say which key they mean without their section
DEFAULTS = {dotted: key.default for dotted, key in KEYS.items()}


def values_of(config: Config) -> dict[str, Any]:
    return {dotted: getattr(getattr(config, key.section), key.name) for dotted, key in KEYS.items()}


def config_of(preset: str, values: dict[str, Any]) -> Config:
    parts = {
        section: part(**{name: values[f"{section}.{name}"] for name in options_of(part)})
        for section, part in SECTIONS.items()
    }
    return Config(preset=preset, **parts)
