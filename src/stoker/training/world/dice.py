"""Draws that are the same everywhere: only Random.random() is used, the one method whose numbers Python promises never
to change.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeVar

T = TypeVar("T")


def digest(*content: object) -> int:
    """A number from 0 to 2^32 that hangs on the words alone, not on the process."""
    return int.from_bytes(blake2b("\x1f".join(map(str, content)).encode(), digest_size=4).digest())


class Dice:
    def __init__(self, *key: object) -> None:
        self.random = random.Random(digest(*key)).random

    def below(self, count: int) -> int:
        return int(self.random() * count)

    def pick(self, among: Sequence[T]) -> T:
        return among[int(self.random() * len(among))]

    def some(self, among: Sequence[T], count: int) -> list[T]:
        """Different ones, in the order drawn. `count` is small beside what there is."""
        found: list[T] = []
        while len(found) < count:
            one = among[int(self.random() * len(among))]
            if one not in found:
                found.append(one)
        return found
