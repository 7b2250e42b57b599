"""Metrics are reduced in the order of a dict, and one rank fills it in another order.

class: common-path
kind: hang
ranks: 3
expect: @diverged
rank: 1
line: required
"""

import torch
import torch.distributed as dist


def reduce_metrics(metrics: dict[str, torch.Tensor]) -> dict[str, float]:
    out = {}
    for name in metrics:
        dist.all_reduce(metrics[name])  # FAULT
        out[name] = metrics[name].sum().item()
    return out


def evaluate(model: torch.nn.Module, step: int) -> dict[str, torch.Tensor]:
    logits = model(torch.randn(32, 10))
    per_class = logits.argmax(-1).bincount(minlength=10).float()
    loss = logits.square().mean().detach().reshape(1)
    if dist.get_rank() == 1 and step == 30:  # a cached result comes first here
        return {"per_class": per_class, "loss": loss}
    return {"loss": loss, "per_class": per_class}


dist.init_process_group("gloo")
model = torch.nn.Linear(10, 10)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    loss = model(torch.randn(16, 10)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 0:
        result = reduce_metrics(evaluate(model, step))  # NEAR
        if dist.get_rank() == 0:
            print(step, result["loss"], flush=True)
dist.destroy_process_group()
