"""What others can make longer and longer: weights that wait, cards that come and go, a run's history, the text of a token."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from conftest import at_length_but, wait_for
from stoker.control.machine.model import GpuGauges, HostGauges
from stoker.control.record import history, reader
from stoker.control.show.gather import Gatherer
from stoker.control.show.web.folders import Timeline

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


def test_cards_with_new_names_at_every_look_are_forgotten(tmp_path: Path) -> None:
    gatherer = Gatherer(str(tmp_path), machine=False)
    steady = GpuGauges(0, "steady", host="good", utilization=0.5)
    for look in range(24):
        cards = tuple(GpuGauges(at, f"{look}-{at}", host="evil") for at in range(256))
        found = gatherer.snapshot(elsewhere=[(HostGauges("evil"), cards), (HostGauges("good"), (steady,))])
    assert len(gatherer._series) < 8192, "24 looks at 256 cards have 24,576"
    assert found.gpus[-1].recent["utilization"] == (0.5,) * 24, "what is still there keeps its past"


@pytest.mark.parametrize("ranks", at_length_but([1], [4096, 1]))
def test_a_strangers_history_is_forgotten_in_time(tmp_path: Path, ranks: int) -> None:
    (tmp_path / history.FOLDER).mkdir()
    record = reader.Run(str(tmp_path), "evil", {}, None, 12345, mine=False)
    timeline, place, now = Timeline(record), tmp_path / history.FOLDER / "seconds.jsonl", 0
    looks, moments = (15, 100) if ranks > 1 else (10, 10_000)
    for _ in range(looks):
        lines: list[dict[str, Any]] = [{"members": {"ranks": [*range(ranks)], "gpus": [], "hosts": []}, "time": 0.0}]
        for _ in range(moments):
            now += 1
            lines.append({"time": float(now), "attempt": 0, "ranks": {"x": [0] * ranks}, "gpus": {}, "hosts": {}})
        if place.exists():
            place.rename(tmp_path / "before")  # it is there until the next one is: that has another inode
        place.write_text("".join(json.dumps({"schema": 1, **line}, separators=(",", ":")) + "\n" for line in lines))
        timeline.look()
    assert 0 < len(timeline._columns) < 0.7 * looks * moments
    assert sum(len(letters) for _, _, letters, _ in timeline._columns) <= 4 << 20
    assert timeline.to_json(now - 1.5)["times"] == [now - 1, now], "the newest are there"
