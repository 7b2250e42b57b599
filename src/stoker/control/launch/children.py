"""Command lines for `stoker` commands that run as child processes: the same Python and the same files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from stoker.contract.env_vars import PASSED_OPTIONS
from stoker.control.cluster.transport import ROOT

# Not `-m stoker`: that puts the working directory first in sys.path, and a user's queue.py there would be imported.
_BOOT = (
    "import sys\nif not sys.flags.safe_path: del sys.path[0]\nsys.path.append({root!r})\nsys.argv[0] = 'stoker'\nfrom"
    " {module} import {entry}\n{entry}()"
)
_SECRET_OPTIONS = ("--env=", "--notify=")


def stoker_command(words: Sequence[str], python_flags: Sequence[str] = ()) -> list[str]:
    """Return the argv of `stoker WORDS`."""
    return module_command("stoker.cli.main", "entry", words, python_flags)


def module_command(module: str, entry: str, words: Sequence[str] = (), python_flags: Sequence[str] = ()) -> list[str]:
    """Return the argv that calls a function of ours, which takes no arguments and reads sys.argv."""
    return [sys.executable, *python_flags, "-c", _BOOT.format(root=ROOT, module=module, entry=entry), *words]


def split_secret_options(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return a command line without the options that may hold secrets, and a variable that carries these.

    They may come from a file or from Python, and all users can see the command lines of processes.
    """
    end = words.index("--") if "--" in words else len(words)
    secret = [word for word in words[:end] if word.startswith(_SECRET_OPTIONS)]
    public = [word for word in words[:end] if not word.startswith(_SECRET_OPTIONS)]
    return [*public, *words[end:]], {PASSED_OPTIONS: json.dumps(secret)} if secret else {}


def restore_secret_options(words: Sequence[str]) -> list[str]:
    """Insert the options from the variable into the command line and sys.argv, and remove the variable."""
    secret = [str(word) for word in json.loads(os.environ.pop(PASSED_OPTIONS, "[]"))]
    begin = len(sys.argv) - len(words)
    sys.argv[begin:begin] = secret
    return [*secret, *words]
