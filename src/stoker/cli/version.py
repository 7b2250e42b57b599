"""`stoker --version`: the version and the commit it was made of."""

from __future__ import annotations

import os
import subprocess

from stoker import __version__

PACKAGE = os.path.dirname(os.path.dirname(__file__))
CHECKOUT = os.path.dirname(os.path.dirname(PACKAGE))
RECORDED = os.path.join(PACKAGE, "commit.txt")  # written into a wheel and a source archive by hatch_build.py


def line() -> str:
    made_of = commit()
    return f"stoker {__version__} (commit {made_of})" if made_of else f"stoker {__version__}"


def commit() -> str:
    """Of the checkout, with + where files differ from it; as recorded in an installed package; empty: not known."""
    if os.path.exists(RECORDED):
        with open(RECORDED, encoding="ascii") as text:
            return text.read().strip()
    if not os.path.exists(os.path.join(CHECKOUT, ".git")):
        return ""
    command = ["git", "-C", CHECKOUT, "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # no git here
        return ""
    return asked.stdout.strip() if asked.returncode == 0 else ""
