"""Every key of the configuration by its dotted name: how its value is read from text, YAML or JSON, and written back."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from stoker.contract import settings
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
        return settings.read(self.spec, self.kind, value)

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
