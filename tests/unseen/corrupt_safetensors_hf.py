"""from_pretrained on a checkpoint whose safetensors file was cut off.

class: corrupt-files
kind: crash
ranks: 2
needs: transformers, safetensors
expect: data.corrupt
rank: any
line: required
must-mention: model.safetensors
"""

import os
import tempfile

import torch.distributed as dist
from safetensors.torch import save_model
from transformers import GPT2Config, GPT2LMHeadModel


def download(folder: str) -> None:
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    config.save_pretrained(folder)
    path = os.path.join(folder, "model.safetensors")
    save_model(GPT2LMHeadModel(config), path, metadata={"format": "pt"})
    os.truncate(path, os.path.getsize(path) // 2)


def load(folder: str) -> GPT2LMHeadModel:
    return GPT2LMHeadModel.from_pretrained(folder)  # FAULT


def main() -> None:
    dist.init_process_group("gloo")
    folder = tempfile.mkdtemp(prefix=f"gpt2-rank{dist.get_rank()}-")
    download(folder)
    model = load(folder)  # NEAR
    print(model.num_parameters())


main()
