"""Another `stoker` command as a child of ours: the same Python, the same files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from stoker.contract.env_vars import PASSED_OPTIONS
from stoker.control.cluster.transport import ROOT

# Not `-m stoker`: that puts the working directory first, and a user's queue.py there would be Stoker's.
_BOOT = (
    "import sys\nif not sys.flags.safe_path: del sys.path[0]\nsys.path.append({root!r})\nsys.argv[0] = 'stoker'\nfrom"
    " {module} import {entry}\n{entry}()"
)
_SECRET = ("--env=", "--notify=")


def stoker_command(words: Sequence[str], flags: Sequence[str] = ()) -> list[str]:
    """argv of `stoker WORDS`. `flags`: of Python."""
    return own_program("stoker.cli.main", "entry", words, flags)


def own_program(module: str, entry: str, words: Sequence[str] = (), flags: Sequence[str] = ()) -> list[str]:
    """argv of a function of ours that takes no arguments and reads sys.argv."""
    return [sys.executable, *flags, "-c", _BOOT.format(root=ROOT, module=module, entry=entry), *words]


def unseen(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """(options and a program without the options that may hold secrets, the variable in which these go). A user may have given
    them in a file or in Python, and command lines are visible to all users.
    """
    end = words.index("--") if "--" in words else len(words)
    hidden = [word for word in words[:end] if word.startswith(_SECRET)]
    shown = [word for word in words[:end] if not word.startswith(_SECRET)]
    return [*shown, *words[end:]], {PASSED_OPTIONS: json.dumps(hidden)} if hidden else {}


def handed(words: Sequence[str]) -> list[str]:
    """The words with those that came the other way, also in sys.argv; nobody that we start has the variable."""
    hidden = [str(word) for word in json.loads(os.environ.pop(PASSED_OPTIONS, "[]"))]
    at = len(sys.argv) - len(words)
    sys.argv[at:at] = hidden
    return [*hidden, *words]
