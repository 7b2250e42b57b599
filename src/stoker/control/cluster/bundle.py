"""What a host needs of Stoker where none is installed, or another: a zip of the agent's rooms and of the training plane, and how to unpack it.

A rank's `stoker` is this one, so its version is the coordinator's, whatever is installed there. What the training plane imports (torch, numpy, tokenizers,
safetensors) must be in the host's own Python.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import os
import zipfile

from stoker.control.cluster.transport import ROOT

_ROOMS = ("contract", "control/agent", "control/machine", "control/rank", "control/record", "training")

OLDEST_PYTHON = (3, 10)  # the agent's, and that of every torch that is still supported
TOO_OLD = "stoker: this Python is too old for the agent:"
NOT_WRITTEN = "stoker: the agent's files can't be written:"

# Runs on the other host, on whatever Python 3 is there. Reads the zip from the protocol's own stdin, keeps it by its digest so that the next
# run compiles nothing.
_UNPACK = """
import sys
if sys.version_info[:2] < OLDEST: sys.exit("TOO_OLD %d.%d" % sys.version_info[:2])
import hashlib, io, os, shutil, zipfile
want = int(sys.argv[1])
data = b""
while len(data) < want:
    more = os.read(0, want - len(data))
    if not more: sys.exit("the agent's files did not arrive whole")
    data += more
home = os.path.expanduser("~")
if not os.path.isabs(home): sys.exit("NOT_WRITTEN this user has no home folder and HOME is not set")
base = os.path.join(home, ".cache", "stoker", "agent-" + hashlib.sha256(data).hexdigest()[:16])
if not os.path.exists(os.path.join(base, "complete")):
    fresh = base + "." + str(os.getpid())
    try:
        zipfile.ZipFile(io.BytesIO(data)).extractall(fresh)
        open(os.path.join(fresh, "complete"), "w").close()
        os.rename(fresh, base)
    except OSError as problem:
        shutil.rmtree(fresh, ignore_errors=True)
        if not os.path.exists(os.path.join(base, "complete")): sys.exit("NOT_WRITTEN %s: %s" % (base, problem.strerror))
sys.path.insert(0, base)
from MODULE import boot
boot(sys.argv[2:])
""".strip().replace("OLDEST", repr(OLDEST_PYTHON)).replace("TOO_OLD", TOO_OLD).replace("NOT_WRITTEN", NOT_WRITTEN)


def unpack(module: str = "stoker.control.agent.guardian") -> str:
    """Python for the other host: takes the files, then calls that module's `boot`.

    One line without a character any login shell acts on: csh takes no newline within quotes, fish reads backslashes there.
    """
    import base64

    return f"import base64;exec(base64.b64decode('{base64.b64encode(_UNPACK.replace('MODULE', module).encode()).decode()}').decode())"


@functools.cache
def pack() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("__init__.py", "balance.py", "control/__init__.py"):
            _add(archive, os.path.join(ROOT, "stoker", name), f"stoker/{name}")
        for room in _ROOMS:
            top = os.path.join(ROOT, "stoker", room)
            for folder, _, files in sorted(os.walk(top)):
                for file in sorted(files):
                    if file.endswith((".py", ".yaml")):
                        path = os.path.join(folder, file)
                        _add(archive, path, os.path.relpath(path, ROOT))
        nvml = nvml_source()
        if nvml:
            _add(archive, nvml, "pynvml.py")
    return out.getvalue()


def _add(archive: zipfile.ZipFile, path: str, name: str) -> None:
    with open(path, "rb") as file:
        archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), file.read(), zipfile.ZIP_DEFLATED)  # same bytes, same digest


def nvml_source() -> str | None:
    spec = importlib.util.find_spec("pynvml")
    return spec.origin if spec is not None else None
