"""No secret in a record: what in an environment looks like one is replaced."""

from __future__ import annotations

import re
from collections.abc import Mapping

HIDDEN = "<redacted>"
_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|PWD|CREDENTIAL|AUTH|COOKIE|SESSION|PRIVATE|DSN|WEBHOOK|SIGNATURE|CONNECTION_STRING", re.I)
_HARMLESS = {"PWD", "OLDPWD", "SSH_AUTH_SOCK", "XDG_SESSION_ID", "XDG_SESSION_TYPE", "XDG_SESSION_CLASS", "DESKTOP_SESSION", "TOKENIZERS_PARALLELISM"}
_VALUE = re.compile(
    r"(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|AKIA[A-Z0-9]{12,}|xox[abprs]-[\w-]{10,}"
    r"|glpat-[\w-]{16,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+|-----BEGIN [A-Z ]*PRIVATE KEY-----)"
)
_URL_PASSWORD = re.compile(r"(\w+://[^/\s:@]*):[^/\s@]+@")


def environment(found: Mapping[str, str]) -> dict[str, str]:
    return {name: HIDDEN if _NAME.search(name) and name not in _HARMLESS else text(value) for name, value in sorted(found.items())}


def text(value: str) -> str:
    """Tokens of known shapes and passwords inside URLs, wherever they stand."""
    return _URL_PASSWORD.sub(r"\1:" + HIDDEN + "@", _VALUE.sub(HIDDEN, value))


def arguments(argv: list[str]) -> list[str]:
    """A command line: the value after a flag, or in NAME=VALUE, goes where the name sounds secret."""
    shown: list[str] = []
    hide_next = False
    for word in argv:
        name, equals, value = word.partition("=")
        secret = bool(_NAME.search(name)) and not name.lower().endswith(("tokens", "tokenizer", "keys", "passes"))
        if hide_next and not word.startswith("-"):
            shown.append(HIDDEN if not word.replace(".", "").isdigit() else word)
        elif secret and equals and not value.replace(".", "").isdigit():
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(text(word))
        hide_next = secret and not equals and name.startswith("-")
    return shown
