"""accelerate with gradient accumulation and gathered metrics.

class: healthy
kind: healthy
ranks: 3
needs: accelerate
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
model = torch.nn.Linear(8, 3)
data = TensorDataset(torch.randn(301, 8), torch.randint(0, 3, (301,)))
model, opt, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters()), DataLoader(data, batch_size=4, shuffle=True)
)
for epoch in range(3):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
    accelerator.print(f"epoch {epoch}: loss {accelerator.gather(loss).mean().item():.4f}")
accelerator.end_training()
