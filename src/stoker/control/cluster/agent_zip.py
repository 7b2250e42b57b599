"""What a host without this Stoker needs: a zip of the agent's packages and the training plane, and its unpacking.

A rank's `stoker` is this one, so its version is the coordinator's, whatever is installed there. What the training plane
imports (torch, numpy, tokenizers, safetensors) must be in the host's own Python.
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
DAMAGED = "stoker: the agent's files did not arrive whole"

# Runs on the other host, on whatever Python 3 is there. Reads the zip from the protocol's own stdin and keeps it by its
# digest, so that the next run compiles nothing. A folder that lost files (a cleaner of caches, a full disk) is replaced.
_UNPACK = (
    """
import sys
if sys.version_info[:2] < OLDEST: sys.exit("TOO_OLD %d.%d" % sys.version_info[:2])
import hashlib, io, os, shutil, tempfile, zipfile
want, digest = sys.argv[1].split(":")
data = b""
while len(data) < int(want):
    more = os.read(0, int(want) - len(data))
    if not more: break
    data += more
if hashlib.sha256(data).hexdigest() != digest: sys.exit("DAMAGED")
archive = zipfile.ZipFile(io.BytesIO(data))
home = os.path.expanduser("~")
if not os.path.isabs(home): sys.exit("NOT_WRITTEN this user has no home folder and HOME is not set")
cache = os.path.join(home, ".cache", "stoker")
base = os.path.join(cache, "agent-" + digest[:32])

def whole():
    try:
        return all(os.path.getsize(os.path.join(base, one.filename)) == one.file_size for one in archive.infolist())
    except OSError:
        return False

try:
    os.makedirs(cache, 0o700, exist_ok=True)
    if not whole():
        fresh = tempfile.mkdtemp(prefix="agent-", dir=cache)
        try:
            archive.extractall(fresh)
            if os.path.lexists(base): os.rename(base, fresh + ".old")
            os.rename(fresh, base)
        except OSError:
            if not whole(): raise
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
            shutil.rmtree(fresh + ".old", ignore_errors=True)
except OSError as problem:
    sys.exit("NOT_WRITTEN %s: %s" % (base, problem.strerror))
sys.path.append(base)
from MODULE import boot
boot(sys.argv[2:])
""".strip()
    .replace("OLDEST", repr(OLDEST_PYTHON))
    .replace("TOO_OLD", TOO_OLD)
    .replace("NOT_WRITTEN", NOT_WRITTEN)
    .replace("DAMAGED", DAMAGED)
)


def unpack(module: str = "stoker.control.agent.guardian") -> str:
    """Takes the files, then calls that module's `boot`. No character a login shell acts on, as csh on a newline."""
    import base64

    words = base64.b64encode(_UNPACK.replace("MODULE", module).encode()).decode()
    return f"import base64;exec(base64.b64decode('{words}').decode())"


def announced(packed: bytes) -> str:
    """What the other side is told to expect: how many bytes, and their digest."""
    import hashlib

    return f"{len(packed)}:{hashlib.sha256(packed).hexdigest()}"


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
        # Same bytes, same digest.
        archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), file.read(), zipfile.ZIP_DEFLATED)


def nvml_source() -> str | None:
    spec = importlib.util.find_spec("pynvml")
    return spec.origin if spec is not None else None
