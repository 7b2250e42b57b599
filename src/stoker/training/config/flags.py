"""Keys as command-line flags: `--optim.learning_rate 1e-4`, `--learning-rate=1e-4`, `--profile`, `--debug`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from typing import Any

from stoker.contract.frozen import frozen
from stoker.contract.options import HelpFormatter, OptionParser
from stoker.training.config import presets
from stoker.training.config.aliases import RENAMED, SECTION_VALUES, SWITCHES, TRANSLATED
from stoker.training.config.keys import BARE, KEYS, LEAVES
from stoker.training.config.presets import PRESETS
from stoker.training.config.schema import ABOUT, SECTIONS


@frozen
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


@frozen
class Shown:
    """What a --help lists: these keys, in this order; None: all of them, section by section."""

    keys: Sequence[str] | None = None
    without: Collection[str] = ()  # keys that only other stages read
    default: Callable[[str], str] | None = None  # a key's default in words; None: that of each preset


SHORT_NAMES = {  # that a stage's short help shows before the whole key
    "data.path": "data",
    "data.context_length": "context-length",
    "optim.learning_rate": "lr",
    "train.max_steps": "max-steps",
    "train.epochs": "epochs",
    "train.log_to": "log-to",
}
_SWITCHES = {"adapter.method": ("lora", "qlora")}  # shown below that key


def add_key_flags(parser: argparse.ArgumentParser, shown: Shown | None = None) -> None:
    """Every key is understood, whichever of them the help lists."""
    shown = shown or Shown()
    taken: set[str] = set()

    def add(where: Any, name: str, spellings: list[str], text: str | None, metavar: str | None, alone: bool) -> None:
        free = [spelling for spelling in spellings if spelling not in taken]
        taken.update(free)
        _add(where, name, free, text, metavar, alone)

    group = parser.add_argument_group("config")
    if shown.keys is None:
        begin = "; ".join(f"{name}: {text}" for name, text in presets.ABOUT.items())
        file = "YAML or JSON file with any of the keys below; its section `run` may hold options of `stoker run`"
    else:
        begin, file = ", ".join(presets.ABOUT), "YAML or JSON file with any of the keys"
    add(group, "preset", ["--preset"], f"where to begin: {begin}", "NAME", False)
    add(group, "config", ["--config"], file, "FILE", False)
    if shown.keys is None:
        add(group, "data", ["--data"], "the same as --data.path: one or several", "PATH", False)
    add(group, "debug", ["--debug"], "the same as --preset debug", None, True)
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
        is_short = bool(text) and shown.keys is not None
        first = [f"--{SHORT_NAMES[dotted]}"] if is_short and dotted in SHORT_NAMES else []
        add(groups[key.section] if text else parser, dotted, [*first, f"--{dotted}"], text, metavar, alone)
        add(parser, dotted, _spellings(dotted)[1:], None, metavar, alone)
        for name in _SWITCHES.get(dotted, ()) if is_short else ():
            add(groups[key.section], name, [f"--{name}"], f"the same as --{dotted} {name}", None, True)
    for name in ("data", *LEAVES, *RENAMED, *TRANSLATED, *SECTION_VALUES):
        alone = name in SWITCHES or (name in BARE and KEYS[BARE[name]].kind == "bool")
        add(parser, name, _spellings(name), None, None, alone)


def _help(dotted: str, shown: Shown) -> str:
    text = KEYS[dotted].spec.help
    default = _default_by_preset(dotted) if shown.default is None else shown.default(dotted)
    return f"{text} ({default})" if default else text


def _default_by_preset(dotted: str) -> str:
    """Return the value of each preset, where they differ; no other is ever used, since there is always a preset."""
    values = {name: shown_value(dotted, preset.get(dotted, KEYS[dotted].default)) for name, preset in PRESETS.items()}
    if len(set(values.values())) == 1:
        return f"default: {values['production']}"
    first = ("production", "small")  # the defaults with GPUs, and without
    order = [*first, *(name for name in values if name not in first)]
    return "default: " + ", ".join(f"{name} {values[name]}" for name in order)


def shown_value(dotted: str, value: Any) -> str:
    """Return a key's value as help prints it."""
    key = KEYS[dotted]
    if value in ((), ""):
        return "none"
    if (key.spec.metavar or "").startswith("TIME"):
        return f"{value / 60:g}min"
    return ", ".join(map(key.text, value)) if isinstance(value, tuple) else key.text(value)


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
    made = OptionParser(prog=prog, allow_abbrev=False, formatter_class=HelpFormatter)
    add_key_flags(made)
    found, extra = made.parse_known_args(list(argv))
    if extra:
        made.refuse_unknown(extra)
    told: tuple[Flag, ...] = getattr(found, "keys", ())
    return told
