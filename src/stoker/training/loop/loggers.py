"""--log-to: TensorBoard, Weights & Biases, trackio, MLflow, where they are installed. One that is not is refused before
training.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any, Protocol

from stoker.contract import redact
from stoker.contract.names import EX_UNAVAILABLE, Refusal

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}


class Logger(Protocol):
    def log(self, step: int, values: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class _TensorBoard:
    def __init__(self, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(os.path.join(folder, "tensorboard"))

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Tracked:
    """wandb, and trackio, which has the same words."""

    def __init__(self, module: Any, folder: str, config: dict[str, Any]) -> None:
        self._run = module
        module.init(project="stoker", name=os.path.basename(folder), config=config)

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, module: Any, folder: str, config: dict[str, Any]) -> None:
        self._run = module
        module.start_run(run_name=os.path.basename(folder))
        module.log_params(
            {
                f"{section}.{key}": value
                for section, keys in config.items()
                if isinstance(keys, dict)
                for key, value in keys.items()
            }
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log_metrics(values, step=step)

    def close(self) -> None:
        self._run.end_run()


def check_loggers(log_to: str) -> list[str]:
    wanted = [word for word in log_to.replace(" ", "").split(",") if word]
    for word in wanted:
        if importlib.util.find_spec(PACKAGES[word]) is None:
            raise Refusal(
                f"train.log_to {word}: it is not installed here; pip install {PACKAGES[word]}, or leave it out",
                EX_UNAVAILABLE,
            )
    return wanted


def open_loggers(log_to: str, folder: str, config: dict[str, Any], say: Callable[[str], None]) -> list[Logger]:
    config = redact.data(config)  # it leaves this machine
    found: list[Logger] = []
    for word in check_loggers(log_to):
        if word == "tensorboard":
            found.append(_TensorBoard(folder))
        else:
            module = importlib.import_module(PACKAGES[word])
            found.append(_MLflow(module, folder, config) if word == "mlflow" else _Tracked(module, folder, config))
        say(f"metrics also go to {word}")
    return found
