"""Signals of the ranks become evidence: progress, a stall and its culprit, a straggler, numbers gone bad. Pure: it asks
and stops nothing itself.
"""
