"""`stoker chat` and `stoker export` in a process forked from one that has torch already: the same code, without torch's seconds.

One such process per worker of pytest, started by the first command. `bash test.sh --all` starts each command by itself.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from forked_ranks import Server, program, server

COMMANDS = ("chat", "export")

_PROGRAM = program("""
import torch
import stoker.cli.chat, stoker.cli.export
import stoker.training.generate.conversation, stoker.training.generate.exporting, stoker.training.generate.gguf_file
from stoker.cli.main import main

def work(job, rank):
    os.environ.clear()
    os.environ.update(job["env"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for handle, path in ((1, job["out"]), (2, job["err"])):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), handle)
    os.chdir(job["cwd"])
    torch.set_num_threads(1)
    sys.argv = ["stoker", *job["words"]]
    return main()
""")


@functools.cache
def _server() -> tuple[Server, Path]:
    held = ExitStack()
    atexit.register(held.close)
    folder = Path(tempfile.mkdtemp(prefix="stoker-tests-commands-"))
    held.callback(shutil.rmtree, folder, ignore_errors=True)
    return held.enter_context(server(_PROGRAM)), folder


def run(words: tuple[str, ...], cwd: Path, env: dict[str, str]) -> tuple[int, bytes, bytes]:
    """Exit code, stdout, stderr."""
    forks, folder = _server()
    out, err = folder / "out", folder / "err"
    for path in (out, err):
        path.unlink(missing_ok=True)
    forks.begin(1, folder, words=words, cwd=str(cwd), env=env, out=str(out), err=str(err))
    (code,) = forks.codes()
    return code, out.read_bytes(), err.read_bytes()
