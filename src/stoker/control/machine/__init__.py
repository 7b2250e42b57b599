"""Observes this machine: GPUs and who holds them, memory, limits, processes, ports. It travels with the agent.

Uses /proc, and nvidia-ml-py where it is there.
"""
