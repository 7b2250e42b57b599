"""The wheel: built without a network, installed outside the checkout, and used."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import stoker as package
from conftest import Done, Stoker, machine_json
from netcluster import NetCluster
from stoker.cli.main import source_commit

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "stoker"
COMMIT = source_commit()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("hatchling", "pip"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"no {name} here: bash setup.sh --test installs what tests need")
    folder = tmp_path_factory.mktemp("wheel")
    # As `python -m build` does: a source archive, and the wheel from that.
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = folder.glob("*.tar.gz")
    words = ("wheel", "--no-index", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder), str(archive))
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.glob("*.whl")
    return made


class Installed(Stoker):
    """The command of a virtual environment that has the wheel and, from the tests' own Python, everything but Stoker."""

    home: Path

    def __call__(self, *args: str, timeout: float = 120, **more: object) -> Done:
        done = subprocess.run(
            [self.home / "bin" / "stoker", *args],
            cwd=self.cwd,
            env=self.environment(),
            capture_output=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr, self.cwd)


@pytest.fixture(scope="module")
def installed_home(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(home, symlinks=True, with_pip=False)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install", "--no-index", "--no-deps", str(wheel)],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    # A plain path: the .pth files in those folders, the checkout's among them, are not read.
    asked = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.path))"]
    path = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    folders = [entry for entry in path if entry.endswith("-packages")]
    (own,) = home.glob("lib/python*/site-packages")
    (own / "tests_own_packages.pth").write_text("\n".join(folders) + "\n")
    return home


@pytest.fixture
def installed(installed_home: Path, tmp_path: Path) -> Iterator[Installed]:
    (tmp_path / "machine.json").write_text(json.dumps(machine_json(0)))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "STOKER_", "CUDA_"))}
    made = Installed(tmp_path, {**kept, "STOKER_MACHINE": str(tmp_path / "machine.json"), "OMP_NUM_THREADS": "1"})
    made.home = installed_home
    yield made


def test_every_tracked_file_and_every_page_is_in_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = {
        str(path.relative_to(SOURCE.parent))
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and SOURCE / "docs" not in path.parents
    }
    pages = {f"stoker/docs/{path.name}" for path in (ROOT / "docs").iterdir() if path.is_file()}
    pages |= {f"stoker/examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}
    recorded = {"stoker/commit.txt"} if COMMIT else set()
    assert {name for name in names if not name.startswith("stoker-")} == tracked | pages | recorded
    assert "stoker/py.typed" in names


def test_the_version_has_one_source(wheel: Path) -> None:
    (about,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA"))
    text = zipfile.ZipFile(wheel).read(about).decode()
    assert f"\nVersion: {package.__version__}\n" in text
    assert "Classifier: Typing :: Typed" in text and "Classifier: Programming Language :: Python :: 3.11" in text
    assert not re.search(r'^version = "', (ROOT / "pyproject.toml").read_text(), re.M)


def test_ranks_run_and_the_last_ones_end_is_explained(installed: Installed) -> None:
    told = installed("--version")
    made_of = f" (commit {COMMIT})" if COMMIT else ""
    assert (told.code, told.out) == (0, f"stoker {package.__version__}{made_of}\n")
    script = installed.script("where.py", "import os, stoker; print(os.environ['RANK'], stoker.__file__)")
    done = installed("run", "--nproc-per-node", "2", "--prefix", "never", script)
    assert done.code == 0, done.err
    assert [line.split()[0] for line in sorted(done.out.splitlines())] == ["0", "1"]
    assert all(line.split()[1].startswith(str(installed.home)) for line in done.out.splitlines()), done.out
    assert installed("why").code == 0


def test_the_agent_travels_from_site_packages(installed: Installed, netcluster: NetCluster) -> None:
    """On the hosts there is a Python with neither Stoker nor torch."""
    bare = installed.cwd / "bare"
    venv.create(bare, symlinks=True, with_pip=False)
    script = installed.script("where.py", "import os, stoker; print(os.environ['RANK'], stoker.__file__)")
    hosts = netcluster.file((1, 1), workdir=str(installed.cwd), python=str(bare / "bin" / "python"))
    done = installed("run", "--hosts", str(hosts), "--no-preflight", "--prefix", "never", script)
    assert done.code == 0, done.err
    found = sorted(done.out.splitlines())
    assert [line.split()[0] for line in found] == ["0", "1"], done.out
    for line, host in zip(found, netcluster.hosts, strict=False):
        assert line.split()[1].startswith(str(host.home / ".cache" / "stoker" / "agent-")), line


def test_it_trains_a_tiny_model(installed: Installed) -> None:
    pytest.importorskip("torch")
    (installed.cwd / "book.txt").write_text("\n".join(f"line {n} of a small book" for n in range(3000)))
    done = installed(
        "train", "pretrain", "--debug", "--data", "book.txt", "--tokenizer.path", "bytes", "--max-steps", "3", timeout=240
    )  # fmt: skip
    assert done.code == 0, done.out[-2000:] + done.err[-2000:]
    assert (done.run_dir / "hf" / "model.safetensors").exists()


def test_doctor_completion_and_docs(installed: Installed) -> None:
    checked = installed("doctor", "--json")
    assert checked.code in (0, 1, 2) and json.loads(checked.out), checked.err
    if importlib.util.find_spec("shtab"):
        assert "_stoker" in installed("completion", "bash").out
    named = installed("train", "grpo", "--config", "gsm8k_1GPU", "--dry-run")
    assert "no config" not in named.err and "does not exist" not in named.err, named.err
    listed = installed("docs")
    topics = [line.split()[0] for line in listed.out.splitlines() if line and not line.startswith("`")]
    assert topics == sorted(path.stem for path in (ROOT / "docs").iterdir() if path.is_file())
    for topic in topics:
        shown = installed("docs", topic)
        (page,) = (ROOT / "docs").glob(f"{topic}.*")
        assert (shown.code, shown.out_bytes) == (0, page.read_bytes()), topic
    missing = installed("docs", "verdict")
    assert missing.code == 66 and "did you mean verdicts" in missing.err
