"""Keys as command-line flags: `--optim.learning_rate 1e-4`, `--learning-rate=1e-4`, `--profile`, `--debug`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from stoker.contract.settings import Parser
from stoker.contract.shape import shape
from stoker.training.config import presets
from stoker.training.config.aliases import RENAMED, SECTION_VALUES, TRANSLATED
from stoker.training.config.derived import about
from stoker.training.config.keys import BARE, KEYS, LEAVES
from stoker.training.config.schema import ABOUT
from stoker.training.config.stages import LEARNING

STANDS_ALONE = ("use_amp", "gradient_checkpointing", "debug")  # aliases that may come without a value


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


def add_key_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("config")
    _add(
        group,
        "preset",
        ["--preset"],
        "where to begin: " + "; ".join(f"{name}: {text}" for name, text in presets.ABOUT.items()),
        "NAME",
        False,
    )
    _add(
        group,
        "config",
        ["--config"],
        "YAML or JSON file with any of the keys below; its section `run` may hold options of `stoker run`",
        "FILE",
        False,
    )
    _add(group, "data", ["--data"], "the same as --data.path: one or several", "PATH", False)
    _add(group, "debug", ["--debug"], "the same as --preset debug", None, True)
    sections: dict[str, Any] = {}
    for dotted, key in KEYS.items():
        if key.section not in sections:
            sections[key.section] = parser.add_argument_group(f"{key.section}: {ABOUT[key.section]}")
        alone = key.kind == "bool"
        differs = presets.differing(dotted)
        default = "none" if key.default in ((), "") else key.text(key.default)
        derived = about(dotted, LEARNING)
        text = (
            f"{key.spec.help} (default:"
            f" {default}{f'; {differs}' if differs else ''}{f'; stages: {derived}' if derived else ''})"
        )
        metavar = key.spec.metavar or (
            "|".join(key.spec.choices) if key.spec.choices else None if alone else key.name.split("_")[-1].upper()
        )
        _add(sections[key.section], dotted, [f"--{dotted}"], text, metavar, alone)
        _add(parser, dotted, _spellings(dotted)[1:], None, metavar, alone)
    for name in [
        *BARE,
        *(leaf for leaf, many in LEAVES.items() if len(many) > 1),
        *RENAMED,
        *TRANSLATED,
        *SECTION_VALUES,
    ]:
        alone = name in STANDS_ALONE or (name in BARE and KEYS[BARE[name]].kind == "bool")
        if name not in ("debug", "data"):
            _add(parser, name, _spellings(name), None, None, alone)


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


def key_parser(prog: str) -> Parser:
    made = Parser(prog=prog, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_key_flags(made)
    return made


def parse(argv: Sequence[str], prog: str = "pretrain") -> tuple[Flag, ...]:
    """Nothing but keys: what a recipe is started with."""
    made = key_parser(prog)
    found, extra = made.parse_known_args(list(argv))
    if extra:
        made.unknown(extra)
    told: tuple[Flag, ...] = getattr(found, "keys", ())
    return told
