"""The tests' own promises: `test.sh --all` runs the complete suites, names of tests are short, a file of tests changes nothing for
the next one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ID_LENGTH, at_length, pytest_make_parametrize_id
from faults.cases import CASES
from healthy.shapes import SHAPES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("everything", [False, True], ids=["default", "all"])
def test_all_runs_every_fault_and_every_healthy_shape(everything: bool) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("STOKER_", "PYTEST_"))}
    planned = subprocess.run(
        [
            sys.executable, "-m", "pytest", "--setup-plan", "-q", "-rs", "-p", "no:cacheprovider", "tests/e2e/test_faults.py", "tests/e2e/test_healthy.py",
            "-k", "test_the_verdict_names_the_cause or test_it_is_left_alone",
        ],
        cwd=ROOT,
        env={**env, **({"STOKER_TEST_ALL": "1"} if everything else {}), "COLUMNS": "500"},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert planned.returncode == 0, planned.stdout + planned.stderr
    skipped = re.findall(
        r"SKIPPED \[(\d+)\] tests/[\w/]+\.py:\d+: runs with: bash test\.sh --all$", planned.stdout, re.M
    )
    others = [sum(not case.ci for case in CASES), sum(not shape.in_ci for shape in SHAPES)]
    assert list(map(int, skipped)) == ([] if everything else others), planned.stdout
    assert len(re.findall(r"tests/\S+::\S+\[", planned.stdout)) == len(CASES) + len(SHAPES) - sum(map(int, skipped))


# In the place of .venv's python. pytest waits for a signal where it is told to, as one that still runs does.
STAND_IN = f"""#!{sys.executable}
import os, signal, sys, time
words = " ".join(sys.argv[1:])
(name,) = (one for one in ("pytest", "mypy", "importlinter", "ruff format", "ruff check") if one in words)

def write(text):
    with open("steps", "a") as steps:
        steps.write(text + "\\n")

if name == "pytest":
    print("all=" + os.environ.get("STOKER_TEST_ALL", ""), words)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as conftest.py does
write("begun " + name)
try:
    time.sleep(100 if os.environ.get("WAITS") == name else 0)
except KeyboardInterrupt:
    sys.exit(write("interrupted " + name))
while os.environ.get("WAITS") and "begun pytest\\n" not in open("steps").readlines() and name in ("mypy", "importlinter"):
    time.sleep(0.02)
print("the words of", name)
write("done " + name)
sys.exit(7 if os.environ.get("FAILS") == name else 0)
"""


def run_test_sh(folder: Path, *words: str, **env: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """test.sh itself, with stand-ins for what it calls, and the steps that were made."""
    (folder / "test.sh").write_text((ROOT / "test.sh").read_text())
    (folder / "setup.sh").write_text("exit 0\n")
    (folder / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "tests" / "__pycache__").mkdir(
        parents=True, exist_ok=True
    )  # or it would compile the tests where a GPU is
    python = folder / ".venv" / "bin" / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    (folder / "steps").unlink(missing_ok=True)
    given = {name: value for name, value in os.environ.items() if name != "STOKER_TEST_ALL"}
    done = subprocess.run(
        ["bash", folder / "test.sh", *words], env={**given, **env}, capture_output=True, text=True, check=False
    )
    return done, (folder / "steps").read_text().splitlines()


def test_test_sh_all_sets_the_variable_that_chooses_them(tmp_path: Path) -> None:
    for words, chosen in (((), "all= "), (("--all",), "all=1 ")):
        done, steps = run_test_sh(tmp_path, *words, "-k", "some")
        line = [line for line in done.stdout.splitlines() if line.startswith("all=")][-1]
        assert done.returncode == 0 and line.startswith(chosen) and line.endswith("-k some") and "--all" not in line
        assert sorted(steps) == sorted(f"{what} {step}" for step in STEPS for what in ("begun", "done"))


STEPS = {"ruff check": "ruff", "ruff format": "format", "mypy": "mypy", "importlinter": "imports", "pytest": "pytest"}


@pytest.mark.parametrize("fails", STEPS)
def test_test_sh_ends_with_the_step_that_fails_and_its_code(fails: str, tmp_path: Path) -> None:
    """mypy and the import rules run beside the tests: these are stopped, and not waited for."""
    beside = fails in ("mypy", "importlinter")
    done, steps = run_test_sh(tmp_path, FAILS=fails, WAITS="pytest" if beside else "")
    assert done.returncode == 7 and f"the words of {fails}" in done.stdout, done.stdout + done.stderr
    assert f"== {STEPS[fails]}\n" in done.stdout
    assert (f"{STEPS[fails]} failed with exit code 7; stopping the tests" in done.stderr) == beside
    assert ("interrupted pytest" in steps) == beside and ("done pytest" in steps) == (fails == "pytest")
    assert fails == "pytest" or "begun importlinter" not in steps or fails == "importlinter"


@pytest.mark.parametrize("value", [b"x" * 65536, b"\0" * 65536, "\x1b[2J" * 1000, "\ud800" * 1000])
def test_a_huge_parameter_has_a_short_name(value: str | bytes, request: pytest.FixtureRequest) -> None:
    made = pytest_make_parametrize_id(value, "value")
    assert made is not None and made.isprintable() and len(made) <= ID_LENGTH and f"[{made}]" in request.node.nodeid
    assert pytest_make_parametrize_id(value + value, "value") != made
    assert pytest_make_parametrize_id("short", "value") is None
    assert max(len(item.nodeid) for item in request.session.items) < 400


LEAVES = {
    "test_a.py": "def test_tidy(monkeypatch): monkeypatch.setenv('LEFT', '1')",
    "test_b.py": """
import os
from stoker.control.doctor.check import check
def test_sets(): os.environ["LEFT"] = "1"
def test_adds(): check("toy.one")(lambda machine: iter(()))
""",
    "test_c.py": "def test_behind(): pass",
}


def test_a_file_that_leaves_something_behind_fails_by_its_own_name(tmp_path: Path) -> None:
    beside = f"import sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\nfrom left_behind import leaves_nothing_behind\n"
    for name, text in {"conftest.py": beside, **LEAVES}.items():
        (tmp_path / name).write_text(text)
    words = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if name != "CI"}  # with it summaries are longer
    argv = [sys.executable, "-m", "pytest", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=env)
    (line,) = re.findall("AssertionError: this file left behind: (.*)", done.stdout)
    assert line == "$LEFT was None and is '1'; checks from outside was [] and is ['toy.one']"
    assert "test_b.py::test_adds\n" in done.stdout and "4 passed, 1 error" in done.stdout, done.stdout


def in_lighter_torch(script: str) -> list[str]:
    """What a process prints whose torch is lighter_torch.py's, whatever this one has."""
    words = [sys.executable, "-c", "import sys; sys.path.insert(0, sys.argv[1]); import lighter_torch\n" + script]
    done = subprocess.run([*words, str(ROOT / "tests")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


STEP = """
import torch, torch.utils.checkpoint
torch.use_deterministic_algorithms(True)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
with torch.compiler.set_stance("force_eager"):
    inputs = torch.randn(1, 2, generator=torch.Generator())
    torch.utils.checkpoint.checkpoint(model, inputs, use_reentrant=False).sum().backward()
optimizer.step()
print(*(name for name in lighter_torch.DEFERRED if type(sys.modules.get(name)) is lighter_torch.Deferred))
"""


def test_a_training_step_needs_nothing_of_what_the_tests_torch_leaves_for_later() -> None:
    pytest.importorskip("torch")
    (left,) = in_lighter_torch(STEP)
    assert {"torch.export", "torch._meta_registrations", "torch._dynamo", "torch._inductor.config"} <= set(left.split())
    assert {"torch.masked", "torchgen.model"} <= set(left.split())


@at_length
def test_what_the_tests_torch_leaves_for_later_is_there_when_asked_for() -> None:
    pytest.importorskip("torch")
    asks = """
from torch._dynamo.exc import Unsupported
import torch._dynamo.exc
print(Unsupported is torch._dynamo.exc.Unsupported, torch._inductor.config.deterministic)
print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item(), torch.export.export.__name__)
print(torch.masked.sum(torch.ones(2), mask=torch.tensor([True, False])).item(), torch.masked.masked_tensor.__name__)
import torchgen.model
print(torchgen.model.FunctionSchema.parse("add(Tensor a) -> Tensor").name)
print(*(name for name in lighter_torch.DEFERRED if type(sys.modules.get(name)) is lighter_torch.Deferred))
"""
    done = in_lighter_torch(STEP + asks)[1:]
    assert done[:-1] == ["True True", "2.0 export", "1.0 masked_tensor", "add"]
    assert {*done[-1].split()} <= {"numpy._core._add_newdocs", "numpy._core._add_newdocs_scalars", "pynvml"}
