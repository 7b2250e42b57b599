"""What the twenty-first review found: folders of logs and checkpoints in which another user puts links."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import Stoker
from localuser import ATTACKER, do_as, needs_root

torch = pytest.importorskip("torch")

from stoker.training.checkpoint.saver import Saver  # noqa: E402


def test_no_checkpoint_is_written_through_a_link_of_another_user(tmp_path: Path, public: Path) -> None:
    """The name of the next one can be told from those that are there. A link led it into another checkpoint of ours: that one's
    files were removed, and then written over.
    """
    needs_root()
    private = tmp_path / "private"
    private.mkdir(0o700)
    for name in ("rank-00000.safetensors", "manifest.json"):
        (private / name).write_text("precious")
    said: list[str] = []
    one = Saver(str(public), rank=0, world=1, token="a1b2c3d4", say=said.append)
    do_as(ATTACKER, lambda: [(public / f"step-00000002.a1b2c3d4-{n}.tmp").symlink_to(private) for n in range(5)])
    for step in (1, 2, 3):
        one.save(step, {"w": torch.ones(3)}, {}, None, wait=True)
    one.close()
    assert [path.read_text() for path in sorted(private.iterdir())] == ["precious", "precious"]
    assert sum("another process has put something in its place" in line for line in said) == 1
    assert [(public / f"step-0000000{step}").exists() for step in (1, 2, 3)] == [True, False, True]


def test_checkpoints_are_not_put_where_others_can_exchange_them(stoker: Stoker, public: Path) -> None:
    (stoker.cwd / "book.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    public.chmod(0o777)
    done = stoker(
        "train",
        "pretrain",
        "--data",
        "book.txt",
        "--max-steps",
        "1",
        "--tokenizer.path",
        "bytes",
        "--checkpoint.folder",
        str(public),
    )
    assert done.code == 73 and "others can replace your checkpoints" in done.err, (done.code, done.err)
    assert list(public.iterdir()) == []
