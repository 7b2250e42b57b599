"""A checkpoint that takes long: a slow disk under rank 0 while the others wait in a barrier, or under all of them."""

import os
import tempfile
import time

import torch
import torch.distributed as dist
from training import RANK, Tiny, arguments, finish, phase

PIECE_S = 0.5

told = arguments(seconds=30.0, who="rank0", marked="no", how="write", times=1, steps=60)
tiny = Tiny()


def save(seconds: float) -> None:
    """A file that grows slowly, or one call that blocks until the disk has it."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.pt")
        torch.save(tiny.model.state_dict(), path + ".tmp")
        with open(path + ".tmp", "ab") as file:
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0:
                if told.how == "write":
                    file.write(bytes(1 << 20))
                    os.fsync(file.fileno())
                    left = min(left, PIECE_S)
                time.sleep(left)
        os.replace(path + ".tmp", path)


for _ in range(told.times):
    tiny.train(told.steps)
    phase("save", told.marked)
    if told.who == "all" or RANK == 0:
        save(told.seconds)
    dist.barrier()
    phase("train", told.marked)
tiny.train(told.steps)
finish()
