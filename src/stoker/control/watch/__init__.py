"""Turns the ranks' signals into evidence: progress, stalls and their culprit, stragglers, bad losses. Pure."""
