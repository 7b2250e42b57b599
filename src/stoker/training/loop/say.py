"""What a rank says: its lines, metrics.jsonl, the loggers that were asked for, and its progress."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import stoker
from stoker.contract import terminal
from stoker.contract.frozen import frozen
from stoker.contract.masking import mask_json, mask_text
from stoker.contract.progress import Progress
from stoker.contract.text import escape_lines
from stoker.contract.units import format_clock
from stoker.control.record.metrics_log import MetricsWriter
from stoker.training.balance.plan import Plan
from stoker.training.loop.config import check_loggers
from stoker.training.loop.learner import Validation
from stoker.training.loop.speed import Speed
from stoker.training.loop.wandb_login import check_wandb_login, wandb_settings
from stoker.training.parallel.group import Group


@frozen
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
    """Return the opener of wandb, or of trackio, which has the same interface.

    What is passed to init() overrides wandb's settings, so the user's project and name are looked up here.
    """

    def opened(folder: str, config: dict[str, Any]) -> Logger:
        environment = {key: os.environ.get(f"{name}_{key}".upper()) for key in ("project", "name", "dir")}
        settings = wandb_settings(os.environ) if name == "wandb" else {}
        project = environment["project"] or settings.get("project", "stoker")
        if name == "wandb" and not environment["dir"]:
            os.environ["WANDB_DIR"] = os.path.abspath(folder)
        module = importlib.import_module(name)
        module.init(project=project, name=environment["name"] or os.path.basename(folder), config=config)
        return Logger(lambda step, values: module.log(values, step=step), module.finish)

    return opened


_LOGGERS = {"tensorboard": _tensorboard, "wandb": _tracked("wandb"), "trackio": _tracked("trackio"), "mlflow": _mlflow}


def open_loggers(log_to: str, folder: str, config: dict[str, Any], say: Callable[[str], None]) -> list[Logger]:
    config = mask_json(config)  # it leaves this machine
    loggers = []
    for word in check_loggers(log_to):
        if word == "wandb":
            check_wandb_login(os.environ)
        loggers.append(_LOGGERS[word](folder, config))
        say(f"metrics also go to {word}")
    return loggers


class Voice:
    def __init__(self, group: Group, log_every: int, metrics_every: int | None = None) -> None:
        """Print a line every `log_every` steps, and write metrics every `metrics_every` steps (None: with each line).

        Where metrics come more often than lines, each has `log_every`: viewers draw means over so many steps.
        """
        self._group, self._steps, self._every = group, 0, log_every
        self._metrics_every = metrics_every or log_every
        self._last: dict[str, Any] = {}  # the newest metrics line: a validation's repeats it
        self._metrics: MetricsWriter | None = None
        self._loggers: list[Logger] = []
        self._progress: Progress | None = None

    def begin(self, folder: str, steps: int, log_to: str, config: dict[str, Any], resumed_at: int) -> None:
        """Metrics, from here on: now it is known at which step."""
        self._steps = steps
        if self._group.first:
            self._progress = Progress("training", steps, done=resumed_at)
            self._metrics = MetricsWriter(folder, resumed_at)
            self._loggers = open_loggers(log_to, folder, config, self.say)

    def say(self, text: str) -> None:
        terminal.clear_bar()
        print(escape_lines(f"INFO | [{self._group.label}] {mask_text(text)}"), flush=True)

    def say_once(self, text: str) -> None:
        """Of the whole job: rank 0 says it."""
        if self._group.first:
            self.say(text)

    def step(
        self, step: int, loss: float, speed: Speed, line: Callable[[str], str], *, every_rank: bool, **values: Any
    ) -> None:
        """Print the step's line and write its metrics when they are due, and at the last step.

        `line` makes the text from the time left.
        """
        done = step + 1
        per_step = speed.seconds_per_step
        left = per_step * (self._steps - done) if per_step is not None else None
        if self._progress is not None:
            reward = values.get("reward")
            self._progress.at(done, f"loss {loss:.4f}" if reward is None else f"reward {reward:.3f}", left)
        fast = speed.tokens_per_s
        self._last = {"loss": loss, **values, "tokens_per_s": round(fast, 1) if fast else None}
        is_last = done == self._steps
        if (step % self._every == 0 or is_last) and (every_rank or self._group.first):
            self.say(f"Step [{step}/{self._steps}] | {line(format_clock(left))}")
        if step % self._metrics_every == 0 or is_last:
            self.metrics(step, **self._last)

    def validation(self, done: int, found: Validation, best: float | None) -> None:
        lowest = "n/a" if best is None else f"{best:.4f}"
        more = {"val_bits_per_byte": found.bits_per_byte, "val_right": found.right}
        bits = f" | Bits per byte: {found.bits_per_byte:.4f}" if found.bits_per_byte is not None else ""
        right = f" | Right: {found.right:.1%}" if found.right is not None else ""
        self.say_once(f"Validation after step {done} | Loss: {found.loss:.4f}{bits}{right} | best {lowest}")
        self.metrics(
            done - 1,
            **self._last,
            val_loss=found.loss,
            **{name: value for name, value in more.items() if value is not None},
            **{f"val_{name}": value for name, value in (found.more or {}).items()},
        )

    def plan(self, step: int, plan: Plan, imbalance: float) -> None:
        """Each rank's samples from a later step on: into this step's metrics, and by a mark into the run's events."""
        self.metrics(step, shares=list(plan.shares), shares_from=plan.step, imbalance=round(imbalance, 4))
        if self._group.first:
            stoker.mark(f"BALANCE {plan.step}: {','.join(map(str, plan.shares))}")

    def metrics(self, step: int, **values: Any) -> None:
        if self._metrics is None:
            return
        interval = {} if self._metrics_every == self._every else {"log_every": self._every}
        self._metrics.write(step=step, total_steps=self._steps, **interval, **values)
        for logger in self._loggers:
            logger.log(step, {name: value for name, value in values.items() if isinstance(value, (int, float))})

    def close(self) -> None:
        if self._progress is not None:
            self._progress.end()
        if self._metrics is not None:
            self._metrics.close()
        for logger in self._loggers:
            logger.close()
