"""An answer's text as its tokens come: characters that are whole, and nothing that may yet turn out to be a stop text."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence

Decode = Callable[[int], bytes]


class Text:
    """`hidden`: ids without a text, such as marks of roles; `strips`: a blank before the whole is no part of it."""

    def __init__(
        self, decode: Decode, stop_texts: Sequence[str] = (), hidden: Collection[int] = (), strips: bool = False
    ) -> None:
        self._decode, self._hidden, self._strips = decode, hidden, strips
        self._stops = [text.encode("utf-8", "surrogatepass") for text in stop_texts if text]
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = b""  # may be the beginning of a stop text
        self.stopped = False

    def feed(self, token: int) -> str:
        """What the token adds to the text; `stopped` is true once a stop text appeared."""
        data = b"" if token in self._hidden else self._decode(token)
        if data and self._strips:
            self._strips, data = False, data.removeprefix(b" ")
        self._held += data
        # The one that is complete first, as if bytes came one at a time: where tokens are parted changes nothing.
        ends = [(at + len(stop), len(stop)) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            self.stopped = True
            end, length = min(ends, key=lambda found: (found[0], -found[1]))
            data, self._held = self._held[: end - length], b""
            return self._characters.decode(data, final=True)
        kept = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        data, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return self._characters.decode(data)

    def rest(self) -> str:
        """What was held back, when no token follows."""
        data, self._held = self._held, b""
        return self._characters.decode(data, final=True)


def _overlap(data: bytes, stop: bytes) -> int:
    """How many of the last bytes may begin the stop text."""
    for length in range(min(len(stop) - 1, len(data)), 0, -1):
        if data.endswith(stop[:length]):
            return length
    return 0
