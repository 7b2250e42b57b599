"""What an export may replace, checkpoints and metrics that nobody foresaw, and packed files of empty frames."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from conftest import Stoker
from stoker.contract import layout
from stoker.contract.names import Refusal
from stoker.contract.safe_io import refuse_other_kind
from stoker.control.show.comparison import noise
from stoker.control.show.curves import MOST_METRICS, Curve, MetricsTail, smoothed
from stoker.control.show.drawing import Line, chart, mean, sparkline
from stoker.training.data.unpack import open_unpacked

ENOUGH_S = 8  # of processor time


def test_metrics_with_other_names_in_every_line_take_time_in_proportion(tmp_path: Path) -> None:
    with (tmp_path / layout.METRICS).open("w") as file:
        for step in range(6000):
            file.write(
                json.dumps({"step": step, "loss": 1.0, **{f"k{step}_{number}": 1 for number in range(40)}}) + "\n"
            )
    tail = MetricsTail(str(tmp_path))
    began = time.process_time()
    assert tail.look()
    assert time.process_time() - began < ENOUGH_S
    assert len(tail.curves) == MOST_METRICS
    assert len(tail.curves["loss"].steps) == 6000


@pytest.mark.parametrize(
    "words",
    [
        ("web", "--save", "nosuch", "thesis"),
        ("doctor", "--only", "host.disk", "--no-probe", "--bundle", "thesis"),
        ("doctor", "--only", "host.disk", "--no-probe", "--record", "thesis"),
    ],
)
def test_a_mistyped_name_costs_no_other_file(stoker: Stoker, words: tuple[str, ...]) -> None:
    thesis = stoker.cwd / "thesis"
    thesis.write_text("a year of work")
    done = stoker(*words)
    assert (
        done.code == 73 and "thesis already exists and is not a" in done.err and thesis.read_text() == "a year of work"
    )


def test_a_file_of_the_same_kind_is_replaced(tmp_path: Path) -> None:
    for name, data in (("page", b"<!DOCTYPE html><p>"), ("empty", b"")):
        (tmp_path / name).write_bytes(data)
        refuse_other_kind(str(tmp_path / name), b"<!doctype html", "an HTML page")
    with pytest.raises(Refusal, match="page already exists and is not a PNG picture"):
        refuse_other_kind(str(tmp_path / "page"), b"\x89PNG", "a PNG picture")


@pytest.mark.parametrize("line", [b"[\n", b"{}}\n"])
def test_a_flood_of_damaged_metrics_costs_little(tmp_path: Path, line: bytes) -> None:
    """10 MB of them took 34 s. What is whole before them is shown."""
    whole = b"".join(b'{"step": %d, "loss": 1.0}\n{"step"\n' % step for step in range(2000))
    (tmp_path / layout.METRICS).write_bytes(whole + line * (9_800_000 // len(line)))
    tail = MetricsTail(str(tmp_path))
    began = time.process_time()
    assert tail.look()
    assert time.process_time() - began < ENOUGH_S
    assert len(tail.curves["loss"].steps) == 2000


@pytest.mark.parametrize("values", [[1e308, -1e308], [1e308, 1e308], [-1.7e308, 1e308, 2.0]])
def test_the_largest_numbers_are_drawn_or_left_out(values: list[float]) -> None:
    curve = Curve()
    curve.extend(list(range(200)), [values[at % len(values)] for at in range(200)])
    for window in (1, 10):
        chart([Line("a", smoothed(curve, window))], 60, 10)
    noise(curve, curve)
    sparkline(curve.values)
    assert mean([1e308, 1e308]) == pytest.approx(1e308)


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
