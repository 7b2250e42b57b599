"""Long lines of ours, broken between words for a terminal. Files and pipes get them whole: there people grep. Pure."""

from __future__ import annotations

import re

NARROWEST = 40  # columns: below, more breaks would not help
# Texts: `re` compiles them when a line is long, and not when every command starts.
_WORD = r"(?:`[^`]*`|\S)+"  # a command in backticks stays whole
_GAP = r"(?<=\S) {2,}(?=\S)"  # between columns, or before the comment on a command
_COMMAND = r"\s*(?:→ )?(?:[A-Z_]+=\S+ )*(?:stoker|pip|python3?|sudo|export|git|nvidia-smi|kill|ssh|scp|bash) "
# A command that ends a line, and that somebody is about to paste: it gets a line of its own where both don't fit.
_AT_THE_END = rf"\b(?:to continue|to start it again|to copy (?:the model|them)): (?={_COMMAND})"


def wrapped(text: str, columns: int, hanging: int = 2) -> str:
    """`columns`: 0 where they are not known, which changes nothing. `hanging`: how much further in a line continues."""
    if columns < NARROWEST:
        return text
    return "\n".join(piece for line in text.split("\n") for piece in _pieces(line, columns, hanging))


def _pieces(line: str, columns: int, hanging: int) -> list[str]:
    """Split a line without recursion: it may have any length."""
    if len(line) > columns and (found := re.search(_AT_THE_END, line)):
        command = f"{' ' * hanging}{line[found.end() :]}"
        return [*_parts(line[: found.end() - 1], columns, hanging), *_parts(command, columns, hanging)]
    return _parts(line, columns, hanging)


def _parts(line: str, columns: int, hanging: int) -> list[str]:
    """Between columns, then between words, with no indent beyond the terminal."""
    lead, end = len(line) - len(line.lstrip()), len(line)
    gaps = [gap for gap in re.finditer(_GAP, line) if gap.start() >= lead] if end > columns else []
    behind: list[list[str]] = []
    while gaps and end > columns:  # what stands behind the last one gets a line of its own
        last = gaps.pop()
        second = gaps[0].end() if gaps else lead + 6
        behind.append(_broken(" " * min(second, columns) + line[last.end() : end], columns, hanging))
        end = last.start()
    return [*_broken(line[:end], columns, hanging), *(piece for pieces in reversed(behind) for piece in pieces)]


def _broken(line: str, columns: int, hanging: int) -> list[str]:
    """Between words alone."""
    lead = line[: len(line) - len(line.lstrip())]
    if len(line) <= columns or len(lead) > columns or re.match(_COMMAND, line):  # what is copied must stay one line
        return [line]
    found = [lead]
    for word in re.findall(_WORD, line):
        if found[-1].strip() and len(found[-1]) + 1 + len(word) > columns:
            found.append(f"{lead}{' ' * hanging}{word}")
        else:
            found[-1] += f" {word}" if found[-1].strip() else word
    return found
