"""Signals of the ranks become evidence: progress, a stall and its culprit, a straggler, numbers gone bad. Pure: it looks at nothing and stops nothing itself."""
