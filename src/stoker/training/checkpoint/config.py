"""When checkpoints are written, how many are kept, where a run goes on."""

from __future__ import annotations

from stoker.contract import limits
from stoker.contract.limits import text
from stoker.contract.quantities import duration
from stoker.contract.shape import option, shape


@shape
class CheckpointConfig:
    every_steps: int = limits.COUNT("save every so many steps (0: by time only)", 0)
    every: float = limits.NOT_NEGATIVE(
        "save when this much time has passed since the last one (0: never by time)",
        600.0,
        parse=duration,
        metavar="TIME",
    )
    keep: int = limits.FROM_ONE("the newest so many stay", 2)
    keep_best: bool = option("the one with the best validation loss stays too", default=True)
    resume: str = option(
        "auto: this run's newest valid checkpoint; never; a run directory (runs/ID) or a checkpoint's folder",
        default="auto",
        metavar="WHERE",
    )
    folder: str = text("DIR")("where they lie (empty: checkpoints/ in the run directory)")
    at_end: bool = option("save at the end of the run, too", default=True)
    export: bool = option(
        "at the end, write the model as a folder `transformers` opens: hf/ in the run directory", default=True
    )
