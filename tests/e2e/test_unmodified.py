"""Scripts that were not written for Stoker, run as torchrun or python would run them: what they compute, see and print is the same."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Done, Stoker, at_length, at_length_but

SCRIPTS = Path(__file__).parents[1] / "scripts" / "unmodified"

# What a launcher gives a rank: torchrun's variables and our three. Names without a value by hand below would show up as a difference.
GIVEN = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR",
    "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "STOKER_RUN_ID", "STOKER_RUN_DIR", "STOKER_RUN_ORIGIN", "GPU_RANK",
)  # fmt: skip


# ---- what they compute ----


def results(stoker: Stoker, ranks: int, script: str, *args: str) -> list[list[dict[str, Any]]]:
    """Runs it to its good end; per rank, the results its log holds."""
    done = stoker.torch("run", "--nproc-per-node", str(ranks), str(SCRIPTS / script), *args)
    logs = [done.log(rank).decode() for rank in range(ranks)]
    assert done.code == 0, done.err + "".join(logs)
    assert done.verdict["status"] == "completed"
    return [
        [json.loads(line.removeprefix("RESULT ")) for line in log.splitlines() if line.startswith("RESULT ")]
        for log in logs
    ]


def ranks_that_stepped(stoker: Stoker) -> list[int]:
    return sorted(event["rank"] for event in stoker.result().events if event["event"] == "first-step")


@at_length
def test_hugging_face_trainer(stoker: Stoker) -> None:
    (zero,), (one,) = results(stoker, 2, "hf_trainer.py", str(stoker.cwd / "out"))
    for rank, found in enumerate((zero, one)):
        assert (found["rank"], found["world"], found["steps"], found["finite"], found["wrapped"]) == (
            rank,
            2,
            3,
            True,
            "DistributedDataParallel",
        )
    assert zero["before"] == one["before"] != zero["after"] == one["after"]
    assert ranks_that_stepped(stoker) == [0, 1]


@at_length
def test_lightning_sees_torchrun_s_environment(stoker: Stoker) -> None:
    (zero,), (one,) = results(stoker, 2, "lightning_ddp.py")
    for rank, found in enumerate((zero, one)):
        assert (found["environment"], found["launches_itself"]) == ("TorchElasticEnvironment", False)
        assert (found["rank"], found["world"], found["steps"], found["moved"]) == (rank, 2, 3, True)
    assert zero["after"] == one["after"]
    assert zero["pid"] != one["pid"]
    assert ranks_that_stepped(stoker) == [0, 1]


def test_plain_ddp_ends_with_the_same_parameters(stoker: Stoker) -> None:
    (zero,), (one,) = results(stoker, 2, "plain_ddp.py")
    for rank, found in enumerate((zero, one)):
        assert (found["rank"], found["local"], found["world"], found["same"], found["moved"]) == (
            rank,
            rank,
            2,
            True,
            True,
        )
    assert one["given"] and not zero["given"]
    assert zero["losses"] == one["losses"]
    assert zero["losses"][0] != zero["losses"][1] and 0.0 not in zero["losses"]
    assert ranks_that_stepped(stoker) == [0, 1]


def test_sibling_is_found_from_another_folder(stoker: Stoker) -> None:
    stoker.script("neighbour.py", "WHO = 'a stranger in the working directory'\n")
    for (found,) in results(stoker, 2, "sibling_import.py"):
        assert found == {
            "who": "the neighbour in the script's own folder",
            "file": str(SCRIPTS / "neighbour.py"),
            "cwd": str(stoker.cwd),
        }


@at_length
def test_data_loaders_spawn_and_fork(stoker: Stoker) -> None:
    squares = [0, 1, 4, 9, 16, 25, 36, 49]
    for found in results(stoker, 1, "data_loaders.py"):
        assert found == [
            {"method": method, "squares": squares, "workers": [0, 1], "processes": 2, "elsewhere": True}
            for method in ("spawn", "fork")
        ]
    # Two processes on one stream: their line ends may mix, with any launcher.
    assert sorted(re.findall(r"worker \d in __(?:mp_)?main__", stoker.result().log(0).decode())) == [
        "worker 0 in __main__",
        "worker 0 in __mp_main__",
        "worker 1 in __main__",
        "worker 1 in __mp_main__",
    ]


def test_pickle_of_a_main_class_at_exit(stoker: Stoker) -> None:
    for (found,) in results(stoker, 2, "pickle_at_exit.py"):
        assert found == {"module": "__main__", "same_class": True, "equal": True, "step": 7}


def test_children_of_the_script_run_its_functions(stoker: Stoker) -> None:
    for (found,) in results(stoker, 1, "spawned_children.py", "--lr", "3"):
        assert found["codes"] == [0, 0]
        assert [(one["by"], one["number"]) for one in found["found"]] == [
            ("forkserver", 4),
            ("spawn", 2),
            ("torch-0", 20),
        ]
        for one in found["found"]:
            assert (one["module"], one["argv"], one["shim"]) == ("__mp_main__", ["--lr", "3"], [])


# ---- what they see ----


def usual_signals() -> None:
    """A shell that starts the tests in the background leaves SIGINT ignored: python would inherit that, a rank not."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


def hangup_ignored() -> None:
    usual_signals()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


class Pair:
    """The same program twice: by the interpreter alone, and as the only rank of a run."""

    def __init__(self, stoker: Stoker) -> None:
        self.stoker = stoker

    def __call__(
        self,
        program: list[str],
        flags: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        signals: Callable[[], None] = usual_signals,
    ) -> tuple[subprocess.CompletedProcess[bytes], Done]:
        # Not with PYTHONUNBUFFERED and the like of whoever runs the tests: flags are to arrive as flags.
        usual = {name: value for name, value in self.stoker.environment().items() if not name.startswith("PYTHON")}
        cwd, common = self.stoker.cwd, {**usual, **(env or {})}
        by_hand = {**common, **dict.fromkeys(GIVEN, "0")}
        # One pipe for both streams, in the log too: their order is part of what is compared.
        plain = subprocess.run(
            [sys.executable, *flags, *program],
            cwd=cwd,
            env=by_hand,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
            check=False,
            preexec_fn=signals,
        )
        own = subprocess.run(
            [sys.executable, *flags, "-m", "stoker", "run", "--nproc-per-node", "1", *program],
            cwd=cwd,
            env=common,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
            check=False,
            preexec_fn=signals,
        )
        return plain, Done(own.returncode, own.stdout, b"", cwd)

    def assert_same(self, program: list[str], **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        plain, done = self(program, **more)
        assert plain.returncode == 0, plain.stdout.decode()
        assert done.code == 0, done.out
        assert done.verdict["status"] == "completed"
        (*words, alone), (*rank_words, under) = plain.stdout.splitlines(), done.log(0).splitlines()
        assert rank_words == words  # warnings, and what sitecustomize had to say
        python, rank = json.loads(alone), json.loads(under)
        apart = [
            {name: one.pop(name) for name in ("sitecustomize", "inherited")} for one in (python, rank)
        ]  # have tests of their own
        assert sorted(rank["environ"]) == sorted(python["environ"])
        # The one difference in what is compared: a launcher gives its variables values of their own.
        for one in (python, rank):
            one["environ"] = {name: value for name, value in one["environ"].items() if name not in GIVEN}
        assert rank == python
        return {**python, **apart[0]}, {**rank, **apart[1]}


# Not compared, because the shim needs them: sys.excepthook and faulthandler (the error report and a crash's stack), the first entry of
# sys.meta_path until torch and its compiler are imported (the optimizer hook), line buffering of stdout, and the modules all that has imported.


@pytest.fixture
def pair(stoker: Stoker) -> Pair:
    return Pair(stoker)


DEVELOPING = ("-X", "dev", "-W", "error::ResourceWarning")


def program(form: str, cwd: Path) -> list[str]:
    if form == "module":
        shutil.copytree(SCRIPTS / "visible_module", cwd / "visible_module")
        shutil.copy(SCRIPTS / "seen.py", cwd / "visible_module")
        return ["-m", "visible_module", "a", "b"]
    if form == "relative":
        (cwd / "code").mkdir()
        for name in ("visible.py", "seen.py"):
            shutil.copy(SCRIPTS / name, cwd / "code")
        return [os.path.join("code", "visible.py"), "a", "b"]
    if form == "link":  # python takes the folder of what the link points at
        (cwd / "link.py").symlink_to(SCRIPTS / "visible.py")
        return ["link.py", "a", "b"]
    return [str(SCRIPTS / "visible.py"), "a", "b"]


FORMS = ["absolute", "relative", "link", "module"]
SEEN = [(form, flags) for form in FORMS for flags in ((), DEVELOPING)]
SEEN_ALWAYS = [("absolute", ()), ("relative", DEVELOPING), ("link", ()), ("module", DEVELOPING)]


@pytest.mark.parametrize(
    "seen", at_length_but(SEEN_ALWAYS, SEEN), ids=lambda seen: f"{seen[0]}-{'dev' if seen[1] else ''}"
)
def test_a_script_sees_what_it_sees_under_python(pair: Pair, seen: tuple[str, tuple[str, ...]]) -> None:
    form, flags = seen
    python, _ = pair.assert_same(program(form, pair.stoker.cwd), flags=flags)
    # That the probe looks at the real thing:
    assert python["argv"][1:] == ["a", "b"]
    assert python["stack"] == (3 if form == "module" else 1)  # python -m has two frames of runpy below
    assert python["traceback"].count("  File ") == 4 and "stoker" not in python["traceback"].replace(
        str(SCRIPTS), ""
    ).replace(str(pair.stoker.cwd), "")
    assert python["main"]["spec_is_none"] == (form != "module")
    assert python["xoptions"].get("dev", False) == (flags == DEVELOPING)


@pytest.mark.parametrize("flags", ["-B -OO -Wdefault -Xfrozen_modules=off", "-u", "-bb", "-P"])
def test_flags_of_the_interpreter_that_runs_stoker_are_the_rank_s_too(pair: Pair, flags: str) -> None:
    # A module: with -P a script would not find its sibling.
    pair.assert_same(
        program("module", pair.stoker.cwd), flags=tuple(flags.split()), env={"PYTHONPATH": str(pair.stoker.cwd)}
    )


def test_no_open_file_of_the_launcher_is_handed_down(pair: Pair) -> None:
    python, rank = pair.assert_same(program("absolute", pair.stoker.cwd))
    assert rank["inherited"] == python["inherited"]


def test_a_program_started_under_nohup_keeps_ignoring_sighup(pair: Pair) -> None:
    python, _ = pair.assert_same(program("absolute", pair.stoker.cwd), signals=hangup_ignored)
    assert python["signals"]["SIGHUP"] == "1"


PATHS = ["", ":", "HERE", "HERE:", "HERE:missing:HERE", "HERE:../elsewhere"]
FORMS_AND_PATHS = [(form, path) for form in ("absolute", "module") for path in PATHS]


# With -m only those that end in the working folder, which it puts in front itself.
@pytest.mark.parametrize(
    "case",
    at_length_but(
        [*(("absolute", path) for path in ("", "HERE:", "HERE:missing:HERE", "HERE:../elsewhere")), ("module", ":")],
        FORMS_AND_PATHS,
    ),
)
def test_pythonpath_is_the_user_s_own(pair: Pair, case: tuple[str, str]) -> None:
    form, path = case
    mine = pair.stoker.cwd / "mine"
    mine.mkdir()
    python, _ = pair.assert_same(program(form, pair.stoker.cwd), env={"PYTHONPATH": path.replace("HERE", str(mine))})
    assert (str(mine) in python["path"]) == ("HERE" in path)
    assert python["pythonpath"] == path.replace("HERE", str(mine))


NOTES = """import os, sys
sys.customized = [*getattr(sys, "customized", []), {"by": __file__, "path": list(sys.path), "environ": sorted(os.environ), "argv": sys.argv}]
"""
# How tracers chain: step aside, let the next sitecustomize on the path run.
CHAINED = NOTES + "sys.path.remove(os.path.dirname(__file__)); del sys.modules['sitecustomize']\nimport sitecustomize\n"


@pytest.mark.parametrize(
    ("texts", "runs"),
    [
        pytest.param([NOTES], 1, id="one"),
        pytest.param([CHAINED, NOTES], 2, id="chained"),
        pytest.param([NOTES, NOTES], 1, id="first-of-two", marks=at_length),
        pytest.param([NOTES + "1 / 0\n"], 1, id="fails"),
        pytest.param([NOTES + "import no_such_thing\n"], 1, id="fails-to-import", marks=at_length),
        pytest.param([NOTES + "print('said by sitecustomize', file=sys.stderr)\n"], 1, id="prints"),
    ],
)
def test_the_user_s_own_sitecustomize_runs_exactly_once(pair: Pair, texts: list[str], runs: int) -> None:
    folders = [pair.stoker.cwd / f"site{number}" for number in range(len(texts))]
    for folder, text in zip(folders, texts, strict=True):
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(text)
    python, rank = pair.assert_same(
        program("absolute", pair.stoker.cwd), env={"PYTHONPATH": os.pathsep.join(map(str, folders))}
    )
    ran = [str(folder / "sitecustomize.py") for folder in folders[:runs]]
    assert [one["by"] for one in rank["customized"]] == ran
    assert rank["sitecustomize"] == python["sitecustomize"]


def test_no_module_of_ours_is_left_under_sitecustomize_s_name(pair: Pair) -> None:
    python, rank = pair.assert_same(program("absolute", pair.stoker.cwd))
    assert rank["sitecustomize"] == python["sitecustomize"]


# ---- how they fail ----


EXCEPTIONS = (
    "chained",
    "grouped",
    "unprintable",
    "surrogate",
    "recursion",
    "broken_import",
    "missing_import",
    "thread_first",
)


WAYS = (*EXCEPTIONS, "exit_text", "exit_number", "interrupt")
ALIKE = {"surrogate", "broken_import", "exit_number"}  # unprintable, missing_import and exit_text are of their kind


@pytest.mark.parametrize("way", at_length_but(set(WAYS) - ALIKE, WAYS))
def test_a_failure_is_printed_as_python_prints_it(pair: Pair, way: str) -> None:
    pair.stoker.script("broken_module.py", "def f(:\n    pass\n")
    plain, done = pair([str(SCRIPTS / "fails.py"), way], env={"PYTHONPATH": str(pair.stoker.cwd)})
    assert done.log(0) == plain.stdout
    assert plain.stdout or way == "exit_number"
    assert done.code == (plain.returncode if plain.returncode > 0 else 128 - plain.returncode)
    assert done.verdict["status"] == "failed"


def test_a_file_that_hides_a_module_the_report_needs_is_named(pair: Pair) -> None:
    """linecache and traceback import tokenize, and that imports token."""
    hiding = pair.stoker.script(
        "token.py", "from dataclasses import dataclass\n\n@dataclass\nclass Tokens:\n    end: int = 1\n"
    )
    script = pair.stoker.script("with_token.py", "import inspect\n")
    plain, done = pair([str(script)])
    assert done.log(0) == plain.stdout
    if plain.returncode == 0:
        pytest.skip("this Python imports token when it starts, so that no file hides it")
    assert done.verdict["cause"] == "env.shadowed" and str(hiding) in done.verdict["summary"]


@pytest.mark.parametrize("way", ["own_hook", "hook_on_top", "original_hook", "broken_hook"])
def test_a_replaced_excepthook_hides_nothing_from_the_verdict(pair: Pair, way: str) -> None:
    script = SCRIPTS / "fails.py"
    line = next(
        number
        for number, text in enumerate(script.read_text().splitlines(), 1)
        if f'raise LookupError("{way}")  # here' in text
    )
    plain, done = pair([str(script), way])
    assert done.log(0) == plain.stdout
    assert plain.stdout
    assert done.code == plain.returncode == 1
    verdict = done.verdict
    assert (verdict["status"], verdict["cause"], verdict["rank"], verdict["exit_code"]) == (
        "failed",
        "rank.exception",
        0,
        1,
    )
    assert f"LookupError: {way} at {script}:{line}" in verdict["summary"]
