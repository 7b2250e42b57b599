"""Data as it is published: formats recognised from the rows, files of all kinds, packed or not, and what is wrong with bad ones."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import pty
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("tokenizers")
pytest.importorskip("tiktoken")

import numpy as np

from conftest import Stoker
from stoker.contract.errors import Refusal
from stoker.training.data import sources, unpack
from stoker.training.data.config import DataConfig
from stoker.training.data.formats.format import Unusable, checked
from stoker.training.data.formats.preferences import preference
from stoker.training.data.formats.table import FORMATS, recognise
from stoker.training.data.order import Mixed, mixture_of, order_of
from stoker.training.data.prepare import prepare
from stoker.training.data.reader import Samples
from stoker.training.data.rows import KINDS, rows
from stoker.training.data.shards import Prepared
from stoker.training.tokenizer.config import TokenizerConfig
from stoker.training.tokenizer.tokenizer import load

BYTES = TokenizerConfig(path="bytes")
USER, ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
DIALOGUE = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: 2 + 2?\n\nAssistant: "
TURNS = [("user", "2 + 2?"), ("assistant", "4")]
CHATS: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "messages": ({"messages": [USER, ANSWER], "id": 3}, TURNS),
    "messages with parts": ({"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "4"}]}]}, TURNS),
    "messages called conversations": ({"conversations": [USER, ANSWER]}, TURNS),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}], "system": "Be brief."},
        [("system", "Be brief."), *TURNS],
    ),
    "alpaca": ({"instruction": "Add.", "input": "2 2", "output": "4", "text": "…"}, [("user", "Add.\n\n2 2"), TURNS[1]]),
    "alpaca without input": ({"instruction": "2 + 2?", "input": "", "output": "4"}, TURNS),
    "prompt-completion": ({"prompt": "2 + 2?", "completion": "4"}, TURNS),
    "prompt-completion of messages": ({"prompt": [USER], "completion": [ANSWER]}, TURNS),
    "preference": ({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, TURNS),
    "preference as a dialogue": (
        {"chosen": DIALOGUE + "4", "rejected": DIALOGUE + "5"},
        [("user", "hi"), ("assistant", "hello"), *TURNS],
    ),
    "gsm8k": ({"question": "2 + 2?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}, [TURNS[0], ("assistant", "2 + 2 = <<2+2=4>>4\n#### 4")]),
    "arc": (
        {"id": "x", "question": "Hot?", "choices": {"text": ["ice", "fire"], "label": ["A", "B"]}, "answerKey": "B"},
        [("user", "Hot?\nA. ice\nB. fire\nAnswer with the letter only."), ("assistant", "B")],
    ),
    "mmlu": (
        {"question": "Hot?", "subject": "physics", "choices": ["ice", "fire"], "answer": 1},
        [("user", "Hot?\nA. ice\nB. fire\nAnswer with the letter only."), ("assistant", "B")],
    ),
}  # fmt: skip


class Place:
    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, list[str]()

    def file(self, name: str, content: str | bytes) -> str:
        path = self.folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    def rows(self, name: str, made: list[Any]) -> str:
        return self.file(name, "".join(json.dumps(row) + "\n" for row in made))

    def prepare(self, *paths: str, **more: Any) -> Prepared:
        given = {
            "validation": "0",
            "context_length": 64,
            "cache": str(self.folder / "cache"),
            "num_workers": 1,
            "kind": "chat",
        }
        return prepare(DataConfig(path=paths, **{**given, **more}), BYTES, self.said.append)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(Refusal) as refused:
        call()
    assert "\n" not in refused.value.line
    return refused.value.line


def learned(made: Prepared) -> list[str]:
    """What is learned of each row of packed conversations."""
    samples, tokenizer = Samples(made, "train", made.context or 64), load(made.tokenizer)
    batch = samples.batch(np.arange(len(samples), dtype=np.int64))
    return [tokenizer.decode([one for one in row.tolist() if one != -100]) for row in batch.targets]


@pytest.mark.parametrize("name", CHATS)
def test_a_row_is_recognised_and_becomes_turns(name: str, place: Place) -> None:
    row, turns = CHATS[name]
    made = recognise(row)
    assert made is not None and made.name == name.split()[0] and made.conversation is not None
    assert checked(made.conversation(row)) == turns
    prepared = place.prepare(place.rows("rows.jsonl", [row] * 3), context_length=512)
    assert place.said[0] == f"data format: {made.name} ({made.about}) in {place.folder / 'rows.jsonl'}"
    answers = "".join(f"{text}<|im_end|>" for role, text in turns if role == "assistant")
    assert "".join(learned(prepared)) == answers * 3


def test_each_format_is_one_entry_with_the_columns_it_reads() -> None:
    for name, (row, _) in CHATS.items():
        made = FORMATS[name.split()[0]]
        kept = {key: value for key, value in row.items() if key in made.columns}
        assert made.conversation is not None and made.conversation(kept) == made.conversation(row), name


def test_a_format_can_be_named_and_what_has_another_is_then_left_out(place: Place) -> None:
    both = {"prompt": "2 + 2?", "completion": "4", "instruction": "Add", "output": "four"}
    path = place.rows("both.jsonl", [both] * 3)
    assert learned(place.prepare(path)) == learned(place.prepare(path, format="alpaca"))
    assert "4<|im_end|>" in learned(place.prepare(path, format="prompt-completion"))[0]
    many = place.rows("many.jsonl", [{"messages": [USER, ANSWER]}] * 200 + [{"instruction": "Add", "output": "four"}])
    line = refusal(lambda: place.prepare(many))
    assert "many.jsonl, line 201: the row is of format alpaca" in line and "data.format messages" in line
    assert place.prepare(many, format="messages").train_documents == 200
    assert "1 of 201 rows can't be used" in place.said[-1] and "line 201" in place.said[-1]
    assert "data.format alpaca is for conversations" in refusal(
        lambda: place.prepare(many, format="alpaca", kind="stream")
    )


HH = {"chosen": DIALOGUE + "4", "rejected": DIALOGUE + "5"}
ULTRA = {"prompt": "2 + 2?", "prompt_id": "a", "chosen": [USER, ANSWER], "messages": [USER, ANSWER], "score_chosen": 9.0,
         "rejected": [USER, {"role": "assistant", "content": "5"}], "score_rejected": 2.5}  # fmt: skip


def test_preference_pairs_as_published() -> None:
    pair = preference(HH)
    assert pair.prompt == (("user", "hi"), ("assistant", "hello"), ("user", "2 + 2?"))
    assert (pair.chosen, pair.rejected) == ((("assistant", "4"),), (("assistant", "5"),))
    for row in (
        ULTRA,
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [{"role": "assistant", "content": "5"}]},
        {"prompt": "\n\nHuman: 2 + 2?\n\nAssistant:", "chosen": " 4", "rejected": " 5"},
        {"chosen": [USER, ANSWER], "rejected": [USER, {"role": "assistant", "content": "5"}]},
    ):
        pair = preference(row)
        assert pair.prompt == (("user", "2 + 2?"),)
        assert [pair.chosen[0][1].strip(), pair.rejected[0][1].strip()] == ["4", "5"]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"chosen": DIALOGUE, "rejected": DIALOGUE + "5"}, "chosen has an empty answer"),
        ({"chosen": DIALOGUE + "4", "rejected": DIALOGUE + "4"}, "the same text"),
        ({"chosen": "4", "rejected": "5"}, "no prompt, and chosen is not a dialogue"),
        ({"chosen": [USER], "rejected": [USER, ANSWER]}, "chosen does not end with an answer"),
        ({"chosen": [USER, ANSWER], "rejected": [{"role": "user", "content": "?"}, ANSWER]}, "different prompts"),
        ({"prompt": "a", "chosen": None, "rejected": "b"}, "chosen is missing"),
        ({"prompt": "a", "chosen": "b"}, "no rejected"),
    ],
)
def test_a_pair_that_can_not_be_used_says_why(row: dict[str, Any], why: str) -> None:
    with pytest.raises(Unusable, match=why):
        preference(row)


ROWS = [
    {"instruction": f"say {number} wörter", "input": "", "output": "no " * (number % 5 + 1)} for number in range(40)
]


def as_files(folder: Path) -> list[str]:
    """The same rows in every kind of file."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
    made = {"a.jsonl": text, "b.json": json.dumps(ROWS, indent=2).encode(), "c.json": text}
    lines = [
        "instruction,input,output",
        *(f'"{row["instruction"]}","{row["input"]}","{row["output"]}"' for row in ROWS),
    ]
    made["d.csv"] = b"\xef\xbb\xbf" + "\r\n".join(lines).encode()
    for name, data in list(made.items()):
        made |= {
            f"{name}.gz": gzip.compress(data),
            f"{name}.bz2": bz2.compress(data),
            f"{name}.xz": lzma.compress(data),
        }
    for name, data in made.items():
        (folder / name).write_bytes(data)
    return [str(folder / name) for name in made]


def test_every_kind_of_file_packed_or_not_gives_the_same_rows_and_tokens(place: Place) -> None:
    paths = as_files(place.folder)
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.Table.from_pylist(ROWS)
    parquet.write_table(table, place.folder / "e.parquet", row_group_size=7)
    with arrow.ipc.new_stream(place.folder / "f.arrow", table.schema) as out:  # as `datasets` keeps its cache
        out.write_table(table)
    with arrow.ipc.new_file(place.folder / "g.arrow", table.schema) as out:
        out.write_table(table, max_chunksize=9)
    for name in ("e.parquet", "f.arrow", "g.arrow"):
        (place.folder / f"{name}.gz").write_bytes(gzip.compress((place.folder / name).read_bytes()))
        paths += [str(place.folder / name), str(place.folder / f"{name}.gz")]
    wanted = learned(place.prepare(paths[0]))
    for path in paths:
        assert [row for _, row in rows(path)] == ROWS, path
        assert learned(place.prepare(path)) == wanted, path
    before = sorted(os.listdir(place.folder / "cache" / "unpacked"))
    place.prepare(*paths)
    assert sorted(os.listdir(place.folder / "cache" / "unpacked")) == before, "unpacked once"


def test_zstandard_where_it_is_installed_and_a_clear_line_where_not(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    path = place.file("a.jsonl.zst", b"(\xb5/\xfd" + b"x" * 50)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    assert "a.jsonl.zst needs a package to unpack it: `pip install zstandard`" in refusal(lambda: list(rows(path)))
    monkeypatch.undo()
    packed = pytest.importorskip("zstandard", reason="no package zstandard: nothing can be packed to be read")
    data = packed.compress(text[:900]) + packed.compress(text[900:])
    assert [row for _, row in rows(place.file("b.jsonl.zst", data))] == ROWS
    assert "is damaged" in refusal(lambda: list(rows(place.file("c.jsonl.zst", data[:-30]))))


def test_a_text_and_a_stream_of_rows_are_read_packed(place: Place) -> None:
    text = "line of text\n" * 400
    plain = place.prepare(place.file("a.txt", text), kind="stream")
    packed = place.prepare(place.file("b.txt.xz", lzma.compress(text.encode())), kind="stream")
    assert packed.train_tokens == plain.train_tokens == len(text) + 1
    table = place.file(
        "c.csv.gz", gzip.compress(("id,text\n" + "".join(f'{n},"a ""b"" {n}"\n' for n in range(90))).encode())
    )
    assert place.prepare(table, kind="stream").train_documents == 90
    assert "data format: text (the column text)" in place.said


def bad_files(place: Place) -> list[tuple[str, list[str]]]:
    good = {"messages": [USER, ANSWER]}
    whole = gzip.compress(
        "".join(json.dumps({"messages": [USER, ANSWER], "n": n}) + "\n" for n in range(5000)).encode()
    )
    return [
        (place.rows("silent.jsonl", [good, {"messages": [USER]}]), ["silent.jsonl, line 2: no message is the assistant's"]),
        (place.rows("empty.jsonl", [good, {"messages": []}]), ["empty.jsonl, line 2: an empty conversation"]),
        (place.rows("mixed.jsonl", [good, {"instruction": "a", "output": "b"}]), ["mixed.jsonl, line 2", "format alpaca"]),
        (place.file("cut.jsonl.gz", whole[:-100]), ["cut.jsonl.gz is damaged", "download it again"]),
        (place.file("flip.jsonl.gz", whole[:2000] + b"????" + whole[2004:]), ["flip.jsonl.gz is damaged"]),
        (place.file("twice.jsonl", '{"messages": [], "messages": []}\n'), ["twice.jsonl, line 1", "'messages' appears twice"]),
        (place.file("twice.json", '[{"a": {"b": 1, "b": 2}}]'), ["twice.json, row 1", "'b' appears twice"]),
        (place.file("cut.json", '[{"messages": []}, {"mess'), ["cut.json, row 2 is not JSON"]),
        (place.file("cells.csv", "prompt,completion\na,b\na,b,c\n"), ["cells.csv, row 2 has 3 cells", "2 columns"]),
        (place.file("none.jsonl.gz", gzip.compress(b"")), ["none.jsonl.gz holds no lines"]),
        (place.file("odd.jsonl.gz", gzip.compress(b'{"a": 1}\n')), ["odd.jsonl.gz, line 1: no known format", "its keys: a"]),
        (place.file("text.txt", "words"), ["text.txt is plain text", "alpaca"]),
        (place.file("fake.arrow", b"hello" * 99), ["fake.arrow is not an arrow file"]),
    ]  # fmt: skip


def test_bad_input_is_one_line_with_file_and_row_and_nothing_is_left_in_the_cache(place: Place) -> None:
    for path, says in bad_files(place):
        line = refusal(lambda path=path: place.prepare(path))
        assert all(word in line for word in says), f"{path}: {line}"
    left = [name for _, _, names in os.walk(place.folder / "cache") for name in names]
    assert not [name for name in left if name.endswith((".tmp", ".bin"))], left
    assert not [name for name in left if name.startswith("manifest")]


def test_conversations_longer_than_the_context_are_named(place: Place) -> None:
    long = {"messages": [USER, {"role": "assistant", "content": "long " * 40}]}
    place.prepare(place.rows("long.jsonl", [{"messages": [USER, ANSWER]}, long]))
    assert "1 of 2 conversations are longer than data.context_length 64 and are cut" in place.said[-1]
    assert "long.jsonl, line 2 has " in place.said[-1]


# ---- several sources with weights ----


def test_a_mixture_gives_each_path_its_share_and_goes_through_each_in_epochs() -> None:
    order = Mixed([100, 300], (0.5, 0.5), 7)
    first, second = order.ids(0, 400), order.ids(400, 800)
    for some in (first, second):
        assert (some < 100).sum() == 200 and (some >= 100).sum() == 200
    small = [one for one in first.tolist() if one < 100]
    assert all(small.count(one) == 2 for one in range(100)), "the small one twice a pass"
    large = [one for one in (*first.tolist(), *second.tolist()) if one >= 100]
    assert len(set(large)) == 300 and len(set(large[:200])) == 200, "none twice before all came once"
    assert [*order.ids(0, 130), *order.ids(130, 400)] == first.tolist(), "a position is one number"


@pytest.mark.parametrize("kind", ["chat", "stream"])
def test_weighted_sources_keep_their_samples_apart(place: Place, kind: str) -> None:
    if kind == "chat":
        a = place.rows("a.jsonl", [{"messages": [USER, {"role": "assistant", "content": "a" * 40}]}] * 30)
        b = place.rows("b.jsonl", [{"messages": [USER, {"role": "assistant", "content": "b" * 40}]}] * 10)
    else:
        a, b = place.file("a.txt", "a" * (64 * 30 - 1)), place.file("b.txt", "b" * 64 * 10)
    made = place.prepare(a, b, kind=kind, mixture=("1", "3"))
    samples = Samples(made, "train", 64)
    data = DataConfig(path=(a, b), mixture=("1,3",), context_length=64)
    assert samples.entries == [30, 10] and samples.count == 40
    inputs = samples.batch(order_of(data, samples.count, samples.entries).ids(0, 40)).inputs
    of_b = sum(int((row == ord("b")).sum() > (row == ord("a")).sum()) for row in inputs)
    assert of_b == 30
    again = place.prepare(a, b, kind=kind, mixture=("2", "1"))
    assert again.key == made.key != place.prepare(a, b, kind=kind).key, "other shares are another order, not other data"


def test_a_mixture_that_can_not_be_is_refused() -> None:
    for more, says in (
        ({"mixture": ("1",)}, "1 shares and data.path 2 entries"),
        ({"mixture": ("1", "-1")}, "a number above 0"),
        ({"mixture": ("1", "x")}, "a number above 0"),
        ({"mixture": ("1", "2"), "max_samples": 5}, "exclude each other"),
    ):
        assert says in refusal(lambda more=more: mixture_of(DataConfig(path=("a", "b"), **more)))  # type: ignore[misc]
    data = DataConfig(path=("a", "b"), mixture=("1", "2"))
    assert "data.mixture: b gives no sample" in refusal(lambda: order_of(data, 5, [5, 0]))


# ---- the hub ----


def test_a_hub_id_has_a_config_a_split_and_a_revision(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Datasets:
        @staticmethod
        def load_dataset_builder(*names: Any, **more: Any) -> Any:
            def streamed(split: str) -> list[dict[str, Any]]:
                asked.append((*names, {**more, "split": split}))
                return [{"messages": [USER, ANSWER]}] * 3

            files = {"train": ["hf://datasets/owner/name@1/a.parquet", "zip://*.csv::hf://datasets/owner/name@1/b.zip"]}
            return SimpleNamespace(config=SimpleNamespace(data_files=files), as_streaming_dataset=streamed)

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    assert place.prepare("owner/name:default:test_sft@v1.2").train_documents == 3
    assert asked == [("owner/name", "default", {"split": "test_sft", "revision": "v1.2"})]
    place.prepare("owner/other")
    assert asked[1][1:] == (None, {"split": "train", "revision": None})
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install datasets" in refusal(lambda: place.prepare("owner/third"))


def test_pairs_of_the_hub_are_fetched_once_before_ranks_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.cli import train
    from stoker.training.config.resolve import recipe_settings

    monkeypatch.chdir(tmp_path)
    asked = []

    def fetch(name: str, cache: str, say: Any) -> str:
        asked.append(name)
        return f"{cache}/hub/rows.jsonl"

    monkeypatch.setattr(train, "fetch", fetch)
    config = recipe_settings(["--dpo.pairs", "owner/name:default:train_prefs", "--preset", "small"], False, {}).config
    made = train._fetch_hub_inputs("dpo", config)
    assert (
        made.dpo.pairs == "cache/hub/rows.jsonl"
        and made.dpo.held_out == ""
        and asked == ["owner/name:default:train_prefs"]
    )
    (tmp_path / "owner").mkdir()
    assert train._fetch_hub_inputs("dpo", config) == config, "a folder of ours: it is a path"


def test_the_datasets_library_reads_a_folder_of_files_as_a_hub_id(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(place.folder / "home"))
    folder = place.folder / "owner" / "name"
    folder.mkdir(parents=True)
    place.rows("owner/name/train.jsonl", [{"messages": [USER, ANSWER]}] * 4)
    place.rows("owner/name/test.jsonl", [{"messages": [USER, ANSWER]}] * 2)
    monkeypatch.chdir(place.folder)
    monkeypatch.setattr(sources, "_refuse_files_of_ours", lambda name, files: None)  # a folder here stands for the hub
    path = sources.fetch("owner/name:default:test", str(place.folder / "cache"), place.said.append)
    assert len(list(rows(path))) == 2


# ---- stoker data show ----


def hh_and_ultra(folder: Path) -> tuple[str, str]:
    hh = [{**HH, "rejected": f"{DIALOGUE}{number}"} for number in range(5, 305)]
    hh[10] = {"chosen": DIALOGUE, "rejected": DIALOGUE + "5"}
    hh[20] = {"chosen": DIALOGUE + "4", "rejected": DIALOGUE + "4"}
    hh[30] = {"chosen": DIALOGUE + "4 " * 2000, "rejected": DIALOGUE + "4"}
    ultra = [{**ULTRA, "prompt_id": str(number)} for number in range(50)]
    for name, made in (("hh", hh), ("ultra", ultra)):
        text = "".join(json.dumps(row) + "\n" for row in made)
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return str(folder / "hh.jsonl.gz"), str(folder / "ultra.jsonl.gz")


def test_show_uses_or_lists_every_row_of_published_pairs(stoker: Stoker, tmp_path: Path) -> None:
    hh, ultra = hh_and_ultra(tmp_path)
    before = sorted(os.listdir(stoker.cwd))
    done = stoker("data", "show", hh, ultra)
    assert done.code == 0, done.err
    assert f"{hh}: format preference (chosen and rejected answers), 300 rows" in done.out
    assert "297 pairs used" in done.out and "3 rows dropped:" in done.out
    assert (
        "chosen has an empty answer (row 11)" in done.out
        and "chosen and rejected are the same text (row 21)" in done.out
    )
    assert "more tokens than the context length 1024 (row 31)" in done.out
    assert f"{ultra}: format preference" in done.out and "50 pairs used" in done.out and "0 rows dropped" in done.out
    assert done.out.count("--- row 1, chosen") == 2 and "assistant\n⟦4<|im_end|>⟧" in done.out
    assert "\x1b" not in done.out and sorted(os.listdir(stoker.cwd)) == before, "nothing is written"
    told = json.loads(stoker("data", "show", hh, "--json").out)["files"][0]
    assert told["rows"] == 300 == told["used"] + sum(reason["count"] for reason in told["dropped"])
    assert [reason["rows"] for reason in told["dropped"]] == [[11], [21], [31]] and len(told["samples"]) == 6
    learned_text = [piece[0] for piece in told["samples"][0]["pieces"] if piece[1]]
    assert learned_text == ["4<|im_end|>"]


def test_show_counts_reasons_takes_a_format_and_refuses_in_one_line(stoker: Stoker, place: Place) -> None:
    path = place.rows("chats.jsonl", [{"messages": [USER, ANSWER]}] * 20 + [{"messages": [USER]}] * 7)
    done = stoker("data", "show", path, "--context-length", "64")
    assert "20 conversations used" in done.out
    assert "no message is the assistant's (7 rows: 21, 22, 23, 24, 25 …)" in done.out
    assert "10 conversations" in stoker("data", "show", path, "--rows", "10", "--format", "messages").out
    text = place.file("book.txt", "some words\n" * 50)
    done = stoker("data", "show", text)
    assert "format text (one document), 50 rows" in done.out and "550 tokens" in done.out
    assert "only text" not in done.out and "⟦some words" in done.out
    for words, code, says in (
        ([place.file("odd.jsonl", '{"a": 1}\n')], 65, "no known format; its keys: a"),
        ([path, "--tokenizer", "nowhere"], 66, "tokenizer nowhere does not exist"),
        ([place.file("cut.jsonl.gz", gzip.compress(b"{}\n" * 99)[:-9])], 65, "is damaged"),
        ([str(place.folder / "gone.jsonl")], 66, "does not exist"),
    ):
        done = stoker("data", "show", *words)
        assert done.code == code and says in done.err and done.err.count("\n") == 1, done.err
    assert "unknown command `stoker data shwo` (did you mean show" in stoker("data", "shwo").err


def test_show_colours_learned_tokens_on_a_terminal(stoker: Stoker, place: Place) -> None:
    path = place.rows("chats.jsonl", [{"messages": [USER, {"role": "assistant", "content": "4\x1b[2J"}]}])
    own, other = pty.openpty()
    process = stoker.start("data", "show", path, stdout=other)
    os.close(other)
    seen = b""
    while True:
        try:
            data = os.read(own, 4096)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        seen += data
    assert process.wait(60) == 0
    assert b"\x1b[32m4\\x1b[2J<|im_end|>\x1b[0m" in seen, "ours in colour, the row's own codes as text"


def test_the_help_of_the_key_names_every_ending() -> None:
    from stoker.contract.frozen import options_of

    told = options_of(DataConfig)["path"].help
    assert " ".join(KINDS) in told and " ".join(unpack.PACKED) in told
