"""Rank 1 loads a safetensors checkpoint that was cut off while it was copied."""

import os
import tempfile

import torch
from moment import fault, guilty
from safetensors.torch import load_file, save_file
from training import steps

for step in steps():
    if guilty(step):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.safetensors")
            save_file({"weight": torch.zeros(1000, 100)}, path)
            os.truncate(path, 100_000)
            fault()
            load_file(path)
