"""A package in the folder that holds Stoker never stands in for a module of the standard library: not in the launcher's
agent, not in a rank.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import stoker as package
from conftest import Stoker
from stoker.contract import process

SRC = Path(__file__).parents[2] / "src"

# Each of these is imported by the agent, the guardian, the shim or what they load.
NAMES = (
    "keyword",
    "operator",
    "reprlib",
    "json",
    "socket",
    "selectors",
    "tempfile",
    "shutil",
    "hashlib",
    "traceback",
    "contextlib",
    "typing",
    "zipfile",
)
SHADOW = "import os\nwith open(os.environ['SHADOWED'], 'a') as file: file.write(__name__ + '\\n')\nraise ImportError('not the standard library')\n"
# As the console script of an installed wheel: the standard library first, then the folder of the packages.
STOKER = (
    "import sys; sys.path += [{site!r}, {rest!r}]; sys.argv[0] = 'stoker'; from stoker.cli.main import entry; entry()"
)


def test_nothing_beside_stoker_stands_in_for_the_standard_library(tmp_path: Path) -> None:
    site, shadowed = tmp_path / "site-packages", tmp_path / "shadowed"
    shutil.copytree(Path(package.__file__).parent, site / "stoker", ignore=shutil.ignore_patterns("__pycache__"))
    for name in NAMES:
        (site / f"{name}.py").write_text(SHADOW)
    script = "import json, stoker; print(json.dumps({'stoker': stoker.__file__, 'shim': 'stoker.control.rank.shim' in __import__('sys').modules}))\n"
    (tmp_path / "train.py").write_text(script)
    boot = STOKER.format(site=str(site), rest=sysconfig.get_paths()["purelib"])
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            boot,
            "run",
            "--nproc-per-node",
            "cpu",
            "--prefix",
            "never",
            "--python",
            sys.executable,
            "train.py",
        ],
        cwd=tmp_path,
        env={**os.environ, "SHADOWED": str(shadowed)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not shadowed.exists(), f"imported from beside Stoker: {shadowed.read_text().split()}"
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stdout
    for line in lines:
        assert json.loads(line) == {"stoker": str(site / "stoker" / "__init__.py"), "shim": True}


# ---- a json.py and a torch.py in the working directory ----


@pytest.mark.parametrize(
    "command", [["doctor"], ["cluster", "check", "--hosts", "localhost"]], ids=["doctor", "cluster-check"]
)
def test_looking_at_a_machine_imports_nothing_from_the_working_directory(stoker: Stoker, command: list[str]) -> None:
    for name in ("json", "torch", "numpy", "ctypes", "importlib_metadata"):
        (stoker.cwd / f"{name}.py").write_text(
            f"open({str(stoker.cwd / 'owned')!r}, 'w').close()\nraise ImportError('planted')\n"
        )
    done = subprocess.run(
        [sys.executable, "-P", "-m", "stoker", *command],
        cwd=stoker.cwd,
        env=stoker.env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "planted" not in done.stdout + done.stderr
    assert not (stoker.cwd / "owned").exists()


def test_a_recipe_imports_nothing_from_the_working_directory(stoker: Stoker) -> None:
    """As where somebody goes to the folder of a model or of data from elsewhere, and trains there."""
    for name in ("json", "torch", "numpy", "stoker"):
        (stoker.cwd / f"{name}.py").write_text(
            f"open({str(stoker.cwd / 'owned')!r}, 'w').close()\nraise ImportError('planted')\n"
        )
    (stoker.cwd / "notes.txt").write_text("\n".join(map(str, range(20_000))))
    command = [sys.executable, "-c", "import sys; del sys.path[0]; from stoker.cli.main import entry; entry()"]
    words = ["train", "pretrain", "--preset", "debug", "--data", "notes.txt", "--max_steps", "2"]
    done = subprocess.run(
        [*command, *words], cwd=stoker.cwd, env=stoker.env, capture_output=True, text=True, timeout=300, check=False
    )
    assert not (stoker.cwd / "owned").exists()
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", ["/nowhere:", ":/nowhere", "."])
def test_an_empty_entry_of_pythonpath_is_not_the_working_directory(tmp_path: Path, path: str) -> None:
    (tmp_path / "planted.py").write_text("print('planted')\n")
    done = subprocess.run(
        [sys.executable, "-c", process.NOT_FROM_HERE + "import planted"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ModuleNotFoundError" in done.stderr and not done.stdout


def test_a_working_directory_that_is_gone_ends_no_question(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os, subprocess, sys; os.rmdir({str(gone)!r}); sys.exit(subprocess.run([sys.executable, '-c', sys.argv[1]]).returncode)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code, process.NOT_FROM_HERE + "print(1)"], cwd=gone, check=False
        ).returncode
        == 0
    )


def test_a_probe_of_a_plan_runs_nothing_of_the_working_directory(stoker: Stoker) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
              "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 256, "rms_norm_eps": 1e-5}  # fmt: skip
    (stoker.cwd / "config.json").write_text(json.dumps(config))
    (stoker.cwd / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    for name in ("json", "shlex", "stoker"):
        (stoker.cwd / f"{name}.py").write_text("open('owned', 'w').close()\nraise SystemExit('owned')\n")
    machine = Path(__file__).parents[1] / "machines" / "h200.json"
    argv = [sys.executable, "-P", "-m", "stoker", "fit", ".", "--data", "rows.jsonl", "--probe"]
    env = {**stoker.environment({"STOKER_MACHINE": str(machine)}), "PYTHONPATH": str(SRC)}
    done = subprocess.run(argv, cwd=stoker.cwd, env=env, capture_output=True, text=True, check=False)
    assert "probe: stoker train sft" in done.stderr, done.stderr
    assert not (stoker.cwd / "owned").exists() and "owned" not in done.stderr, done.stderr


def test_no_program_of_ours_is_started_with_the_working_directory_on_its_path() -> None:
    """`python -m` puts it first; -P does not. A rank is started as its user asks."""
    found = []
    for path in (SRC / "stoker").rglob("*.py"):
        for argv in re.findall(r"sys\.executable,[^\]\)]*", path.read_text()):
            if '"-m"' in argv and '"-P"' not in argv:
                found.append((path.name, argv))
    assert found == []
