"""Options as frozen classes: each field defines a flag, a YAML or JSON key, its help and the check of its value."""

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
    """Keeps the line breaks of a text and wraps lines that are too long."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return wrap_text(super()._fill_text(text, width, indent), width, hanging=0)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        """Print a metavar of several words, such as "[RUN] FILE", once."""
        if isinstance(action.metavar, str) and " " in action.metavar:
            return action.metavar
        return super()._format_args(action, default_metavar)


class OptionParser(argparse.ArgumentParser):
    """Raises Refusal instead of exiting, and suggests flags. With an `epilog`, line breaks in texts are kept."""

    def __init__(self, prog: str, description: str | None = None, epilog: str | None = None, **settings: Any) -> None:
        settings.setdefault("formatter_class", HelpFormatter if epilog else argparse.HelpFormatter)
        super().__init__(prog, description=description, epilog=epilog, **settings)

    def option(self, flags: str, metavar: str, help: str, type: Callable[[str], Any] = str, **settings: Any) -> None:
        """Add a flag with a value. `flags` holds its spellings, separated by spaces."""
        self.add_argument(*flags.split(), metavar=metavar, help=help, type=_make_argument_type(type), **settings)

    def switch(self, flag: str, help: str) -> None:
        """Add a flag without a value."""
        self.add_argument(flag, action="store_true", help=help)

    def take_over(self, other: argparse.ArgumentParser) -> None:
        """Add the arguments of another parser, except --help."""
        for action in other._actions:
            if "-h" not in action.option_strings:
                self._add_action(action)

    def run_argument(self, kinds: str = "id, name or path of a run, or latest", default: str = "the newest") -> None:
        """Add an optional argument that names a run."""
        offer_run_names(self.add_argument("run", nargs="?", metavar="RUN", help=f"{kinds} (default: {default})"))

    def runs_dir(self) -> None:
        self.option("--runs-dir", "DIR", "folder of the run directories (default: $STOKER_RUNS, else ./runs)")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Refuse --flag=--, whose value argparse drops and replaces with an empty list."""
        if action.option_strings and arg_strings == ["--"]:
            raise argparse.ArgumentError(action, "expected one argument")
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        raise Refusal(f"{message}; `{self.prog} --help` lists the options", EX_USAGE)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments. Raises Refusal with a suggestion for an unknown flag."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse_unknown(unknown)
        return parsed

    def refuse_unknown(self, arguments: list[str]) -> NoReturn:
        """Raise Refusal for unknown arguments."""
        flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        first = next((argument for argument in arguments if argument.startswith("-")), "")
        if not first:
            self.error(f"unrecognized arguments: {' '.join(arguments)}")
        suggestion = suggest(first.partition("=")[0], flags) or f"; `{self.prog} --help` lists the options"
        raise Refusal(f"unknown option {first}{suggestion}", EX_USAGE)


def check_port(port: int) -> None:
    """Refuse an impossible value of --port. 0 stands for any free port."""
    if not 0 <= port <= 65535:
        raise Refusal(f"--port must be from 0 to 65535, got {port}", EX_USAGE)


def offer_run_names(argument: argparse.Action) -> None:
    """Make shell completion offer the names of runs here, with functions that `stoker completion` defines."""
    argument.complete = {"bash": "_stoker_runs", "zsh": "_stoker_runs", "tcsh": "f:*"}  # type: ignore[attr-defined]


def _make_argument_type(type: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap a parser so that argparse prints the text of its ValueErrors, which it hides otherwise."""
    if type in (str, int, float):
        return type

    def read_argument(text: str) -> Any:
        try:
            return type(text)
        except ValueError as problem:
            raise argparse.ArgumentTypeError(str(problem)) from problem

    return read_argument


def _kind(settings: type[Any], name: str) -> str:
    """Return the type of an option: bool, int, float or str."""
    return str(settings.__annotations__[name]).replace(" | None", "")


def add_flags(
    parser: argparse.ArgumentParser,
    settings: type[Any],
    without: tuple[str, ...] = (),
    shown: tuple[str, ...] | None = None,
) -> None:
    """Add a flag for each option, except those in `without`. --help lists those in `shown`, or all."""
    groups: dict[str, Any] = {}
    for name, spec in options_of(settings).items():
        if name in without:
            continue
        if spec.group not in groups:
            groups[spec.group] = parser.add_argument_group(spec.group)
        kind = _kind(settings, name)
        spellings = [*spec.flags, "--" + name.replace("_", "-")] + (["--" + name] if "_" in name else [])
        arguments: dict[str, Any] = {
            "dest": name,
            "default": argparse.SUPPRESS,
            "help": spec.help if shown is None or name in shown else argparse.SUPPRESS,
        }
        if kind == "bool":
            groups[spec.group].add_argument(*spellings, action="store_true", **arguments)
            continue
        arguments |= {
            "type": _make_flag_type(spec, kind),
            "metavar": spec.metavar or name.split("_")[-1].upper(),
            "choices": spec.choices,
        }
        groups[spec.group].add_argument(*spellings, action="append" if spec.many else "store", **arguments)


def _make_flag_type(spec: Option, kind: str) -> Callable[[str], Any]:
    """Return a parser for one value of a flag. argparse itself checks the choices."""
    return _make_argument_type(lambda text: _check_limit(spec, _parse_number_or_text(spec, kind, text), text))


def read_setting(spec: Option, kind: str, value: Any) -> Any:
    """Return an option's value from a flag's text, YAML or JSON. Raises ValueError with a message for the user.

    `kind` is bool, int, float or str. `explain_limit` checks the limit.
    """
    if spec.many:
        items = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(item, (dict, list, tuple, bool)) or item is None for item in items):
            raise ValueError(f"{value!r} must be a text or a list of texts")
        return tuple(str(item) for item in items)
    if isinstance(value, (dict, list, tuple)):
        raise ValueError(f"{value!r} is not a single value")
    if kind == "bool":
        return parse_bool(value)
    text = str(value)
    if isinstance(value, bool):  # YAML reads a bare on or off as a bool
        is_on_off = spec.choices is not None or (kind == "str" and spec.parse is not None)
        text = ("off", "on")[value] if is_on_off else text.lower()
        if kind == "str" and not is_on_off:
            raise ValueError(f"{text} is not text; put it in quotes")
    parsed = _parse_number_or_text(spec, kind, text)
    if spec.choices and parsed not in spec.choices:
        raise ValueError(f"{text!r} is not one of {', '.join(spec.choices)}")
    return parsed


def _parse_number_or_text(spec: Option, kind: str, text: str) -> Any:
    try:
        if spec.parse:
            return spec.parse(text)
        if kind == "int":
            return parse_int(text)
        value = float(text) if kind == "float" else text
    except ValueError as problem:
        message = str(problem)
        if message.startswith(("invalid literal", "could not convert")):  # Python's own messages
            other = " or auto" if spec.metavar and spec.metavar.endswith("|auto") else ""
            message = f"{text!r} is not a {'whole ' if kind == 'int' else ''}number{other}"
        raise ValueError(message) from problem
    if isinstance(value, float) and value - value != 0 and spec.limit is None:
        raise ValueError(f"{text!r} is not a finite number")
    return value


def explain_limit(spec: Option, value: Any, text: str) -> str:
    """Return why a number violates the option's limit, or "" if it doesn't."""
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
    """Return a whole number; also reads 1e6 and 1000000.0, as people write numbers of tokens."""
    try:
        return int(text)
    except ValueError:
        value = float(text)
        if value - value != 0 or value != int(value):
            raise ValueError(f"{text!r} is not a whole number") from None
        return int(value)


def _check_limit(spec: Option, value: Any, text: str) -> Any:
    """Return the value. Raises ValueError if it violates the option's limit."""
    if violation := explain_limit(spec, value, text):
        raise ValueError(violation)
    return value


def build_options(settings: type[T], *layers: Mapping[str, Any]) -> T:
    """Return the options from several layers, of which later ones win: file, environment, flags."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged |= {key: tuple(value) if isinstance(value, list) else value for key, value in layer.items()}
    return settings(**merged)


def options_from_environment(
    settings: type[Any], variables: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return the options that the environment sets. `variables` maps options to their variables."""
    options = options_of(settings)
    values: dict[str, Any] = {}
    for name, variable in variables.items():
        if variable in environment:
            kind = _kind(settings, name)
            text = environment[variable] or ("0" if kind == "bool" else "")
            values[name] = _convert(options[name], kind, text, variable)
    return values


def options_from_mapping(settings: type[Any], data: Mapping[Any, Any], source: str) -> dict[str, Any]:
    """Return the options that a config file sets. Refuses unknown keys; `source` names the file."""
    options = options_of(settings)
    values: dict[str, Any] = {}
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if name not in options:
            raise Refusal(f"{source}: unknown key {key!r}{suggest(name, options)}", EX_CONFIG)
        values[name] = _convert(options[name], _kind(settings, name), value, f"{source}: {key}")
    return values


def _convert(spec: Option, kind: str, value: Any, source: str) -> Any:
    try:
        return _check_limit(spec, read_setting(spec, kind, value), str(value))
    except ValueError as problem:
        raise Refusal(f"{source}: {problem}", EX_CONFIG) from problem
