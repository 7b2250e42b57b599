"""Typed shapes as settings: each field is a flag, a YAML/JSON key and a line of help.

argparse and this file instead of a library: cyclopts, tyro, jsonargparse and typer cost 80-140 ms and 8-15 MB in a
launcher whose whole start must stay under 0.2 s, and torchrun's own grammar is argparse's (see docs/decisions.md).
"""

from __future__ import annotations

import argparse

from stoker.contract import spelling
from stoker.contract.names import EX_CONFIG, EX_USAGE, Refusal
from stoker.contract.shape import Option, options_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, NoReturn, TypeVar

    T = TypeVar("T")

suggest = spelling.suggest


class Parser(argparse.ArgumentParser):
    """Raises Refusal instead of exiting, and suggests the flag that was probably meant."""

    def error(self, message: str) -> NoReturn:
        raise Refusal(f"{message}; `{self.prog} --help` lists what there is", EX_USAGE)

    def unknown(self, words: list[str]) -> NoReturn:
        flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        first = next((word for word in words if word.startswith("-")), words[0])
        raise Refusal(f"unknown option {first}{suggest(first.partition('=')[0], flags)}", EX_USAGE)


def _kind(settings: type[Any], name: str) -> str:
    return str(settings.__annotations__[name]).replace(" | None", "")


def add_flags(
    parser: argparse.ArgumentParser,
    settings: type[Any],
    without: tuple[str, ...] = (),
    shown: tuple[str, ...] | None = None,
) -> None:
    """`without`: fields that are no flags here. `shown`: those that help lists; None: all."""
    groups: dict[str, Any] = {}
    for name, spec in options_of(settings).items():
        if name in without:
            continue
        if spec.group not in groups:
            groups[spec.group] = parser.add_argument_group(spec.group)
        kind = _kind(settings, name)
        spellings = [*spec.flags, "--" + name.replace("_", "-")] + (["--" + name] if "_" in name else [])
        more: dict[str, Any] = {
            "dest": name,
            "default": argparse.SUPPRESS,
            "help": spec.help if shown is None or name in shown else argparse.SUPPRESS,
        }
        if kind == "bool":
            groups[spec.group].add_argument(*spellings, action="store_true", **more)
            continue
        convert = spec.parse or {"int": int, "float": float}.get(kind, str)
        more |= {
            "type": _reader(convert),
            "metavar": spec.metavar or name.split("_")[-1].upper(),
            "choices": spec.choices,
        }
        groups[spec.group].add_argument(*spellings, action="append" if spec.many else "store", **more)


def _read(convert: Callable[[str], Any], text: str) -> Any:
    try:
        value = convert(text)
        if isinstance(value, float) and value - value != 0:
            raise ValueError(f"{text!r} is not a finite number")
        return value
    except ValueError as problem:
        plain = {int: f"{text!r} is not a whole number", float: f"{text!r} is not a number"}.get(convert)  # type: ignore[call-overload]
        raise ValueError(plain or str(problem)) from problem


def _reader(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return _read(convert, text)
        except ValueError as problem:
            raise argparse.ArgumentTypeError(str(problem)) from problem

    return read


def build(settings: type[T], *layers: Mapping[str, Any]) -> T:
    """Later layers win: file, environment, flags."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged |= {key: tuple(value) if isinstance(value, list) else value for key, value in layer.items()}
    return settings(**merged)


def from_environment(
    settings: type[Any], variables: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, Any]:
    """`variables`: the variable of each setting that has one."""
    known = options_of(settings)
    return {
        name: _convert(known[name], _kind(settings, name), environment[variable], variable)
        for name, variable in variables.items()
        if variable in environment
    }


def from_mapping(settings: type[Any], data: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """What a config file holds; every key must be one of the settings."""
    known = options_of(settings)
    found: dict[str, Any] = {}
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise Refusal(f"{where}: unknown key {key!r}{suggest(name, known)}", EX_CONFIG)
        found[name] = _convert(known[name], _kind(settings, name), value, f"{where}: {key}")
    return found


def _convert(spec: Option, kind: str, value: Any, where: str) -> Any:
    try:
        if kind == "bool":
            if isinstance(value, bool):
                return value
            if str(value).lower() in ("1", "true", "yes", "on"):
                return True
            if str(value).lower() in ("0", "false", "no", "off", ""):
                return False
            raise ValueError(f"{value!r} is not true or false")
        if spec.many:
            items = value if isinstance(value, list) else [value]
            return tuple(str(item) for item in items)
        if isinstance(value, (dict, list)):
            raise ValueError(f"{value!r} is not a single value")
        convert = spec.parse or {"int": int, "float": float}.get(kind, str)
        choices = spec.choices
        result = _read(convert, str(value))
        if choices and result not in choices:
            raise ValueError(f"{value!r} is not one of {', '.join(choices)}")
        return result
    except ValueError as problem:
        raise Refusal(f"{where}: {problem}", EX_CONFIG) from problem
