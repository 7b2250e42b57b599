"""--log-to: TensorBoard, Weights & Biases, trackio, MLflow; one that is not installed is refused before training."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

from stoker.contract import redact
from stoker.contract.names import EX_UNAVAILABLE, Refusal
from stoker.contract.shape import shape


@shape
class Logger:
    log: Callable[[int, dict[str, float]], None]
    close: Callable[[], None]


def _tensorboard(folder: str, config: dict[str, Any]) -> Logger:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(os.path.join(folder, "tensorboard"))

    def log(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Logger(log, writer.close)


def _mlflow(folder: str, config: dict[str, Any]) -> Logger:
    module = importlib.import_module("mlflow")
    module.start_run(run_name=os.path.basename(folder))
    sections = {section: keys for section, keys in config.items() if isinstance(keys, dict)}
    module.log_params({f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()})
    return Logger(lambda step, values: module.log_metrics(values, step=step), module.end_run)


def _tracked(name: str) -> Callable[[str, dict[str, Any]], Logger]:
    """wandb, and trackio, which has the same words."""

    def opened(folder: str, config: dict[str, Any]) -> Logger:
        module = importlib.import_module(name)
        module.init(project="stoker", name=os.path.basename(folder), config=config)
        return Logger(lambda step, values: module.log(values, step=step), module.finish)

    return opened


_LOGGERS = {"tensorboard": _tensorboard, "wandb": _tracked("wandb"), "trackio": _tracked("trackio"), "mlflow": _mlflow}


def check_loggers(log_to: str) -> list[str]:
    wanted = [word for word in log_to.replace(" ", "").split(",") if word]
    for word in wanted:
        if importlib.util.find_spec(word) is None:
            raise Refusal(
                f"train.log_to {word}: it is not installed here; pip install {word}, or leave it out", EX_UNAVAILABLE
            )
    return wanted


def open_loggers(log_to: str, folder: str, config: dict[str, Any], say: Callable[[str], None]) -> list[Logger]:
    config = redact.data(config)  # it leaves this machine
    loggers = []
    for word in check_loggers(log_to):
        loggers.append(_LOGGERS[word](folder, config))
        say(f"metrics also go to {word}")
    return loggers
