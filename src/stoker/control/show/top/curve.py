"""The loss of a run as lines of the screen."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.control.show.drawing import Line as Drawn
from stoker.control.show.drawing import chart
from stoker.control.show.snapshot import Metric, finite
from stoker.control.show.top.cells import ACCENT, BAD, DIM, Line, Piece, fit

_AXIS = 2  # lines below the curve
_MOST = 1e300  # the difference of two values must be a number, too


def curve_lines(points: Sequence[tuple[int, Metric]], width: int, height: int) -> list[Line]:
    """At most `height` lines. A step whose loss is not a finite number is a × at the bottom."""
    known = [(step, max(-_MOST, min(_MOST, value))) for step, raw in points if (value := finite(raw)) is not None]
    rows = height - _AXIS
    if width < 20 or rows < 2 or not known:
        return []
    drawn = chart([Drawn("loss", tuple(known))], width, rows)
    lost = [step for step, raw in points if isinstance(raw, str)]
    first, last = known[0][0], max(known[-1][0], known[0][0] + 1)
    inner = len(drawn[0]) - 1
    for step in lost:
        at = max(0, min(inner - 1, round((step - first) / (last - first) * (inner - 1))))
        drawn[rows - 1][at + 1] = ("×", "red")
    return [fit(_pieces(row), width) for row in drawn]


def _pieces(row: list[tuple[str, str]]) -> list[Piece]:
    """Cells of one colour together."""
    pieces: list[Piece] = []
    for sign, colour in row:
        style = {"": DIM, "red": BAD}.get(colour, ACCENT)
        if sign == " " or (pieces and pieces[-1][1] == style):
            before = pieces.pop() if pieces else ("", style)
            pieces.append((before[0] + sign, before[1]))
        else:
            pieces.append((sign, style))
    return pieces
