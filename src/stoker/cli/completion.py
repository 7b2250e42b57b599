"""stoker completion bash|zsh|tcsh"""

from __future__ import annotations

import argparse
from importlib import import_module

from stoker.contract.errors import EX_UNAVAILABLE, Refusal
from stoker.contract.options import OptionParser

_USE = """bash:  eval "$(stoker completion bash)"   # in ~/.bashrc
zsh:   eval "$(stoker completion zsh)"   # in ~/.zshrc, after compinit
tcsh:  stoker completion tcsh > ~/.stoker.tcsh; source ~/.stoker.tcsh   # in ~/.tcshrc"""


# Runs by id and by name, in the folder that commands look in. Others may make folders there, and bash expands the words of
# `compgen -W`, commands too: a name with a sign that a shell knows is left out. Files are bash's own to complete, where no run
# fits: of a list like this one it would not quote their signs.
_NAMES = """ls -1 "${STOKER_RUNS:-runs}" 2>/dev/null | LC_ALL=C sed -nE 's/^[0-9]{8}-[0-9]{6}-([[:alnum:]._-]+)$/\\1\\n&/p'"""
_PREAMBLE = {
    "bash": f"""_stoker_runs() {{ compgen -W "latest $({_NAMES})" -- "$1"; }}""",
    "zsh": f"""_stoker_runs() {{ local -a names; names=(latest ${{(f)"$({_NAMES})"}}); _alternative 'runs:run:($names)' 'files:file:_files'; }}""",
}


def parser() -> OptionParser:
    made = OptionParser("stoker completion", "Prints a completion script.", _USE)
    made.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    return made


def whole_parser() -> argparse.ArgumentParser:
    from stoker.cli.main import COMMANDS

    whole = argparse.ArgumentParser(prog="stoker")
    commands = whole.add_subparsers(parser_class=OptionParser)
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text).take_over(import_module(f"stoker.cli.{name}").parser())
    return whole


def main(argv: list[str]) -> int:
    shell = parser().parse_args(argv).shell
    try:
        import shtab
    except ModuleNotFoundError:
        raise Refusal("no package shtab, which writes the script; pip install shtab", EX_UNAVAILABLE) from None
    script = shtab.complete(whole_parser(), shell, preamble=_PREAMBLE.get(shell, ""))
    if shell == "bash":  # else no file names
        script = script.replace("complete -o bashdefault ", "complete -o bashdefault -o default ")
    print(script)
    return 0
