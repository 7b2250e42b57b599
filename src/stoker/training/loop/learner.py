"""What learns: a decoder, unless a stage says otherwise; how its weights come and go, and how it is measured on what
was held out.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from stoker.contract.shape import shape
from stoker.training.loop.evaluate import Measure, validate
from stoker.training.model import hf
from stoker.training.model.decoder import Decoder

Say = Callable[[str], None]


def _save(model: Decoder, folder: str, tokenizer: str, say: Say, write: bool) -> None:
    hf.save(model, folder, tokenizer_folder=tokenizer, say=say, write=write)


@shape
class Learner:
    kind: type[Decoder] = Decoder
    load: Callable[[Decoder, str, Say], None] = hf.load
    save: Callable[[Decoder, str, str, Say, bool], None] = (
        _save  # model, folder, the tokenizer's folder, say, whether this rank writes
    )
    measure: Measure = validate
    # what a step's line says besides the loss: taken right after the step, read where a line is printed
    numbers: Callable[[Decoder], dict[str, Tensor]] = lambda model: {}
