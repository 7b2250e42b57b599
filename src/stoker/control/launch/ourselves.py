"""Another `stoker` command as a child of ours: the same Python, the same files."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from stoker.control.cluster.transport import ROOT

# Not `-m stoker`: that puts the working directory first, and a user's queue.py there would be Stoker's.
_BOOT = (
    "import sys\nif not sys.flags.safe_path: del sys.path[0]\nsys.path.append({root!r})\nsys.argv[0] = 'stoker'\nfrom"
    " {module} import {entry}\n{entry}()"
)


def stoker_command(words: Sequence[str], flags: Sequence[str] = ()) -> list[str]:
    """argv of `stoker WORDS`. `flags`: of Python."""
    return own_program("stoker.cli.main", "entry", words, flags)


def own_program(module: str, entry: str, words: Sequence[str] = (), flags: Sequence[str] = ()) -> list[str]:
    """argv of a function of ours that takes no arguments and reads sys.argv."""
    return [sys.executable, *flags, "-c", _BOOT.format(root=ROOT, module=module, entry=entry), *words]
