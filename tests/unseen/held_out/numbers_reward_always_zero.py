"""GRPO by hand: the answer is looked for in another format than the prompt asks for, each reward is 0, and so is the loss.

class: numbers
kind: numbers
ranks: 2
outcome: any
expect: @flat, reward.*, rl.*
rank: none, 0
line: none
"""

import re
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

DIGITS, GROUP = 10, 8


def render(token: int) -> str:
    return f"<answer>{token}</answer>"


def reward(completion: str, target: int) -> float:
    match = re.search(r"\\boxed\{(\d+)\}", completion)
    return float(match is not None and int(match.group(1)) == target)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    policy = DDP(nn.Sequential(nn.Embedding(DIGITS, 16), nn.Linear(16, DIGITS)))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, weight_decay=0.0)
    torch.manual_seed(1 + rank)
    for step in range(200):
        time.sleep(0.03)
        question = torch.randint(0, DIGITS, (4,)).repeat_interleave(GROUP)
        log_probs = policy(question).log_softmax(-1)
        with torch.no_grad():
            tokens = torch.distributions.Categorical(logits=log_probs).sample()
        rewards = torch.tensor(
            [reward(render(t), (q + 1) % DIGITS) for t, q in zip(tokens.tolist(), question.tolist(), strict=True)]
        )
        groups = rewards.view(-1, GROUP)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
        chosen = log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)
        loss = -(advantages * (chosen - chosen.detach()).exp()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 2 == 0:
            print(f"step {step} reward {rewards.mean().item():.4f} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


main()
