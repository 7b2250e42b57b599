"""How often a prompt should be sampled. Where prompts are sparse each counts for more: w ∝ (1 / density)^power. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def weights(density: NDArray[np.float64], power: float, most: float) -> NDArray[np.float64]:
    """Mean 1, none above `most`."""
    logs = -power * np.log(density)
    return capped(np.exp(np.maximum(logs - logs.max(), -600.0)), most)


def capped(raw: NDArray[np.float64], most: float) -> NDArray[np.float64]:
    """Water-filling: what lies above the cap is cut, and the rest is raised in proportion, until nothing is above and
    the mean is 1.
    """
    count = len(raw)
    if most <= 1 or count == 0:
        return np.ones(count)
    full = np.zeros(count, dtype=bool)
    while True:
        left = max(count - most * full.sum(), 0.0)
        scaled = np.where(full, most, raw * (left / raw[~full].sum()))
        above = ~full & (scaled > most)
        if not above.any():
            return np.asarray(scaled)
        full |= above
