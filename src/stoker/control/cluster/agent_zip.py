"""Packs Stoker's files into a zip for another host, and has the code that unpacks it there.

The zip contains the agent's packages and the training plane, so `stoker` on every rank has the coordinator's version, even
if another one is installed there. The host's Python must have torch, numpy, tokenizers and safetensors.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import os
import zipfile

from stoker.control.cluster.transport import ROOT

_PACKAGES = ("contract", "control/agent", "control/machine", "control/rank", "control/record", "training")

OLDEST_PYTHON = (3, 10)  # the oldest that the agent runs on; no supported torch needs an older one
TOO_OLD = "stoker: this Python is too old for the agent:"
NOT_WRITTEN = "stoker: the agent's files can't be written:"
DAMAGED = "stoker: the agent's files did not arrive whole"

# Runs on the other host, on any Python 3. It reads the zip from stdin, where the agent protocol follows it, and unpacks it
# to a folder named after its digest, so that the next run finds compiled files. A folder with missing files, after a cache
# cleaner or a full disk, is replaced.
_UNPACK = (
    """
import sys
if sys.version_info[:2] < OLDEST: sys.exit("TOO_OLD %d.%d" % sys.version_info[:2])
import hashlib, io, os, shutil, tempfile, zipfile
size, digest = sys.argv[1].split(":")
data = b""
while len(data) < int(size):
    chunk = os.read(0, int(size) - len(data))
    if not chunk: break
    data += chunk
if hashlib.sha256(data).hexdigest() != digest: sys.exit("DAMAGED")
archive = zipfile.ZipFile(io.BytesIO(data))
home = os.path.expanduser("~")
if not os.path.isabs(home): sys.exit("NOT_WRITTEN this user has no home folder and HOME is not set")
cache = os.path.join(home, ".cache", "stoker")
base = os.path.join(cache, "agent-" + digest[:32])

def is_complete():
    try:
        return all(os.path.getsize(os.path.join(base, file.filename)) == file.file_size for file in archive.infolist())
    except OSError:
        return False

try:
    os.makedirs(cache, 0o700, exist_ok=True)
    if not is_complete():
        fresh = tempfile.mkdtemp(prefix="agent-", dir=cache)
        try:
            archive.extractall(fresh)
            if os.path.lexists(base): os.rename(base, fresh + ".old")
            os.rename(fresh, base)
        except OSError:
            if not is_complete(): raise
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


def unpack_code(module: str = "stoker.control.agent.guardian") -> str:
    """Return Python code that unpacks the files and calls the module's `boot`.

    It is encoded in base64, which has no character that a login shell interprets. Even a newline would end a command in csh.
    """
    import base64

    encoded = base64.b64encode(_UNPACK.replace("MODULE", module).encode()).decode()
    return f"import base64;exec(base64.b64decode('{encoded}').decode())"


def size_and_digest(packed: bytes) -> str:
    """Return the argument of the unpacking code: the number of bytes to read, and their digest."""
    import hashlib

    return f"{len(packed)}:{hashlib.sha256(packed).hexdigest()}"


@functools.cache
def pack_agent() -> bytes:
    """Return the zip. Equal files give equal bytes, so that the digest stays the same."""
    paths = [os.path.join(ROOT, "stoker", name) for name in ("__init__.py", "balance.py", "control/__init__.py")]
    for package in _PACKAGES:
        for folder, _, names in sorted(os.walk(os.path.join(ROOT, "stoker", package))):
            paths += [os.path.join(folder, name) for name in sorted(names) if name.endswith((".py", ".yaml"))]
    files = [(path, os.path.relpath(path, ROOT)) for path in paths]
    pynvml = importlib.util.find_spec("pynvml")
    if pynvml is not None and pynvml.origin:
        files.append((pynvml.origin, "pynvml.py"))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, name in files:
            with open(path, "rb") as file:
                info = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))  # a fixed date keeps the bytes equal
                archive.writestr(info, file.read(), zipfile.ZIP_DEFLATED)
    return packed.getvalue()
