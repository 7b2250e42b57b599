"""datasets.py beside the script hides Hugging Face's datasets: load_dataset can't be imported.

class: environment
kind: crash
ranks: 3
needs: datasets
expect: env.*, launch.*
rank: any
line: required
must-mention: datasets.py
"""

import torch.distributed as dist
from datasets import load_dataset  # FAULT


def rows() -> list:
    return list(load_dataset("json", data_files="train.jsonl", split="train"))


dist.init_process_group("gloo")
print(len(rows()))
