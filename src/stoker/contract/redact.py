"""No secret in a record: what in an environment looks like one is replaced."""

from __future__ import annotations

import re
from collections.abc import Mapping

HIDDEN = "<redacted>"
_NAME = re.compile(
    r"KEY|TOKEN|SECRET|PASS|PWD|CREDENTIAL|AUTH|COOKIE|SESSION|PRIVATE|DSN|WEBHOOK|SIGNATURE|CONNECTION_STRING|(^|_|-)(PAT|PW|CREDS?)(_|-|$)", re.IGNORECASE
)
_OURS = re.compile(r"tokenizer\.|text[_-]key", re.IGNORECASE)  # keys of our own configuration
_HARMLESS = {"PWD", "OLDPWD", "SSH_AUTH_SOCK", "XDG_SESSION_ID", "XDG_SESSION_TYPE", "XDG_SESSION_CLASS", "DESKTOP_SESSION", "TOKENIZERS_PARALLELISM"}
_VALUE = re.compile(
    r"(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|AKIA[A-Z0-9]{12,}|xox[abprs]-[\w-]{10,}"
    r"|(?<=Bearer )[^\s'\"]{8,}|(?<=hooks\.slack\.com/services/)[\w/-]+|(?<=discord\.com/api/webhooks/)[\w/-]+"
    r"|glpat-[\w-]{16,}|eyJ[\w-]{8,4000}\.[\w-]{8,4000}\.[\w-]{1,4000}|-----BEGIN [A-Z ]*PRIVATE KEY-----)"
)
_URL_PASSWORD = re.compile(r"(://[^/\s:@]{0,200}):[^/\s@]{1,400}@")  # begins with a literal: linear on any input
LONGEST = 8192  # of one value: a record is no place for more


def environment(found: Mapping[str, str]) -> dict[str, str]:
    return {name: HIDDEN if _NAME.search(name) and name not in _HARMLESS else text(value) for name, value in sorted(found.items())}


def text(value: str) -> str:
    """Tokens of known shapes and passwords inside URLs, wherever they stand."""
    if len(value) > LONGEST:
        value = value[:LONGEST] + f"... ({len(value)} characters)"
    return whole(value)


def whole(value: str) -> str:
    """The same of a text of any length."""
    return _URL_PASSWORD.sub(r"\1:" + HIDDEN + "@", _VALUE.sub(HIDDEN, value))


def arguments(argv: list[str]) -> list[str]:
    """A command line: the value after a flag, or in NAME=VALUE, goes where the name sounds secret."""
    shown: list[str] = []
    hide_next = False
    for word in argv:
        name, equals, value = word.partition("=")
        inner, inner_equals, inner_value = value.partition("=")
        secret = sounds_secret(name)
        if hide_next and not word.startswith("-"):
            shown.append(word if _number(word) else HIDDEN)
        elif secret and equals and not _number(value):
            shown.append(f"{name}={HIDDEN}")
        elif inner_equals and sounds_secret(inner) and not _number(inner_value):  # --env=API_KEY=...
            shown.append(f"{name}={inner}={HIDDEN}")
        else:
            shown.append(text(word))
        hide_next = secret and not equals and name.startswith("-")
    return shown


def command(line: str) -> str:
    """A command line as one string, as /proc shows it."""
    return " ".join(arguments(line.split(" ")))


def sounds_secret(name: str) -> bool:
    return bool(_NAME.search(_OURS.sub("", name))) and not name.lower().endswith(("tokens", "tokenizer", "keys", "passes"))


def _number(word: str) -> bool:
    return word.replace(".", "").isdigit()
