"""Points on a sphere, as numpy arrays: centred, in clusters, and how evenly they are shared out. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]  # [points, width], each of length 1
ALIKE = 1e-3  # a point this near to the middle of all has no direction but rounding's
ROUNDS = 100  # of k-means


def unit(vectors: Vectors) -> Vectors:
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(length, 1e-12), dtype=np.float32)


def centred(vectors: Vectors) -> Vectors:
    """Without what all share, of length 1 again: hidden states lie in a narrow cone (cosines above 0.9)."""
    moved = vectors - vectors.mean(0, keepdims=True, dtype=np.float64).astype(np.float32)
    alike = np.linalg.norm(moved, axis=1) < ALIKE
    moved[alike] = 0.0
    moved[alike, 0] = 1.0  # all these are the same point
    return unit(moved)


def clusters(vectors: Vectors, k: int, seed: int) -> NDArray[np.int64]:
    """k-means, seeded: the cluster of each point, 0 to k - 1. Where there are fewer different points than k, some clusters stay empty."""
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
    """k-means++ (Arthur and Vassilvitskii 2007): each next middle is drawn by its squared distance to the others."""
    chosen = [int(draw.integers(len(points)))]
    nearest = _squares(points, points[chosen]).min(1)
    while len(chosen) < k and nearest.sum() > 0:
        chosen.append(int(draw.choice(len(points), p=nearest / nearest.sum())))
        nearest = np.minimum(nearest, _squares(points, points[chosen[-1:]]).min(1))
    return points[chosen].copy()


def _squares(points: NDArray[np.float64], middles: NDArray[np.float64]) -> NDArray[np.float64]:
    found = (points**2).sum(1)[:, None] - 2 * points @ middles.T + (middles**2).sum(1)[None, :]
    return np.where(found < 1e-12, 0.0, found)  # rounding: a point has no distance to itself


def gini(shares: Sequence[float]) -> float:
    """How unevenly something is shared out: 0 where all are equal, (k - 1) / k where one of k has all."""
    ordered = sorted(shares)
    count, total = len(ordered), math.fsum(ordered)
    if not total or ordered[0] == ordered[-1]:
        return 0.0
    return math.fsum((2 * place - count - 1) * share for place, share in enumerate(ordered, 1)) / (count * total)


def evenness(shares: Sequence[float]) -> float:
    """The shares' entropy, divided by that of equal ones: 1 where all are equal, 0 where one has all."""
    total = math.fsum(shares)
    if len(shares) < 2 or not total:
        return 1.0
    return math.fsum(share / total * math.log(total / share) for share in shares if share) / math.log(len(shares))
