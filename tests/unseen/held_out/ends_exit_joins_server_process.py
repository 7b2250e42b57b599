"""The last rank's tokenizer server is a process that nobody tells to end: Python's exit joins it for ever.

class: ends
kind: hang
ranks: 3
expect: @hang, hang.child
rank: 2
line: none
"""

import multiprocessing
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def serve(requests: multiprocessing.Queue, replies: multiprocessing.Queue) -> None:
    while True:
        text = requests.get()
        replies.put([ord(character) % 64 for character in text])


class Tokenizer:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.requests, self.replies = context.Queue(), context.Queue()
        self.process = context.Process(target=serve, args=(self.requests, self.replies))
        self.process.start()

    def __call__(self, text: str) -> list[int]:
        self.requests.put(text)
        return self.replies.get()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tokenizer = Tokenizer() if rank == 2 else lambda text: [ord(character) % 64 for character in text]
    model = DDP(torch.nn.Sequential(torch.nn.Embedding(64, 8), torch.nn.Linear(8, 64)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(60):
        time.sleep(0.05)
        ids = torch.tensor(tokenizer(f"the text of row {step} of rank {rank}"))
        loss = torch.nn.functional.cross_entropy(model(ids[:-1]), ids[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
