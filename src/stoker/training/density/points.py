"""Points on a sphere, as numpy arrays. No torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]  # [points, width], each of length 1
ALIKE = 1e-3  # a point this near to the middle of all has no direction but rounding's


def unit(vectors: Vectors) -> Vectors:
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(length, 1e-12), dtype=np.float32)


def centred(vectors: Vectors) -> Vectors:
    """Without what all have in common, again of length 1: hidden states lie in a narrow cone (cosines above 0.9), where
    neighbours are hard to tell.
    """
    moved = vectors - vectors.mean(0, keepdims=True, dtype=np.float64).astype(np.float32)
    alike = np.linalg.norm(moved, axis=1) < ALIKE
    moved[alike] = 0.0
    moved[alike, 0] = 1.0  # all these are the same point
    return unit(moved)
