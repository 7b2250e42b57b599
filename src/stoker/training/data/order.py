"""The order of the samples: a permutation per epoch that is computed, not stored. A position is one number, whatever
the ranks.

A Feistel network permutes the smallest even number of bits that holds `count`; what lands outside walks on until it is
inside (fewer than four rounds on average). Each epoch has keys of its own.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

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
        places = np.arange(start, stop, dtype=np.int64)
        epochs, within = places // self.count, places % self.count
        if not self.shuffled or self.count == 1:
            return within
        found = np.empty(len(places), dtype=np.int64)
        for epoch in range(start // self.count, (stop - 1) // self.count + 1 if stop > start else 0):
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
