"""Random batches for smoke tests."""

import torch


def batch(rows: int) -> torch.Tensor:
    return torch.randn(rows, 4)
