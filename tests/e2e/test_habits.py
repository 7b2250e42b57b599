"""Words of other tools: commands and flags that people type from habit, and what TAB offers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import stoker as package
from conftest import Stoker
from stoker.cli import chat, main
from stoker.contract.errors import Refusal
from stoker.contract.units import parse_duration, plural
from stoker.control.verdict.rules.environment import install_advice
from stoker.training.config.flags import parse
from stoker.training.config.layers import gather

SOURCE = Path(package.__file__).parents[1]


@pytest.mark.parametrize(("word", "command"), main.ALIASES.items())
def test_a_word_of_another_tool_is_the_command(stoker: Stoker, word: str, command: str) -> None:
    habit, ours = stoker(word, "--help"), stoker(command, "--help")
    assert (habit.code, habit.out) == (ours.code, ours.out) == (0, ours.out) and ours.out


def test_a_word_with_another_meaning_is_answered(stoker: Stoker) -> None:
    for word, meant in {"torchrun": "stoker run", "sft": "stoker train sft", "nvitop": "stoker top"}.items():
        done = stoker(word, "x")
        assert done.code == 64 and f"did you mean `{meant}`?" in done.err and done.err.count("\n") == 1, done.err
    commands = {word.split()[1] for word in main.SUGGESTED.values()}
    assert commands <= main.COMMANDS.keys() and not main.SUGGESTED.keys() & main.COMMANDS.keys()


def test_help_lists_every_command_once_in_groups_of_80_columns(stoker: Stoker) -> None:
    lines = stoker("--help").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line[:-1] for line in lines if line.endswith(":") and not line.startswith(" ")] == list(main.GROUPS)
    listed = [line.split()[0] for line in lines if line.startswith("  ") and line.split()[0] in main.COMMANDS]
    assert listed == list(main.COMMANDS)


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--steps", "7"], {"train.max_steps": 7}),
        (["--bf16"], {"compute.dtype": "bf16"}),
        (["--fp16", "false"], {"compute.dtype": "auto"}),
        (["--wandb"], {"train.log_to": "wandb"}),
        (["--checkpoint.every", "5 min"], {"checkpoint.every": 300.0}),
        (["--checkpoint.every", "500 steps"], {"checkpoint.every_steps": 500, "checkpoint.every": 0.0}),
        (["--every=1 step"], {"checkpoint.every_steps": 1, "checkpoint.every": 0.0}),
        (["--checkpoint.every", "600.0"], {"checkpoint.every": 600.0}),
        (["--checkpoint.every", "0"], {"checkpoint.every": 0.0}),
    ],
)
def test_a_flag_of_another_trainer(words: list[str], values: dict[str, object]) -> None:
    assert gather(parse(words), {}).flags.values == values


def test_a_number_without_a_unit_is_refused_with_both_ways_to_write_it() -> None:
    with pytest.raises(Refusal, match=r"--checkpoint.every: 500 of what\? write 500s, 500m or '500 steps'"):
        gather(parse(["--checkpoint.every", "500"]), {})
    assert parse_duration("1h 30 min 5 sec") == 5405


def test_tab_offers_runs(stoker: Stoker) -> None:
    pytest.importorskip("shtab")
    for name in ("20261115-031402-exp1", "20261116-031402-train", "slurm"):
        (stoker.cwd / "runs" / name).mkdir(parents=True)
    (stoker.cwd / "complete.sh").write_text(stoker("completion", "bash").out)
    asked = (
        'source complete.sh; COMP_WORDS=(stoker why e); COMP_CWORD=2; _shtab_stoker; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", asked], cwd=stoker.cwd, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["exp1"], done.stdout + done.stderr
    done = subprocess.run(
        ["bash", "-c", asked.replace("why e", "why 2026")], cwd=stoker.cwd, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["20261115-031402-exp1", "20261116-031402-train"], done.stdout + done.stderr


def test_chat_answers_slash_words_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    from stoker.training.generate.conversation import Conversation

    talk = Conversation.__new__(Conversation)
    talk._turns, talk._dropped = [("user", b"hello")], True
    typed = iter(["/help", "/new", "/what", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    monkeypatch.setattr(chat, "_print_answer", lambda *_, **__: pytest.fail("it went to the model"))
    assert chat._converse(talk) == 0
    said = capsys.readouterr().err
    assert said.count("/quit or Ctrl-D exits") == 2 and "unknown command /what" in said and talk._turns == []


@pytest.mark.parametrize(
    ("platform", "way_out"), [("win32", "WSL2"), ("darwin", "MPS"), ("freebsd14", "this is freebsd14")]
)
def test_another_system_is_refused_in_a_line(
    platform: str, way_out: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert main.main(["run", "train.py"]) == 69
    line = capsys.readouterr().err
    assert way_out in line and line.count("\n") == 1


@pytest.mark.parametrize("words", ["--help", "docs", "docs verdicts", "no-such-command"])
def test_a_reader_that_is_gone_gets_no_traceback(stoker: Stoker, words: str) -> None:
    command = f'"{sys.executable}" -m stoker {words} | true; echo "${{PIPESTATUS[0]}}"'
    env = stoker.environment()
    done = subprocess.run(["bash", "-c", command], cwd=stoker.cwd, env=env, capture_output=True, text=True, check=False)
    assert done.stdout == ("64\n" if "such" in words else "0\n") and "Error" not in done.stderr, done.stderr
    assert "Exception" not in done.stderr


def test_output_that_can_not_be_written_is_one_line(stoker: Stoker) -> None:
    command = [sys.executable, "-m", "stoker", "docs", "verdicts"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, env=stoker.environment(), stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 71 and done.stderr.count("\n") == 1 and "No space left" in done.stderr, done.stderr


def test_a_package_that_only_training_needs_is_named(stoker: Stoker) -> None:
    (stoker.cwd / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')\n")
    stoker.script("book.txt", "a line\n" * 2000)
    done = stoker("train", "pretrain", "--debug", "--data", "book.txt", env={"PYTHONPATH": f"{stoker.cwd}:{SOURCE}"})
    line = done.err.splitlines()[-1]
    assert done.code == 69 and "needs the package numpy" in line, done.err
    assert "pip install '.[train]'" in line and ".whl[train]" in line, "from the clone or the wheel"


def test_nothing_is_installed_by_the_name_stoker_which_is_somebody_elses_on_pypi() -> None:
    command = re.compile(r"install[^\n`]*?[\s'\"]stoker(?![\w./-])")
    pages = [*SOURCE.parent.glob("*.md"), *SOURCE.parent.glob("docs/*.md"), *SOURCE.rglob("*.py")]
    assert (
        len(pages) > 300 and command.search("pip install 'stoker[train]'") and command.search("pip install -U stoker")
    )
    assert [f"{page}: {line}" for page in pages for line in command.findall(page.read_text())] == []


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [(1, "row", "1 row"), (0, "row", "0 rows"), (12000, "token", "12,000 tokens"), (2, "pass", "2 passes"),
     (3, "entry", "3 entries"), (2, "day", "2 days"), (2, "process", "2 processes"), (1, "process", "1 process")],
)  # fmt: skip
def test_a_number_and_its_noun_agree(count: int, noun: str, text: str) -> None:
    assert plural(count, noun) == text


def test_one_row_is_not_one_rows(stoker: Stoker) -> None:
    stoker.script("one.jsonl", '{"text": "a"}\n')
    done = stoker("data", "show", "one.jsonl")
    assert "1 row\n" in done.out and "1 text used, 1 token" in done.out, done.out


def test_a_script_that_misses_stoker_itself_is_sent_to_the_clone() -> None:
    assert "pip install stoker" not in install_advice("stoker")[0] and "pip install ." in install_advice("stoker")[0]
    assert install_advice("numpy")[0].startswith("pip install numpy ")
