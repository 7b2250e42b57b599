"""Observes this machine: GPUs and the processes on them, memory, limits, processes, ports. It travels with the agent.

Uses /proc, and nvidia-ml-py where it is installed.
"""
