"""The secret that machines started by hand may share: who does not know it gets no number, and hands out none.

Each side sends a fresh random number and proves that it knows the secret by an HMAC over both numbers and all that was
said. A proof that is overheard is worth nothing at any other meeting. The secret itself never travels; only a weak one
could be guessed from what does.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from typing import Any

from stoker.contract.names import EX_CONFIG, RDZV_SECRET, RDZV_SECRET_FILE, Refusal
from stoker.contract.untrusted import open_regular

_SHORTEST = 16
_LONGEST = 4096


class Secret:
    def __init__(self, key: bytes) -> None:
        self._key = key

    def nonce(self) -> str:
        return secrets.token_hex(16)

    def proof(self, side: str, said: Mapping[str, Any], challenge: str) -> str:
        """`side`: whose proof, so that none can be sent back as one's own. `said`: all that both must agree on."""
        text = json.dumps(["stoker-rdzv-1", side, challenge, dict(said)], sort_keys=True, separators=(",", ":"))
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()

    def fits(self, proof: Any, side: str, said: Mapping[str, Any], challenge: str) -> bool:
        right = self.proof(side, said, challenge)
        return isinstance(proof, str) and proof.isascii() and hmac.compare_digest(proof, right)


def find(environment: Mapping[str, str]) -> Secret | None:
    """From the variable, or the file that the other variable names. Never from the command line: others can read that."""
    given, path = environment.get(RDZV_SECRET, ""), environment.get(RDZV_SECRET_FILE, "")
    if given and path:
        raise _refusal(f"{RDZV_SECRET} and {RDZV_SECRET_FILE} are both set: give one of them")
    where = RDZV_SECRET_FILE if path else RDZV_SECRET
    key = (_read(path) if path else given).strip()
    if not key:
        return None
    if len(key) < _SHORTEST:
        better = f"give {_SHORTEST} or more, as from `openssl rand -hex 32`"
        raise _refusal(f"{where}: {len(key)} characters can be guessed; {better}")
    return Secret(key.encode("utf-8", "surrogateescape"))


def _refusal(line: str) -> Refusal:
    return Refusal(line, EX_CONFIG, cause="launch.nodes")


def _read(path: str) -> str:
    path = os.path.expanduser(path)
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            about = os.fstat(file.fileno())
            data = file.read(_LONGEST)
    except OSError as problem:
        raise _refusal(f"{RDZV_SECRET_FILE}={path} can't be read: {problem.strerror}") from problem
    if about.st_uid not in (0, os.getuid()) or about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise _refusal(f"{RDZV_SECRET_FILE}={path}: others can read it, or it is not yours; `chmod 600 {path}`")
    if not data.strip():
        raise _refusal(f"{RDZV_SECRET_FILE}={path} is empty")
    return data.decode("utf-8", "surrogateescape")
