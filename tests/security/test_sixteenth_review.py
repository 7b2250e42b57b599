"""What the sixteenth review found: folders and files of other programs, bent checkpoints, secrets in other clothes."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stoker.contract.names import Refusal  # noqa: E402
from stoker.training.checkpoint import folders  # noqa: E402
from stoker.training.checkpoint.saver import Saver  # noqa: E402
from stoker.training.generate import gguf_file  # noqa: E402
from stoker.training.loop.resume import located, position  # noqa: E402
from stoker.training.recipes.build import samples_per_step  # noqa: E402
from stoker.training.rl.config import GrpoConfig, names_code  # noqa: E402
from stoker.training.rl.task import resumed  # noqa: E402


def saver(folder: Path, said: list[str], **more: Any) -> Saver:
    return Saver(str(folder), rank=0, world=1, token=os.urandom(4).hex(), say=said.append, keep=1, **more)


def test_what_is_no_checkpoint_of_ours_stays(tmp_path: Path) -> None:
    """A folder of another program may have a checkpoint's name, or that of one that is being deleted."""
    for name in ("step-00000001", "step-00000002", ".gone-holiday"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("a year of work")
    said: list[str] = []
    one = saver(tmp_path, said, keep_best=False)
    for step in (2, 3, 4, 5):
        one.save(step, {"w": torch.ones(3)}, {}, None, wait=True)
    one.close()
    assert all(
        (tmp_path / name / "thesis.tex").exists() for name in ("step-00000001", "step-00000002", ".gone-holiday")
    )
    assert "step-00000002 already exists and is not a checkpoint" in "\n".join(said)
    assert sorted(folders.steps_in(str(tmp_path))) == [1, 2, 5], "and ours are kept and removed as asked"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be two users")
def test_a_checkpoint_of_another_user_is_not_replaced(tmp_path: Path) -> None:
    said: list[str] = []
    one = saver(tmp_path, said)
    one.save(2, {"w": torch.ones(3)}, {}, None, wait=True)
    one.close()
    theirs = tmp_path / "step-00000002"
    os.chown(theirs, 65534, 65534)
    before = (theirs / "manifest.json").read_bytes()
    two = saver(tmp_path, said)
    two.save(2, {"w": torch.zeros(3)}, {}, None, wait=True)
    two.close()
    assert theirs.stat().st_uid == 65534 and (theirs / "manifest.json").read_bytes() == before
    assert "step-00000002 already exists and is another user's" in "\n".join(said)


def test_a_run_that_continues_no_other_leaves_its_checkpoints_alone(tmp_path: Path) -> None:
    said: list[str] = []
    for run, steps in (("a", (10, 20)), ("b", (30, 40))):
        one = saver(tmp_path, said, only=run, keep_best=False)
        for step in steps:
            one.save(step, {"w": torch.ones(3)}, {"run": run}, None, wait=True)
        one.close()
    assert sorted(folders.steps_in(str(tmp_path))) == [20, 40]


def test_an_export_writes_over_no_file_of_others(tmp_path: Path) -> None:
    out = tmp_path / "big.gguf"
    out.write_bytes(b"GGUF and the weights of somebody")
    link = tmp_path / "link.gguf"
    link.symlink_to(out)
    for path in (out, link):
        with pytest.raises(Refusal, match="was not written by stoker export"):
            gguf_file.write(str(tmp_path / "model"), str(path), None, None, print)
    assert out.read_bytes().endswith(b"of somebody") and link.is_symlink()


@pytest.mark.parametrize(
    "bent", [{"best": []}, {"best": "x"}, {"best": float("nan")}, {"samples": 10**38}, {"step": -5}]
)
def test_positions_that_can_not_be(bent: dict[str, Any]) -> None:
    meta = {"step": 1, "samples": 2, "tokens": 3, "best": None, "data": {}, **bent}
    with pytest.raises(Refusal, match="has no step number"):
        position(meta, SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bent",
    [
        {"history": 5},
        {"history": {"first": [], "recent": [{"strange": 1}]}},
        {"history": {"first": [], "recent": ["x"]}},
        {"step": "x"},
        {"updates": None},
    ],
)
def test_histories_that_can_not_be(bent: dict[str, Any]) -> None:
    meta = {
        "stage": "grpo", "optimizer": "adamw", "step": 1, "updates": 1, "tokens": 1,
        "history": {"first": [], "recent": []}, **bent,
    }  # fmt: skip
    with pytest.raises(Refusal) as refused:
        resumed(SimpleNamespace(meta=meta, path="ck"), "adamw", GrpoConfig())  # type: ignore[arg-type]
    assert "ck" in refused.value.line and "\n" not in refused.value.line


@pytest.mark.parametrize("reward", ["rewards.py:score", "a=b.py:score=1", "lang=en/r.py:score=1", "r.py:score=0.5"])
def test_a_config_file_names_no_code(reward: str) -> None:
    """However a weight is cut off it."""
    assert names_code([reward]) and names_code((reward,)) and names_code(reward)
    assert not names_code(["exact", "regex:a.py=1", "length=0.1"])


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be two users")
def test_a_checkpoint_of_another_user_is_not_resumed_from_by_name(tmp_path: Path) -> None:
    said: list[str] = []
    one = saver(tmp_path, said)
    one.save(9, {"w": torch.ones(3)}, {}, None, wait=True)
    one.close()
    theirs = tmp_path / "step-00000009"
    os.chown(theirs, 65534, 65534)
    with pytest.raises(Refusal, match="belongs to nobody, who may change it"):
        located(str(theirs))
    with pytest.raises(Refusal, match="there is no checkpoint"):
        located(str(tmp_path))


@pytest.mark.parametrize("stored", ["a", 0, -4, 10**12, True])
def test_a_batch_that_no_run_has(stored: object) -> None:
    c = SimpleNamespace(batch=SimpleNamespace(tokens=0, micro=0, accumulation=1))
    found = SimpleNamespace(meta={"batch": [stored, 1]}, path="ck")
    with pytest.raises(Refusal, match="samples a step"):
        samples_per_step(c, 4, 1, found)  # type: ignore[arg-type]
