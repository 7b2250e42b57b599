"""A data set in a zip archive: some bytes of a member have changed, and its checksum is wrong when rank 0 reads it.

class: corrupt-files
kind: crash
ranks: 2
expect: data.corrupt, @raised
rank: 0
line: required
must-mention: image025.pt
"""

import io
import os
import tempfile
import time
import zipfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

MEMBERS = 60


def write_archive(path: str, damaged: bool) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for index in range(MEMBERS):
            buffer = io.BytesIO()
            torch.save(torch.randn(4, 10), buffer)
            archive.writestr(f"image{index:03d}.pt", buffer.getvalue())
        offset = archive.getinfo("image025.pt").header_offset
    if damaged:
        with open(path, "r+b") as file:
            file.seek(offset + 400)
            file.write(b"\0\xff" * 8)


class Images:
    def __init__(self, path: str) -> None:
        self.archive = zipfile.ZipFile(path)
        self.names = sorted(self.archive.namelist())

    def __getitem__(self, index: int) -> torch.Tensor:
        content = self.archive.read(self.names[index])  # FAULT
        return torch.load(io.BytesIO(content))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    path = os.path.join(tempfile.mkdtemp(), "images.zip")
    write_archive(path, damaged=rank == 0)
    images = Images(path)
    model = DDP(torch.nn.Linear(10, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(MEMBERS):
        time.sleep(0.05)
        loss = model(images[step]).square().mean()  # NEAR
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 1 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


main()
