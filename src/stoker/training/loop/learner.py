"""What learns: a decoder, unless a stage says otherwise; how its weights come and go, and how it is measured on what
was held out.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from stoker.contract.shape import shape
from stoker.contract.wholefile import write_whole
from stoker.training.loop.evaluate import Measure, validate
from stoker.training.model import hf
from stoker.training.model.decoder import Decoder
from stoker.training.model.hf_write import CARD
from stoker.training.tokenizer.chat import write_template
from stoker.training.tokenizer.tokenizer import load as load_tokenizer

Say = Callable[[str], None]


@shape
class Beside:
    """What lies beside an export's weights."""

    tokenizer: str  # its folder
    taught_chat: bool  # conversations were learned, of a model that was made elsewhere
    card: str = ""  # README.md; empty: none

    def end_ids(self) -> tuple[int, ...]:
        """Tokens that the model was taught to end an answer with."""
        return load_tokenizer(self.tokenizer).stop_ids[:1] if self.taught_chat else ()

    def write(self, folder: str) -> None:
        if self.card:
            write_whole(os.path.join(folder, CARD), self.card.encode("utf-8", "replace"))
        if self.taught_chat:
            write_template(folder, load_tokenizer(self.tokenizer))


def _save(model: Decoder, folder: str, beside: Beside, say: Say, write: bool) -> None:
    hf.save(
        model,
        folder,
        tokenizer_folder=beside.tokenizer,
        end_ids=beside.end_ids(),
        more=beside.write,
        say=say,
        write=write,
    )


@shape
class Learner:
    kind: type[Decoder] = Decoder
    load: Callable[[Decoder, str, Say], None] = hf.load
    save: Callable[[Decoder, str, Beside, Say, bool], None] = _save  # model, folder, …, say, whether this rank writes
    measure: Measure = validate
