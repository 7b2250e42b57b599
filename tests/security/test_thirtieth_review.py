"""What the thirtieth review found in the control plane: an image has no secrets of a checkout, and text that takes long to look
through for secrets must neither take ever longer nor keep an agent from saying that it lives.
"""

from __future__ import annotations

import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

from conftest import Stoker
from stoker.contract.text import within

ROOT = Path(__file__).parents[2]
SLOW = "%25:" + "auth: " * 40  # of what takes long, but no longer than it is


def test_an_error_that_quotes_much_text_costs_no_agent(stoker: Stoker) -> None:
    """torch's own file, as @record writes it. The agent was taken for lost: no verdict on the rank, and no restart."""
    lines = (
        "import json, os, sys",
        f"text = {SLOW!r} * 3700",
        "json.dump({'message': {'message': text, 'extraInfo': {}}}, open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w'))",
        "sys.exit(3)",
    )
    script = stoker.script("train.py", "\n".join(lines))
    done = stoker("run", "--nproc-per-node", "2", script)
    assert done.code == 3 and "ended with exit code 3" in done.err, done.err


def test_no_word_is_cut_in_two() -> None:
    """Half a secret is not recognized as one."""
    assert within({"message": "a row: " + "x" * 400}, 300) == {"message": "a row:"}
    assert within("x" * 400, 164) == "x" * 100


# ---- the image ----


def _copied(path: str) -> bool:
    """Whether `docker build` copies it: the last pattern that fits the path, or a folder that it is in, counts."""
    parts, copied = path.split("/"), True
    ways = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    for pattern in (ROOT / "deploy/Dockerfile.dockerignore").read_text().splitlines():
        told = pattern.removeprefix("!").removeprefix("**/")
        if not pattern.startswith("#") and any(
            fnmatch(way, told) and way.count("/") == told.count("/") for way in (*ways, *parts)
        ):
            copied = pattern.startswith("!")
    return copied


@pytest.mark.parametrize(
    "path", [".git/config", ".git/logs/HEAD", ".env", "id_ed25519", "cluster.yaml", "wandb/x", "runs/x"]
)
def test_an_image_has_nothing_private_of_a_checkout(path: str) -> None:
    """A clone by https://TOKEN@host keeps the token in .git/config, and `COPY .` took it along."""
    assert not _copied(path)


def test_an_image_has_what_its_version_is_made_of(tmp_path: Path) -> None:
    """All that is tracked, or `stoker --version` would call it changed; git needs no config to name the commit."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    listed = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=True)
    assert all(map(_copied, (*listed.stdout.splitlines(), ".git/HEAD", ".git/refs/heads/main", ".git/index")))
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.example"]
    for words in (["init", "--quiet"], ["commit", "--quiet", "--allow-empty", "--message=x"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / ".git" / "config").unlink()
    assert subprocess.run([*git, "describe", "--always"], capture_output=True, check=True).stdout.strip()


# ---- another user's record ----
