"""`stoker train` of one rank without the launcher: the stage's recipe as torchrun would start it, in a process forked from one
that has torch already. For tests of what a stage learns, writes and prints; the command and its launcher have tests of their own.

One such process per worker of pytest, started by the first recipe.
"""

from __future__ import annotations

import atexit
import functools
from contextlib import ExitStack

from conftest import Done, Stoker
from forked_ranks import Server, program, server

_PROGRAM = program("""
from importlib import import_module
import torch, torch._dynamo  # the first optimizer imports the second
from stoker.training.recipes import dpo, reward, sft, stage

def work(job, rank):
    return stage.run(import_module("stoker.training.recipes." + job["stage"]).main, job["words"])
""")


@functools.cache
def _server() -> Server:
    held = ExitStack()
    atexit.register(held.close)
    return held.enter_context(server(_PROGRAM))


def trained(stoker: Stoker, words: list[str]) -> Done:
    """`words`: train STAGE --name NAME and the settings, whose paths are absolute. The run is in runs/, as the command leaves it."""
    command, stage, flag, name, *settings = words
    assert (command, flag) == ("train", "--name")
    folder = stoker.cwd / f"forked-{name}"
    _server().begin(1, folder, stage=stage, words=settings)
    (code,) = _server().codes()
    said = (folder / "rank-0.log").read_bytes()
    for run in (folder / "runs").glob("torchrun-*"):
        (stoker.cwd / "runs").mkdir(exist_ok=True)
        run.rename(stoker.cwd / "runs" / f"forked-{name}")
    return Done(code, said, said, stoker.cwd)
