"""Names that hide behind other names, and texts and indexes that made work multiply."""

from __future__ import annotations

import hashlib
import json
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


def test_another_name_for_a_key_that_runs_code_is_not_believed(tmp_path: Path) -> None:
    from stoker.training.model.hf_config import kept_text

    told = {"attribute_map": {"zz": "_attn_implementation"}, "zz": "evil/kernel", "text_config": {"attribute_map": {}}}
    kept = json.loads(kept_text(told))
    assert "attribute_map" not in json.dumps(kept) and kept["zz"] == "evil/kernel"


def test_a_line_without_end_behind_a_carriage_return_is_written() -> None:
    lines, written = LogLines(), 0
    for turn in range(64):
        lines.feed((b"" if turn else b"\r") + b"y" * 60_000)
        if lines.unfinished > 1 << 20:
            written += len(lines.partial())
    assert written > 1 << 20


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


@pytest.mark.parametrize("name", ["generation_config.json", "config.yaml", "tokenizer_config.json"])
def test_an_export_copies_nothing_that_a_link_leads_to(stoker: Stoker, name: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from stoker.training.model import hf
    from stoker.training.model.config import ModelConfig
    from stoker.training.model.decoder import Decoder
    from stoker.training.tokenizer.tokenizer import bytes_tokenizer

    run = stoker.cwd / "run"
    bytes_tokenizer().save(str(stoker.cwd / "tokenizer"))
    model = Decoder(ModelConfig(layers=1, dim=64, heads=1, kv_heads=1, head_dim=64, ff=64, vocab_size=320), 64)
    model.start(1)
    hf.save(model, str(run / "hf"), say=lambda line: None, tokenizer_folder=str(stoker.cwd / "tokenizer"))
    private = stoker.cwd / "private"
    private.write_text('{"client_secret": "hunter2hunter2"}')
    place = run / name if name == "config.yaml" else run / "hf" / name
    place.unlink(missing_ok=True)
    place.symlink_to(private)
    done = stoker.torch("export", str(run / "hf"), "out")
    assert done.code != 0 and "leads out of its folder" in done.err, done.err
    assert not any("hunter2" in file.read_text(errors="replace") for file in stoker.cwd.glob("out/*"))


def test_shards_that_are_links_to_one_long_header_end_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoker.contract.tensorheader import pack_header
    from stoker.training.model import hf_config

    header = pack_header({f"a{n}": ("U8", [0]) for n in range(40_000)}, {})
    (tmp_path / "x0.safetensors").write_bytes(header)
    for n in range(1, 200):
        (tmp_path / f"x{n}.safetensors").symlink_to("x0.safetensors")
    index = {"weight_map": {f"a{n}": f"x{n}.safetensors" for n in range(200)}}
    (tmp_path / hf_config.INDEX).write_text(json.dumps(index))
    monkeypatch.setattr(hf_config, "SECONDS", 0.5)
    monkeypatch.setattr(hf_config, "_HEADERS_A_SECOND", 1000)
    with pytest.raises(Refusal, match="reading its weights' headers takes"):
        hf_config.stored_in(str(tmp_path))


def test_a_link_of_another_user_to_a_file_beside_it_is_not_followed(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root: two users")
    (tmp_path / "private.json").write_text("{}")
    (tmp_path / "config.json").symlink_to("private.json")
    assert read_json(tmp_path / "config.json", inside=True) == {}
    os.lchown(tmp_path / "config.json", 12345, 12345)
    with pytest.raises(OSError, match="leads out of its folder"):
        read_json(tmp_path / "config.json", inside=True)


def test_a_recorded_machine_of_many_cards_or_words_is_checked_once() -> None:
    from stoker.control.doctor.checks.gpu import count
    from stoker.control.machine.model import machine_from_json

    with pytest.raises(ValueError, match="no machine has more than 1024"):
        machine_from_json(machine_json(2000))
    words = ",".join(str(number) for number in range(100_000))
    (finding,) = count({"CUDA_VISIBLE_DEVICES": words}, machine_from_json(machine_json(2)), 0)
    assert len(finding.text) < 600
