"""What others can make longer and longer: weights that wait, cards that come and go, a run's history, the text of a token."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from conftest import wait_for
from stoker.contract.names import Refusal
from stoker.training.tokenizer.tokenizer import bytes_tokenizer, load

Change = Callable[[], None]


class Engine:
    """Answers are being written all the time: what it is given waits until `apply`."""

    def __init__(self) -> None:
        self.pending: list[tuple[Change, Callable[[int], None]]] = []

    def update(self, change: Change, version: int | None, digest: str, applied: Callable[[int], None]) -> None:
        self.pending.append((change, applied))

    def apply(self) -> None:
        change, applied = self.pending.pop(0)
        change()
        applied(7)


def is_waiting(ident: int | None, for_more: Callable[[], bool]) -> bool:
    """A thread that waits for the engine, or for bodies where there are none."""
    frame: FrameType | None = sys._current_frames().get(ident or 0)
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names[:1] == ["wait"] and ("_load" in names or for_more())


def test_weights_that_wait_are_in_memory_once(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("tokenizers")
    from stoker.training.model import hf
    from stoker.training.model.config import ModelConfig
    from stoker.training.model.decoder import Decoder
    from stoker.training.serve.weights import Loader

    shape = ModelConfig(layers=1, dim=16, heads=2, kv_heads=2, head_dim=8, ff=16, vocab_size=300)
    for seed in range(4):
        made = Decoder(shape, 32)
        made.start(seed)
        hf.save(made, str(tmp_path / "pushed" / str(seed)), say=lambda _: None, tokenizer_folder=None)
    base = str(tmp_path / "pushed" / "0")
    model = hf.opened(base, 32, torch.float32, torch.device("cpu"), lambda _: None)
    engine, replies = Engine(), list[int]()
    loader = Loader(model, base, str(tmp_path / "pushed"), engine, lambda _: None)
    loader.start()
    for seed in range(1, 4):
        loader.load(json.dumps({"folder": str(seed)}).encode(), lambda status, _: replies.append(status))
    for done in range(3):
        rests = lambda: (engine.pending and is_waiting(loader._thread.ident, loader._bodies.empty)) or None  # noqa: E731
        assert wait_for(rests, 60)
        assert len(engine.pending) == 1, "copies of the weights that nobody uses yet"
        engine.apply()
        assert len(replies) == done + 1
    assert replies == [200, 200, 200]


def test_a_token_of_a_page_of_text_is_refused(tmp_path: Path) -> None:
    """A model that writes nothing else made 3.2 GB of one answer, and took 8.4 GB of memory for it."""
    bytes_tokenizer().save(str(tmp_path))
    told = json.loads((tmp_path / "tokenizer.json").read_text())
    told["model"]["vocab"]["\U0001f600" * 1024] = 400
    (tmp_path / "tokenizer.json").write_text(json.dumps(told))
    assert load(str(tmp_path)).vocab_size == 401
    told["model"]["vocab"]["\U0001f600" * 1025] = 401
    (tmp_path / "tokenizer.json").write_text(json.dumps(told))
    with pytest.raises(Refusal, match=r"a token has 1,025 characters; 1,024 is the most"):
        _ = load(str(tmp_path)).vocab_size
