"""Draws docs/pictures/hang.svg: a real run on two CPU ranks whose data loader hangs, and what Stoker prints about it.

python benchmarks/hang_picture.py docs/pictures/hang.svg     # needs torch and rich (textual brings it)
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

SCRIPT = """
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Pages(torch.utils.data.Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, number):
        if number == 961:
            time.sleep(3600)
        return torch.ones(8)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    pages = Pages()
    sampler = torch.utils.data.DistributedSampler(pages, shuffle=False)
    for step, batch in enumerate(torch.utils.data.DataLoader(pages, 4, sampler=sampler, num_workers=1)):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.02)
        if dist.get_rank() == 0 and step % 40 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
"""
COLUMNS = 112


def shown(command: str, folder: Path) -> str:
    """The command as typed and what it prints, without memory lines."""
    done = subprocess.run(
        ["bash", "-c", f"{command} 2>&1"], cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if "MEM:" not in line]
    return "\n".join([f"$ {command}", *lines]).replace(f"{folder}/", "")


def main(target: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(SCRIPT)
        run = shown("stoker run --nproc-per-node 2 --hang-timeout 30s train.py", Path(folder))
        why = shown("stoker why", Path(folder))
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    for line in f"{run}\n\n{why}".splitlines():
        explains = "yellow" if "has made no progress" in line else ""
        console.print(Text(line, style="bold" if line.startswith("$") else explains))
    picture = console.export_svg(title="stoker")
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.S)  # the fonts of a web server
    Path(target).write_text(picture)


if __name__ == "__main__":
    main(sys.argv[1])
