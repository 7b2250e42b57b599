"""A feature server accepts the request and never answers.

class: inside-a-rank
kind: hang
ranks: 3
expect: @hang
rank: 2
line: required
"""

import socket
import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class FeatureClient:
    def __init__(self, port: int) -> None:
        self.connection = socket.create_connection(("127.0.0.1", port))

    def fetch(self, key: str) -> bytes:
        self.connection.sendall(key.encode() + b"\n")
        return self.connection.recv(64)  # FAULT


def serve(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    for _ in range(20):
        connection.recv(64)
        connection.sendall(b"0.5")
    threading.Event().wait()  # keeps the connection open


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
    client = FeatureClient(listener.getsockname()[1])
    model = DDP(torch.nn.Linear(8, 8))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(60):
        scale = float(client.fetch(f"step{step}")) if rank == 2 else 0.5  # NEAR
        opt.zero_grad()
        model(torch.randn(4, 8) * scale).square().mean().backward()
        opt.step()


main()
