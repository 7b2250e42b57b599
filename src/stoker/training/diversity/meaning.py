"""How varied answers are by their embeddings. Pure; vectors have length 1."""

from __future__ import annotations

import numpy as np

from stoker.training.density.points import Vectors


def spread(vectors: Vectors) -> float:
    """The mean cosine distance between two of them."""
    count = len(vectors)
    if count < 2:
        return 0.0
    together = float((vectors.sum(0, dtype=np.float64) ** 2).sum())
    own = float((vectors.astype(np.float64) ** 2).sum())
    return max(1.0 - (together - own) / (count * (count - 1)), 0.0)


def vendi(vectors: Vectors) -> float:
    """How many different ones they amount to: exp of the entropy of the eigenvalues of the similarities ÷ n (Friedman
    and Dieng 2023).
    """
    points = vectors.astype(np.float64)
    values = np.linalg.eigvalsh(points @ points.T / len(points))
    values = values[values > 1e-12]
    return float(np.exp(-(values * np.log(values)).sum()))
