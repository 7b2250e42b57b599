"""Which Python and which torch the ranks would get here, without importing torch: its version file says it in 0.1 s
instead of seconds.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

from stoker.contract.untrusted import NOT_FROM_HERE
from stoker.control.agent.probe_names import resolve

_LOOK = """
import importlib.util, json, os, sys
found = {"python": sys.version.split()[0]}
spec = importlib.util.find_spec("torch")
if spec is None:
    found["error"] = "No module named 'torch'"
else:
    try:
        said = {}
        with open(os.path.join(os.path.dirname(spec.origin or "."), "version.py")) as file: exec(file.read(), said)
        found.update(version=said.get("__version__"), cuda=said.get("cuda"))
    except OSError:
        from importlib.metadata import version
        found["version"] = version("torch")
print(json.dumps(found, default=str))
"""


def builds(python: str = "") -> Any:
    name = socket.gethostname()
    found: dict[str, Any] = {"hostname": name, "resolves": {name: resolve(name)}}
    program = os.path.expanduser(python) or sys.executable
    done = subprocess.run(
        [program, "-c", NOT_FROM_HERE + _LOOK], capture_output=True, timeout=15, check=False, stdin=subprocess.DEVNULL
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(b"{")]
    if not lines:
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        return {**found, "torch": {"error": f"{program} ended with {done.returncode}" + (f": {last}" if last else "")}}
    return {**found, "torch": json.loads(lines[-1])}
