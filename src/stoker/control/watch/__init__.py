"""Turns what ranks report into evidence: progress, stalls and their culprit, stragglers, bad losses. It does no I/O."""
