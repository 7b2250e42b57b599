"""docs/cli.md, made from the parsers themselves:   python -m stoker.cli.reference > docs/cli.md"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from importlib import import_module

from stoker.cli.main import ALIASES, GROUPS
from stoker.contract.options import OptionParser

_HEAD = """# Command line

Made from the code by `python -m stoker.cli.reference`; a test keeps it current. `stoker COMMAND --help` prints the same. Other tools' words work, too: {aliases}.
"""
_TRAIN = """`stoker train STAGE` also takes every option of [`stoker run`](#stoker-run), and every key of [the configuration](settings.md) as a flag. `stoker train STAGE --help` lists
the keys that a stage needs most.
"""


def page() -> Iterator[str]:
    yield _HEAD.format(aliases=", ".join(f"`{word}` (`{name}`)" for word, name in ALIASES.items()))
    for group, commands in GROUPS.items():
        yield f"## {group.capitalize()}\n"
        for name, about in commands.items():
            yield f"### stoker {name}\n"
            yield f"{about[0].upper()}{about[1:]}.\n"
            if name == "train":
                yield _TRAIN
                continue
            module = import_module(f"stoker.cli.{name}")
            subs = sorted(part for part in vars(module) if part.endswith("_parser") and not part.startswith("_"))
            parsers = [getattr(module, part)() for part in subs] if name == "cluster" else [module.parser()]
            for parser in parsers:
                yield from _one(parser, many=len(parsers) > 1)


def _one(parser: OptionParser, many: bool) -> Iterator[str]:
    if many:
        yield f"#### {parser.prog}\n"
    formatter = argparse.HelpFormatter(parser.prog)
    rows = [
        action
        for action in parser._actions
        if action.help is not argparse.SUPPRESS and "-h" not in action.option_strings
    ]
    if not rows:
        return
    yield "| argument | meaning |\n|---|---|"
    for action in rows:
        text = formatter._expand_help(action) if action.help else ""
        yield f"| {_spelled(action)} | {_escaped(text)} |"
    yield ""


def _spelled(action: argparse.Action) -> str:
    """The spelling with dashes, a short one before it, and what it takes."""
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    if action.choices and not action.metavar:
        value = "|".join(map(str, action.choices))
    value = value if isinstance(value, str) else " ".join(value)
    if not action.option_strings:
        return f"`{value or action.dest}`".replace("|", "\\|")
    spellings = [flag for flag in action.option_strings if "_" not in flag or len(action.option_strings) == 1]
    return ", ".join(f"`{flag}{' ' + value if value and place == len(spellings) - 1 else ''}`" for place, flag in enumerate(spellings)).replace("|", "\\|")  # fmt: skip


def _escaped(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    print("\n".join(page()).rstrip("\n"))
