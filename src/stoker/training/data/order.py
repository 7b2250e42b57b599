"""The order of the samples: a permutation per epoch that is computed, not stored. A position is one number, whatever
the ranks.

A Feistel network permutes the smallest even number of bits that holds `count`; what lands outside walks on until it is
inside (fewer than four rounds on average). Each epoch has keys of its own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stoker.contract.errors import EX_CONFIG, Refusal
from stoker.contract.units import plural
from stoker.training.data.config import DataConfig

ROUNDS = 6
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # splitmix64's multipliers


class Order:
    def __init__(self, count: int, seed: int, shuffled: bool = True) -> None:
        assert count > 0, "an order of no samples"
        self.count = count
        self.seed = seed
        self.shuffled = shuffled  # False: as they lie, for validation
        self._half = max((count - 1).bit_length() + 1, 2) // 2

    def ids(self, start: int, stop: int) -> NDArray[np.int64]:
        """Sample ids of the global indices start..stop; index // count is the epoch."""
        return self.at(np.arange(start, stop, dtype=np.int64))

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of any global indices."""
        epochs, within = places // self.count, places % self.count
        if not self.shuffled or self.count == 1:
            return within
        found = np.empty(len(places), dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            mine = epochs == epoch
            found[mine] = self._permute(within[mine], epoch)
        return found

    def _keys(self, epoch: int) -> NDArray[np.uint64]:
        text = f"stoker-order-1 {self.seed} {epoch}".encode()
        return np.frombuffer(hashlib.blake2b(text, digest_size=8 * ROUNDS).digest(), dtype="<u8").astype(np.uint64)

    def _permute(self, places: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        keys = self._keys(epoch)
        found = self._network(places.astype(np.uint64), keys)
        while True:
            outside = found >= np.uint64(self.count)
            if not outside.any():
                return found.astype(np.int64)
            found[outside] = self._network(found[outside], keys)

    def _network(self, values: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        half = np.uint64(self._half)
        low = np.uint64((1 << self._half) - 1)
        left, right = values >> half, values & low
        for key in keys:
            mixed = right + key  # wraps, as it shall
            mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[0]
            mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[1]
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & low)
        found: NDArray[np.uint64] = (left << half) | right
        return found


Mixture = tuple[float, ...]  # the share of each entry of `data.path`


def mixture_of(data: DataConfig) -> Mixture | None:
    """None: each sample comes once a pass, whichever entry it is of."""
    words = [word for text in data.mixture for word in text.replace(",", " ").split()]
    if not words:
        return None
    try:
        shares = [float(word) for word in words]
    except ValueError:
        shares = []
    if not shares or not all(0 < share < math.inf for share in shares) or math.isinf(sum(shares)):
        raise Refusal(f"data.mixture {' '.join(words)}: give a number above 0 for each path, e.g. 3 1", EX_CONFIG)
    if len(shares) != len(data.path):
        line = f"data.mixture has {len(shares)} shares and data.path {plural(len(data.path), 'entry')}"
        raise Refusal(f"{line}: give one share for each path", EX_CONFIG)
    if data.max_samples:
        raise Refusal("data.mixture and data.max_samples exclude each other: leave one of them out", EX_CONFIG)
    return tuple(share / sum(shares) for share in shares)


class Mixed(Order):
    """Entries weighted by their shares. A pass has as many samples as all entries together; each entry goes through its
    own samples in epochs of its own, so that none comes twice before all have come once. Computed like any order: a
    position is one number.
    """

    def __init__(self, counts: Sequence[int], mixture: Mixture, seed: int) -> None:
        super().__init__(sum(counts), seed)
        exact = [self.count * share for share in mixture]
        draws = [math.floor(number) for number in exact]
        left = self.count - sum(draws)
        for entry in sorted(range(len(draws)), key=lambda entry: draws[entry] - exact[entry])[:left]:
            draws[entry] += 1
        self._draws, self._slots = np.array(draws), np.concatenate([[0], np.cumsum(draws)])
        self._begins = np.concatenate([[0], np.cumsum(counts)])
        self._own = [Order(count, _seed(seed, entry)) for entry, count in enumerate(counts)]

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        slots = super().at(places)
        entries = np.searchsorted(self._slots, slots, side="right") - 1
        found = np.empty(len(places), dtype=np.int64)
        for entry in np.unique(entries).tolist():
            mine = entries == entry
            turn = places[mine] // self.count * self._draws[entry] + slots[mine] - self._slots[entry]
            found[mine] = self._begins[entry] + self._own[entry].at(turn)
        return found


def _seed(seed: int, entry: int) -> int:
    digest = hashlib.blake2b(f"stoker-entry-1 {seed} {entry}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def order_of(data: DataConfig, count: int, entries: Sequence[int]) -> Order:
    """`entries`: samples of each entry of `data.path`."""
    mixture = mixture_of(data)
    if mixture is None:
        return Order(min(count, data.max_samples or count), data.seed)
    empty = [path for path, samples in zip(data.path, (*entries, *([0] * len(mixture))), strict=False) if not samples]
    if empty or len(entries) != len(mixture):
        line = f"data.mixture: {', '.join(empty[:3]) or 'an entry'} gives no sample of {data.context_length} tokens"
        raise Refusal(line, EX_CONFIG)
    return Mixed(entries, mixture, data.seed)
