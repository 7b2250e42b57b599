"""A recipe's lines as a terminal shows them: the device is in the prefix, and a step has one line. Files keep the whole.

INFO | [GPU 0] Step [0/100] | Loss: 12.2340 | LR: 1.00e-05 | Grad Norm: 2.7565 | ETA: 5:30 | 9,120 tok/s | MFU: n/a
Step 0/100 | Loss 12.2340 | LR 1.00e-05 | Grad 2.7565 | 9,120 tok/s | ETA 5:30
"""

from __future__ import annotations

import re
import shutil

from stoker.contract.terminal import ERROR, SUCCESS, WARNING, coloured
from stoker.contract.wrapping import wrapped

WIDEST = 100  # columns
_BEGIN = re.compile(rb"INFO \| \[([GC]PU) (\d+)\] ")
_STEP = re.compile(r"Step \[(\d+/\d+)\]")
_LEFT_OUT = ("Mem", "MFU", "Cut", "Length", "Entropy", "KL", "LR", "Grad")  # where it is too narrow, in this order
_KEPT = ("Step", "Loss", "Reward", "Right", "ETA")
_COLOURS = {"✓".encode(): SUCCESS, b"stoker: failed after": ERROR, b"stoker: stopped after": WARNING}
_SHORTER = {"Grad Norm": "Grad"}


class ShortLines:
    def __init__(self, prefix: bytes, steps: bool) -> None:
        """`prefix`: what stands before each line. `steps`: whether this rank's steps are shown; one rank's are enough."""
        self._prefix, self._steps = prefix, steps

    def __call__(self, line: bytes) -> bytes | None:
        begin = _BEGIN.match(line)
        if begin is None:
            return line
        head = b" " if self._prefix else begin[1] + begin[2] + b": "
        rest = line[begin.end() :]
        if not rest.startswith(b"Step ["):
            room = shutil.get_terminal_size((0, 24)).columns - len(self._prefix)
            return wrapped((head + rest).decode("utf-8", "replace"), room).encode() if room > 0 else head + rest
        if not self._steps:
            return None
        room = min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST) - len(self._prefix + head)
        return head + step_line(rest.decode("utf-8", "replace"), room).encode()


class OwnLines:
    """The launcher's own lines out of its log, as its terminal showed them: in colour."""

    def __init__(self, colours: bool) -> None:
        self._colours = colours

    def __call__(self, line: bytes) -> bytes:
        colour = next((colour for begin, colour in _COLOURS.items() if line.startswith(begin)), "")
        return coloured(line.decode("utf-8", "replace"), colour).encode() if colour and self._colours else line


def step_line(line: str, room: int) -> str:
    """What nobody knows is left out; of the rest as much as there is room for, and the time left last."""
    fields = [_field(text) for text in line.split(" | ") if not text.endswith(": n/a")]
    fields = [(name, text) for name, text in fields if name != "ETA"] + [one for one in fields if one[0] == "ETA"]
    others = [name for name, _ in reversed(fields) if name and name not in (*_KEPT, *_LEFT_OUT)]
    for gone in (*others, *_LEFT_OUT):
        if len(_joined(fields)) <= room:
            break
        fields = [(name, text) for name, text in fields if name != gone]
    return _joined(fields)


def _field(text: str) -> tuple[str, str]:
    """(its name, how it is shown); the speed has no name."""
    if step := _STEP.fullmatch(text):
        return "Step", f"Step {step[1]}"
    name, colon, value = text.partition(": ")
    if not colon:
        return "", text
    name = _SHORTER.get(name, name)
    return name, f"{name} {value}"


def _joined(fields: list[tuple[str, str]]) -> str:
    return " | ".join(text for _, text in fields)
