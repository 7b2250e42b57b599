"""Caches, models, manifests and tokenizers that somebody else may have made: nothing of theirs is run, followed, waited
for or believed, and a small file takes no gigabytes.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import EVERYTHING, Stoker, at_length
from localuser import VICTIM, do_as
from small_model import write_model
from stoker.contract.disk_space import DiskSpace
from stoker.contract.errors import Refusal
from stoker.contract.evidence import RankError, RankExit
from stoker.control.doctor.stale_caches import find_caches, list_cache_roots
from stoker.control.record import private_folders
from stoker.control.record.metrics_log import MetricsWriter
from stoker.control.verdict.echo import is_consequence
from stoker.speedrun import state
from stoker.speedrun.rows import copy_usable
from stoker.speedrun.stages import Stage
from stoker.training.checkpoint import folders, manifest
from stoker.training.checkpoint.manifest import Entry, Manifest, Piece, Sums
from stoker.training.checkpoint.reading import find
from stoker.training.config.layers import gather
from stoker.training.config.resolve import settle
from stoker.training.data import build, ours, reader, shards, sources
from stoker.training.data.ours import digest_files
from stoker.training.generate import finding
from stoker.training.loop.supervised import sample_log
from stoker.training.model import hf_config, hf_files
from stoker.training.recipes.stage import where_runs_go

STRANGER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user's files can only be made by root")


def quiet(_line: str) -> None:
    pass


# ---- the data cache ----


def test_compiled_code_never_comes_from_the_project_s_folder(tmp_path: Path) -> None:
    """The compiler unpickles and runs what lies in its cache; ./cache may have come with a downloaded project."""
    (tmp_path / "cache" / "compile").mkdir(parents=True)
    code = """import os
from stoker.training.model import ready
ready.environment(print)
print(os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"])"""
    env = {name: value for name, value in os.environ.items() if not name.endswith("_CACHE_DIR")}
    run = [sys.executable, "-c", code]
    home = {**env, "XDG_CACHE_HOME": str(tmp_path / "home")}
    said = subprocess.run(run, cwd=tmp_path, env=home, capture_output=True, text=True, check=True).stdout.split()
    assert said == [str(tmp_path / "home" / "stoker" / "compile" / name) for name in ("inductor", "triton")]
    assert (tmp_path / "home" / "stoker" / "compile").stat().st_mode & 0o077 == 0


@needs_root
def test_prepared_data_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    for number, (uid, mode, own) in enumerate(((0, 0o755, True), (0, 0o1777, False))):
        cache = tmp_path / f"cache{number}"
        cache.mkdir()
        cache.chmod(mode)
        os.chown(cache, uid, uid)
        lines: list[str] = []
        used = ours.own_cache(str(cache), lines.append)
        assert (used == str(cache)) is own and bool(lines) is not own
        if not own:
            assert used == str(cache / "user-0") and os.stat(used).st_mode & 0o077 == 0
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "cache0")
    assert ours.own_cache(str(link), quiet) == str(link), "a link of one's own to a larger disk is fine"
    os.lchown(link, STRANGER, STRANGER)
    assert ours.own_cache(str(link), quiet) == str(tmp_path / "home" / "stoker" / "data")


def test_a_link_in_place_of_a_lock_empties_nothing(tmp_path: Path) -> None:
    victim, cache, data = tmp_path / "victim", tmp_path / "cache", tmp_path / "a.txt"
    victim.write_text("mine")
    data.write_text("text")
    os.utime(data, (1, 1))
    cache.mkdir()
    (cache / "digests.json.lock").symlink_to(victim)
    (cache / ours.TAG).symlink_to(tmp_path / "made")
    ours.tag(str(cache))
    assert not (tmp_path / "made").exists()
    with pytest.raises(Refusal, match="lock file"):
        digest_files([str(data)], str(cache), 1, quiet)
    assert victim.read_text() == "mine"


@pytest.mark.parametrize(
    "content", ['{"schema": 1}', '{"schema": 1, "files": 3}', '{"schema": 1, "files": {"x": [1]}}', "[]"]
)
def test_a_damaged_index_of_digests_is_made_again(tmp_path: Path, content: str) -> None:
    data = tmp_path / "a.txt"
    data.write_text("text")
    os.utime(data, (1, 1))
    (tmp_path / "digests.json").write_text(content)
    first = digest_files([str(data)], str(tmp_path), 1, quiet)
    assert first == digest_files([str(data)], str(tmp_path), 1, quiet)
    assert list(json.loads((tmp_path / "digests.json").read_text())["files"]) == [str(data)]


@pytest.mark.parametrize(
    "content", [{}, {"splits": {}}, {"splits": {"train": {}, "validation": {}}}, {"key": 3, "splits": []}]
)
def test_a_manifest_of_data_that_lacks_something_is_none(tmp_path: Path, content: dict[str, Any]) -> None:
    (tmp_path / shards.MANIFEST).write_text(json.dumps({"schema": shards.SCHEMA, **content}))
    assert shards.read_manifest(str(tmp_path)) is None


# ---- the speedrun's folder ----


@needs_root
def test_a_speedrun_uses_no_folder_of_another_user(tmp_path: Path) -> None:
    victim, link, theirs = tmp_path / "victim", tmp_path / "speedrun-cpu", tmp_path / "speedrun-gpu"
    victim.mkdir()
    theirs.mkdir()
    os.chown(theirs, STRANGER, STRANGER)
    link.symlink_to(victim)
    for folder in (link, theirs):
        for use in (state.check_own, state.hold):
            with pytest.raises(Refusal, match="not a folder of yours"):
                use(str(folder))
    assert not os.listdir(victim)


@pytest.mark.parametrize(
    "rows", [[{"name": [1]}], [3], {"a": 1}, [{"name": "base", "key": "k", "stage": 3}], [{"name": "base"}], None]
)
def test_a_damaged_chain_counts_as_none(tmp_path: Path, rows: Any) -> None:
    (tmp_path / "chain.json").write_text(json.dumps({"schema": 1, "stages": rows}))
    stage = Stage("base", "pretrain", (), {}, ("model",))
    found = state.entries(str(tmp_path), [stage], {"base": "k"})
    assert found["base"].status == state.WAITING and not state.recorded_otherwise(str(tmp_path), {"base": "k"})


# ---- models ----


def test_a_config_asks_for_no_more_rows_than_are_stored(tmp_path: Path) -> None:
    write_model(tmp_path)
    path = tmp_path / "config.json"
    told = json.loads(path.read_text())
    hf_files.check(str(tmp_path), hf_config.shape_of(str(tmp_path)))
    path.write_text(json.dumps({**told, "vocab_size": 1 << 24}))
    with pytest.raises(Refusal, match="a vocab_size of 16777216"):
        hf_files.check(str(tmp_path), hf_config.shape_of(str(tmp_path)))


@needs_root
def test_nobody_chats_with_a_stranger_s_model_by_default(tmp_path: Path) -> None:
    for name, uid in (("mine", 0), ("theirs", STRANGER)):
        folder = tmp_path / name / "hf"
        folder.mkdir(parents=True)
        write_model(folder)
        os.chown(tmp_path / name, uid, uid)
        os.utime(folder / "config.json", (1e9 + uid, 1e9 + uid))
    assert finding.find(None, None, str(tmp_path), quiet).folder == str(tmp_path / "mine" / "hf")


# ---- checkpoints ----


def a_manifest(
    tensors: dict[str, Entry], files: dict[str, Sums] | None = None, meta: dict[str, Any] | None = None
) -> bytes:
    return manifest.encode(Manifest(1, 1, "t", files or {"f": Sums(0, 1 << 24, ())}, tensors, meta or {}))


def grid(rows: int, columns: int) -> Entry:
    pieces = tuple(Piece("f", f"{r}-{c}", (r, c), (1, 1)) for r in range(rows) for c in range(columns))
    return Entry((rows, columns), "F32", pieces)


@at_length
def test_pieces_along_any_dimension_are_checked_quickly_and_in_a_grid_within_bounds() -> None:
    many = 60_000 if EVERYTHING else 20_000  # comparing each with each would take minutes
    columns = Entry((2, many), "F32", tuple(Piece("f", str(n), (0, n), (2, 1)) for n in range(many)))
    assert manifest.decode(a_manifest({"a": columns, "b": grid(30, 30)})).tensors["b"].shape == (30, 30)
    with pytest.raises(ValueError, match="too many pieces"):
        manifest.decode(a_manifest({f"t{n}": grid(64, 64) for n in range(8)}))
    twice = Entry((2, 2), "F32", (Piece("f", "a", (0, 0), (2, 1)), Piece("f", "b", (0, 0), (1, 2))))
    with pytest.raises(ValueError, match="do not make the whole"):
        manifest.decode(a_manifest({"a": twice}))


def test_an_export_mends_only_its_own_folder(tmp_path: Path) -> None:
    for name in ("x", "other"):
        (tmp_path / f".replaced-{name}").mkdir()
    folders.repair(str(tmp_path), only="x")
    assert sorted(os.listdir(tmp_path)) == [".replaced-other", "x"]


# ---- plain torchrun ----


@needs_root
def test_a_recipe_under_torchrun_uses_no_folder_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STOKER_RUN_DIR", raising=False)
    c = settle(gather([], {}), False).config
    own = where_runs_go(c)
    assert own == where_runs_go(c) and not os.path.exists(own)
    os.makedirs(own)
    assert where_runs_go(c) == own
    for spoil in (lambda: os.chmod(own, 0o777), lambda: (os.chmod(own, 0o755), os.chown(own, STRANGER, STRANGER))):
        spoil()
        assert where_runs_go(c) != own


def test_logs_of_a_run_follow_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("samples-rank-0.jsonl", "metrics.jsonl"):
        (tmp_path / name).symlink_to(victim)
    with pytest.raises(OSError):
        sample_log(str(tmp_path), 0).write("1")
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "made")
    with pytest.raises(OSError):
        MetricsWriter(str(tmp_path))
    assert victim.read_text() == "mine" and not (tmp_path / "made").exists()


@needs_root
def test_a_checkpoint_of_another_user_is_not_resumed_from_by_a_recipe(tmp_path: Path) -> None:
    theirs = tmp_path / "step-00000009"
    theirs.mkdir()
    os.chown(theirs, STRANGER, STRANGER)
    lines: list[str] = []
    assert find(str(tmp_path), lines.append) is None and f"belongs to uid {STRANGER}" in lines[0]


def test_tokens_are_read_as_the_vocabulary_says_whatever_the_manifest_calls_them() -> None:
    source = Path(reader.__file__).read_text()
    assert '["dtype"]' not in source and "dtype_for(" in source


# ---- folders whose owner can exchange what is in them ----


@needs_root
def test_a_cache_whose_owner_can_exchange_it_is_not_written_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    cache = tmp_path / "cache"
    for uid, mode in ((STRANGER, 0o1777), (0, 0o777)):
        cache.mkdir()
        cache.chmod(mode)
        os.chown(cache, uid, uid)
        assert ours.own_cache(str(cache), quiet) == str(tmp_path / "home" / "stoker" / "data")
        with pytest.raises(Refusal, match="replace your folders"):
            private_folders.own_folder(str(cache), "torchrun-x")
        assert os.listdir(cache) == []
        cache.rmdir()


def test_a_cache_that_is_not_there_yet_is_made_before_others_can(public: Path) -> None:
    do_as(VICTIM, lambda: ours.own_cache(str(public / "deep" / "cache"), quiet))
    do_as(VICTIM, lambda: ours.own_cache(str(public / "cache"), quiet))
    assert (public / "cache").stat().st_uid == VICTIM and (public / "cache").stat().st_mode & 0o077 == 0
    assert (public / "deep" / "cache").stat().st_mode & 0o022 == 0


@needs_root
def test_a_cache_that_another_user_made_first_is_not_used(
    tmp_path: Path, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They make theirs between our look and our mkdir."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    mkdir = os.mkdir

    def be_quicker(path: str, mode: int = 0o777) -> None:
        if path == str(public / "cache"):
            mkdir(path)
            os.chown(path, STRANGER, STRANGER)
        mkdir(path, mode)

    monkeypatch.setattr(os, "mkdir", be_quicker)
    lines: list[str] = []
    assert ours.own_cache(str(public / "cache"), lines.append) == str(tmp_path / "home" / "stoker" / "data")
    assert "belongs to" in lines[-1]


def test_where_no_cache_can_be_made_a_private_one_is_used(public: Path) -> None:
    (public / "closed").mkdir(0o755)
    lines: list[str] = []

    def prepare() -> None:
        os.environ["XDG_CACHE_HOME"] = str(public / "home")
        used = ours.own_cache(str(public / "closed" / "cache"), lines.append)
        assert used == str(public / "home" / "stoker" / "data")
        assert lines == [f"data.cache {public}/closed/cache can't be made (Permission denied); yours is {used}"]

    do_as(VICTIM, prepare)


def test_cleaning_caches_leaves_what_is_not_stokers(tmp_path: Path) -> None:
    """A checkout may hold a link `cache -> ..` beside which the user keeps data of their own."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "cache").symlink_to("..")
    mine, prepared = tmp_path / "datasets" / "imagenet", tmp_path / "datasets" / ("0" * 32)
    mine.mkdir(parents=True)
    prepared.mkdir()

    def found() -> list[str]:
        return [one.path for one in find_caches(list_cache_roots({}, str(checkout))) if one.kind == "data"]

    assert found() == []
    ours.tag(str(tmp_path))
    assert found() == [str(prepared)]


def test_a_long_message_of_a_host_is_judged_at_once() -> None:
    error = RankError(type="ValueError", module="builtins", message="bad row: " + "[" * 20_000)
    began = time.process_time()
    is_consequence(RankExit(0, "h", "GPU0", 1, 1, 0.0, error=error))
    assert time.process_time() - began < 2, "its time grows with the square of the message"


@pytest.mark.parametrize(
    "option",
    [
        "notify: touch x",
        "hosts: h.yaml",
        "ssh_option: [-oProxyCommand=x]",
        "python: ./p",
        "env: [A=1]",
        "master_addr: x",
        "rdzv_endpoint: x:1",
        "log-dir: /x",
    ],
)
def test_a_file_of_settings_starts_no_program(stoker: Stoker, option: str) -> None:
    (stoker.cwd / "c.yaml").write_text(f"preset: debug\nrun: {{{option}}}\n")
    done = stoker("train", "tokenizer", "--config", "c.yaml", "--data", "d.txt")
    assert done.code == 78 and "give it as a flag" in done.err and not (stoker.cwd / "x").exists()


def test_prepared_data_is_for_its_owner_alone(stoker: Stoker) -> None:
    pytest.importorskip("numpy", reason="numpy is not installed")
    (stoker.cwd / "cache").mkdir(mode=0o755)
    (stoker.cwd / "text.txt").write_text("a text of many words\n" * 200)
    words = ("--data", "text.txt", "--tokenizer.path", "bytes", "--context_length", "64", "--data.validation", "0")
    done = stoker("prepare", *words, "--data.cache", "cache")
    assert done.code == 0, done.err
    (dataset,) = (place for place in (stoker.cwd / "cache" / "datasets").iterdir() if place.is_dir())
    assert dataset.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("write", ["unpacked", "speedrun"])
def test_rows_of_a_private_file_stay_private_in_a_folder_that_is_open(tmp_path: Path, write: str) -> None:
    private, folder = tmp_path / "pairs.jsonl.gz", tmp_path / "cache" / "unpacked"
    folder.mkdir(parents=True)
    for place in (tmp_path / "cache", folder):
        place.chmod(0o755)
    private.write_bytes(gzip.compress(b'{"prompt": "hello", "completion": "there"}\n'))
    private.chmod(0o600)
    if write == "unpacked":
        made = sources.unfold(str(private), str(tmp_path / "cache"), print, DiskSpace(str(folder), ""))
    else:
        made = str(folder / "sft-1.jsonl")
        copy_usable("sft", [str(private)], made)
    assert "hello" in Path(made).read_text()
    assert os.stat(made).st_mode & 0o077 == 0


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_caches_lock_that_is_something_else_is_not_written_through(tmp_path: Path, kind: str) -> None:
    (tmp_path / "victim").write_text("mine")
    lock = tmp_path / "key.lock"
    {
        "link": lambda: lock.symlink_to(tmp_path / "victim"),
        "pipe": lambda: os.mkfifo(lock),
    }[kind]()
    with pytest.raises(OSError), build.alone(str(tmp_path / "key"), print):
        pass
    assert (tmp_path / "victim").read_text() == "mine"


@pytest.mark.parametrize("file", ["/dev/zero", "../x.bin", "a/b.bin", "", 5, None])
def test_a_cache_that_names_files_elsewhere_is_no_cache(tmp_path: Path, file: object) -> None:
    manifest = {"schema": shards.SCHEMA, "splits": {"train": {"shards": [{"file": file, "bytes": 0, "crc32": 0}]}}}
    (tmp_path / shards.MANIFEST).write_text(json.dumps(manifest))
    assert shards.read_manifest(str(tmp_path)) is None


def test_a_shard_that_is_a_link_is_damage(tmp_path: Path) -> None:
    (tmp_path / "train-00000.bin").symlink_to("/dev/zero")
    split = {"tokens": 0, "bytes": 0, "documents": 0, "shards": [{"file": "train-00000.bin", "bytes": 0, "crc32": 0}]}
    about = {"key": "k", "kind": "stream", "context": None, "tokenizer_digest": "d", "vocab_size": 9, "end_id": 1}
    splits = {"train": split, "validation": {**split, "shards": []}}
    manifest = {"schema": shards.SCHEMA, **about, "seconds": 0.1, "splits": splits}
    (tmp_path / shards.MANIFEST).write_text(json.dumps(manifest))
    found = shards.read_manifest(str(tmp_path))
    assert found is not None and "is a symbolic link" in (shards.damage(str(tmp_path), found, verify=True) or "")


def test_a_cache_that_is_a_link_to_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").symlink_to(tmp_path / "absent")
    with pytest.raises(
        Refusal, match=r"cache is a link to .*absent, which does not exist: create it, or remove the link"
    ):
        ours.own_cache(str(tmp_path / "cache"), print)
    (tmp_path / "absent").mkdir()
    assert ours.own_cache(str(tmp_path / "cache"), print) == str(tmp_path / "cache")
