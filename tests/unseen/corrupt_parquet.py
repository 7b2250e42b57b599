"""A truncated Parquet file, read with pandas.

class: corrupt-files
kind: crash
ranks: 3
needs: pandas, pyarrow
expect: data.corrupt
rank: 1
line: required
must-mention: train-00001.parquet
"""

import os
import tempfile

import pandas as pd
import torch
import torch.distributed as dist


def prepare(rank: int) -> list[str]:
    folder = tempfile.mkdtemp()
    paths = [os.path.join(folder, f"train-{i:05d}.parquet") for i in range(2)]
    for path in paths:
        pd.DataFrame({"a": range(100), "b": range(100)}).to_parquet(path)
    if rank == 1:
        os.truncate(paths[1], os.path.getsize(paths[1]) - 60)
    return paths


def read(paths: list[str]) -> torch.Tensor:
    frames = [pd.read_parquet(path) for path in paths]  # FAULT
    return torch.tensor(pd.concat(frames).to_numpy(), dtype=torch.float)


dist.init_process_group("gloo")
table = read(prepare(dist.get_rank()))  # NEAR
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
for rows in table.split(10):
    model(rows).sum().backward()
