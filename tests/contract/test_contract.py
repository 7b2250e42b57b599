"""The words all rooms share."""

from __future__ import annotations

import mmap
import random
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.contract import beat, process, protocol, units
from stoker.contract.errors import Refusal
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import as_json, frozen, option, pick_fields, replace, section
from stoker.contract.options import (
    OptionParser,
    add_flags,
    build_options,
    options_from_environment,
    options_from_mapping,
    suggest,
)
from stoker.contract.spelling import suggest_file


@pytest.mark.parametrize(
    ("text", "count"),
    [("20GB", 20 * 10**9), ("1.5GiB", 1610612736), ("512mb", 512 * 10**6), ("7", 7), ("3 TB", 3 * 10**12)],
)
def test_size(text: str, count: int) -> None:
    assert units.parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("10m", 600), ("1h30m", 5400), ("250ms", 0.25), ("2 d", 172800)]
)
def test_duration(text: str, seconds: float) -> None:
    assert units.parse_duration(text.replace(" ", "")) == seconds


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (3.24e9, "3.0 GiB"),
        (15_400_000, "14.7 MiB"),
        (2000, "2.0 KiB"),
        (2**41, "2.0 TiB"),
        (576, "576 bytes"),
        (0, "0 bytes"),
    ],
)
def test_amount(count: float, text: str) -> None:
    assert units.format_bytes(count) == text


@pytest.mark.parametrize("text", ["", "GB", "20XB", "1iB", "ten"])
def test_a_size_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        units.parse_bytes(text)


@pytest.mark.parametrize("text", ["", "m", "10x", "1h banana", "-5s"])
def test_a_duration_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        units.parse_duration(text)


def test_protocol_survives_any_cut_and_a_greeting() -> None:
    said = [
        ({"is": "a"}, b""),
        ({"is": "out", "rank": 3}, b'\n{"is":"no"}\n\0\xff' * 50),
        ({"is": "b", "text": "ü\n"}, b""),
    ]
    stream = (
        b"Welcome to host!\nSTOKER? not yet\n"
        + protocol.SENTINEL
        + b"".join(protocol.encode_message(message, payload) for message, payload in said)
    )
    for seed in range(50):
        rng = random.Random(seed)
        decoder = protocol.Decoder(expect_sentinel=True)
        heard, at = [], 0
        while at < len(stream):
            step = rng.randint(1, 40)
            heard += list(decoder.feed(stream[at : at + step]))
            at += step
        assert [({k: v for k, v in message.items() if k != "size"}, payload) for message, payload in heard] == said


@pytest.mark.parametrize("noise", [b"STOKER-AGENT 99\n", b"x" * 70000])
def test_protocol_refuses_another_version_and_endless_greetings(noise: bytes) -> None:
    with pytest.raises(protocol.ProtocolError):
        list(protocol.Decoder(expect_sentinel=True).feed(noise))


def test_beats_come_through_and_old_ones_are_dropped_not_mixed_up() -> None:
    memory = mmap.mmap(-1, beat.PAGE_SIZE)
    writer, reader = beat.BeatWriter(memory, 7), beat.BeatReader(memory)
    assert reader.read_new() == []
    for step in range(5):
        writer.beat(1000 + step, step, 1)
    writer.beat(2000, 9, 0, 2.5)
    got = reader.read_new()
    assert [beat.step for beat in got] == [0, 1, 2, 3, 4, 9]
    assert got[-1].loss == 2.5 and got[0].loss is None
    for step in range(1000):
        writer.beat(step, step)
    late = reader.read_new()
    assert [beat.step for beat in late] == list(range(1000 - beat.SLOTS + 1, 1000))


@frozen
class _Sample:
    count: int = option("how many", default=3)
    name: str | None = option("a name", default=None)
    fast: bool = option("quickly", default=False)


def test_shape_is_frozen_typed_and_comparable() -> None:
    one = _Sample(count=4)
    assert one == replace(_Sample(), count=4) and one != _Sample() and hash(one) == hash(_Sample(4))
    assert as_json({"x": (one,)}) == {"x": [{"count": 4, "name": None, "fast": False}]}
    with pytest.raises(AttributeError):
        one.count = 5  # type: ignore[misc]
    with pytest.raises(TypeError, match="no field 'colour'"):
        _Sample(colour="red")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="needs 'status'"):
        Verdict()  # type: ignore[call-arg]


def test_settings_layers_and_the_near_key() -> None:
    layers = (
        options_from_mapping(_Sample, {"count": "7", "fast": "yes"}, "file"),
        options_from_environment(_Sample, {"count": "N"}, {"N": "8", "NAME": "x"}),
        {"name": "y"},
    )
    assert build_options(_Sample, *layers) == _Sample(8, "y", True)
    with pytest.raises(Refusal, match=r"unknown key 'coutn' \(did you mean count"):
        options_from_mapping(_Sample, {"coutn": 1}, "file")
    with pytest.raises(Refusal, match="count"):
        options_from_mapping(_Sample, {"count": [1]}, "file")


def test_suggestions_know_abbreviations() -> None:
    flags = ["--nproc-per-node", "--grace", "--name", "--gpus"]
    assert suggest("--nprc", flags) == " (did you mean --nproc-per-node?)"
    assert suggest("--zzzzzzzz", flags) == ""


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("missing.txt", ["bin.txt", "mixed.txt"], ""),
        ("notes.txt", ["n.txt", "votes-of-all.txt"], ""),
        ("a.txt", ["b.txt"], ""),
        ("part-1.txt", ["part-2.txt"], ""),
        ("part-1.jsonl", ["part-2.jsonl", "part-1.json"], "part-1.json"),
        ("train.text", ["train.txt"], "train.txt"),
        ("bock.txt", ["book.txt", "back.md"], "book.txt"),
        ("texts/bock.txt", ["book.txt"], "texts/book.txt"),
        ("okay.py", ["ok.py"], "ok.py"),
    ],
)
def test_a_file_is_suggested_only_where_its_name_is_close(word: str, known: list[str], meant: str) -> None:
    assert suggest_file(word, known) == (f" (did you mean {meant}?)" if meant else "")


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("stf", ["sft", "stable"], "sft"),
        ("huge", ["debug", "small", "stable"], ""),
        ("--steps", ["--max-steps", "--seed"], "--max-steps"),
        ("--steps", ["--max-steps", "--warmup-steps"], ""),
        ("layers.9.mlp", ["layers.1.mlp"], ""),
        ("xy", ["xz"], ""),
        ("epcohs", ["epochs", "eps"], "epochs"),
        ("colour", ["count", "color"], "color"),
    ],
)
def test_a_name_is_suggested_only_where_it_is_close(word: str, known: list[str], meant: str) -> None:
    assert suggest(word, known) == (f" (did you mean {meant}?)" if meant else "")


def test_verdict_survives_json_and_a_newer_writer() -> None:
    verdict = Verdict("failed", "rank.exit", "x", 3, rank=1, evidence=("a",), fix=("b",))
    assert Verdict.from_json({**verdict.to_json(), "added_later": 1}) == verdict


def test_a_module_is_found_because_it_lies_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.contract.discovery import import_modules

    folder = tmp_path / "found_parts"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match="holds no modules"):
        import_modules("found_parts")
    for name in ("second", "first"):
        (folder / f"{name}.py").write_text(f"NAME = {name!r}")
    assert [module.NAME for module in import_modules("found_parts")] == ["first", "second"]


def test_a_command_tells_what_is_wrong_with_a_value_in_the_readers_words() -> None:
    made = OptionParser("stoker test")
    made.option("--wait -w", "TIME", "how long", units.parse_duration, default=1.0)
    made.option("--count", "N", "how many", int)
    made.switch("--json", "as JSON")
    assert vars(made.parse_args(["-w", "2m", "--json"])) == {"wait": 120.0, "count": None, "json": True}
    with pytest.raises(Refusal, match="--wait/-w: 'soon' is not a duration; write it like 30s"):
        made.parse_args(["--wait", "soon"])
    with pytest.raises(Refusal, match="--count: invalid int value: 'x'"):
        made.parse_args(["--count", "x"])


def test_options_stand_below_the_section_they_follow() -> None:
    @frozen
    class Some:
        first: int = option("before any section", "N", default=0)
        _run = section("life of the run")
        second: str = option("in it", default="")

    made = OptionParser("stoker test", usage="stoker test")
    add_flags(made, Some)
    text = made.format_help()
    assert text.index("--first N") < text.index("life of the run:") < text.index("--second SECOND")
    assert pick_fields(Some(second="x"), "second") == {"second": "x"}


# ---- programs of ours in somebody's folder, with a Python older than 3.11, which has no -P ----


def test_a_program_of_ours_imports_nothing_of_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')\n")
    code = process.NOT_FROM_HERE + "import json; print(json.dumps([1]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "[1]\n", done.stderr
