"""Keys as command-line flags: `--optim.learning_rate 1e-4`, `--learning-rate=1e-4`, `--profile`, `--debug`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from typing import Any

from stoker.contract.settings import Help, Parser
from stoker.contract.shape import shape
from stoker.training.config import presets
from stoker.training.config.aliases import RENAMED, SECTION_VALUES, SWITCHES, TRANSLATED
from stoker.training.config.derived import BATCH, LENGTH, RATES
from stoker.training.config.keys import BARE, KEYS, LEAVES
from stoker.training.config.schema import ABOUT, SECTIONS

DERIVED = (*RATES, *LENGTH, *BATCH)  # a stage that trains derives these


@shape
class Flag:
    name: str  # `preset`, `config`, a dotted key, or a name that aliases know
    spelling: str  # as it was typed
    text: str


class _Collect(argparse.Action):
    """All in one list, in the order given; read only once it is known what lies below."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        found = getattr(namespace, "keys", ())
        texts = values if isinstance(values, list) else [values]
        namespace.keys = (*found, *(Flag(self.name, option_string or "", text) for text in texts))

    name = ""


@shape
class Shown:
    """What a --help lists: these keys, in this order; None: all of them, section by section."""

    keys: Sequence[str] | None = None
    without: Collection[str] = ()  # keys that only other stages read
    more: Callable[[str], str] = lambda dotted: ""  # what else is to be said of a key's default


def add_key_flags(parser: argparse.ArgumentParser, shown: Shown | None = None) -> None:
    """Every key is understood, whichever of them the help lists."""
    shown = shown or Shown()
    group = parser.add_argument_group("config")
    if shown.keys is None:
        begin = "; ".join(f"{name}: {text}" for name, text in presets.ABOUT.items())
        file = "YAML or JSON file with any of the keys below; its section `run` may hold options of `stoker run`"
    else:
        begin, file = ", ".join(presets.ABOUT), "YAML or JSON file with any of the keys"
    _add(group, "preset", ["--preset"], f"where to begin: {begin}", "NAME", False)
    _add(group, "config", ["--config"], file, "FILE", False)
    paths = shown.keys is None or next(iter(shown.keys), "") == "data.path"
    _add(group, "data", ["--data"], "the same as --data.path: one or several" if paths else None, "PATH", False)
    _add(group, "debug", ["--debug"], "the same as --preset debug", None, True)
    groups: dict[str, Any] = {}
    if shown.keys is not None:
        groups = dict.fromkeys(SECTIONS, parser.add_argument_group("most used keys"))
    listed = [dotted for dotted in (KEYS if shown.keys is None else shown.keys) if dotted not in shown.without]
    for dotted in (*listed, *(dotted for dotted in KEYS if dotted not in listed)):
        key = KEYS[dotted]
        if key.section not in groups and dotted in listed:
            groups[key.section] = parser.add_argument_group(f"{key.section}: {ABOUT[key.section]}")
        text = _help(dotted, shown) if dotted in listed else None
        alone, metavar = key.kind == "bool", _metavar(dotted)
        _add(groups[key.section] if text else parser, dotted, [f"--{dotted}"], text, metavar, alone)
        _add(parser, dotted, _spellings(dotted)[1:], None, metavar, alone)
    for name in (*LEAVES, *RENAMED, *TRANSLATED, *SECTION_VALUES):
        alone = name in SWITCHES or (name in BARE and KEYS[BARE[name]].kind == "bool")
        if name not in ("debug", "data"):
            _add(parser, name, _spellings(name), None, None, alone)


def _help(dotted: str, shown: Shown) -> str:
    key = KEYS[dotted]
    default = "none" if key.default in ((), "") else key.text(key.default)
    if (key.spec.metavar or "").startswith("TIME"):
        default = f"{key.default / 60:g}min"
    if shown.keys is not None:
        if dotted in DERIVED:
            return f"{key.spec.help} (default: by stage and data)"
        return f"{key.spec.help} (default: {default})" if default != "none" else key.spec.help
    differs, more = presets.differing(dotted), shown.more(dotted)
    return (
        f"{key.spec.help} (default: {default}{f'; {differs}' if differs else ''}{f'; stages: {more}' if more else ''})"
    )


def _metavar(dotted: str) -> str | None:
    key = KEYS[dotted]
    if key.spec.metavar:
        return key.spec.metavar
    if key.spec.choices:
        return "|".join(key.spec.choices)
    return None if key.kind == "bool" else key.name.split("_")[-1].upper()


def _spellings(name: str) -> list[str]:
    return [f"--{name}", f"--{name.replace('_', '-')}"] if "_" in name else [f"--{name}"]


def _add(where: Any, name: str, spellings: list[str], text: str | None, metavar: str | None, alone: bool) -> None:
    """Without a text: another way to write it, which help does not list."""
    if not spellings:
        return
    shown = argparse.SUPPRESS if text is None else text.replace("%", "%%")
    more: dict[str, Any] = {"nargs": "?", "const": "true"} if alone else {}
    if SECTION_VALUES.get(name, name) == "data.path":
        more = {"nargs": "+"}  # what a shell makes of --data texts/*.txt
    action = where.add_argument(
        *spellings,
        action=_Collect,
        dest="keys",
        default=argparse.SUPPRESS,
        help=shown,
        metavar=metavar or "true|false",
        **more,
    )
    action.name = name


def parse(argv: Sequence[str], prog: str = "pretrain") -> tuple[Flag, ...]:
    """Nothing but keys: what a recipe is started with."""
    made = Parser(prog=prog, allow_abbrev=False, formatter_class=Help)
    add_key_flags(made)
    found, extra = made.parse_known_args(list(argv))
    if extra:
        made.unknown(extra)
    told: tuple[Flag, ...] = getattr(found, "keys", ())
    return told
