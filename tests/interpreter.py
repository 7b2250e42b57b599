"""The interpreter of the tests and of all that they start: a private virtual environment in front of the one they were started with.

- It needs no PYTHONPATH, where the tests were started with one. Tests set PYTHONPATH themselves, or compare what a script sees
  with and without Stoker. With `PYTHONPATH=src pytest` their children would lose Stoker. So its entries are in a .pth file here.
- Its torch is lighter_torch.py's, but for `bash test.sh --all` and for a machine with a GPU, where kernels are compiled.

It becomes sys.executable: the tests start every child with that.
"""

from __future__ import annotations

import atexit
import os
import shutil
import site
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

NAME = "as_the_tests_were_started.pth"


def own_interpreter(lighter: bool) -> None:
    path = os.environ.pop("PYTHONPATH", "")
    entries = [os.path.abspath(entry) for entry in path.split(os.pathsep) if entry]
    if os.path.exists(os.path.join(sysconfig.get_path("purelib"), NAME)) or not (entries or lighter):
        return
    py_spy = Path(sys.executable).with_name("py-spy")
    home = Path(tempfile.mkdtemp(prefix="stoker-tests-python-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    venv.create(home, symlinks=True, with_pip=False)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(home), "platbase": str(home)}))
    # PYTHONPATH comes before installed packages; addsitedir reads their own .pth files, too.
    installed = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    lines = [*entries, *(f"import site; site.addsitedir({folder!r})" for folder in installed if os.path.isdir(folder))]
    if lighter:
        import lighter_torch  # noqa: F401  # for this process, and for workers that are forked from it

        shutil.copy(Path(__file__).with_name("lighter_torch.py"), packages)
        lines.append("import lighter_torch")
    (packages / NAME).write_text("\n".join(lines) + "\n")
    if py_spy.exists():  # an installation has it next to its Python
        (home / "bin" / "py-spy").symlink_to(py_spy)
    sys.executable = str(home / "bin" / "python")
