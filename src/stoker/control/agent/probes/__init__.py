"""Probes: questions about a host, each answered by a function that the agent calls in a forked child.

inspector.PROBES names the file of each probe. A file is imported in the child, when its probe is called.
"""
