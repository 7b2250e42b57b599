"""Names that hide behind other names, and texts and indexes that made work multiply."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path

import pytest

from conftest import Stoker, machine_json
from stoker.contract.names import Refusal
from stoker.contract.safe_io import read_json
from stoker.contract.secretvalues import pairs
from stoker.control.cluster import listing
from stoker.control.launch.console import LogLines


@pytest.mark.parametrize("part", ["password=f(", "password=x.", "password='a ", "token=x.token=", "secret=f[ "])
def test_many_names_in_one_text_are_each_looked_at_once(part: str) -> None:
    begun = time.thread_time()
    list(pairs(part * 20_000))
    assert time.thread_time() - begun < 5, "12 s for 80 KB, once"


def test_a_secret_behind_calls_of_source_code_is_still_found() -> None:
    text = "password=f(x) password=Tr0ub4dor&3xyz token=self.token"
    assert [text[begin:end] for begin, end in pairs(text)] == ["Tr0ub4dor&3xyz"]


def git(folder: Path, *words: str, given: str | None = None) -> None:
    settings = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "protocol.file.allow=always")
    subprocess.run(["git", *settings, *words], cwd=folder, check=True, capture_output=True, text=True, input=given)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    if not shutil.which("git"):
        pytest.skip("no git here")
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "train.py").write_text("pass\n")
    git(folder, "add", "train.py")
    return folder


def index(paths: list[str]) -> bytes:
    """Of git, version 2: files of these names, whether or not git would add them."""
    data = b"DIRC" + struct.pack(">II", 2, len(paths))
    for path in sorted(paths):
        entry = struct.pack(">10I20sH", *[0] * 6, 0o100644, 0, 0, 0, bytes(20), len(path)) + path.encode()
        data += entry + bytes(8 - len(entry) % 8)
    return data + hashlib.sha1(data, usedforsecurity=False).digest()


@pytest.mark.parametrize("with_git", [False, True])
def test_an_index_that_names_folders_within_folders_is_read_once(checkout: Path, with_git: bool) -> None:
    names = ["/".join("d" * depth) for depth in range(1, 13)]
    for depth, name in enumerate(names):
        (checkout / name).mkdir()
        if with_git:
            git(checkout / name, "init", "-q")
            inside = ["/".join("d" * more) for more in range(1, 12 - depth)]
            (checkout / name / ".git" / "index").write_bytes(index(inside))
    (checkout / ".git" / "index").write_bytes(index(["train.py", *names]))
    calls: list[tuple[str, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        ask = listing._ask_git
        patch.setattr(listing, "_ask_git", lambda root, *words: calls.append(words) or ask(root, *words))  # type: ignore[func-returns-value]
        found = [entry.path for entry in listing.working_directory(str(checkout)).entries]
    assert "train.py" in found and len(calls) <= 4 * 13, "four for each folder, not 2 to the power of their depth"


def test_a_submodule_that_was_not_fetched_is_left_out(checkout: Path, tmp_path: Path) -> None:
    inner, clone = tmp_path / "inner", tmp_path / "clone"
    inner.mkdir()
    git(inner, "init", "-q")
    (inner / "part.py").write_text("pass\n")
    git(inner, "add", "part.py")
    git(inner, "commit", "-qm", "a")
    git(checkout, "submodule", "add", str(inner), "inner")
    git(checkout, "commit", "-qm", "a")
    git(tmp_path, "clone", "-q", str(checkout), str(clone))
    assert "train.py" in [entry.path for entry in listing.working_directory(str(clone)).entries]
    git(clone, "submodule", "update", "--init")
    assert "inner/part.py" in [entry.path for entry in listing.working_directory(str(clone)).entries]


def test_a_line_without_end_behind_a_carriage_return_is_written() -> None:
    lines, written = LogLines(), 0
    for turn in range(64):
        lines.feed((b"" if turn else b"\r") + b"y" * 60_000)
        if lines.unfinished > 1 << 20:
            written += len(lines.partial())
    assert written > 1 << 20


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"]
)
def test_a_tokenizers_files_that_lead_out_of_its_folder_are_not_read(tmp_path: Path, name: str) -> None:
    pytest.importorskip("numpy", reason="numpy is not installed")
    from stoker.training.tokenizer.tokenizer import bytes_tokenizer, load

    folder, private = tmp_path / "folder", tmp_path / "id_rsa"
    bytes_tokenizer().save(str(folder))
    private.write_text((folder / name).read_text() if (folder / name).exists() else "{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(private)
    with pytest.raises(Refusal, match="leads out of its folder"):
        load(str(folder))
    (folder / name).unlink()
    (folder / f"real-{name}").write_text(private.read_text())
    (folder / name).symlink_to(f"real-{name}")
    load(str(folder))


def test_files_of_the_hubs_cache_are_read_and_others_beside_it_are_not(tmp_path: Path) -> None:
    entry = tmp_path / "models--a--b"
    snapshot, blobs = entry / "snapshots" / "0123", entry / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "abc").write_text("{}")
    (tmp_path / "private").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    assert read_json(snapshot / "config.json", inside=True) == {}
    (blobs / "more").symlink_to(tmp_path / "private")
    (snapshot / ".git").mkdir()
    (snapshot / ".git" / "config").write_text("{}")
    for target in ("../../../private", "../../blobs/more", "/proc/self/environ", ".git/config"):
        (snapshot / "other.json").unlink(missing_ok=True)
        (snapshot / "other.json").symlink_to(target)
        with pytest.raises(OSError, match="leads out of its folder"):
            read_json(snapshot / "other.json", inside=True)


def test_prepared_data_is_for_its_owner_alone(stoker: Stoker) -> None:
    pytest.importorskip("numpy", reason="numpy is not installed")
    (stoker.cwd / "cache").mkdir(mode=0o755)
    (stoker.cwd / "text.txt").write_text("a text of many words\n" * 200)
    words = ("--data", "text.txt", "--tokenizer.path", "bytes", "--context_length", "64", "--data.validation", "0")
    done = stoker("prepare", *words, "--data.cache", "cache")
    assert done.code == 0, done.err
    (dataset,) = (place for place in (stoker.cwd / "cache" / "datasets").iterdir() if place.is_dir())
    assert dataset.stat().st_mode & 0o777 == 0o700


def test_a_link_of_another_user_to_a_file_beside_it_is_not_followed(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root: two users")
    (tmp_path / "private.json").write_text("{}")
    (tmp_path / "config.json").symlink_to("private.json")
    assert read_json(tmp_path / "config.json", inside=True) == {}
    os.lchown(tmp_path / "config.json", 12345, 12345)
    with pytest.raises(OSError, match="leads out of its folder"):
        read_json(tmp_path / "config.json", inside=True)


def test_row_groups_count_together(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    from stoker.training.data import read, units

    path, table = tmp_path / "a.parquet", arrow.table({"text": ["x" * 200_000] * 60})
    with parquet.ParquetWriter(path, table.schema) as writer:
        for _ in range(30):
            writer.write_table(table)
    spans = [units.Span(str(path), "parquet", 0, 60, group=group) for group in range(30)]
    with pytest.raises(Refusal, match="unpacks to more than"):
        for span in spans:
            sum(len(text) for text, _ in read.texts(span, "text"))
    good = tmp_path / "b.parquet"
    with parquet.ParquetWriter(good, table.schema) as writer:
        for group in range(3):
            writer.write_table(arrow.table({"text": [f"{group} {n} a text" for n in range(500)]}))
    for group in range(3):
        assert len(list(read.texts(units.Span(str(good), "parquet", 0, 500, group=group), "text"))) == 500


def test_a_recorded_machine_of_many_cards_or_words_is_checked_once() -> None:
    from stoker.control.doctor.checks.gpu import count
    from stoker.control.machine.model import machine_from_json

    with pytest.raises(ValueError, match="no machine has more than 1024"):
        machine_from_json(machine_json(2000))
    words = ",".join(str(number) for number in range(100_000))
    (finding,) = count({"CUDA_VISIBLE_DEVICES": words}, machine_from_json(machine_json(2)), 0)
    assert len(finding.text) < 600
