"""A recipe's lines as a terminal shows them: the device is in the prefix, and a step has one line. Files keep the whole.

INFO | [GPU 0] Step [0/100] | Loss: 12.2340 | LR: 1.00e-05 | Grad Norm: 2.7565 | ETA: 5:30 | 9,120 tok/s | MFU: n/a
Step 0/100 | Loss 12.2340 | LR 1.00e-05 | Grad 2.7565 | 9,120 tok/s | ETA 5:30
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Sequence

from stoker.contract.terminal import ERROR, SUCCESS, WARNING, colour_text, wrap_text

WIDEST = 100  # columns
_LABEL = re.compile(rb"(?:([^\s/:]+)/)?[GC]PU(\d{1,9}):")  # of a rank
_BEGIN = re.compile(rb"INFO \| \[([GC]PU) (\d+)\] ")
_STEP = re.compile(r"Step \[(\d+/\d+)\]")
_LEFT_OUT = ("Mem", "MFU", "Cut", "Length", "Entropy", "KL", "LR", "Grad")  # where it is too narrow, in this order
_KEPT = ("Step", "Loss", "Reward", "Right", "ETA")
_COLOURS = {"✓".encode(): SUCCESS, b"stoker: failed after": ERROR, b"stoker: stopped after": WARNING}
_SHORTER = {"Grad Norm": "Grad"}


class ShortLines:
    def __init__(self, prefix: bytes, steps: bool, recipe: bool = True) -> None:
        """`prefix`: what stands before each line. `steps`: whether this rank's steps are shown; one rank's are enough. `recipe`:
        it is one of ours; of others, as `stoker serve`, Stoker's own lines alone are known.
        """
        self._prefix, self._steps, self._recipe = prefix, steps, recipe

    def __call__(self, line: bytes) -> bytes | None:
        begin = _BEGIN.match(line) if self._recipe else None
        if begin is None:
            return self._folded(line) if line.startswith(b"stoker: ") else line
        head = b" " if self._prefix else begin[1] + begin[2] + b": "
        rest = line[begin.end() :]
        if not rest.startswith(b"Step ["):
            return self._folded(head + rest)
        if not self._steps:
            return None
        room = min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST) - len(self._prefix + head)
        return head + step_line(rest.decode("utf-8", "replace"), room).encode()

    def _folded(self, line: bytes) -> bytes:
        room = shutil.get_terminal_size((0, 24)).columns - len(self._prefix)
        if room <= 0:
            return line
        text = line.decode("utf-8", "replace")
        shown = wrap_text(text, room)
        if max(map(len, shown.split("\n"))) > room:  # a path, which has no place to break at
            with contextlib.suppress(OSError):
                shown = wrap_text(text.replace(f" {os.getcwd()}/", " "), room)
        return shown.encode()


class OwnLines:
    """A launcher's own lines out of its log or its pipe, as its terminal would show them: folded, and in colour."""

    def __init__(self, colours: bool, columns: Callable[[], int]) -> None:
        """`columns`: that there are for a line now; 0: nobody knows."""
        self._colours, self._columns = colours, columns

    def __call__(self, line: bytes) -> bytes:
        colour = next((colour for begin, colour in _COLOURS.items() if line.startswith(begin)), "")
        pieces = wrap_text(line.decode("utf-8", "replace"), self._columns()).split("\n")
        return "\n".join(colour_text(piece, colour if self._colours else "") for piece in pieces).encode()


class RoleLines:
    """What the run of a role writes to its pipe, each rank's lines with its label, as a terminal of its own would show it."""

    def __init__(self, prefix: bytes, own: OwnLines, recipe: bool, hosts: Sequence[str] = ()) -> None:
        """`prefix`: what stands before each line, the ranks' labels apart. `recipe`: it is one of ours. `hosts`: in rank order."""
        self._prefix, self._own, self._recipe = prefix, own, recipe
        self._hosts = tuple(host.encode() for host in hosts)
        self._first: tuple[int, int] | None = None  # of the ranks that have printed something

    def __call__(self, line: bytes) -> bytes | None:
        label = _LABEL.match(line)
        if label is None:
            return self._own(line)
        place = self._hosts.index(label[1]) if label[1] in self._hosts else 0, int(label[2])
        self._first = min(self._first or place, place)
        shorten = ShortLines(self._prefix + label[0], steps=place == self._first, recipe=self._recipe)
        shown = shorten(line[label.end() :])
        return None if shown is None else label[0] + shown.replace(b"\n", b"\n" + label[0])


def step_line(line: str, room: int) -> str:
    """Return a step's line with as many of its fields as there is room for. What is n/a is left out, and ETA comes last."""
    fields = [_field(text) for text in line.split(" | ") if not text.endswith(": n/a")]
    fields = [(name, text) for name, text in fields if name != "ETA"] + [one for one in fields if one[0] == "ETA"]
    others = [name for name, _ in reversed(fields) if name and name not in (*_KEPT, *_LEFT_OUT)]
    of_reward = ("Loss", "Right") if any(name == "Reward" for name, _ in fields) else ()  # there the reward says most
    for gone in (*others, *_LEFT_OUT, *of_reward):
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
