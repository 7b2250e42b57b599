"""What the twentieth review found: secrets on the lines below a name within a message, and phrases that are quoted with their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.contract.names import Refusal
from stoker.training.data import show, unpack
from stoker.training.data.rows import rows
from stoker.training.tokenizer.tokenizer import bytes_tokenizer


def test_lists_that_share_their_items_unfold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short text counted as its one character: half a megabyte took 45 s."""
    arrow = pytest.importorskip("pyarrow")
    view = getattr(arrow, "ListViewArray", None)
    if view is None:
        pytest.skip("this pyarrow has no list views")
    begins, sizes = arrow.array([0] * 200, arrow.int32()), arrow.array([1000] * 200, arrow.int32())
    table = arrow.table({"text": view.from_arrays(begins, sizes, arrow.array(["y"] * 1000))})
    path = tmp_path / "shared.arrow"
    with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    monkeypatch.setattr(unpack, "ALWAYS", 1 << 20)
    monkeypatch.setattr(unpack, "MOST_TIMES", 1)
    with pytest.raises(Refusal, match="unpacks to more than"):
        list(rows(str(path)))


def test_rows_of_no_known_format_are_not_read_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "HOPELESS_AFTER_ALL", 10)
    path = tmp_path / "empty.jsonl"
    path.write_text("{}\n" * 20 + "nonsense\n")
    with pytest.raises(Refusal, match="no known format"):
        show.show(str(path), show.Ask(bytes_tokenizer(), 64), lambda line: None)
