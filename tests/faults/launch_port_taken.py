"""Rank 1 opens a store on a port of its own choice, and somebody else listens there."""

import socket

import torch.distributed as dist
from moment import fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        with socket.create_server(("", 0)) as taken:
            fault()
            dist.TCPStore("127.0.0.1", taken.getsockname()[1], is_master=True, wait_for_workers=False)
