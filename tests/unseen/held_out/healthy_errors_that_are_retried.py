"""Remote storage fails now and then: a rank prints a traceback, waits and tries again, and all goes well in the end.

class: healthy
kind: healthy
ranks: 3
"""

import logging
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
log = logging.getLogger("storage")


class Storage:
    """Gives rows of a bucket; every twelfth request fails twice."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.failures = 0

    def read(self, index: int) -> torch.Tensor:
        if self.rank == 1 and index % 12 == 11 and self.failures < 2:
            self.failures += 1
            raise ConnectionResetError(104, "Connection reset by peer")
        self.failures = 0
        return torch.randn(8, 12, generator=torch.Generator().manual_seed(index))


def read_with_retries(storage: Storage, index: int) -> torch.Tensor:
    for attempt in range(5):
        try:
            return storage.read(index)
        except ConnectionError:
            log.exception("reading row %d failed (attempt %d of 5)", index, attempt + 1)
            time.sleep(0.5 * 2**attempt)
    raise TimeoutError(f"row {index} can't be read")


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    storage = Storage(rank)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.ReLU(), torch.nn.Linear(24, 12)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(100):
        time.sleep(0.05)
        batch = read_with_retries(storage, step)
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            log.info("step %d loss %.4f", step, loss.item())
    dist.destroy_process_group()


main()
