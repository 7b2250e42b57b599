"""The script asserts its number of ranks and is started with another.

class: environment
kind: crash
ranks: 2
expect: @raised, launch.*
rank: any
line: required
must-mention: AssertionError
"""

import torch.distributed as dist


class Mesh:
    def __init__(self, tensor_parallel: int, data_parallel: int) -> None:
        self.check(tensor_parallel * data_parallel)

    def check(self, size: int) -> None:
        assert dist.get_world_size() == size, f"world size {dist.get_world_size()} is not {size}"  # FAULT


dist.init_process_group("gloo")
mesh = Mesh(2, 2)  # NEAR
