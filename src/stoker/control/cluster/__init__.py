"""Reaching hosts: transports that carry the agent protocol."""
