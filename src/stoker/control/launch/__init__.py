"""Runs a job from its request to its verdict: agents, attempts, supervision and restarts (docs/internals.md)."""
