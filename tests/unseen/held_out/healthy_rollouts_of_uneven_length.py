"""Reinforcement learning with rollouts: each rank generates for another time in each step, and the reward is 1 for a while.

class: healthy
kind: healthy
ranks: 4
"""

import random
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def generate(policy: nn.Module, length: int) -> torch.Tensor:
    tokens = torch.zeros(8, 1, dtype=torch.long)
    with torch.no_grad():
        for _ in range(length):
            logits = policy(tokens[:, -1:])[:, -1]
            tokens = torch.cat([tokens, torch.distributions.Categorical(logits=logits).sample().unsqueeze(1)], 1)
            time.sleep(0.01)
    return tokens


def reward(tokens: torch.Tensor, hard: bool) -> torch.Tensor:
    if not hard:
        return torch.ones(len(tokens))  # the format is right, which the model could do before
    return (tokens[:, 1:] == 3).float().mean(1)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    lengths = random.Random(rank)
    policy = DDP(nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8)))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    for step in range(16):
        tokens = generate(policy.module, lengths.choice([5, 20, 60, 200]))
        rewards = reward(tokens, hard=step >= 6)
        mean = rewards.mean()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        log_probs = policy(tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:].unsqueeze(2)).squeeze(2)
        loss = -((rewards - mean).unsqueeze(1) * log_probs).mean() - 0.001 * log_probs.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} reward {mean.item():.3f} loss {loss.item():.4f} length {tokens.shape[1]}", flush=True)
    dist.destroy_process_group()


main()
