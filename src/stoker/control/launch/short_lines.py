"""Shortens a recipe's lines for a terminal: each step fits on one line. Files keep the complete lines.

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

MAX_COLUMNS = 100
_LABEL = re.compile(rb"(?:([^\s/:]+)/)?[GC]PU(\d{1,9}):")  # begins a rank's line
_RECIPE_LINE = re.compile(rb"INFO \| \[([GC]PU) (\d+)\] ")
_STEP = re.compile(r"Step \[(\d+/\d+)\]")
_DROPPED_FIRST = ("Mem", "MFU", "Cut", "Length", "Entropy", "KL", "LR", "Grad")  # in this order, if a line is too long
_KEPT = ("Step", "Loss", "Reward", "Right", "ETA")
_COLOURS = {"✓".encode(): SUCCESS, b"stoker: failed after": ERROR, b"stoker: stopped after": WARNING}
_SHORT_NAMES = {"Grad Norm": "Grad"}


class ShortLines:
    """Shortens the lines of one rank."""

    def __init__(self, prefix: bytes, steps: bool, recipe: bool = True) -> None:
        """`prefix` precedes each line. `steps`: show this rank's steps; one rank's are enough.

        `recipe`: the lines are a recipe's. In other programs, such as `stoker serve`, only Stoker's own lines are known.
        """
        self._prefix, self._steps, self._is_recipe = prefix, steps, recipe

    def __call__(self, line: bytes) -> bytes | None:
        start = _RECIPE_LINE.match(line) if self._is_recipe else None
        if start is None:
            return self._wrap(line) if line.startswith(b"stoker: ") else line
        device = b" " if self._prefix else start[1] + start[2] + b": "
        text = line[start.end() :]
        if not text.startswith(b"Step ["):
            return self._wrap(device + text)
        if not self._steps:
            return None
        columns = min(shutil.get_terminal_size((MAX_COLUMNS, 24)).columns, MAX_COLUMNS) - len(self._prefix + device)
        return device + shorten_step_line(text.decode("utf-8", "replace"), columns).encode()

    def _wrap(self, line: bytes) -> bytes:
        columns = shutil.get_terminal_size((0, 24)).columns - len(self._prefix)
        if columns <= 0:
            return line
        text = line.decode("utf-8", "replace")
        wrapped = wrap_text(text, columns)
        if max(map(len, wrapped.split("\n"))) > columns:  # a path can't be wrapped, so make it relative
            with contextlib.suppress(OSError):
                wrapped = wrap_text(text.replace(f" {os.getcwd()}/", " "), columns)
        return wrapped.encode()


class LauncherLines:
    """Wraps and colors the lines of a launcher's log or pipe as that launcher would on a terminal."""

    def __init__(self, colours: bool, columns: Callable[[], int]) -> None:
        """`columns` returns the current width for a line, or 0 if it is unknown."""
        self._colours, self._columns = colours, columns

    def __call__(self, line: bytes) -> bytes:
        colour = next((colour for start, colour in _COLOURS.items() if line.startswith(start)), "")
        pieces = wrap_text(line.decode("utf-8", "replace"), self._columns()).split("\n")
        return "\n".join(colour_text(piece, colour if self._colours else "") for piece in pieces).encode()


class RoleLines:
    """Formats the output of a role's run, whose lines begin with the ranks' labels, as on a terminal."""

    def __init__(self, prefix: bytes, launcher_lines: LauncherLines, recipe: bool, hosts: Sequence[str] = ()) -> None:
        """`prefix` precedes each line and its rank's label. `hosts` are in rank order."""
        self._prefix, self._launcher_lines, self._is_recipe = prefix, launcher_lines, recipe
        self._hosts = tuple(host.encode() for host in hosts)
        self._first_rank: tuple[int, int] | None = None  # host and local rank, of the ranks that have printed

    def __call__(self, line: bytes) -> bytes | None:
        label = _LABEL.match(line)
        if label is None:
            return self._launcher_lines(line)
        rank = self._hosts.index(label[1]) if label[1] in self._hosts else 0, int(label[2])
        self._first_rank = min(self._first_rank or rank, rank)
        shorten = ShortLines(self._prefix + label[0], steps=rank == self._first_rank, recipe=self._is_recipe)
        text = shorten(line[label.end() :])
        return None if text is None else label[0] + text.replace(b"\n", b"\n" + label[0])


def shorten_step_line(line: str, columns: int) -> str:
    """Return a step's line with as many of its fields as fit. Fields that are n/a are left out, and ETA comes last."""
    fields = [_shorten_field(text) for text in line.split(" | ") if not text.endswith(": n/a")]
    fields.sort(key=lambda field: field[0] == "ETA")
    unknown = [name for name, _ in reversed(fields) if name and name not in (*_KEPT, *_DROPPED_FIRST)]
    has_reward = any(name == "Reward" for name, _ in fields)  # the reward is more informative than loss and accuracy
    for dropped in (*unknown, *_DROPPED_FIRST, *(("Loss", "Right") if has_reward else ())):
        if len(_join(fields)) <= columns:
            break
        fields = [(name, text) for name, text in fields if name != dropped]
    return _join(fields)


def _shorten_field(text: str) -> tuple[str, str]:
    """Return a field's name and text. The speed has no name."""
    if step := _STEP.fullmatch(text):
        return "Step", f"Step {step[1]}"
    name, colon, value = text.partition(": ")
    if not colon:
        return "", text
    name = _SHORT_NAMES.get(name, name)
    return name, f"{name} {value}"


def _join(fields: list[tuple[str, str]]) -> str:
    return " | ".join(text for _, text in fields)
