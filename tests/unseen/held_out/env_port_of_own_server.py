"""The process group gets a store with a port of its own, which the metrics server of rank 0 has opened just before.

class: environment
kind: crash
ranks: 3
expect: env.*, launch.*, net.*, @raised
rank: 0
line: required
"""

import http.server
import os
import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

PORT = 20000 + (int(os.environ["MASTER_PORT"]) + 77) % 9000  # both settings were derived in the same way


class Metrics(http.server.BaseHTTPRequestHandler):
    value = 0.0

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"loss {self.value}\n".encode())


def serve_metrics() -> None:
    server = http.server.HTTPServer(("127.0.0.1", PORT), Metrics)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def connect(rank: int, world_size: int) -> None:
    store = dist.TCPStore("127.0.0.1", PORT, world_size, is_master=rank == 0)  # FAULT
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        serve_metrics()
    else:
        time.sleep(2)  # rank 0 opens the port first
    connect(rank, world_size)  # NEAR
    model = DDP(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(60):
        time.sleep(0.05)
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        Metrics.value = loss.item()
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {Metrics.value:.4f}", flush=True)
    dist.destroy_process_group()


main()
