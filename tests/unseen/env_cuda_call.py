"""model.cuda() with a build of torch that has no CUDA.

class: environment
kind: crash
ranks: 2
expect: env.cuda-build, gpu.*
rank: any
line: required
"""

import torch
import torch.distributed as dist


class Runner:
    def __init__(self) -> None:
        self.model = self.place(torch.nn.Linear(4, 4))

    def place(self, model: torch.nn.Module) -> torch.nn.Module:
        return model.cuda()  # FAULT


dist.init_process_group("gloo")
runner = Runner()  # NEAR
