"""Resume from a torch.save() file that was not written to its end, on the rank that has a copy of its own.

class: corrupt-files
kind: crash
ranks: 3
expect: data.corrupt
rank: 2
line: required
must-mention: last.pt
"""

import os
import tempfile

import torch
import torch.distributed as dist


class Resume:
    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "last.pt")

    def save(self, model: torch.nn.Module, whole: bool) -> None:
        torch.save({"model": model.state_dict(), "step": 10}, self.path)
        if not whole:
            os.truncate(self.path, os.path.getsize(self.path) * 2 // 3)

    def load(self, model: torch.nn.Module) -> int:
        state = torch.load(self.path)  # FAULT
        model.load_state_dict(state["model"])
        return state["step"]


dist.init_process_group("gloo")
model = torch.nn.Linear(64, 64)
resume = Resume(tempfile.mkdtemp())
resume.save(model, whole=dist.get_rank() != 2)
step = resume.load(model)  # NEAR
model = torch.nn.parallel.DistributedDataParallel(model)
for _ in range(step):
    model(torch.randn(2, 64)).sum().backward()
