"""What others can make longer and longer: weights that wait, cards that come and go, a run's history, the text of a token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import at_length_but
from stoker.contract.names import Refusal
from stoker.control.machine.model import GpuGauges, HostGauges
from stoker.control.record import history, reader
from stoker.control.show.gather import Gatherer
from stoker.control.show.web.folders import Timeline
from stoker.training.tokenizer.tokenizer import bytes_tokenizer, load


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
