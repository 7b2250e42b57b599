"""How crowded each point's surroundings are, by its exact nearest neighbours."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stoker.training.density.points import Vectors

CHUNK = 1 << 24  # similarities that exist at once: 64 MB
FLOOR = 0.1  # of the median distance: copies of one prompt are dense, not infinitely so, and keep a weight


def distances(vectors: Vectors, k: int) -> NDArray[np.float64]:
    """The mean cosine distance of each to its k nearest others, chunk by chunk of the whole table of similarities."""
    count = len(vectors)
    k = min(k, count - 1)
    found = np.zeros(count)
    if k < 1:
        return found
    step = max(CHUNK // count, 1)
    for begin in range(0, count, step):
        similar = vectors[begin : begin + step] @ vectors.T
        rows = np.arange(len(similar))
        similar[rows, begin + rows] = -np.inf  # a point is no neighbour of its own
        nearest = np.partition(similar, count - k, axis=1)[:, count - k :]
        found[begin : begin + step] = 1.0 - nearest.mean(1, dtype=np.float64)
    return np.maximum(found, 0.0)


def densities(vectors: Vectors, k: int) -> NDArray[np.float64]:
    """1 / mean distance: it needs no bandwidth, as a kernel would, and an outlier's is small but not exponentially so."""
    far = distances(vectors, k)
    typical = float(np.median(far)) or float(far.mean())
    if typical <= 0:
        return np.ones(len(vectors))  # all the same point
    return np.asarray(1.0 / (far + FLOOR * typical))
