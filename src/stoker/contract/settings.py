"""Typed dataclasses as settings: each field is a flag, a YAML/JSON key and a line of help.

argparse and this file instead of a library: cyclopts, tyro, jsonargparse and typer cost 80-140 ms and 8-15 MB in a launcher whose
whole start must stay under 0.2 s, and torchrun's own grammar is argparse's (see docs/decisions.md).
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, field, fields
from typing import Any, NoReturn, TypeVar

from stoker.contract.names import EX_CONFIG, EX_DATAERR, EX_NOINPUT, EX_USAGE, Refusal

T = TypeVar("T")


def option(
    default: Any, help: str, *, flags: tuple[str, ...] = (), parse: Callable[[str], Any] | None = None, metavar: str | None = None,
    choices: tuple[str, ...] | None = None, many: bool = False, group: str = "options",
) -> Any:  # fmt: skip
    """A dataclass field that knows its flag. `many`: may be given several times, collects a tuple."""
    meta = {"help": help, "flags": flags, "parse": parse, "metavar": metavar, "choices": choices, "many": many, "group": group}
    return field(default=default, metadata=meta)


class Parser(argparse.ArgumentParser):
    """Raises Refusal instead of exiting, and suggests the flag that was probably meant."""

    def error(self, message: str) -> NoReturn:
        raise Refusal(f"{message}; `{self.prog} --help` lists what there is", EX_USAGE)

    def unknown(self, words: list[str]) -> NoReturn:
        flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        first = next((word for word in words if word.startswith("-")), words[0])
        raise Refusal(f"unknown option {first}{suggest(first.partition('=')[0], flags)}", EX_USAGE)


def suggest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), 1, 0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _kind(spec: Field[Any]) -> str:
    return str(spec.type).replace(" | None", "")


def add_flags(parser: argparse.ArgumentParser, settings: type[Any]) -> None:
    groups: dict[str, Any] = {}
    for spec in fields(settings):
        meta = spec.metadata
        if "help" not in meta:
            continue
        group = groups.setdefault(meta["group"], None) or parser.add_argument_group(meta["group"])
        groups[meta["group"]] = group
        dashed = "--" + spec.name.replace("_", "-")
        spellings = [*meta["flags"], dashed] + (["--" + spec.name] if "_" in spec.name else [])
        more: dict[str, Any] = {"dest": spec.name, "default": argparse.SUPPRESS, "help": meta["help"]}
        if _kind(spec) == "bool":
            group.add_argument(*spellings, action="store_true", **more)
            continue
        convert = meta["parse"] or {"int": int, "float": float}.get(_kind(spec), str)
        more |= {"type": _reader(convert), "metavar": meta["metavar"] or spec.name.split("_")[-1].upper(), "choices": meta["choices"]}
        group.add_argument(*spellings, action="append" if meta["many"] else "store", **more)


def _reader(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as problem:
            plain = {int: f"{text!r} is not a whole number", float: f"{text!r} is not a number"}.get(convert)  # type: ignore[call-overload]
            raise argparse.ArgumentTypeError(plain or str(problem)) from problem

    return read


def build(settings: type[T], *layers: Mapping[str, Any]) -> T:
    """Later layers win: file, environment, flags."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged |= {key: tuple(value) if isinstance(value, list) else value for key, value in layer.items()}
    return settings(**merged)


def from_environment(settings: type[Any], prefix: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """torchrun reads PET_NPROC_PER_NODE and its like as defaults of its flags; so do we."""
    found: dict[str, Any] = {}
    for spec in fields(settings):
        name = prefix + spec.name.upper()
        if "help" in spec.metadata and name in environment:
            found[spec.name] = _convert(spec, environment[name], name)
    return found


def from_file(settings: type[Any], path: str) -> dict[str, Any]:
    """YAML or JSON; every key must be one of the settings."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError as problem:
        raise Refusal(f"config file {path} is not there", EX_NOINPUT) from problem
    except (OSError, UnicodeDecodeError) as problem:
        raise Refusal(f"config file {path} can't be read: {problem}", EX_NOINPUT) from problem
    import yaml

    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as problem:
        where = getattr(problem, "problem_mark", None)
        at = f" at line {where.line + 1}, column {where.column + 1}" if where else ""
        raise Refusal(f"config file {path} is not YAML{at}: {getattr(problem, 'problem', problem)}", EX_DATAERR) from problem
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise Refusal(f"config file {path} holds a {type(data).__name__}, not keys and values", EX_DATAERR)
    known = {spec.name: spec for spec in fields(settings) if "help" in spec.metadata}
    found: dict[str, Any] = {}
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise Refusal(f"config file {path}: unknown key {key!r}{suggest(name, known)}", EX_CONFIG)
        found[name] = _convert(known[name], value, f"config file {path}: {key}")
    return found


def _convert(spec: Field[Any], value: Any, where: str) -> Any:
    kind = _kind(spec)
    try:
        if kind == "bool":
            if isinstance(value, bool):
                return value
            if str(value).lower() in ("1", "true", "yes", "on"):
                return True
            if str(value).lower() in ("0", "false", "no", "off", ""):
                return False
            raise ValueError(f"{value!r} is not true or false")
        if spec.metadata["many"]:
            items = value if isinstance(value, list) else [value]
            return tuple(str(item) for item in items)
        if isinstance(value, (dict, list)):
            raise ValueError(f"{value!r} is not a single value")
        convert = spec.metadata["parse"] or {"int": int, "float": float}.get(kind, str)
        choices = spec.metadata["choices"]
        result = convert(str(value))
        if choices and result not in choices:
            raise ValueError(f"{value!r} is not one of {', '.join(choices)}")
        return result
    except ValueError as problem:
        raise Refusal(f"{where}: {problem}", EX_CONFIG) from problem


def defaults(settings: type[Any]) -> dict[str, Any]:
    return {spec.name: spec.default for spec in fields(settings) if spec.default is not MISSING}
