"""What a hosts file wants to know of a host: its cards, and which Python has torch. Imports none of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import Any

from stoker.contract import names
from stoker.contract.untrusted import NOT_FROM_HERE
from stoker.control.machine.observe import Observer

_ASK = """
import importlib.util, json, sys
from importlib import metadata
found = importlib.util.find_spec("torch") is not None
try: version = metadata.version("torch")
except metadata.PackageNotFoundError: version = "of unknown version" if found else None
print("\\n" + json.dumps({"version": "%d.%d.%d" % sys.version_info[:3], "torch": version if found else None}))
"""


def setup(pythons: list[str]) -> Any:
    """`pythons`: where to look, the best first; a leading ~ is the home here."""
    machine = Observer(os.environ.get(names.MACHINE)).look()
    return {
        "gpus": [gpu.name for gpu in machine.gpus if gpu.error is None],
        "gpu_error": machine.gpu_error,
        "pythons": [found for found in (_ask(word) for word in pythons) if found is not None],
    }


def _ask(word: str) -> dict[str, Any] | None:
    program = shutil.which(os.path.expanduser(word))
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "-c", NOT_FROM_HERE + _ASK], capture_output=True, timeout=20, check=True, stdin=subprocess.DEVNULL
        )
        return {"python": word, **json.loads(done.stdout.splitlines()[-1])}
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None  # it is there and is no Python that works
