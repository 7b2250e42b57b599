"""The ranks' signals become evidence: progress, a stall and its culprit, stragglers, bad numbers. Pure."""
