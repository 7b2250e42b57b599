"""accelerate: the training is over and the group destroyed when the main process finds too many predictions (padded last batch).

class: ends
kind: crash
ranks: 2
needs: accelerate
expect: @raised
rank: 0
line: required
must-mention: AssertionError
"""

import time

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def write_predictions(predictions: list[float], rows: int) -> None:
    assert len(predictions) == rows, f"{len(predictions)} predictions for {rows} rows"  # FAULT
    print(f"{rows} predictions are written", flush=True)


def main() -> None:
    accelerator = Accelerator(cpu=True)
    x = torch.randn(301, 12)
    y = x.sum(1, keepdim=True)
    model = torch.nn.Linear(12, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    train = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    test = DataLoader(TensorDataset(x[:101], y[:101]), batch_size=8)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    for epoch in range(3):
        for inputs, targets in train:
            time.sleep(0.03)
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
    model.eval()
    predictions: list[float] = []
    with torch.no_grad():
        for inputs, _ in test:
            predictions += accelerator.gather(model(inputs)).flatten().tolist()
    main_process = accelerator.is_main_process
    accelerator.wait_for_everyone()
    accelerator.end_training()
    if main_process:
        write_predictions(predictions, rows=101)  # NEAR


main()
