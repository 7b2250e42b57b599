"""Names that hide behind other names, and texts and indexes that made work multiply."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import Stoker, machine_json
from stoker.contract.names import Refusal
from stoker.contract.safe_io import read_json
from stoker.control.launch.console import LogLines


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

    words = ",".join(str(number) for number in range(100_000))
    (finding,) = count({"CUDA_VISIBLE_DEVICES": words}, machine_from_json(machine_json(2)), 0)
    assert len(finding.text) < 600
