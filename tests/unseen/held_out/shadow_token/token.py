"""The special tokens of the toy vocabulary."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SpecialTokens:
    begin: int = 0
    end: int = 1
    pad: int = 2
    count: int = 32
