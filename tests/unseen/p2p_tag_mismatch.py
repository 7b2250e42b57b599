"""Sender and receiver count their tags differently after a while; the receiver skipped one.

class: point-to-point
kind: hang
ranks: 2
expect: @diverged, @hang
rank: 1, none
line: all
"""

import torch
import torch.distributed as dist


class Channel:
    def __init__(self, peer: int) -> None:
        self.peer, self.tag = peer, 0

    def send(self, t: torch.Tensor) -> None:
        self.tag += 1
        dist.send(t, dst=self.peer, tag=self.tag)  # FAULT

    def recv(self, t: torch.Tensor) -> torch.Tensor:
        self.tag += 1
        dist.recv(t, src=self.peer, tag=self.tag)  # FAULT
        return t


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    channel = Channel(1 - rank)
    for step in range(50):
        if rank == 0:
            channel.send(torch.randn(256))
        else:
            if step == 20:
                channel.tag += 1  # a batch was dropped
            loss = channel.recv(torch.empty(256)).square().mean()
            if step % 10 == 0:
                print("step", step, "loss", loss.item(), flush=True)


main()
