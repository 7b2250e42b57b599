"""What is here: GPUs, holders, memory, ports. Observes only. /proc and nvidia-ml-py: it travels with the agent."""
