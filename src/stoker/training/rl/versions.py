"""Which versions of the weights may have written a step's completions. Version v is the weights after v steps.

The rule that requests, checks and retention share: every token of a completion that is learned at step s was written by
weights of version s - grpo.staleness or newer.
"""

from __future__ import annotations


def oldest_version(step: int, staleness: int) -> int:
    """Return the oldest version that may have written a token of this step's completions."""
    return max(step - staleness, 0)


def versions_kept(staleness: int) -> int:
    """Return how many of the newest versions a server may still be told to load, or may name in a completion."""
    return staleness + 1
