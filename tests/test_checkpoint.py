"""Checkpoints: complete or not there. Real files, processes, signals and full disks."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

import stoker  # noqa: E402
from conftest import EVERYTHING, at_length, wait_for  # noqa: E402
from devices import needs_gpu  # noqa: E402
from stoker.contract.errors import Refusal  # noqa: E402
from stoker.training.checkpoint import part, snapshot  # noqa: E402
from stoker.training.checkpoint.reading import find, open_checkpoint, verify  # noqa: E402
from stoker.training.checkpoint.saver import Saver  # noqa: E402

# What every script below begins with: torch is imported once, each rank is a fork of it.
FORKS = """
import os, random, signal, sys, time
import torch
from stoker.training.checkpoint.reading import find, open_checkpoint
from stoker.training.checkpoint.saver import Saver
torch.set_num_threads(1)

def ranks(world, work):
    found = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            try:
                work(rank, world)
            except BaseException:
                __import__("traceback").print_exc()
                os._exit(1)
            os._exit(0)
        found.append(pid)
    return found

def all_end_well(pids):
    for pid in pids:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


def run_script(folder: Path, text: str, *args: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(FORKS + text)
    return subprocess.run(
        [sys.executable, str(script), *args], capture_output=True, text=True, timeout=120, check=False
    )


def of_all_types() -> dict[str, Any]:
    """Every dtype safetensors has, with random bits (NaNs among them), odd sizes, no dimension, nothing in it, and a transposed one."""
    generator = torch.Generator().manual_seed(7)
    found: dict[str, Any] = {}
    for dtype, name in snapshot.DTYPES.items():
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (13 * 5 * 8,), dtype=torch.uint8, generator=generator)
        found[f"of.{name}"] = raw.view(dtype)[: 13 * 5].reshape(13, 5)
    found["scalar"] = torch.tensor(3.5)
    found["empty"] = torch.empty(0, 4)
    found["turned"] = torch.randn(6, 10, generator=generator).t()
    found["large"] = torch.randn(301, 17, generator=generator)
    return found


def bits(tensor: Any) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and bits(one[name]) == bits(other[name]) for name in one
    )


def blank(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


class Job:
    """All ranks of a job in one process; their Savers write in their own threads."""

    def __init__(self, folder: Path, world: int = 1, **more: Any) -> None:
        self.folder, self.by_rank = folder, list[tuple[int, str]]()
        self.savers = [
            Saver(
                str(folder),
                rank=rank,
                world=world,
                say=lambda line, rank=rank: self.by_rank.append((rank, line)),
                **{"token": "a1", "patience": 20.0, **more},
            )
            for rank in range(world)
        ]

    @property
    def lines(self) -> list[str]:
        return [line for _, line in self.by_rank]

    def save(self, step: int, tensors: dict[str, Any], score: float | None = None, **meta: Any) -> list[bool]:
        results = [False] * len(self.savers)

        def one(rank: int) -> None:
            results[rank] = self.savers[rank].save(step, tensors, meta, score, wait=True)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(self.savers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def close(self) -> None:
        for saver in self.savers:
            saver.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(world: int = 1, folder: Path | None = None, **more: Any) -> Job:
        made.append(Job(folder or tmp_path / "checkpoints", world, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".writer")


@pytest.mark.parametrize("world", [1, 4, 40])
def test_every_bit_comes_back_whatever_the_number_of_ranks(job: Callable[..., Job], world: int) -> None:
    state = of_all_types()
    one = job(world)
    assert one.save(100, state, 0.5, position={"sample": 12}) == [True] * world
    assert one.lines == [] and names(one.folder) == ["step-00000100"]
    said: list[str] = []
    found = find(str(one.folder), said.append)
    assert found is not None and said == []
    assert (found.step, found.world, found.score, found.meta) == (100, world, 0.5, {"position": {"sample": 12}})
    back = blank(state)
    found.read_into(back)
    assert same(state, back)
    assert all(bits(found.read(name)) == bits(tensor) for name, tensor in state.items())


def test_the_files_are_plain_safetensors_and_the_ranks_share_the_bytes(job: Callable[..., Job], tmp_path: Path) -> None:
    state = {f"layer.{n}": torch.randn(64, 32) for n in range(7)} | {"head": torch.randn(1000, 8)}
    job(3).save(1, state)
    files = sorted((tmp_path / "checkpoints/step-00000001").glob("rank-*.safetensors"))
    sizes = [
        sum(
            tensor.numel() * 4
            for name, tensor in safetensors_torch.load_file(file).items()
            if not name.startswith("rng")
        )
        for file in files
    ]
    assert sum(sizes) == sum(tensor.numel() * 4 for tensor in state.values())
    assert max(sizes) - min(sizes) <= 64 * 4, "equal but for a row"


def test_the_script_word_resume_takes_what_was_saved_and_no_unfinished_one(
    job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = job(2)
    one.save(3, {"w": torch.ones(4)})
    shutil.copytree(one.folder / "step-00000003", one.folder / "step-00000009.a0-4.tmp")
    monkeypatch.setenv("STOKER_RUN_DIR", str(tmp_path))
    assert stoker.resume() == str(one.folder / "step-00000003")
    again = job(1, token="a2")
    assert names(one.folder) == ["step-00000003"], "what a dead attempt left is removed at the start"
    assert again.lines == []


def test_training_may_write_the_tensors_as_soon_as_save_returns(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a save that is asked for while one is under way is skipped, said once, and never queued."""
    go = threading.Event()
    written = part.write_atomic
    monkeypatch.setattr(part, "write_atomic", lambda path, data: (go.wait(100), written(path, data)))
    one, weight = job(), torch.full((1000,), 1.0)
    saver = one.savers[0]
    assert saver.save(1, {"w": weight}, {})
    weight.fill_(2.0)
    assert saver.busy() and not saver.save(2, {"w": weight}, {}) and not saver.save(3, {"w": weight}, {})
    assert len(one.lines) == 1 and "step 2 is skipped" in one.lines[0]
    go.set()
    assert saver.save(4, {"w": weight}, {}, wait=True), "with wait the one under way is waited for"
    assert names(one.folder) == ["step-00000001", "step-00000004"]
    assert open_checkpoint(str(one.folder / "step-00000001")).read("w").eq(1.0).all()
    assert open_checkpoint(str(one.folder / "step-00000004")).read("w").eq(2.0).all()


def test_a_rank_that_skips_what_another_began_costs_only_that_checkpoint(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 skips step 2, still writing step 1, and begins step 3, which rank 1 skips, still writing step 2: rank 0 is told, and need not wait for its deadline."""
    one, state = job(2, keep=5), {"w": torch.ones(10)}
    gates, written = {"1 rank-00000": threading.Event(), "2 rank-00001": threading.Event()}, part.write_atomic

    def gated(path: str, data: Any) -> None:
        place, name = os.path.split(path)
        gate = gates.get(f"{int(os.path.basename(place)[5:13])} {name.partition('.')[0]}")
        if gate is not None:
            gate.wait(100)
        written(path, data)

    monkeypatch.setattr(part, "write_atomic", gated)
    zero, other = one.savers
    assert zero.save(1, state, {}) and other.save(1, state, {})
    assert wait_for(lambda: None if other.busy() else True, 10) and zero.busy()
    assert not zero.save(2, state, {}) and other.save(2, state, {})
    gates["1 rank-00000"].set()
    assert wait_for(lambda: None if zero.busy() else True, 10) and other.busy()
    assert zero.save(3, state, {}) and not other.save(3, state, {})
    assert wait_for(lambda: True if "step-00000003.a1-3.tmp" in names(one.folder) else None, 10)
    gates["2 rank-00001"].set()
    assert wait_for(zero.problem, 10) and "rank 1 could not write its part: it was still writing the one before" in str(
        zero.problem()
    )
    assert one.save(4, state) == [True, True] and zero.problem() is None
    assert names(one.folder) == ["step-00000001", "step-00000004"], "what never became a checkpoint is gone"


def test_a_restart_that_was_told_how_to_begin_finds_only_its_own(job: Callable[..., Job]) -> None:
    """Two runs saved into one folder: the other one is further, and not to be gone on with."""
    one = job(keep=9)
    for step, run in ((50, "mine"), (60, "mine"), (300, "other")):
        assert all(one.save(step, {"x": torch.ones(2)}, run=run))
    said: list[str] = []
    found = find(str(one.folder), said.append, of_run="mine")
    assert (
        found is not None
        and found.step == 60
        and find(str(one.folder), said.append, of_run="nobody") is None
        and said == []
    )


def test_the_newest_and_the_best_stay(job: Callable[..., Job]) -> None:
    one = job(keep=2)
    for step, score in [(1, 3.0), (2, 1.0), (3, 2.0), (4, float("nan")), (5, 4.0), (6, None)]:
        one.save(step, {"w": torch.full((4,), float(step))}, score)
    assert names(one.folder) == ["step-00000002", "step-00000005", "step-00000006"]
    plain = job(folder=one.folder.parent / "plain", keep=1, keep_best=False)
    for step in (1, 2, 3):
        plain.save(step, {"w": torch.ones(4)}, float(step))
    assert names(plain.folder) == ["step-00000003"]


def test_a_step_saved_again_replaces_the_old_one_and_a_crash_in_between_brings_it_back(job: Callable[..., Job]) -> None:
    job().save(5, {"w": torch.ones(4)})
    later = job(token="a2")
    assert later.save(5, {"w": torch.full((4,), 2.0)}) == [True]
    assert names(later.folder) == ["step-00000005"]
    assert open_checkpoint(str(later.folder / "step-00000005")).read("w").eq(2.0).all()
    assert later.save(5, {"w": torch.full((4,), 3.0)}) == [True], (
        "already there: the final save of a step that was just saved is not written twice"
    )
    assert open_checkpoint(str(later.folder / "step-00000005")).read("w").eq(2.0).all()
    os.rename(later.folder / "step-00000005", later.folder / ".replaced-step-00000005")
    found = find(str(later.folder), print)
    assert found is not None and found.step == 5


def flip_a_bit(folder: Path) -> None:
    with open(folder / "rank-00001.safetensors", "r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def cut(folder: Path) -> None:
    os.truncate(folder / "rank-00001.safetensors", 100)


def lose(folder: Path) -> None:
    (folder / "rank-00001.safetensors").unlink()


def flip_in_the_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3', 1))


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (flip_a_bit, "rank-00001.safetensors is damaged between bytes 0 and"),
    (cut, "rank-00001.safetensors has 100 bytes instead of"),
    (lose, "rank-00001.safetensors is missing"),
    (lambda folder: (folder / "manifest.json").unlink(), "manifest.json: No such file"),
    (lambda folder: (folder / "manifest.json").write_text('{"schema": 1, "st'), "manifest.json: "),
    (flip_in_the_manifest, "manifest.json: its own checksum is wrong"),
]


@pytest.mark.parametrize(("damage", "line"), DAMAGE)
def test_a_damaged_one_is_refused_by_name_and_the_one_before_is_taken(
    job: Callable[..., Job], damage: Callable[[Path], None], line: str
) -> None:
    one = job(2)
    for step in (1, 2):
        one.save(step, {"w": torch.full((1000,), float(step)), "v": torch.full((1000,), float(step))})
    assert verify(str(one.folder / "step-00000002")) == []
    damage(one.folder / "step-00000002")
    said: list[str] = []
    found = find(str(one.folder), said.append)
    assert found is not None and found.step == 1 and found.read("w").eq(1.0).all()
    assert len(said) == 1 and "step-00000002" in said[0] and line in said[0]
    assert any(line in problem for problem in verify(str(one.folder / "step-00000002")))


def test_a_bad_region_of_a_large_file_is_named_and_all_are_looked_at(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.training.checkpoint.manifest.CHUNK", 1000)
    monkeypatch.setattr(snapshot, "_SLAB", 4096)  # several buffers, too
    one, state = job(2), of_all_types()
    one.save(1, state)
    folder = one.folder / "step-00000001"
    back = blank(state)
    open_checkpoint(str(folder)).read_into(back)
    assert same(state, back) and verify(str(folder)) == []
    for rank, at in ((0, 2500), (1, 3999)):
        with open(folder / f"rank-{rank:05d}.safetensors", "r+b") as file:
            data = bytearray(file.read())
            data[at] ^= 1
            file.seek(0)
            file.write(data)
    assert verify(str(folder)) == [
        "rank-00000.safetensors is damaged between bytes 2000 and 3000 (checksum)",
        "rank-00001.safetensors is damaged between bytes 3000 and 4000 (checksum)",
    ]


def test_nothing_there_is_none_and_nothing_said(tmp_path: Path) -> None:
    said: list[str] = []
    assert (
        find(str(tmp_path / "nowhere"), said.append) is None and find(str(tmp_path), said.append) is None and said == []
    )


def test_a_checkpoint_of_another_model_is_refused_by_tensor(job: Callable[..., Job]) -> None:
    one = job()
    one.save(1, {"a": torch.ones(3, 4), "b": torch.ones(5)})
    found = open_checkpoint(str(one.folder / "step-00000001"))
    into = {"a": torch.zeros(3, 4), "b": torch.zeros(5)}
    cases: list[tuple[dict[str, Any], str]] = [
        ({**into, "c": torch.zeros(1)}, "it has no c"),
        ({"a": into["a"]}, "it holds b, which is not here"),
        ({**into, "a": torch.zeros(4, 3)}, r"a has shape \[3, 4\] there and \[4, 3\] here"),
        ({**into, "b": torch.zeros(5, dtype=torch.bfloat16)}, "b is F32 there and BF16 here"),
    ]
    for tensors, line in cases:
        with pytest.raises(Refusal, match=f"step-00000001 is a checkpoint of another model or optimizer: {line}"):
            found.read_into(tensors)
    assert into["a"].eq(0).all(), "nothing is written before everything fits"


def rewritten(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A manifest somebody else made, with a checksum of its own that is right."""
    body = json.loads((folder / "manifest.json").read_bytes())
    body.pop("sha256")
    change(body)
    sha256 = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({**body, "sha256": sha256}))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda body: body["files"].update({"../outside.safetensors": body["files"]["rank-00000.safetensors"]}),
            "not a plain file name",
        ),
        (
            lambda body: body["files"].update({"/etc/passwd": body["files"]["rank-00000.safetensors"]}),
            "not a plain file name",
        ),
        (lambda body: body["tensors"]["w"]["pieces"][0].update(file="../outside.safetensors"), "not among the files"),
        (
            lambda body: body["tensors"]["w"]["pieces"][0].update(offset=[-1]),
            "offset: expected a whole number of at least 0, found -1",
        ),
        (lambda body: body["tensors"]["w"]["pieces"][0].update(shape=[3]), "do not make the whole tensor"),
        (lambda body: body.update(schema=99), "its schema is 99"),
        (lambda body: body.update(files=[]), "files: expected an object"),
    ],
)
def test_a_manifest_is_not_trusted(
    job: Callable[..., Job], change: Callable[[dict[str, Any]], None], line: str
) -> None:
    one = job()
    one.save(1, {"w": torch.ones(4)})
    folder = one.folder / "step-00000001"
    rewritten(folder, lambda body: None)
    open_checkpoint(str(folder))
    rewritten(folder, change)
    with pytest.raises(Refusal, match=r"step-00000001 is not a valid checkpoint: manifest\.json") as refused:
        open_checkpoint(str(folder))
    assert line in refused.value.line


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"this user can't mount a small file system: {made.stderr.strip()}")
    yield place
    while os.path.ismount(place):
        subprocess.run(["umount", "-l", str(place)], capture_output=True, check=True)


@pytest.mark.parametrize("asks_first", [True, False])
def test_a_full_disk_costs_one_checkpoint_and_says_so_once(
    job: Callable[..., Job], disk: Path, monkeypatch: pytest.MonkeyPatch, asks_first: bool
) -> None:
    if not asks_first:
        monkeypatch.setattr(part, "_room_for", lambda *_: None)
    one = job(2, folder=disk / "checkpoints")
    small, large = {"w": torch.ones(100_000)}, {"w": torch.ones(900_000)}
    assert one.save(1, small) == [True, True]
    assert one.save(2, large) == [False, False] and one.save(3, large) == [False, False]
    assert names(one.folder) == ["step-00000001"], "nothing is left of the failed ones"
    problem = one.savers[0].problem()
    assert (
        problem is not None
        and ("No space left on device" in problem or "are free" in problem)
        and "the last good one is step-00000001" in problem
    )
    said = [(rank, re.sub(r"[\d.]+", "", line)) for rank, line in one.by_rank]
    assert said and len(set(said)) == len(said), "no rank says the same thing again for step 3"
    assert (
        one.save(4, small) == [True, True]
        and one.savers[0].problem() is None
        and "checkpoints work again" in one.lines[-1]
    )
    assert verify(str(one.folder / "step-00000004")) == []


def test_a_write_that_fails_halfway_leaves_nothing(job: Callable[..., Job]) -> None:
    """A file-size limit stops the second megabyte with EFBIG; needs no rights."""
    one = job()
    one.save(1, {"w": torch.ones(1000)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        assert one.save(2, {"w": torch.ones(1_000_000)}) == [False]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(one.folder) == ["step-00000001"]
    assert (
        len(one.lines) == 1
        and "step 2 was not written" in one.lines[0]
        and "rank-00000.safetensors: File too large" in one.lines[0]
        and "GiB free" in one.lines[0]
    )
    assert one.save(3, {"w": torch.ones(1_000_000)}) == [True]


def test_a_read_only_disk_keeps_the_last_good_one(job: Callable[..., Job], disk: Path) -> None:
    one = job(folder=disk / "checkpoints")
    one.save(1, {"w": torch.ones(100)})
    # The saver's lock, a file open for writing, keeps the mount below from becoming read-only: a second one of the same disk covers it.
    subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)
    assert one.save(2, {"w": torch.ones(100)}) == [False]
    assert "Read-only file system" in one.lines[0] and "the last good one is step-00000001" in one.lines[0]
    found = find(str(one.folder), print)
    assert found is not None and found.step == 1
    with pytest.raises(Refusal, match=r"checkpoints can't be written in .*Read-only file system"):
        Saver(str(disk / "elsewhere"), rank=0, world=1, token="b", say=print)


def test_a_disk_that_went_away_is_not_written_around(job: Callable[..., Job], disk: Path) -> None:
    one = job(folder=disk)
    one.save(1, {"w": torch.ones(100)})
    subprocess.run(["umount", "-l", str(disk)], check=True)
    assert one.save(2, {"w": torch.ones(100)}) == [False]
    assert "the file system it was on is gone (unmounted?)" in one.lines[0] and list(disk.iterdir()) == []


def test_a_folder_that_was_deleted_is_made_anew_and_that_is_said(job: Callable[..., Job]) -> None:
    one = job()
    one.save(1, {"w": torch.ones(100)})
    shutil.rmtree(one.folder)
    assert one.save(2, {"w": torch.ones(100)}) == [True] and "was removed, with all checkpoints in it" in one.lines[0]
    shutil.rmtree(one.folder.parent)
    assert one.save(3, {"w": torch.ones(100)}) == [False] and "there is no other one" in one.lines[1]


def test_a_rank_whose_part_never_comes_is_named(job: Callable[..., Job]) -> None:
    one = job(3, patience=0.3)
    for saver in one.savers[:2]:
        saver.save(1, {"w": torch.ones(100)}, {})
    assert wait_for(one.savers[0].problem, 10)
    assert "the part of rank 2 did not come within 0.3 s" in one.lines[0]
    assert wait_for(lambda: True if names(one.folder) == [] else None, 5)


SECOND_JOB = """
from stoker.contract.errors import Refusal
try:
    Saver(sys.argv[1], rank=0, world=1, token="b", say=print)
except Refusal as refused:
    print(refused.line)
state = {"w": torch.ones(3_000_000)}
saver = Saver(sys.argv[2], rank=0, world=1, token="b", say=print)
saver.save(7, state, {})
raise RuntimeError("training broke")
"""


def test_a_second_job_is_kept_out_and_an_exception_does_not_hang_in_a_save(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    one = job()
    done = run_script(tmp_path, SECOND_JOB, str(one.folder), str(tmp_path / "other"))
    assert f"process {os.getpid()} on " in done.stdout and "is writing checkpoints in" in done.stdout
    assert done.returncode == 1 and done.stderr.rstrip().endswith("RuntimeError: training broke")
    found = find(str(tmp_path / "other"), print)
    assert found is not None and found.step == 7, "a save under way gets a moment to finish"


KILLS = """
folder, life, last, refused = sys.argv[1], 0, 0, []
rng = random.Random(int(sys.argv[2]))

def live(rank, world):
    saver = Saver(folder, rank=rank, world=world, token=f"life{life}", say=lambda line: None, patience=5.0)
    step = last
    while True:
        step += 1
        state = {f"w{n}": torch.full((50, 20), float(step)) for n in range(5)}
        saver.save(step, state, {"step": step}, float(step % 7), wait=True)

for life in range(int(sys.argv[3])):
    pids = ranks(2, live)
    begun = time.monotonic()
    while find(folder, refused.append) is None and time.monotonic() < begun + 20:
        time.sleep(0.005)
    time.sleep(rng.uniform(0.0, 0.15))
    for pid in rng.sample(pids, 2):
        os.kill(pid, rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)))
        time.sleep(rng.choice((0.0, 0.02)))
    for pid in pids:
        os.waitpid(pid, 0)
    refused.clear()
    found = find(folder, refused.append)
    assert refused == [], refused
    assert found is not None and found.step >= last and found.meta == {"step": found.step}, (found, last)
    state = {f"w{n}": torch.zeros(50, 20) for n in range(5)}
    found.read_into(state)
    assert all(tensor.eq(found.step).all() for tensor in state.values())
    last = found.step
print("survived", life + 1, "last step", last)
Saver(folder, rank=0, world=1, token="end", say=print).close()
print(sorted(name.partition("-")[0] for name in os.listdir(folder)))
"""


def test_kills_while_saving_always_leave_a_valid_one(tmp_path: Path) -> None:
    seed, kills = str(os.getpid()), "10" if EVERYTHING else "3"
    done = run_script(tmp_path, KILLS, str(tmp_path / "checkpoints"), seed, kills)
    assert done.returncode == 0 and f"survived {kills} last step" in done.stdout, (
        f"seed {seed}\n{done.stdout}{done.stderr}"
    )
    assert set(json.loads(done.stdout.splitlines()[-1].replace("'", '"'))) == {".writer", "step"}


SHARDED = """
from collections import OrderedDict
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
folder, plain, reference = sys.argv[1:]

def state_of(seed, world):
    '''Sizes that no world here divides; with 3 ranks, "few" leaves the last one empty-handed.'''
    torch.manual_seed(seed)
    model = torch.nn.Sequential(OrderedDict(odd=torch.nn.Linear(5, 7), few=torch.nn.Linear(7, 2), one=torch.nn.Linear(2, 1)))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * seed
    optimizer.step()
    state = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        state |= {f"optimizer.{key}.{name}": value for key, value in optimizer.state[parameter].items()}
    state["count"] = torch.tensor([seed, seed + 1])
    return state

def group(rank, world, which):
    dist.init_process_group("gloo", init_method=f"file://{reference}.{which}", rank=rank, world_size=world)

def whole(state):
    return {name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone() for name, value in state.items()}

def saves(rank, world):
    group(rank, world, 1)
    state = state_of(3, world)
    if rank == 2:
        assert state["model.few.weight"].to_local().numel() == 0
    saver = Saver(folder, rank=rank, world=world, token="s", say=print, patience=30)
    assert saver.save(10, state, {"world": world}, wait=True), saver.problem()
    full = whole(state)
    if rank == 0:
        save_file({name: value.contiguous() for name, value in full.items()}, reference)
    dist.barrier()

def loads(rank, world):
    group(rank, world, 2)
    want = load_file(reference)
    for where in (folder, plain):
        state = state_of(99, world)
        found = open_checkpoint(where + "/step-00000010")
        found.read_into(state)
        assert all(torch.equal(value, want[name]) for name, value in whole(state).items())
    dist.barrier()

def replicates(rank, world):
    saver = Saver(plain, rank=rank, world=world, token="p", say=print, patience=30)
    assert saver.save(10, load_file(reference), {}, wait=True), saver.problem()

all_end_well(ranks(3, saves))
all_end_well(ranks(4, replicates))
all_end_well(ranks(2, loads))
"""


@at_length
def test_sharded_over_three_ranks_is_read_by_two_and_by_one_and_replicated_by_sharded(tmp_path: Path) -> None:
    where = [str(tmp_path / name) for name in ("checkpoints", "plain", "reference.safetensors")]
    done = run_script(tmp_path, SHARDED, *where)
    assert done.returncode == 0, done.stdout + done.stderr
    want = safetensors_torch.load_file(where[2])
    found = find(where[0], print)
    assert (
        found is not None
        and found.world == 3
        and len(found.tensors["model.odd.weight"].pieces) == 3
        and len(found.tensors["model.few.weight"].pieces) == 2
    )
    state = blank(want)
    found.read_into(state)
    assert same(state, want)


@needs_gpu
def test_on_a_gpu_the_snapshot_is_of_the_moment_and_the_host_does_not_wait(job: Callable[..., Job]) -> None:
    one = job(keep=5)
    saver = one.savers[0]
    state = {f"w{n}": torch.full((4096, 4096), float(n), device="cuda") for n in range(20)} | {
        "turned": torch.arange(12.0, device="cuda").reshape(3, 4).t()
    }
    want = {name: tensor.cpu() for name, tensor in state.items()}
    saver.prepare_buffers(state)
    saver._join_preparing()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1, 4):
            torch.cuda._sleep(50_000_000)
            assert saver.save(step, state, {}) or saver.busy()
            saver.before_update()
            for tensor in state.values():
                tensor.add_(1.0)
            if step == 1:
                torch.cuda.set_sync_debug_mode("default")
                assert wait_for(lambda: None if saver.busy() else True, 60)
                torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert wait_for(lambda: None if saver.busy() else True, 60)
    back = blank(state)
    open_checkpoint(str(one.folder / "step-00000001")).read_into(back)
    assert same({name: tensor.cpu() for name, tensor in back.items()}, want)
    open_checkpoint(str(one.folder / "step-00000002")).read_into(back)
    assert all(torch.equal(back[name].cpu(), want[name] + 1) for name in want)
