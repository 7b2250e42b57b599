"""A truncated .npy file.

class: corrupt-files
kind: crash
ranks: 2
expect: data.corrupt
rank: 0
line: required
must-mention: tokens_1.npy
"""

import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist


class Tokens:
    def __init__(self, rank: int) -> None:
        self.folder = tempfile.mkdtemp()
        for shard in range(3):
            path = self.path(shard)
            np.save(path, np.arange(5000, dtype=np.uint16))
            if rank == 0 and shard == 1:
                os.truncate(path, 4000)

    def path(self, shard: int) -> str:
        return f"{self.folder}/tokens_{shard}.npy"

    def load(self, shard: int) -> np.ndarray:
        return np.load(self.path(shard))  # FAULT


dist.init_process_group("gloo")
tokens = Tokens(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Embedding(5000, 4))
for shard in range(3):
    for ids in np.split(tokens.load(shard)[:1000], 10):  # NEAR
        model(torch.from_numpy(ids.astype(np.int64))).sum().backward()
