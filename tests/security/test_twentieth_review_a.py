"""What the twentieth review found: logs of another user's run that are followed, and lines without end that begin as a recipe's."""

from __future__ import annotations

from stoker.control.launch.console import LONGEST, LineCutter


def test_a_line_without_end_is_shown_in_pieces_however_it_begins() -> None:
    """One that began as a recipe's was kept for its end, whatever its length: a hostile host's rank filled the launcher."""
    cutter = LineCutter(b"rank 1:", lambda line: line)
    shown = cutter.feed(b"INFO | [")
    piece = b"x" * (1 << 20)
    for _ in range(LONGEST // len(piece)):
        shown += cutter.feed(piece)
    assert shown.startswith(b"rank 1:INFO | [x") and len(shown) > LONGEST
    assert cutter.feed(b"y\nz\n") == b"y\nrank 1:z\n"
