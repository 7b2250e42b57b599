"""What the container image holds."""

from __future__ import annotations

import shlex
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


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


ROOT = Path(__file__).resolve().parents[2]


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


def test_the_image_has_no_host_keys_of_its_own() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ")
    (layer,) = [line for line in text.splitlines() if line.startswith("RUN") and "openssh-server" in line]
    removed = shlex.split(layer.rpartition("rm -rf")[2])
    assert "/etc/ssh/ssh_host_*" in removed, "everybody who has the image would know the keys of every pod"
