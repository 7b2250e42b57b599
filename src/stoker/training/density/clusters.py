"""k-means: seeded, so that the same points give the same clusters."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stoker.training.density.points import Vectors

ROUNDS = 100


def clusters(vectors: Vectors, k: int, seed: int) -> NDArray[np.int64]:
    """The cluster of each point, 0 to k - 1. Where there are fewer different points than k, some clusters stay empty."""
    points = np.asarray(vectors, dtype=np.float64)
    middles = _spread_out(points, min(k, len(points)), np.random.default_rng(seed))
    labels = np.full(len(points), -1, dtype=np.int64)
    for _ in range(ROUNDS):
        squares = _squares(points, middles)
        fresh = squares.argmin(1)
        if (fresh == labels).all():
            break
        labels = fresh
        for number in range(len(middles)):
            members = points[labels == number]
            if len(members):
                middles[number] = members.mean(0)
            else:  # nobody is nearest to it: it moves to the point that is worst off
                middles[number] = points[squares[np.arange(len(points)), labels].argmax()]
    return labels


def _spread_out(points: NDArray[np.float64], k: int, draw: np.random.Generator) -> NDArray[np.float64]:
    """k-means++: each next middle is a point, drawn by its squared distance to those that are there (Arthur and
    Vassilvitskii 2007).
    """
    chosen = [int(draw.integers(len(points)))]
    nearest = _squares(points, points[chosen]).min(1)
    while len(chosen) < k and nearest.sum() > 0:
        chosen.append(int(draw.choice(len(points), p=nearest / nearest.sum())))
        nearest = np.minimum(nearest, _squares(points, points[chosen[-1:]]).min(1))
    return points[chosen].copy()


def _squares(points: NDArray[np.float64], middles: NDArray[np.float64]) -> NDArray[np.float64]:
    found = (points**2).sum(1)[:, None] - 2 * points @ middles.T + (middles**2).sum(1)[None, :]
    return np.where(found < 1e-12, 0.0, found)  # rounding: a point has no distance to itself
