"""Options as frozen classes: each field is a flag, a YAML or JSON key, a line of --help and a check of its value."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from stoker.contract import spelling
from stoker.contract.errors import EX_CONFIG, EX_USAGE, Refusal
from stoker.contract.frozen import Option, options_of
from stoker.contract.terminal import wrap_text

T = TypeVar("T")

suggest = spelling.suggest


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Line breaks of a text stay; lines that are too long get more."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return wrap_text(super()._fill_text(text, width, indent), width, hanging=0)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        """Print a metavar of several words, such as "[RUN] FILE", once."""
        if isinstance(action.metavar, str) and " " in action.metavar:
            return action.metavar
        return super()._format_args(action, default_metavar)


class OptionParser(argparse.ArgumentParser):
    """Raises Refusal instead of exiting, and suggests a flag. With an `epilog` line breaks of texts stay."""

    def __init__(self, prog: str, description: str | None = None, epilog: str | None = None, **more: Any) -> None:
        more.setdefault("formatter_class", HelpFormatter if epilog else argparse.HelpFormatter)
        super().__init__(prog, description=description, epilog=epilog, **more)

    def option(self, flags: str, metavar: str, help: str, type: Callable[[str], Any] = str, **more: Any) -> None:
        """`flags`: its spellings, separated by spaces."""
        self.add_argument(*flags.split(), metavar=metavar, help=help, type=_of_one_word(type), **more)

    def switch(self, flag: str, help: str) -> None:
        self.add_argument(flag, action="store_true", help=help)

    def take_over(self, other: argparse.ArgumentParser) -> None:
        """Its arguments, but for --help."""
        for action in other._actions:
            if "-h" not in action.option_strings:
                self._add_action(action)

    def run_argument(self, kinds: str = "id, name or path of a run, or latest", default: str = "the newest") -> None:
        completes_run_names(self.add_argument("run", nargs="?", metavar="RUN", help=f"{kinds} (default: {default})"))

    def runs_dir(self) -> None:
        self.option("--runs-dir", "DIR", "folder of the run directories (default: $STOKER_RUNS, else ./runs)")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """argparse drops the value of --flag=--, and gives an empty list instead."""
        if action.option_strings and arg_strings == ["--"]:
            raise argparse.ArgumentError(action, "expected one argument")
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        raise Refusal(f"{message}; `{self.prog} --help` lists the options", EX_USAGE)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """argparse lists what it does not know; a flag that is nearly right gets the right one instead."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.unknown(unknown)
        return found

    def unknown(self, words: list[str]) -> NoReturn:
        flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        first = next((word for word in words if word.startswith("-")), "")
        if not first:
            self.error(f"unrecognized arguments: {' '.join(words)}")
        near = suggest(first.partition("=")[0], flags)
        raise Refusal(f"unknown option {first}{near or f'; `{self.prog} --help` lists the options'}", EX_USAGE)


def check_port(port: int) -> None:
    """Of --port; 0: any that is free."""
    if not 0 <= port <= 65535:
        raise Refusal(f"--port {port}: a port is a number from 0 to 65535", EX_USAGE)


def completes_run_names(argument: argparse.Action) -> None:
    """TAB then offers runs: functions of `stoker completion`'s script."""
    argument.complete = {"bash": "_stoker_runs", "zsh": "_stoker_runs", "tcsh": "f:*"}  # type: ignore[attr-defined]


def _of_one_word(type: Callable[[str], Any]) -> Callable[[str], Any]:
    """argparse has words of its own for a bad int or float, and hides those of other readers' errors."""
    if type in (str, int, float):
        return type

    def read_word(text: str) -> Any:
        try:
            return type(text)
        except ValueError as problem:
            raise argparse.ArgumentTypeError(str(problem)) from problem

    return read_word


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
        more |= {
            "type": _reader(spec, kind),
            "metavar": spec.metavar or name.split("_")[-1].upper(),
            "choices": spec.choices,
        }
        groups[spec.group].add_argument(*spellings, action="append" if spec.many else "store", **more)


def read_setting(spec: Option, kind: str, value: Any) -> Any:
    """A setting's value from a flag's text, from YAML or from JSON. Raises ValueError, in words, for what can't be one.

    `kind`: bool, int, float or str. Limits are checked apart (`outside`): there it is known who gave the value.
    """
    if spec.many:
        items = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(item, (dict, list, tuple, bool)) or item is None for item in items):
            raise ValueError(f"{value!r} is not a list of texts")
        return tuple(str(item) for item in items)
    if isinstance(value, (dict, list, tuple)):
        raise ValueError(f"{value!r} is not a single value")
    if kind == "bool":
        return parse_bool(value)
    text = str(value)
    if isinstance(value, bool):  # YAML reads a bare on or off so
        worded = spec.choices is not None or (kind == "str" and spec.parse is not None)
        text = ("off", "on")[value] if worded else text.lower()
        if kind == "str" and not worded:
            raise ValueError(f"{text} is not text; put it in quotes")
    found = _number_or_text(spec, kind, text)
    if spec.choices and found not in spec.choices:
        raise ValueError(f"{text!r} is not one of {', '.join(spec.choices)}")
    return found


def _number_or_text(spec: Option, kind: str, text: str) -> Any:
    try:
        if spec.parse:
            return spec.parse(text)
        if kind == "int":
            return parse_int(text)
        found = float(text) if kind == "float" else text
    except ValueError as problem:
        words = str(problem)
        if words.startswith(("invalid literal", "could not convert")):  # Python's own
            other = " or auto" if spec.metavar and spec.metavar.endswith("|auto") else ""
            words = f"{text!r} is not a {'whole ' if kind == 'int' else ''}number{other}"
        raise ValueError(words) from problem
    if isinstance(found, float) and found - found != 0 and spec.limit is None:
        raise ValueError(f"{text!r} is not a finite number")
    return found


def explain_limit(spec: Option, value: Any, text: str) -> str:
    """What is wrong with a number that its limit leaves out; nothing else."""
    return f"{text} is out of range: {spec.limit}" if spec.limit is not None and value not in spec.limit else ""


def parse_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("1", "true", "yes", "on"):
        return True
    if str(value).lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{value!r} is not true or false")


def parse_int(text: str) -> int:
    """Also 1e6 and 1000000.0: a number of tokens is written like that."""
    try:
        return int(text)
    except ValueError:
        value = float(text)
        if value - value != 0 or value != int(value):
            raise ValueError(f"{text!r} is not a whole number") from None
        return int(value)


def _reader(spec: Option, kind: str) -> Callable[[str], Any]:
    """Of one item, where a flag may be given several times."""
    return _of_one_word(lambda text: _within(spec, _number_or_text(spec, kind, text), text))  # argparse has the choices


def _within(spec: Option, value: Any, text: str) -> Any:
    if wrong := explain_limit(spec, value, text):
        raise ValueError(wrong)
    return value


def build_options(settings: type[T], *layers: Mapping[str, Any]) -> T:
    """Later layers win: file, environment, flags."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged |= {key: tuple(value) if isinstance(value, list) else value for key, value in layer.items()}
    return settings(**merged)


def options_from_environment(
    settings: type[Any], variables: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, Any]:
    """`variables`: the variable of each setting that has one."""
    known = options_of(settings)
    return {
        name: _convert(known[name], kind, environment[variable] or ("0" if kind == "bool" else ""), variable)
        for name, variable in variables.items()
        if variable in environment and (kind := _kind(settings, name))
    }


def options_from_mapping(settings: type[Any], data: Mapping[Any, Any], where: str) -> dict[str, Any]:
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
        return _within(spec, read_setting(spec, kind, value), str(value))
    except ValueError as problem:
        raise Refusal(f"{where}: {problem}", EX_CONFIG) from problem
