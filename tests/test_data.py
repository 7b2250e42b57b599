"""Prepared data: the same tokens whatever the processes, found again by bytes, whole or not there; samples in an order that is computed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("tokenizers")
pytest.importorskip("tiktoken")

import numpy as np

from conftest import EVERYTHING, Stoker, at_length, wait_for
from stoker.contract.errors import Refusal
from stoker.control.doctor.stale_caches import list_cache_roots
from stoker.training.config.amount import lines_in
from stoker.training.data import shards, show, units
from stoker.training.data.build import best_fit
from stoker.training.data.config import DataConfig
from stoker.training.data.order import Order, mixture_of
from stoker.training.data.prepare import prepare
from stoker.training.data.read import Place as RowPlace
from stoker.training.data.read import Remarks, conversations
from stoker.training.data.reader import Samples
from stoker.training.data.shards import Prepared, open_prepared
from stoker.training.data.sources import FORMS, find_sources
from stoker.training.data.units import Span
from stoker.training.tokenizer.config import TokenizerConfig
from stoker.training.tokenizer.tokenizer import bytes_tokenizer, load

BYTES = TokenizerConfig(path="bytes")


def words(count: int, seed: int = 0) -> str:
    dice = random.Random(seed)
    return "".join(
        dice.choice(["river ", "boat ", "she said, ", "1984 ", "über\n", "\n\n", "  x = 1;\n", "Never.\n"])
        for _ in range(count)
    )


class Place:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []

    def file(self, name: str, content: str | bytes) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    def rows(self, name: str, rows: list[Any]) -> str:
        return self.file(name, "".join(json.dumps(row) + "\n" for row in rows))

    def prepare(self, *paths: str, tokenizer: TokenizerConfig = BYTES, verify: bool = False, **more: Any) -> Prepared:
        given = {"validation": "0", "context_length": 16, "cache": str(self.folder / "cache"), "num_workers": 1, **more}
        return prepare(DataConfig(path=paths, **given), tokenizer, self.said.append, verify)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def tokens(made: Prepared, split: str = "train") -> list[int]:
    told = shards.read_manifest(made.folder)
    assert told is not None
    return [
        int(one)
        for about in told["splits"][split]["shards"]
        for one in np.fromfile(os.path.join(made.folder, about["file"]), dtype=told["dtype"])
    ]


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(Refusal) as refused:
        call()
    assert "\n" not in refused.value.line
    return refused.value.line


def test_every_form_gives_its_documents_each_with_an_end(place: Place) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [words(5, seed) for seed in range(40)]
    parquet.write_table(
        arrow.table({"other": list(range(40)), "text": texts}), place.folder / "rows.parquet", row_group_size=7
    )
    plain = [place.file(f"texts/{number:02d}.txt", text) for number, text in enumerate(texts)]
    ways = {
        "jsonl": [place.rows("rows.jsonl", [{"text": text} for text in texts])],
        "parquet": [str(place.folder / "rows.parquet")],
        "folder": [str(place.folder / "texts")],
        "glob": [str(place.folder / "texts" / "*.txt")],
        "files": plain,
    }
    found = {way: place.prepare(*paths) for way, paths in ways.items()}
    wanted = b"".join(text.encode() + b"\0" for text in texts)  # the end of text as a NUL, to compare
    for way, made in found.items():
        assert bytes(0 if one == made.end_id else one for one in tokens(made)) == wanted, way
        assert made.train_documents == 40 and made.train_bytes == len(wanted) - 40
    assert found["folder"].key == found["glob"].key == found["files"].key and found["jsonl"].key != found["parquet"].key


@at_length
def test_the_number_of_processes_changes_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "UNIT", 20_000)  # many units of a small file
    text = place.file("a.txt", words(30_000))
    rows = place.rows("b.jsonl", [{"text": words(20, seed)} for seed in range(800)])
    tokenizer = TokenizerConfig(vocab_size=400, train_megabytes=1)
    made = [
        place.prepare(
            text, rows, tokenizer=tokenizer, validation="0.2", num_workers=count, cache=str(place.folder / f"c{count}")
        )
        for count in ((1, 2, 3) if EVERYTHING else (1, 3))
    ]
    assert len(units.jobs_of(units.split(units_sources(text, rows), 0.2)[0])) > 10
    assert len({one.key for one in made}) == 1
    for split in ("train", "validation"):
        assert tokens(made[0], split) != [] and all(tokens(one, split) == tokens(made[0], split) for one in made)
    whole = load(made[0].tokenizer).decode_bytes(
        one for one in tokens(made[0]) + tokens(made[0], "validation") if one != made[0].end_id
    )
    assert whole == Path(text).read_bytes() + b"".join(
        json.loads(line)["text"].encode() for line in Path(rows).read_text().splitlines()
    )


def units_sources(*paths: str) -> Any:
    return find_sources(paths, "cache", print)


def test_one_text_is_split_by_its_bytes_exactly(place: Place) -> None:
    text = words(4000).encode()
    made = place.prepare(place.file("one.txt", text), validation="0.1")
    assert bytes(tokens(made)) == text[: made.train_bytes] and 0 <= made.train_bytes - int(len(text) * 0.9) < 4
    assert made.validation_bytes == len(text) - made.train_bytes and made.validation_tokens == made.validation_bytes + 1
    other = place.prepare(str(place.folder / "one.txt"), validation=place.file("held.txt", b"held out text\n" * 9))
    assert other.train_bytes == len(text) and other.validation_bytes == 14 * 9 and other.key != made.key


def test_the_cache_is_known_by_bytes_and_not_by_names(place: Place) -> None:
    first = place.prepare(place.file("a.txt", words(900)))
    assert first.fresh and not place.prepare(str(place.folder / "a.txt")).fresh
    renamed = place.prepare(place.file("sub/other name.txt", words(900)))
    assert (
        renamed.key == first.key
        and not renamed.fresh
        and not place.prepare(str(place.folder / "a.txt"), context_length=32).fresh
    )
    changed = place.prepare(place.file("a.txt", words(900) + "!"))
    assert changed.fresh and changed.key != first.key
    assert (
        open_prepared(first.folder).key == first.key
        and place.prepare(str(place.folder / "a.txt"), tokenizer=TokenizerConfig(vocab_size=300)).key != changed.key
    )


def test_a_remembered_digest_is_forgotten_when_the_file_changes(place: Place) -> None:
    path = place.file("a.txt", words(900))
    long_ago = time.time() - 100
    os.utime(path, (long_ago, long_ago))
    first = place.prepare(path)
    assert str(path) in (place.folder / "cache" / "digests.json").read_text()
    data = bytearray(Path(path).read_bytes())
    data[10] ^= 1
    Path(path).write_bytes(bytes(data))
    os.utime(path, (long_ago, long_ago))  # the same size and time: ctime gives it away
    assert place.prepare(path).key != first.key


@pytest.mark.parametrize("how", ["flipped", "truncated", "removed", "manifest"])
def test_a_damaged_shard_is_found_named_and_made_again(place: Place, how: str) -> None:
    path = place.file("a.txt", words(900))
    first = place.prepare(path)
    before = tokens(first)
    shard = Path(first.folder) / ("manifest.json" if how == "manifest" else "train-00000.bin")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 4
    shard.unlink()
    if how != "removed":
        shard.write_bytes(bytes(data[:-6]) if how in ("truncated", "manifest") else bytes(data))
    again = place.prepare(path)
    assert (
        again.fresh
        and tokens(again) == before
        and any(shard.name in line and "preparing again" in line for line in place.said)
    )
    assert not place.prepare(path, verify=True).fresh


BUILDER = """
import sys
from stoker.training.data import units, crew
from stoker.training.data.config import DataConfig
from stoker.training.data.prepare import prepare
from stoker.training.tokenizer.config import TokenizerConfig
units.UNIT = 100_000
made = prepare(DataConfig(path=(sys.argv[1],), validation="0", cache=sys.argv[2], num_workers=2, context_length=16), TokenizerConfig(path="bytes"), lambda line: print(line, flush=True))
print("fresh" if made.fresh else "found", made.key, flush=True)
"""


def test_two_builders_at_once_build_once(place: Place) -> None:
    path, cache = place.file("a.txt", words(200_000)), str(place.folder / "cache")
    both = [
        subprocess.Popen([sys.executable, "-c", BUILDER, path, cache], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [one.communicate(timeout=60)[0] for one in both]
    assert sorted(one.splitlines()[-1].split()[0] for one in said) == ["found", "found", "fresh"], said
    assert len({one.split()[-1] for one in said}) == 1
    assert [name for name in os.listdir(os.path.join(cache, "datasets")) if name.endswith(".tmp")] == []


def test_a_killed_builder_leaves_nothing_that_looks_complete(place: Place) -> None:
    path, cache = place.file("a.txt", words(400_000)), place.folder / "cache"
    for _ in range(3):
        builder = subprocess.Popen([sys.executable, "-c", BUILDER, path, str(cache)], stdout=subprocess.DEVNULL)
        assert wait_for(
            lambda: (
                True
                if list(cache.glob("datasets/*.tmp/parts/*")) or list(cache.glob("datasets/*/manifest.json"))
                else None
            ),
            30,
        )
        builder.send_signal(signal.SIGKILL)
        builder.wait()
        if list(cache.glob("datasets/*/manifest.json")):
            pytest.fail("the builder was done before it could be killed: more data is needed")
    made = place.prepare(path)
    assert (
        made.fresh and made.train_bytes == os.path.getsize(path) and bytes(tokens(made)[:-1]) == Path(path).read_bytes()
    )
    assert list(cache.glob("datasets/*.tmp")) == []


def test_a_killed_worker_is_named_and_nothing_is_left(place: Place) -> None:
    path, cache = place.file("a.txt", words(1_500_000)), place.folder / "cache"
    builder = subprocess.Popen(
        [sys.executable, "-c", BUILDER, path, str(cache)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    children = Path(f"/proc/{builder.pid}/task/{builder.pid}/children")
    found = wait_for(lambda: children.read_text().split() if list(cache.glob("datasets/*.tmp/parts/*")) else None, 30)
    os.kill(int(found[0]), signal.SIGKILL)
    _, errors = builder.communicate(timeout=60)
    assert builder.returncode == 1 and f"process {found[0]} was killed by signal 9" in errors
    assert list(cache.glob("datasets/*.tmp")) == [] and not list(cache.glob("datasets/*/manifest.json"))


def dangling(place: Place) -> str:
    folder = Path(place.file("dangling/fine.txt", "fine text " * 9)).parent
    (folder / "gone.txt").symlink_to("nowhere.txt")
    return str(folder)


def test_bad_input_is_refused_in_one_line_with_file_and_place(place: Place) -> None:
    good = {"text": "fine " * 20}
    cases: list[tuple[str, list[str]]] = [
        (place.file("empty.txt", ""), ["empty.txt is empty"]),
        (place.file("blank.txt", " \n" * 99), ["blank.txt holds only whitespace"]),
        (place.file("big-blank.txt", " \n" * 99_999), ["big-blank.txt", "no text"]),
        (place.file("picture.txt", b"\x89PNG\r\n\x1a\n" + os.urandom(500)), ["picture.txt", "PNG"]),
        (place.file("late.txt", b"fine text\n" * 9000 + b"\0" + b"more"), ["late.txt", "NUL byte at offset 90000"]),
        (place.file("control.txt", b"\x01\x02\x03text" * 99), ["control.txt", "control characters"]),
        (
            place.file("latin.txt", "caf\u00e9 und mehr\n".encode("latin-1") * 30),
            ["latin.txt", "offset 3", "0xe9", "iconv -f latin-1"],
        ),
        (place.file("wide.txt", "text".encode("utf-16")), ["UTF-16", "iconv"]),
        (
            place.rows("key.jsonl", [good] * 5 + [{"texts": "x", "id": 1}]),
            ["key.jsonl, line 6", "no 'text'", "texts, id", "did you mean texts"],
        ),
        (place.rows("chats.jsonl", [{"messages": []}]), ["data.kind=chat"]),
        (place.rows("null.jsonl", [good, {"text": None}]), ["null.jsonl, line 2", "null"]),
        (place.file("broken.jsonl", json.dumps(good) + "\n\n{'text': 1}\n"), ["broken.jsonl, line 3", "not JSON"]),
        (
            place.file("cut.jsonl", (json.dumps(good) + "\n") * 5 + '{"text": "cut o'),
            ["cut.jsonl, line 6 is not JSON: Unterminated string", "column 10; it begins"],
        ),
        ("/dev/zero", ["/dev/zero is a device, not a regular file"]),
        (dangling(place), ["dangling/gone.txt can't be read: No such file"]),
        (os.path.dirname(place.file("hollow/a.txt", "")), ["hollow holds only empty files"]),
        (place.file("array.json", '[{"text": "a"}, {"text": "b"'), ["array.json, row 2 is not JSON"]),
        (place.file("twice.jsonl", '{"text": "a"}\n{"text": "a", "text": "b"}\n'), ["line 2", "'text' appears twice"]),
        (place.file("archive.zip", "PK"), ["unzip"]),
        (place.file("number.jsonl", "12\n"), ["number.jsonl, line 1", "int"]),
        (place.file("bad.jsonl", b'{"text": "caf\xe9"}\n'), ["bad.jsonl is not UTF-8", "offset 13"]),
        (place.file("fake.parquet", "no parquet" * 9), ["fake.parquet is not a parquet file"]),
        (place.file("packed.jsonl.gz", b"\x1f\x8b123"), ["packed.jsonl.gz is damaged", "download it again"]),
        (str(place.folder / "latin.text"), ["does not exist (did you mean ", "latin.txt?"]),
        (str(place.folder / "no*match"), ["no file matches"]),
        (os.path.dirname(place.file("odd/a.bin", "x")), ["holds no", ".bin"]),
        (
            place.file("short.txt", "ten tokens"),
            ["data.context_length is 16, longer than the data", "11 tokens", "at most 10"],
        ),
    ]
    for path, says in cases:
        line = refusal(lambda path=path: place.prepare(path))
        assert all(word in line for word in says), f"{path}: {line}"
    assert "data.path is empty" in refusal(place.prepare)
    assert "260 at least" in refusal(
        lambda: place.prepare(place.rows("ok.jsonl", [good] * 9), tokenizer=TokenizerConfig(vocab_size=100))
    )
    assert "between 0 and 1" in refusal(lambda: place.prepare(str(place.folder / "ok.jsonl"), validation="3"))
    assert list((place.folder / "cache" / "datasets").glob("*.tmp")) == []


def test_an_empty_file_among_others_is_left_out_and_named(place: Place) -> None:
    place.file("many/full.txt", "some text " * 20)
    place.file("many/none.txt", "")
    for path in (place.folder / "many", place.folder / "many" / "*.txt"):
        place.said.clear()
        assert place.prepare(str(path)).train_documents == 1
        assert place.said[0] == f"left out, because they are empty: {place.folder / 'many' / 'none.txt'}"


def test_the_help_names_every_ending_that_a_folder_is_read_for(stoker: Stoker) -> None:
    told = stoker("prepare", "--help", env={"COLUMNS": "300"}).out
    for text in (told.partition("options:")[0], told.partition("--data.path")[2]):
        assert " ".join(FORMS) in text


def test_a_parquet_file_without_the_column_names_those_it_has(place: Place) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"content": ["a"], "url": ["b"]}), place.folder / "rows.parquet")
    line = refusal(lambda: place.prepare(str(place.folder / "rows.parquet"), text_key="contents"))
    assert "no column 'contents'" in line and "did you mean content" in line and "content, url" in line


def test_a_file_of_one_line_is_cut_between_characters(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "UNIT", 50_000)
    monkeypatch.setattr(units, "LOOK", 10_000)
    line = "東京" * 60_000
    made = place.prepare(place.file("line.txt", line))
    assert bytes(tokens(made)[:-1]) == line.encode() and made.train_documents == 1


def conversation(seed: int) -> dict[str, Any]:
    dice = random.Random(seed)
    turns = [
        message
        for _ in range(dice.randrange(1, 4))
        for message in (
            ("user", words(dice.randrange(1, 6), seed)),
            ("assistant", words(dice.randrange(1, 6), seed + 1)),
        )
    ]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.mark.parametrize("place_of_it", ["first", "last"])
def test_one_unusable_row_is_left_out_wherever_it_stands(place: Place, place_of_it: str) -> None:
    """The last 1 % is held out: of 15 rows one would be 7 %."""
    rows: list[dict[str, Any]] = [conversation(seed) for seed in range(1500)]
    rows.insert(0 if place_of_it == "first" else 1500, {"messages": [{"role": "user", "content": "nobody answers"}]})
    made = place.prepare(place.rows("chats.jsonl", rows), kind="chat", context_length=512, validation="0.01")
    line = next(line for line in place.said if "can't be used" in line)
    assert line.startswith("1 of 1,501 rows can't be used: ") and line.endswith("; left out"), line
    assert made.validation_tokens


def test_chats_are_packed_whole_and_learn_the_assistant_only(place: Place) -> None:
    rows = [conversation(seed) for seed in range(300)]
    rows += [
        {"messages": [{"role": "user", "content": "nobody answers"}]},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "long " * 300}]},
    ]
    made = place.prepare(place.rows("chats.jsonl", rows), kind="chat", context_length=512)
    assert (
        place.said[-2].startswith("1 of 302 rows can't be used: ")
        and "chats.jsonl, line 301: no message is the assistant's; left out" in place.said[-2]
    )
    assert "1 of 301 conversations are longer than data.context_length 512 and are cut" in place.said[-1]
    assert place.said[-1].endswith("chats.jsonl, line 302 has 1,522 tokens")
    assert (
        made.dropped == 0
        and made.cut == 1
        and made.train_documents == 301
        and made.fill is not None
        and made.fill > 0.9
    )
    samples, tokenizer = Samples(made, "train", 512), load(made.tokenizer)
    batch = samples.batch(np.arange(len(samples)))
    assert (
        batch.segments is not None and batch.segments.dtype == np.int32 and batch.segments.shape == batch.inputs.shape
    )
    seen, learned = [], []
    for inputs, targets, segments in zip(batch.inputs, batch.targets, batch.segments, strict=True):
        assert segments[0] == 0 and (np.diff(segments) >= 0).all() and (np.diff(segments) <= 1).all()
        for number in range(segments[-1] + 1):
            mine = segments == number
            text = tokenizer.decode(inputs[mine].tolist())
            if not text.startswith("<|pad|>"):
                assert text.startswith("<|im_start|>user\n") and text.count("<|im_start|>user") >= 1
                seen.append(text)
                learned.append(tokenizer.decode([one for one in targets[mine].tolist() if one != -100]))
            else:
                assert (targets[mine] == -100).all()
    wanted = [
        "".join(one["content"] + "<|im_end|>" for one in row["messages"] if one["role"] == "assistant")
        for row in rows[:300]
    ]
    assert len(seen) == 301 and sorted(one for one in learned if not one.startswith("long ")) == sorted(wanted)
    assert "packed for a context of 512" in refusal(lambda: Samples(made.folder, "train", 64))
    line = refusal(
        lambda: place.prepare(place.rows("roles.jsonl", [{"messages": [{"role": "bot", "content": "x"}]}]), kind="chat")
    )
    assert (
        "1 of 1 rows can't be used" in line
        and "roles.jsonl, line 1" in line
        and "'bot'" in line
        and "that is 1 % or more" in line
    )
    many = place.rows("many.jsonl", [*rows[:60], *[{"messages": [{"role": "bot", "content": "x"}]}] * 9])
    line = refusal(lambda: place.prepare(many, kind="chat", context_length=512))
    assert (
        "9 of 69 rows can't be used" in line
        and all(f"line {number}:" in line for number in (61, 62, 63))
        and "line 64" not in line
    )
    text = place.rows("text.jsonl", [{"text": "x"}] * 3000)
    assert "text.jsonl, line 1: no known format of conversations" in refusal(lambda: place.prepare(text, kind="chat"))
    few = place.rows("few.jsonl", [{"text": "a text that is no conversation"}] * 9)
    assert "few.jsonl, line 1: no known format of conversations; its keys: text" in refusal(
        lambda: place.prepare(few, kind="chat", tokenizer=TokenizerConfig(vocab_size=300))
    )


def test_best_fit_fills_rows_and_never_overfills() -> None:
    dice = np.random.default_rng(0)
    lengths = np.clip(dice.exponential(200, 5000).astype(np.int64) + 1, 1, 1025)
    packing = best_fit(lengths, 1025)
    used = np.zeros((packing.rows, 1025), dtype=np.int64)
    for row, start, length in zip(packing.row, packing.start, lengths, strict=True):
        used[row, start : start + length] += 1
    assert used.max() == 1 and used.sum() == lengths.sum() and packing.fill == used.mean() > 0.98


def test_a_stream_is_read_across_shards(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_TOKENS", 1000)
    made = place.prepare(place.file("a.txt", words(2000)), validation="0.1")
    assert made.shards > 5
    flat = np.array(tokens(made))
    samples = Samples(made, "train", 48)
    assert len(samples) == (len(flat) - 1) // 48
    ids = np.random.default_rng(0).permutation(len(samples))
    batch = samples.batch(ids)
    assert batch.inputs.dtype == np.int64 and batch.segments is None
    for row, one in enumerate(ids):
        assert (batch.inputs[row] == flat[one * 48 : one * 48 + 48]).all() and (
            batch.targets[row] == flat[one * 48 + 1 : one * 48 + 49]
        ).all()
    held, rest = Samples(made.folder, "validation", 48), np.array(tokens(made, "validation"))
    every = held.batch(np.arange(len(held)))
    assert (every.targets[every.targets != -100] == rest[1:]).all() and (
        every.inputs.ravel()[: len(rest) - 1] == rest[:-1]
    ).all()
    with pytest.raises(IndexError):
        samples.batch(np.array([len(samples)]))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 16, 17, 31, 64, 97, 1000, 1021, 4096, 4097])
def test_an_order_has_each_sample_once_per_epoch(count: int) -> None:
    for seed in range(3):
        order = Order(count, seed)
        for epoch in range(3):
            assert sorted(order.ids(epoch * count, (epoch + 1) * count).tolist()) == list(range(count))
    whole = Order(count, 5).ids(0, 3 * count)
    middle = count + count // 2
    assert (np.concatenate([Order(count, 5).ids(0, middle), Order(count, 5).ids(middle, 3 * count)]) == whole).all()
    assert (Order(count, 5, shuffled=False).ids(0, 2 * count) == np.tile(np.arange(count), 2)).all()


def test_orders_look_random_and_differ_by_seed_and_epoch() -> None:
    count = 1000
    first = np.stack([Order(count, seed).ids(0, count) for seed in range(400)])
    counts = np.histogram(first[:, 0], bins=10, range=(0, count))[0]
    assert ((counts - 40.0) ** 2 / 40.0).sum() < 40  # chi-square, 9 degrees of freedom: 40 has p = 1e-5
    steps = np.abs(np.diff(first, axis=1)).mean()
    assert abs(steps - count / 3) < 5  # neighbours are as far apart as two random numbers
    correlation = np.corrcoef(first[:, ::97].astype(float), rowvar=False)
    assert np.abs(correlation - np.eye(len(correlation))).max() < 0.3
    one = Order(10**12, 7)
    assert len(set(one.ids(0, 10_000).tolist())) == 10_000 and (one.ids(10**12, 10**12 + 50) != one.ids(0, 50)).all()


def test_the_command_takes_the_preset_that_training_takes_here(
    stoker: Stoker, box: Callable[..., dict[str, str]]
) -> None:
    (stoker.cwd / "book.txt").write_text(words(3000))
    small, production = "preset small: the default without a GPU", "preset production: the default with GPUs"
    cases = [
        (0, [], small),
        (1, [], production),
        (0, ["--parallel.device", "cuda"], production),
        (1, ["--preset", "small"], "preset small ("),
    ]
    for gpus, more, line in cases:
        done = stoker(
            "prepare",
            "--data",
            "book.txt",
            "--tokenizer.path",
            "bytes",
            *more,
            env={"CUDA_VISIBLE_DEVICES": "0", **box(gpus)},
        )
        assert done.code == 0 and f"stoker: {line}" in done.err, done.err


def test_the_command_prepares_says_what_and_imports_no_torch(stoker: Stoker) -> None:
    (stoker.cwd / "book.txt").write_text(words(3000))
    command = [
        "prepare",
        "--data",
        "book.txt",
        "--tokenizer.path",
        "bytes",
        "--data.context_length",
        "64",
        "--data.validation",
        "0.1",
    ]
    done = stoker(*command)
    assert done.code == 0, done.err
    assert "1 document, prepared in" in done.out and ", validation " in done.out and "cache/datasets/" in done.out
    told = json.loads(stoker(*command, "--json", "--verify").out)
    assert (
        told["schema"] == 1
        and not told["fresh"]
        and told["train_bytes"] + told["validation_bytes"] == (stoker.cwd / "book.txt").stat().st_size
    )
    refused = stoker("prepare", "--data", "bock.txt", "--tokenizer.path", "bytes")
    assert (
        refused.code == 66
        and "did you mean book.txt" in refused.err
        and refused.err.splitlines()[-1].startswith("stoker: ")
    )
    check = "import sys\nfrom stoker.cli import main\nmain.main(sys.argv[1:])\nassert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    assert (
        subprocess.run(
            [sys.executable, "-c", check, *command], cwd=stoker.cwd, env=stoker.env, capture_output=True, check=False
        ).returncode
        == 0
    )


def test_what_stoker_made_is_no_data(tmp_path: Path) -> None:
    """`--data .`: the cache that the first look makes, and runs, must not be in the second."""
    (tmp_path / "book.txt").write_text("some words " * 400)
    (tmp_path / "runs" / "1-base").mkdir(parents=True)
    (tmp_path / "runs" / "1-base" / "run.json").write_text("{}")
    (tmp_path / "runs" / "1-base" / "notes.txt").write_text("not data")
    said: list[str] = []
    data = DataConfig(path=(str(tmp_path),), cache=str(tmp_path / "cache"), validation="0", context_length=16)
    first = prepare(data, TokenizerConfig(path="bytes"), said.append)
    assert (tmp_path / "cache" / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55")
    assert prepare(data, TokenizerConfig(path="bytes"), said.append).key == first.key
    assert f"left out, because they are Stoker's own files: {tmp_path / 'runs' / '1-base'}" in said
    assert [
        one.path for one in find_sources([str(tmp_path / "runs" / "1-base")], str(tmp_path / "other"), said.append)
    ] != [], "unless it is named"


def test_shares_that_add_up_to_no_number_are_refused() -> None:
    with pytest.raises(Refusal, match=r"data\.mixture"):
        mixture_of(DataConfig(path=("a", "b"), mixture=("1e308 1e308",)))


@pytest.mark.parametrize("block", [1, 3, 1 << 20])
def test_lines_are_counted_across_blocks(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.training.config.amount._BLOCK", block)
    for text, count in ((b"", 0), (b"a", 1), (b"a\n", 1), (b" a \n\t\r\n\nb\r\n\n c", 3), (b"\n \n", 0)):
        (tmp_path / "x.jsonl").write_bytes(text)
        assert lines_in(str(tmp_path / "x.jsonl")) == count, text


def test_a_file_whose_rows_are_no_conversations_is_not_read_to_the_end(tmp_path: Path) -> None:
    remarks = Remarks()
    for number in range(10_000):
        remarks.add(RowPlace("a", "a", row=number + 1), "wrong")
    assert remarks.count == 10_000 and len(remarks.first) == 3
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    lines = [json.dumps(chat), *['{"messages": null}'] * 100_000]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    span = Span(str(tmp_path / "rows.jsonl"), "jsonl", 0, os.path.getsize(tmp_path / "rows.jsonl"))
    with pytest.raises(Refusal, match=r"rows\.jsonl, line 2: "):
        for _ in conversations(span, Remarks()):
            pass


def test_rows_of_no_known_format_are_not_read_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "HOPELESS_AFTER_ALL", 10)
    path = tmp_path / "empty.jsonl"
    path.write_text("{}\n" * 20 + "nonsense\n")
    with pytest.raises(Refusal, match="no known format"):
        show.show(str(path), show.Ask(bytes_tokenizer(), 64), lambda line: None)


def test_a_folder_of_other_things_is_not_marked_as_a_cache(tmp_path: Path) -> None:
    """Backups leave out what is marked so, and a config file may name any folder as its cache."""
    (tmp_path / "text.txt").write_text("some text to learn " * 400)
    home, cache = tmp_path / "home", tmp_path / "cache"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    for folder in (home, cache):
        data = DataConfig(path=(str(tmp_path / "text.txt"),), cache=str(folder), context_length=16)
        prepare(data, TokenizerConfig(path="bytes"), lambda line: None)
    assert sorted(os.listdir(home)) == ["stoker-cache", "thesis.tex"]
    assert (home / "stoker-cache/CACHEDIR.TAG").exists() and (cache / "CACHEDIR.TAG").exists()
    roots = [root for kind, root, _ in list_cache_roots({"STOKER_CACHE": str(home)}, str(tmp_path)) if kind == "data"]
    assert roots == [str(cache / "datasets"), str(home / "stoker-cache/datasets")]
