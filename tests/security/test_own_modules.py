"""A package in the folder that holds Stoker never stands in for a module of the standard library: not in the launcher's
agent, not in a rank.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import stoker as package

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
