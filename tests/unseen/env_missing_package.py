"""A package is imported inside a function, and is not installed.

class: environment
kind: crash
ranks: 3
expect: env.import
rank: any
line: required
must-mention: flash_attention_9000
"""

import torch
import torch.distributed as dist


def attention_kernel():
    import flash_attention_9000  # FAULT

    return flash_attention_9000.attention


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = attention_kernel()  # NEAR


dist.init_process_group("gloo")
model = Attention()
