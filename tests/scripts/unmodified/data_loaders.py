"""Two worker processes per loader, spawned and forked, with a dataset class of this very script."""

import json
import os
import sys

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Squares(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        info = get_worker_info()
        return torch.tensor([index * index, os.getpid(), info.id])


def hello(worker: int) -> None:
    print(f"worker {worker} in {__name__}")
    sys.stdout.flush()


def main() -> None:
    for method in ("spawn", "fork"):
        loader = DataLoader(
            Squares(), batch_size=2, num_workers=2, multiprocessing_context=method, worker_init_fn=hello
        )
        rows = torch.cat(list(loader)).tolist()
        found = {
            "method": method,
            "squares": [row[0] for row in rows],
            "workers": sorted({row[2] for row in rows}),
            "processes": len({row[1] for row in rows}),
            "elsewhere": os.getpid() not in {row[1] for row in rows},
        }
        print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main()
