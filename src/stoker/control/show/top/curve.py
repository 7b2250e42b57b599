"""A curve in a terminal: dots of braille, two by four in a character."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.control.show.snapshot import Metric, finite
from stoker.control.show.top.cells import ACCENT, BAD, DIM, Line, Piece, fit, number, short

_BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # row, column
_LABEL = 10  # columns left of the curve
_MOST = 1e300  # the difference of two values must be a number, too


def curve_lines(points: Sequence[tuple[int, Metric]], width: int, height: int) -> list[Line]:
    """`height` lines, the last one with the steps. A step whose value is not a finite number is a × at the bottom."""
    inner, rows = width - _LABEL, height - 1
    known = [(step, max(-_MOST, min(_MOST, value))) for step, raw in points if (value := finite(raw)) is not None]
    if inner < 4 or rows < 2 or not points:
        return []
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)
    low, high = min((value for _, value in known), default=0.0), max((value for _, value in known), default=1.0)
    if high - low < 1e-12 * max(abs(high), 1e-300):
        low, high = low - 0.5, high + 0.5
    cells = _dots(known, inner, rows, (first, last), (low, high))
    lost = {_column(step, first, last, inner * 2) // 2 for step, raw in points if isinstance(raw, str)}
    lines: list[Line] = []
    for row in range(rows):
        label = {0: number(high), rows - 1: number(low)}.get(row, "")
        pieces: list[Piece] = [(f"{label:>{_LABEL - 2}} ", DIM), ("┤" if label else "│", DIM)]
        text = "".join(chr(_BRAILLE + dots) if dots else " " for dots in cells[row])
        pieces += _marked(text, lost) if row == rows - 1 else [(text, ACCENT)]
        lines.append(fit(pieces, width))
    begin, end = f"step {short(first)}", short(last)
    space = " " * max(1, inner - len(begin) - len(end))
    return [*lines, fit([(" " * _LABEL + begin + space + end, DIM)], width)]


def _marked(text: str, lost: set[int]) -> list[Piece]:
    pieces: list[Piece] = []
    for at, sign in enumerate(text):
        piece = ("×", BAD) if at in lost else (sign, ACCENT)
        if pieces and pieces[-1][1] == piece[1]:
            pieces[-1] = (pieces[-1][0] + piece[0], piece[1])
        else:
            pieces.append(piece)
    return pieces


def _column(step: int, first: int, last: int, columns: int) -> int:
    return max(0, min(columns - 1, int((step - first) / (last - first) * (columns - 1) + 0.5)))


def _dots(
    known: Sequence[tuple[int, float]], width: int, rows: int, steps: tuple[int, int], values: tuple[float, float]
) -> list[list[int]]:
    """Neighbouring points are connected: a steep fall is a line, not two dots."""
    cells = [[0] * width for _ in range(rows)]
    low, high = values
    before: tuple[int, int] | None = None
    for step, value in known:
        x = _column(step, *steps, width * 2)
        y = max(0, min(rows * 4 - 1, int((high - value) / (high - low) * (rows * 4 - 1) + 0.5)))
        last_x, last_y = before or (x, y)
        distance = max(1, x - last_x, abs(y - last_y))
        for part in range(1, distance + 1):
            at_x, at_y = last_x + (x - last_x) * part // distance, last_y + (y - last_y) * part // distance
            if 0 <= at_x < width * 2:
                cells[at_y // 4][at_x // 2] |= _DOTS[at_y % 4][at_x % 2]
        before = x, y
    return cells
