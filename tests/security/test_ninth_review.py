"""What a ninth security review found in config files, exports, data readers and the transformers engine: each test shows one way in, and that it is closed."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from conftest import at_length
from stoker.contract import memory
from stoker.contract.diskroom import DiskRoom
from stoker.contract.names import EX_CONFIG, Refusal
from stoker.training.config import files, layers
from stoker.training.config.flags import parse
from stoker.training.config.keys import KEYS
from stoker.training.data import crew, sources, units, unpack
from stoker.training.data.config import DataConfig
from stoker.training.data.prepare import prepare
from stoker.training.data.read import Place, Remarks, conversations, texts
from stoker.training.data.rows import rows
from stoker.training.data.units import Span
from stoker.training.tokenizer.config import TokenizerConfig

# ---- a config file that switches on a model's own code ----

SPELLINGS = {
    "section": "model:\n  load: m\n  trust_remote_code: true\n",
    "dashes": "model:\n  trust-remote-code: yes\n",
    "dotted": "model.trust_remote_code: true\n",
    "dotted, dashes": "model.trust-remote-code: 'true'\n",
    "alone": "trust_remote_code: true\n",
    "section of the notes": "training:\n  trust_remote_code: true\n",
    "JSON": '{"model": {"trust_remote_code": true}}',
}


@pytest.mark.parametrize("text", SPELLINGS.values(), ids=SPELLINGS)
def test_only_the_users_own_config_file_lets_a_models_code_run(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert layers.gather(parse(["--config", str(path)]), {}).told("model.trust_remote_code")[0] is True  # type: ignore[index]
    path.chmod(0o666)  # others can write it
    with pytest.raises(Refusal, match=r"config file of your own.*--model\.trust_remote_code") as problem:
        layers.gather(parse(["--config", str(path)]), {})
    assert problem.value.code == EX_CONFIG and str(path) in problem.value.line
    given = layers.gather(parse(["--config", str(path), "--trust-remote-code"]), {})
    assert given.told("model.trust_remote_code")[0] is True  # type: ignore[index]
    environment = {"STOKER_TRAIN_MODEL_TRUST_REMOTE_CODE": "false"}
    assert layers.gather(parse(["--config", str(path)]), environment).told("model.trust_remote_code")[0] is False  # type: ignore[index]


def test_a_downloaded_or_shipped_config_file_lets_no_code_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloaded = tmp_path / "models--owner--name" / "snapshots" / "abc" / "c.yaml"
    downloaded.parent.mkdir(parents=True)
    downloaded.write_text("model:\n  trust_remote_code: true\n")
    with pytest.raises(Refusal, match="downloaded from the hub"):
        layers.gather(parse(["--config", str(downloaded)]), {})
    monkeypatch.setattr(files, "_NAMED", str(downloaded.parent))
    with pytest.raises(Refusal, match="comes with Stoker"):
        layers.gather(parse(["--config", "c"]), {})


def test_what_only_an_own_file_may_set_are_keys_and_their_defaults_may_stand_in_any(tmp_path: Path) -> None:
    assert set(layers.ONLY_IN_OWN_FILE) <= set(KEYS)
    path = tmp_path / "c.yaml"
    path.write_text("model:\n  trust_remote_code: false\n")
    path.chmod(0o666)
    assert layers.gather(parse(["--config", str(path)]), {}).told("model.trust_remote_code")[0] is False  # type: ignore[index]


# ---- data files ----


def in_a_process(code: str, *argv: str, room: int = 4 << 30) -> Any:
    """With a limit of its own, above ours: should ours fail, this ends it."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (room, room))  # noqa: E731
    return subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False, timeout=300, preexec_fn=limit
    )


READ = """
import re, sys
from stoker.contract.names import Refusal
from stoker.training.data.rows import rows
try:
    print(sum(1 for _ in rows(sys.argv[1])), "rows")
except Refusal as refusal:
    print(refusal.line)
print(int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) >> 10)  # not getrusage: that counts its parent's
"""


def read(path: Path) -> tuple[str, int]:
    """(how many rows, or the refusal; megabytes)."""
    done = in_a_process(READ, str(path))
    assert done.returncode == 0, done.stderr[-2000:]
    line, memory = done.stdout.splitlines()
    return line, int(memory)


@at_length
def test_a_csv_row_has_an_end(tmp_path: Path) -> None:
    line = b'"' + b"x" * 1000 + b"\n" + b"y" * 1000 + b'",'
    with gzip.open(tmp_path / "row.csv.gz", "wb", compresslevel=1) as file:
        file.write(b"text\n")
        for _ in range(80):
            file.write(line * 500 + b'"\n",')
    found, memory = read(tmp_path / "row.csv.gz")
    assert found == f"{tmp_path}/row.csv.gz: row 1 is longer than 64 MB: a quote may be missing" and memory < 1500
    (tmp_path / "head.csv").write_bytes(b'"' + b"x\n" * (1 << 20))
    assert "the first row, which names the columns, is longer than 1 MB" in read(tmp_path / "head.csv")[0]
    (tmp_path / "wide.csv").write_text(",".join(map(str, range(20_000))))
    assert "names 20,000 columns" in read(tmp_path / "wide.csv")[0]
    (tmp_path / "good.csv").write_text('text\n"a\nb"\n' * 3)
    assert read(tmp_path / "good.csv")[0] == "5 rows"


@at_length
def test_values_of_a_json_file_are_counted(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "lists.json.gz", "wb", compresslevel=1) as file:
        file.write(b'[{"text":"a","x":[' + b"{}," * (18 << 20) + b"0]}]")
    found, memory = read(tmp_path / "lists.json.gz")
    assert "row 1 has more than" in found and memory < 1500
    with gzip.open(tmp_path / "long.json.gz", "wb", compresslevel=1) as file:
        file.write(b'[{"text":"' + b"a" * (65 << 20) + b'"}]')
    assert "row 1 is " in read(tmp_path / "long.json.gz")[0]
    good = [{"text": "ä" * (3 << 20)}, *({"text": str(number)} for number in range(1000))]
    (tmp_path / "good.json").write_text(json.dumps(good, ensure_ascii=False))
    assert read(tmp_path / "good.json")[0] == "1001 rows"


def nulls(path: Path, count: int) -> None:
    """An arrow stream whose one column takes no bytes, however long."""
    pyarrow = pytest.importorskip("pyarrow", reason="arrow files need pyarrow")
    batch = pyarrow.RecordBatch.from_arrays([pyarrow.nulls(10**6)], names=["text"])
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    path.write_bytes(bytes(sink.getvalue()).replace(struct.pack("<q", 10**6), struct.pack("<q", count)))


def test_rows_without_bytes_are_bounded_by_the_files_size(tmp_path: Path) -> None:
    nulls(tmp_path / "nulls.arrow", 10**12)
    assert "1,000,000,000,000 rows in" in read(tmp_path / "nulls.arrow")[0]
    nulls(tmp_path / "few.arrow", 1000)
    assert read(tmp_path / "few.arrow")[0] == "1000 rows"
    with pytest.raises(Refusal, match="may be an attack"):
        room = DiskRoom(str(tmp_path), "")
        sources.unfold(str(tmp_path / "nulls.arrow"), str(tmp_path / "cache"), lambda line: None, 1, room)
    assert not os.listdir(tmp_path / "cache" / "unpacked")


def same_text(path: Path, count: int, text: str) -> None:
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    pyarrow = pytest.importorskip("pyarrow", reason="parquet files need pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="parquet files need pyarrow")
    column = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array(numpy.zeros(count, dtype="int32")), pyarrow.array([text])
    )
    parquet.write_table(
        pyarrow.table({"text": column}), path, row_group_size=count, data_page_size=1 << 30, compression="zstd",
        write_batch_size=count, max_rows_per_page=1 << 30,
    )  # fmt: skip


def test_a_parquet_file_has_no_more_rows_than_its_size_allows(tmp_path: Path) -> None:
    same_text(tmp_path / "many.parquet", 5_000_000, "a")
    assert "5,000,000 rows in" in read(tmp_path / "many.parquet")[0]


def test_one_long_text_in_many_rows_fills_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same_text(tmp_path / "long.parquet", 20_000, "x" * 10_000)
    monkeypatch.setattr(unpack, "ALWAYS", 1 << 20)
    spans, _ = units.split(sources.find_sources([str(tmp_path / "long.parquet")], str(tmp_path), print), 0.0)
    with pytest.raises(Refusal, match="unpacks to more than 200 times"):
        for span in spans:
            for _ in texts(span, "text"):
                pass
    with pytest.raises(Refusal, match="unpacks to more than 200 times"):
        for _ in rows(str(tmp_path / "long.parquet")):
            pass


def test_remarks_about_rows_take_no_memory(tmp_path: Path) -> None:
    remarks = Remarks()
    for number in range(10_000):
        remarks.add(Place("a", "a", row=number + 1), "wrong")
    assert remarks.count == 10_000 and len(remarks.first) == 3
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    lines = [json.dumps(chat), *['{"messages": null}'] * 100_000]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    span = Span(str(tmp_path / "rows.jsonl"), "jsonl", 0, os.path.getsize(tmp_path / "rows.jsonl"))
    with pytest.raises(Refusal, match=r"rows\.jsonl, line 2: "):
        for _ in conversations(span, Remarks()):
            pass


def test_small_frames_of_xz_are_read_in_linear_time(tmp_path: Path) -> None:
    frames = [lzma.compress(b""), lzma.compress(b"a")]
    (tmp_path / "empty.jsonl.xz").write_bytes(frames[0] * 30_000 + frames[1] * 3000 + b"\0" * 8)
    began = time.process_time()
    with unpack.open_unpacked(str(tmp_path / "empty.jsonl.xz")) as stream:
        assert stream.read() == b"a" * 3000
    assert time.process_time() - began < 10
    (tmp_path / "cut.jsonl.xz").write_bytes(frames[1] + frames[1][:-9])
    with (
        pytest.raises(Refusal, match="it ends in the middle"),
        unpack.open_unpacked(str(tmp_path / "cut.jsonl.xz")) as stream,
    ):
        stream.read()


# ---- whatever a data file does: a limit on memory, one line that names it, nothing in the cache ----

GREEDY = """
import sys
from stoker.contract.names import Refusal
from stoker.training.data import jsonl, read, rows, units
rows.ROW_ROOM = read.ROW_ROOM = 256 << 20
rows.parse_row = read.parse_row = lambda line: {"text": [[] for _ in range(10 ** 9)]}  # a way in that nobody closed
path = sys.argv[1]
span = units.Span(path, "jsonl", 0, 10)
for take in (lambda: list(rows.rows(path)), lambda: list(read.texts(span, "text"))):
    try:
        print(take())
    except Refusal as refusal:
        print(refusal.line)
"""


@at_length
def test_a_row_that_takes_much_memory_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n{}\n")
    done = in_a_process(GREEDY, str(path))
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{path}, after line 0: the next row takes too much memory"), lines
    assert lines[1].startswith(f"{path}: the next row takes too much memory"), lines


def test_what_was_read_before_a_failure_is_given_first() -> None:
    def items() -> Iterator[int]:
        yield from range(200)
        raise ValueError("the end")

    taken = []
    with pytest.raises(ValueError, match="the end"):
        for item in memory.bounded_steps(items(), 1 << 30):
            taken.append(item)
    assert taken == list(range(200))


PREPARE = """
import sys
from stoker.training.data import work
work.MOST_MEMORY = 128 << 20
real = work.do
def do(*more):
    {what}
work.do = do
work.main()
"""


@pytest.mark.parametrize("what", ["bytearray(1 << 30)", "import os; os.abort()"])
def test_the_end_of_a_preparing_process_is_one_line_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    (tmp_path / "work.py").write_text(PREPARE.format(what=what))
    launch = subprocess.Popen
    monkeypatch.setattr(
        crew.subprocess, "Popen", lambda argv, **how: launch([argv[0], str(tmp_path / "work.py")], **how)
    )
    (tmp_path / "a.txt").write_text("hello world\n" * 1000)
    data = DataConfig(path=(str(tmp_path / "a.txt"),), cache=str(tmp_path / "cache"), num_workers=2, context_length=8)
    with pytest.raises(Refusal, match=r"preparing data.*a\.txt.*memory"):
        prepare(data, TokenizerConfig(path="bytes"), lambda line: None)
    assert not [name for name in os.listdir(tmp_path / "cache" / "datasets") if not name.endswith(".lock")]
