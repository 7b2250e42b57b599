"""Strangers' NaN dumps, checkpoints and tokenizers, and programs of --notify that read nothing: refused in one line, waited for by nobody."""

from __future__ import annotations

import json
import os
import random
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_fuzz import ROUNDS, bent, refused_or_fine

from stoker.contract.errors import Refusal
from stoker.contract.evidence import Verdict
from stoker.contract.safe_io import AtomicFile, write_atomic, write_json
from stoker.control.launch.notify import Notifier
from stoker.training.forensics import reading
from stoker.training.forensics.culprit import banner, decide, headline
from stoker.training.forensics.report import Report, TensorStats
from stoker.training.tokenizer.tokenizer import bytes_tokenizer

STATS = TensorStats("output", (2, 3), "float32", 6, 1, 0, -1.0, 3e38, 3e38)
REPORT = Report(
    3,
    0,
    2,
    "CPU 0",
    float("nan"),
    float("inf"),
    "forward",
    "NaN",
    "aten.bmm",
    "layers.0",
    sample_ids=(4, 5),
    output=STATS,
    inputs=(STATS,),
    advice=("lower it",),
)
DUMP: dict[str, Any] = {
    "report": REPORT.to_json(),
    "files": {"cut": {"output": "1 of 2 rows"}, "left_out": {"parameters.safetensors": "no room"}},
}
BATCH: dict[str, Any] = {
    "schema": 1,
    "samples": [{"micro_batch": 0, "id": 4, "tokens": [1, 2], "text": "ab", "targets": 2}],
}


def read_dump(folder: Path) -> None:
    dumps = reading.ranks(str(folder))
    assert decide([dump.report for dump in dumps]).summary
    for dump in dumps:
        banner(dump.report), headline(dump.report), reading.texts(dump), json.dumps(dump.report.to_json())


def test_bent_reports_of_a_nan(tmp_path: Path) -> None:
    dice, fine = random.Random(7), 0
    for number in range(ROUNDS):
        report, batch = (bent(DUMP, dice), BATCH) if number % 2 else (DUMP, bent(BATCH, dice))
        (tmp_path / "report.json").write_text(json.dumps(report))
        (tmp_path / "batch.json").write_text(json.dumps(batch))
        fine += refused_or_fine(lambda: read_dump(tmp_path), (report, batch))
    assert 0 < fine < ROUNDS, "the changes are too tame, or too wild"


def test_a_library_that_panics_while_it_encodes() -> None:
    class PanicException(BaseException):  # what Rust's panics are in Python
        pass

    def panics(_text: str) -> Any:
        raise PanicException("called `Result::unwrap()` on an `Err` value: regex stack overflow")

    tokenizer = bytes_tokenizer()
    tokenizer.__dict__["encoder"] = panics
    with pytest.raises(Refusal, match="PanicException"):
        tokenizer.encode("abc")


def test_a_program_that_never_reads_its_notice_holds_nobody_up() -> None:
    verdict = Verdict("failed", "rank.exception", "x" * 300_000, 1, run="r")  # more than a pipe takes
    complaints: list[str] = []
    notifier = Notifier("sleep 0.2", complaints.append)
    notifier.send(verdict, "restarting", "")
    notifier.send(verdict, "ended", "")
    notifier.close()
    assert complaints == []


def test_a_notice_arrives_whole(tmp_path: Path) -> None:
    verdict = Verdict("failed", "rank.exception", "x" * 300_000, 1, run="r")
    notifier = Notifier(f"cat > {tmp_path}/told", lambda _line: None)
    notifier.send(verdict, "ended", "")
    notifier.close()
    assert json.loads((tmp_path / "told").read_text())["summary"] == "x" * 300_000


# ---- files that are whole or not there ----


def test_a_whole_file_replaces_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(str(path), {"a": "\udc80"})
    write_json(str(path), {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2} and os.listdir(tmp_path) == ["a.json"]
    with pytest.raises(RuntimeError), AtomicFile(str(path)) as file:
        file.write(b"half")
        raise RuntimeError
    assert json.loads(path.read_text()) == {"a": 2} and os.listdir(tmp_path) == ["a.json"]


def test_a_whole_file_follows_no_link_to_its_target(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("mine")
    link.symlink_to(victim)
    write_atomic(str(link), b"new")
    assert victim.read_text() == "mine" and not link.is_symlink() and link.read_bytes() == b"new"


def test_a_whole_file_s_bits_are_the_umask_s_or_those_asked_for(tmp_path: Path) -> None:
    code = f"""import os; os.umask(0o027)
from stoker.contract.safe_io import AtomicFile, write_atomic
write_atomic({str(tmp_path / "a")!r}, "x")
with AtomicFile({str(tmp_path / "b")!r}, mode=0o600) as file: file.write(b"x")"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "ab"] == [0o640, 0o600]
