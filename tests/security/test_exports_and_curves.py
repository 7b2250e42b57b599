"""What an export may replace, checkpoints and metrics that nobody foresaw, and packed files of empty frames."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.training.data.unpack import open_unpacked


def test_one_decompressor_reads_all_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making one takes longer than reading a frame: a million empty frames took 20 s."""
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
    frame = zstandard.ZstdCompressor().compress
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(frame(b"one\n") + frame(b"") * 1000 + frame(b"two\n"))
    made = []
    real = zstandard.ZstdDecompressor
    monkeypatch.setattr(zstandard, "ZstdDecompressor", lambda **told: made.append(told) or real(**told))
    with open_unpacked(str(path)) as stream:
        assert stream.read() == b"one\ntwo\n"
    assert len(made) == 1
