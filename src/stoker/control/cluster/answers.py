"""What hosts answer when they are asked (agent/probes.py): held against the fields an answer must have, and made fit to
be printed.

A host may be broken, or hostile. An answer that does not fit becomes {"error": ...}, as if the host had said so itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.contract import typed
from stoker.contract.protocol import ProtocolError
from stoker.contract.untrusted import parse_json, printable

_LONGEST = 4000  # of a text in an answer: a compiler's complaint

TORCH = {"version?": "str | None", "cuda?": "str | None", "archs?": "list[str]", "nccl?": "str | None", "seconds?": "float | None", "error?": "str | None",
         "python?": "str | None"}  # fmt: skip
PORTS = {"ports": "tuple[int, int]"}
PAIR = {
    "ports": "dict[str, str]",
    "rtt?": "float | None",
    "segment?": "int | None",
    "big?": "bool | None",
    "passes?": "int | None",
}
RATE = {"rate": "float"}
STORE = {"port": "int"}
TIMES = {"bytes": "int", "times": "list[float]"}
_RESOLVES = {"resolves": "dict[str, list[str]]"}

# By the probe's name. One that says several words (net, torch) ends with nothing; its words are checked where they are
# used.
_FINAL: dict[str, dict[str, Any]] = {
    "builds": {"hostname": "str", **_RESOLVES, "torch": TORCH},
    "clock": {"time": "float"},
    "files": {"script": "str | None", "package": "str | None", "names": "dict[str, str]", "paths": "dict[str, str | None]"},
    "names": {**_RESOLVES, "links": {"*": {"speed": "int | None", "physical": "bool"}}},
    "ready": {"problems": "list[str]", "shared": "bool", "unwritable": "str"},
    "route": {"routes": {"*": {"interface?": "str | None", "source?": "str", "mtu?": "int | None", "address?": "str", "error?": "str"}},
              "addresses": "dict[str, list[str]]", "hostname": "str", "reached_at": "str | None"},
    "setup": {"gpus": "list[str | None]", "gpu_error": "str | None", "pythons": "list[dict[str, str | None]]"},
}  # fmt: skip


def read_word(payload: bytes) -> dict[str, Any]:
    """Any word of a probe: an object, its texts printable."""
    try:
        word = parse_json(payload or b"{}")
    except ValueError as problem:
        raise ProtocolError(f"its answer can't be read: {problem}") from None
    if not isinstance(word, dict):
        raise ProtocolError("its answer is not an object")
    cleaned: dict[str, Any] = _clean(word)
    if "error" in cleaned and not isinstance(cleaned["error"], (str, type(None))):
        cleaned["error"] = "an error it does not explain"
    return cleaned


def read_answer(what: str, payload: bytes) -> dict[str, Any]:
    """The last word of a probe, as its kind asks for it."""
    word = read_word(payload)
    if "error" in word:
        return {"error": word["error"] or "an error it does not explain"}
    if what == "examine":
        from stoker.control.machine.facts import examination_from_json

        try:
            examination_from_json(word)
        except ValueError as problem:
            return _unfit(what, problem)
        return word
    return fitting(_FINAL[what], word, what) if what in _FINAL else word


def fitting(fields: Mapping[str, Any], word: Any, what: str) -> dict[str, Any]:
    """The word, if it has these fields; {"error": ...} otherwise."""
    if isinstance(word, dict) and set(word) == {"error"}:
        return word
    try:
        return typed.read_fields(fields, word)
    except ValueError as problem:
        return _unfit(what, problem)


def _unfit(what: str, problem: ValueError) -> dict[str, Any]:
    return {"error": f"its answer about {what} can't be used: {problem}"}


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value, _LONGEST)
    if isinstance(value, dict):
        return {printable(name, _LONGEST): _clean(one) for name, one in value.items()}
    return [_clean(one) for one in value] if isinstance(value, list) else value
