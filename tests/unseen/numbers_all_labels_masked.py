"""A prompt mask covers all labels (-100): the masked mean is exactly 0 from the first step; the job completes.

class: numbers
kind: numbers
outcome: completes
ranks: 2
expect: @flat
rank: any
line: none
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Collator:
    def __init__(self) -> None:
        self.template = [5, 6]  # comes before an answer; never found, as the tokenizer splits it in another way

    def labels(self, ids: torch.Tensor) -> torch.Tensor:
        labels = ids.clone()
        for row in labels:
            text = row.tolist()
            start = next((i for i in range(len(text)) if text[i : i + 2] == self.template), len(text))
            row[:start] = -100
        return labels


def masked_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    mask = labels != -100
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    return losses / mask.sum().clamp(min=1)


def main() -> None:
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16)))
    opt = torch.optim.AdamW(model.parameters())
    collator = Collator()
    for step in range(200):
        ids = torch.randint(7, 16, (4, 10))
        loss = masked_loss(model(ids), collator.labels(ids))
        opt.zero_grad()
        loss.backward()
        opt.step()
        if dist.get_rank() == 0:
            print({"step": step, "loss": round(loss.item(), 4)}, flush=True)
    dist.destroy_process_group()


main()
