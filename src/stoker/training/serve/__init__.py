"""Answers to requests that come and go: continuous batching over a paged cache of keys and values."""
