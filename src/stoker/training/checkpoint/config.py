"""When checkpoints are written, how many are kept, where a run goes on."""

from __future__ import annotations

from stoker.contract import limits
from stoker.contract.frozen import frozen, option
from stoker.contract.limits import text_option
from stoker.contract.units import parse_duration


def interval(text: str) -> float:
    """Seconds. `500` could be steps: a number needs its unit, but for 0, and for 600.0, which is how config.yaml has it."""
    if text.strip().isdecimal() and int(text):
        number = text.strip()
        raise ValueError(f"{number} of what? write {number}s, {number}m or '{number} steps'")
    return parse_duration(text)


@frozen
class CheckpointConfig:
    every_steps: int = limits.COUNT("save every this many steps (0: by time only)", 0)
    every: float = limits.NOT_NEGATIVE(
        "save this often: 5min, 1h, '500 steps' (0: never by time)",
        600.0,
        parse=interval,
        metavar="TIME|STEPS",
    )
    keep: int = limits.FROM_ONE("how many of the newest to keep", 2)
    keep_best: bool = option("also keep the one with the best validation loss", default=True)
    resume: str = option(
        "auto: this run's newest valid checkpoint; never; a run (runs/ID, its name) or a checkpoint's folder",
        default="auto",
        metavar="WHERE",
    )
    folder: str = text_option("DIR")("where to save them (empty: checkpoints/ in the run directory)")
    at_end: bool = option("save at the end of the run, too", default=True)
    export: bool = option(
        "at the end, write the model as a folder `transformers` opens: hf/ in the run directory", default=True
    )
