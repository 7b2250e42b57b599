"""A hand-written entropy bonus takes p * log(p): a masked action has p = 0, and the loss is NaN from the first mask on.

class: numbers
kind: numbers
ranks: 2
outcome: any
expect: @numbers
rank: none, 0
line: none
"""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

ACTIONS = 6


def policy_loss(logits: torch.Tensor, actions: torch.Tensor, advantages: torch.Tensor, entropy_weight: float):
    p = logits.softmax(-1)
    chosen = p.gather(1, actions.unsqueeze(1)).squeeze(1)
    entropy = -(p * p.log()).sum(-1)
    return -(advantages * chosen.log()).mean() - entropy_weight * entropy.mean()


def main() -> None:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    policy = DDP(torch.nn.Sequential(torch.nn.Linear(5, 32), torch.nn.Tanh(), torch.nn.Linear(32, ACTIONS)))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    for step in range(160):
        time.sleep(0.03)
        observations = torch.randn(16, 5)
        logits = policy(observations)
        actions = torch.randint(1, ACTIONS, (16,))  # of recorded episodes
        if step >= 60:  # the curriculum: the first action is forbidden from here on
            mask = torch.zeros(ACTIONS)
            mask[0] = float("-inf")
            logits = logits + mask
        loss = policy_loss(logits, actions, torch.randn(16), 0.01)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 4 == 0:
            print(f"step {step} loss {loss.item():.5f}", flush=True)
    dist.destroy_process_group()


main()
