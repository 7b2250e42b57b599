"""What is here: GPUs, who holds them, memory, ports. Observes, never acts. /proc and nvidia-ml-py only: it travels with
the agent.
"""
