"""Ranks: the process group, the split of a batch, DDP and FSDP2."""
