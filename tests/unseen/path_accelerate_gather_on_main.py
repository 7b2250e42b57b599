"""accelerate: gather_for_metrics under is_main_process.

class: common-path
kind: hang
ranks: 2
needs: accelerate
expect: @diverged
rank: 0
line: required
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> float:
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for x, y in loader:
            prediction = model(x).argmax(-1)
            if accelerator.is_main_process:
                prediction, y = accelerator.gather_for_metrics((prediction, y))  # FAULT
                correct += (prediction == y).sum().item()
                total += y.numel()
    model.train()
    return correct / max(total, 1)


def main() -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(12, 3)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dataset = TensorDataset(torch.randn(256, 12), torch.randint(0, 3, (256,)))
    train, test = DataLoader(dataset, batch_size=8, shuffle=True), DataLoader(dataset, batch_size=16)
    model, opt, train, test = accelerator.prepare(model, opt, train, test)
    for epoch in range(3):
        for x, y in train:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
        accuracy = evaluate(accelerator, model, test)  # NEAR
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {accuracy:.3f}")


main()
