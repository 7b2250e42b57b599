"""The model families, one file each. A family registers itself by being in this folder, or through `register`.

No torch here: the launcher reads config.json before a rank starts. docs/families.md says how to add one.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from importlib import import_module

from stoker.contract.errors import EX_CONFIG, EX_DATAERR, Refusal
from stoker.training.model.config import ModelConfig
from stoker.training.model.families.family import ConfigJson, Family

RESERVED = ("auto", "family", "none")
_NO_FAMILIES = ("family",)  # files here that hold none
__all__ = ["ConfigJson", "Family", "family_in", "family_of", "known_family", "register"]
_registered: dict[str, Family] = {}
_searched = False


def register(family: Family) -> None:
    """Adds a family. One that is incomplete, there already or badly named is refused, with the file it is in."""
    _families()
    _add(family)


def _add(family: Family) -> None:
    where = _file_of(family)
    if not isinstance(family, Family):
        raise Refusal(f"{where}: a family is an object of a class derived from Family, not {family!r}", EX_CONFIG)
    missing = family.missing()
    if missing:
        raise Refusal(f"{where}: the family {family.name or type(family).__name__} has no {missing}", EX_CONFIG)
    if family.name in RESERVED:
        raise Refusal(f"{where}: {family.name} is a reserved name: give the family another one", EX_CONFIG)
    for other in _registered.values():
        if family.name == other.name or family.architecture == other.architecture:
            same = family.name if family.name == other.name else family.architecture
            raise Refusal(f"{where}: {same} is registered already, in {_file_of(other)}", EX_CONFIG)
    _registered[family.name] = family


def _file_of(family: object) -> str:
    return str(getattr(sys.modules.get(type(family).__module__), "__file__", None) or type(family).__module__)


def _families() -> dict[str, Family]:
    global _searched
    if not _searched:
        _searched = True
        for module in sorted(entry.name for entry in pkgutil.iter_modules(__path__)):
            if module not in _NO_FAMILIES:
                loaded = import_module(f"{__name__}.{module}")
                if not hasattr(loaded, "FAMILY"):
                    raise Refusal(f"{os.fspath(str(loaded.__file__))}: there is no FAMILY in it", EX_CONFIG)
                _add(loaded.FAMILY)
    return _registered


def known_family(told: ConfigJson) -> Family | None:
    families, named, kind = _families(), told.get("architectures"), told.get("model_type")
    if named:
        return next((family for family in families.values() if named == [family.architecture]), None)
    return families.get(kind) if isinstance(kind, str) else None


def family_in(told: ConfigJson) -> Family:
    """Which family a folder's config.json is of."""
    families = _families()
    known = ", ".join(family.architecture for family in families.values())
    family = known_family(told)
    if family is not None:
        return family
    named, hint = told.get("architectures"), "; `stoker train` can train others with model.engine transformers"
    if named:
        told.refuse(f"its architecture is {told.words(named)}; those that load are {known}{hint}")
    told.refuse(f"its model_type is {str(told.get('model_type'))[:80]!r}; those that load are {known}{hint}")


def family_of(c: ModelConfig) -> Family:
    """The one a model was loaded from; of one that was not loaded, the first that takes it."""
    families = _families()
    if c.family:
        if c.family not in families:
            raise Refusal(f"no family {c.family} is registered here; there are {', '.join(families)}", EX_DATAERR)
        return families[c.family]
    for family in families.values():
        if family.takes(c):
            return family
    raise Refusal("no family can write a model of this shape: `stoker docs families` says how to add one", EX_CONFIG)
