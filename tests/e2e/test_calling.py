"""stoker.launch: a function in every rank of a run, from a script, from stdin as a REPL would have it, from captured output as in a notebook."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker, at_length, tagged, wait_for

SCRIPT = """
import functools, json, os, sys
import stoker

def rank(): return int(os.environ["RANK"])
def scaled(factor, add=0): return {"value": rank() * factor + add, "sentinel": os.environ.get("SENTINEL"), "argv": sys.argv[1:], "file": __file__, "world": os.environ["WORLD_SIZE"]}
def fails(): raise ValueError("boom") if rank() == 1 else SystemExit(0)
def leaves(): sys.exit(0)
def again():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank() == 1: sys.exit(3)
    return os.environ["TORCHELASTIC_RESTART_COUNT"]
def unsendable(): return lambda: 1

if __name__ == "__main__":
    tell = lambda **found: print(json.dumps(found), flush=True)
    def failure(*args, **options):
        try: stoker.launch(*args, **options)
        except stoker.LaunchFailed as failed: return [failed.cause, failed.rank, failed.exit_code, os.path.basename(failed.run_dir).partition("-")[2][7:], failed.traceback.splitlines()[-1:], str(failed).splitlines()[0]]
    exec(sys.stdin.read())
"""


def calls(stoker: Stoker, text: str, **more: Any) -> tuple[list[Any], str]:
    """What a script with these calls tells, line by line, and its stderr."""
    path = stoker.cwd / stoker.script("caller.py", SCRIPT)
    done = subprocess.run(
        [sys.executable, str(path), "own argument"],
        input=text,
        cwd=stoker.cwd,
        env=stoker.env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **more,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")], done.stderr


def test_results_by_rank(stoker: Stoker) -> None:
    (plain, partial, none, restarted), _ = calls(
        stoker,
        (
            "tell(got=stoker.launch(scaled, 10, nproc=2, env={'SENTINEL': 'x'}))\n"
            "tell(got=stoker.launch(functools.partial(scaled, add=5), 1, nproc=1))\n"
            "tell(got=stoker.launch(leaves, nproc=2))\n"
            "tell(got=stoker.launch(again, nproc=2, max_restarts=1))\n"
        ),
    )
    for rank in (0, 1):
        seen = plain["got"][str(rank)]
        assert (seen["value"], seen["sentinel"], seen["argv"], seen["world"]) == (
            rank * 10,
            "x",
            ["own argument"],
            "2",
        ) and seen["file"].endswith("caller.py")
    assert (
        partial["got"]["0"]["value"] == 5
        and none["got"] == {"0": None, "1": None}
        and restarted["got"] == {"0": "1", "1": "1"}
    )
    names = sorted(path.name.partition("-")[2][7:] for path in (stoker.cwd / "runs").iterdir() if not path.is_symlink())
    assert names == ["again", "call", "leaves", "scaled"]
    assert not list(Path(os.environ.get("TMPDIR", "/tmp")).glob("stoker-launch-*/leaves.py"))


def test_failures_carry_the_verdict(stoker: Stoker) -> None:
    (told,), err = calls(
        stoker,
        (
            "tell(exception=failure(fails, nproc=2), refused=failure(scaled, 1, nproc=0), back=failure(unsendable, nproc=1, show='none'), "
            "taken=failure(scaled, 1, nproc=1, gpus='7'))\n"
        ),
    )
    cause, rank, code, name, last, text = told["exception"]
    assert (cause, rank, code, name, last) == (
        "rank.exception",
        1,
        1,
        "fails",
        ["ValueError: boom"],
    ) and "caller.py" in text
    assert told["refused"][:3] == ["launch.refused", None, 64] and "from 1 up" in told["refused"][5]
    assert (
        told["back"][0] == "rank.exception"
        and "the result of unsendable can't be sent back to the caller" in told["back"][5]
    )
    assert told["taken"][:3] == ["gpu.too-few", None, 69]
    assert "ValueError: boom" in err


def test_mistakes_of_the_caller(stoker: Stoker) -> None:
    (told,), _ = calls(
        stoker,
        (
            "def error(*args, **options):\n"
            "    try: stoker.launch(*args, **options)\n"
            "    except Exception as problem: return f'{type(problem).__name__}: {problem}'\n"
            "tell(typo=error(scaled, 1, max_restart=2), hosts=error(scaled, 1, hosts='a,b'), lock=error(scaled, __import__('threading').Lock()))\n"
        ),
    )
    assert told["typo"] == "TypeError: stoker.launch has no option 'max_restart' (did you mean max_restarts?)"
    assert (
        told["hosts"].startswith("TypeError: stoker.launch has no option 'hosts'")
        and "cannot pickle '_thread.lock' object" in told["lock"]
    )
    assert not (stoker.cwd / "runs").exists()


def test_a_call_without_the_guard_is_explained(stoker: Stoker) -> None:
    script = stoker.script("bare.py", "import stoker\ndef f(): return 1\nprint(stoker.launch(f, nproc=1))\n")
    done = subprocess.run(
        [sys.executable, script],
        cwd=stoker.cwd,
        env=stoker.env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and "put the call below  if __name__ == '__main__':" in done.stderr
    assert len([path for path in (stoker.cwd / "runs").iterdir() if not path.is_symlink()]) == 1, (
        "it must not start itself again"
    )
    (stoker.cwd / "own.py").write_text("import os\ndef f(n): return n + int(os.environ['RANK'])\n")
    script = stoker.script(
        "bare2.py", "import stoker, own\nprint(stoker.launch(own.f, 3, nproc=2))\n"
    )  # a function of a module needs no guard
    done = subprocess.run(
        [sys.executable, script],
        cwd=stoker.cwd,
        env=stoker.env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.endswith("{0: 3, 1: 4}\n"), done.stderr


TYPED = """
import dataclasses, enum, functools, json, os, xml.dom.minidom
import stoker
@dataclasses.dataclass
class Config:
    width: int = 4
    names: list = dataclasses.field(default_factory=list)
    def wider(self): return dataclasses.replace(self, width=self.width * FACTOR)

class Base:
    __slots__ = ("kept",)
    def __init__(self, kept): self.kept = kept

class Net(Base):
    count = 0
    def __init__(self, width):
        super().__init__(width)
        Net.count += 1
    @property
    def size(self): return scale(self.kept)
    @staticmethod
    def kind(): return "net"
    @classmethod
    def made(cls): return cls.count

class Colour(enum.Enum):
    RED = 1

FACTOR = 3
data = open(os.devnull)
def scale(x): return x * FACTOR

def depth(n): return 0 if n == 0 else 1 + depth(n - 1)

def adder(n):
    def add(x): return x + n
    return add

def train(config, add):
    net = Net(config.width)
    wide = config.wider()
    return {"size": net.size, "kind": Net.kind(), "made": Net.made(), "config": wide, "isa": isinstance(wide, Config), "depth": depth(3), "add": add(1), "xml": xml.dom.minidom.parseString("<a/>").documentElement.tagName, "lambda": (lambda: config.names)(), "data": getattr(config, "data", None)}

out = stoker.launch(train, Config(4, ["a"]), adder(6), nproc=2, quiet=True, show="none")
print(json.dumps([out[0] == out[1], type(out[0].pop("config")) is Config, out[0]]))
k = 7
print(json.dumps(stoker.launch(lambda x: x + k, 1, nproc=1, quiet=True, show="none")))
def colours(): return Colour.RED

try: stoker.launch(colours, nproc=1)
except ValueError as problem: print(json.dumps(str(problem)))

import contextlib, io
def say(): print("hello from", os.environ["RANK"])

out, err = io.StringIO(), io.StringIO()
with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    results = stoker.launch(say, nproc=2)

print(json.dumps([sorted(out.getvalue().splitlines()), "all 2 ranks ended with exit code 0" in err.getvalue()]))
"""


@pytest.mark.parametrize("how", [["-"], ["-i", "-q"]])
def test_typed_into_a_repl(stoker: Stoker, how: list[str]) -> None:
    """Nothing has a file that a rank could import: functions and classes go by value. And stdin stays the REPL's."""
    done = subprocess.run(
        [sys.executable, *how],
        input=TYPED,
        cwd=stoker.cwd,
        env=stoker.env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("[", "{", '"'))]
    assert done.returncode == 0 and len(told) == 4, done.stderr
    want = {
        "size": 12,
        "kind": "net",
        "made": 1,
        "isa": True,
        "depth": 3,
        "add": 7,
        "xml": "a",
        "lambda": ["a"],
        "data": None,
    }
    assert told[0] == [True, True, want]
    assert told[1] == {"0": 8}
    assert told[2] == "Colour is an Enum that other processes can't import: put it into a .py file and import it"
    assert told[3] == [["CPU0:hello from 0", "CPU1:hello from 1"], True]


SLEEPS = """
import os, signal, sys, time, stoker
def save(*_): open("saved-" + os.environ["RANK"], "w").close(); sys.exit(0)
def work():
    for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, save)
    open("up-" + os.environ["RANK"], "w").close()
    time.sleep(100)
if __name__ == "__main__":
    try: stoker.launch(work, nproc=2)
    except KeyboardInterrupt: print("interrupted", flush=True); sys.exit(7)
"""


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 7), (signal.SIGTERM, -15), (signal.SIGKILL, -9)])
def test_the_run_ends_with_its_caller(stoker: Stoker, signum: signal.Signals, code: int) -> None:
    """Ctrl-C is passed on; a caller that dies takes the run along. Either way the ranks may save, and nothing is left."""
    caller = subprocess.Popen(
        [sys.executable, stoker.script("s.py", SLEEPS)],
        cwd=stoker.cwd,
        env=stoker.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert wait_for(lambda: True if len(list(stoker.cwd.glob("up-*"))) == 2 else None, 30)
    caller.send_signal(signum)
    out, _ = caller.communicate(timeout=60)
    assert caller.returncode == code and (b"interrupted" in out) == (signum == signal.SIGINT)
    assert wait_for(lambda: True if not tagged(stoker.cwd) else None, 30), tagged(stoker.cwd)
    assert wait_for(lambda: True if len(list(stoker.cwd.glob("saved-*"))) == 2 else None, 10)
    assert wait_for(lambda: True if (stoker.latest / "verdict.json").exists() else None, 10)
    assert stoker.result().verdict["cause"] == "launch.stopped"


def test_importing_stoker_stays_light() -> None:
    code = "import sys; before = set(sys.modules); import stoker; stoker.launch; stoker.LaunchFailed; print(*sorted(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in loaded if not name.startswith("stoker")] in ([], ["__future__"])
    assert "stoker.calling" not in loaded and not any(name.startswith("stoker.control.launch") for name in loaded)


@at_length
def test_a_module_of_torch_from_a_repl(stoker: Stoker) -> None:
    text = """
import stoker, torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 1, bias=False)
        nn.init.ones_(self.line.weight)
    def forward(self, x): return self.line(x)

def train(net):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = Net()(torch.ones(4)) + net(torch.ones(4))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()

print(stoker.launch(train, Net(), nproc=2, show="none", quiet=True))
"""
    done = subprocess.run(
        [sys.executable, "-"],
        input=text,
        cwd=stoker.cwd,
        env=stoker.environment({"OMP_NUM_THREADS": "1"}),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout == "{0: 16.0, 1: 16.0}\n", done.stderr
