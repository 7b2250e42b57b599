"""Messages fit 80 columns on a terminal. Files and pipes get whole lines, to grep in."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from conftest import Stoker, Terminal
from stoker.cli import cluster, data, train
from stoker.cli.main import COMMANDS, load_command
from stoker.contract.options import OptionParser
from stoker.contract.terminal import wrap_text

ROOT = Path(__file__).parents[2]
LONGEST = 80  # of the fixed part of a message
_ENTRY = ["-c", "import sys; from stoker.cli.main import main; sys.exit(main(sys.argv[1:]))"]


def test_a_line_breaks_between_words_and_a_command_stays_whole() -> None:
    text = "stoker: one two three `stoker run --name a train.py` four five six seven eight nine"
    assert wrap_text(text, 0) == text  # no terminal
    lines = wrap_text(text, 50).split("\n")
    assert lines == [
        "stoker: one two three",
        "  `stoker run --name a train.py` four five six",
        "  seven eight nine",
    ]
    assert " ".join(line.strip() for line in lines) == text
    command = f"  stoker run {'--flag value ' * 8}train.py"
    assert wrap_text(command, 60) == command
    assert wrap_text(f"{command}   what it is for", 60) == f"{command}\n        what it is for"
    row = "  length         141 steps, 3 passes over your 199 conversations  sft's default; --epochs or --max-steps"
    assert wrap_text(row, 80).split("\n") == [row[:64], " " * 17 + "sft's default; --epochs or --max-steps"]
    word = "/a/path/without/any/blank" * 4
    assert wrap_text(f"    {word} is long", 60).split("\n") == [f"    {word}", "      is long"]


def parsers() -> dict[str, OptionParser]:
    found = {name: load_command(name)[1]() for name in COMMANDS}
    found |= {"train sft": train.build_parser("sft", short=True), "data show": data.build_show_parser()}
    return found | {"cluster check": cluster.build_check_parser(), "cluster init": cluster.build_init_parser()}


def test_a_command_that_ends_a_line_gets_one_of_its_own() -> None:
    command = "stoker train grpo --name 20260101-000000-job --allocation stoker:d1+ddp:d1 --grpo.prompts prompts.jsonl"
    for lead in (
        "stoker: to continue:",
        "stoker: hf/ (the model) is on host 10.0.0.1, in a folder; to copy the model:",
    ):
        lines = wrap_text(f"{lead} {command}", 80).split("\n")
        assert lines[-1] == f"  {command}" and " ".join(lines[:-1]).replace("   ", " ") == lead
    assert wrap_text("stoker: to continue: stoker run a.py", 80) == "stoker: to continue: stoker run a.py"
    copied = "scp -r -F /home/me/cluster/ssh_config me@10.0.0.1:/home/me/runs/20260101-000000-job/hf runs/x/"
    assert f"  {copied}" in wrap_text(f"  {copied}   # hf/ (the model)", 80).split("\n")


def test_help_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = parsers()
    assert len(found) > 25
    long = {
        name: line for name, made in found.items() for line in made.format_help().splitlines() if len(line) > LONGEST
    }
    assert long == {}


def plain(terminal: Terminal) -> list[str]:
    text = re.sub(rb"\x1b\[[0-?]*[ -/]*[@-~]", b"", terminal.shown).decode()
    return [line.rstrip("\r") for line in text.splitlines()]


def test_a_description_that_takes_two_lines_has_no_indent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    about = OptionParser("stoker x", "Words " * 20, "examples:\n  stoker x").format_help().split("\n\n")[1]
    assert len(about.splitlines()) == 2 and all(line.startswith("Words") for line in about.splitlines()), about


def test_a_failed_run_and_its_verdict_fit_the_terminal(stoker: Stoker) -> None:
    """Bytes are compared, not the screen: a terminal breaks long lines itself, in the middle of words."""
    stoker.script("train.py", "raise ValueError('the loss of this script is a long story ' + 'that goes on ' * 12)\n")
    run = Terminal(stoker, [*_ENTRY, "run", "--nproc-per-node", "2", "train.py"], (80, 24))
    assert run.wait() == 1
    own = [line for line in plain(run) if line.startswith(("stoker: ", "  ", "✓ ", "cause: "))]
    assert any("failed after" in line for line in own)
    assert [line for line in own if len(line) > LONGEST and " " in line.strip()] == []  # a path stays whole
    why = Terminal(stoker, [*_ENTRY, "why"], (80, 24))
    assert why.wait() == 0
    shown = plain(why)
    assert any(line.startswith("cause: rank.exception") for line in shown)
    assert [line for line in shown if len(line) > LONGEST and " " in line.strip()] == []
    whole = stoker("why").out.splitlines()
    assert any("that goes on " * 12 in line for line in whole)  # a pipe: as long as it is


def test_a_refusal_fits_the_terminal_and_is_one_line_elsewhere(stoker: Stoker) -> None:
    words = [
        "train",
        "sft",
        "--data",
        "nothing.jsonl",
        "--generate.temperature",
        "1",
        "--model.load",
        "no/such-model-here",
    ]
    refused = Terminal(stoker, [*_ENTRY, *words, "--lora", "--qlora"], (80, 24))
    assert refused.wait() >= 64
    shown = [line for line in plain(refused) if line]
    assert shown and max(map(len, shown)) <= LONGEST, shown
    piped = stoker(*words, "--lora", "--qlora")
    assert piped.err.count("\n") == 1 and " ".join(line.strip() for line in shown) == piped.err.strip()


def test_a_memory_plan_fits_the_terminal(stoker: Stoker) -> None:
    (stoker.cwd / "llama").mkdir()
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 1024,
        "num_attention_heads": 8,
    }
    shape |= {"num_hidden_layers": 8, "intermediate_size": 4096, "vocab_size": 32000}
    (stoker.cwd / "llama" / "config.json").write_text(json.dumps(shape))
    words = ["fit", "llama", "--gpus", "2x24GB"]
    fitted = Terminal(stoker, [*_ENTRY, *words], (80, 60))
    assert fitted.wait() == 0
    assert any("speed:" in line or "parallel" in line for line in fitted.lines)
    shown = fitted.shown.decode().splitlines()
    assert [line for line in shown if len(line) > 80 and not line.startswith("stoker train ")] == [], shown
    assert max(map(len, stoker(*words).out.splitlines())) > 130  # a file gets whole lines


def test_a_file_of_chats_fits_the_terminal(stoker: Stoker) -> None:
    chat = {"messages": [{"role": "user", "content": "How long is it?" * 4}, {"role": "assistant", "content": "So."}]}
    (stoker.cwd / "chats-that-people-wrote.jsonl").write_text(f"{json.dumps(chat)}\n" * 300)
    shown = Terminal(stoker, [*_ENTRY, "data", "show", "chats-that-people-wrote.jsonl"], (80, 24))
    assert shown.wait() == 0
    lines = plain(shown)
    own = lines[: next(at for at, line in enumerate(lines) if line.startswith("--- row"))]
    assert any("300 conversations used" in line for line in own) and max(map(len, own)) <= LONGEST, own


def test_a_line_about_memory_leaves_the_last_column_free(stoker: Stoker) -> None:
    """Some terminals break a line that fills them, and show an empty one after it."""
    stoker.script(
        "train.py",
        "import stoker, time\nkept = b'x' * (300 << 20)\nfor n in range(30): stoker.beat(step=n), time.sleep(0.1)\n",
    )
    run = Terminal(stoker, [*_ENTRY, "run", "train.py"], (80, 24))
    assert run.wait() == 0
    marks = [line for line in plain(run) if "MEM:POST-MODEL" in line]
    assert marks and all(len(line) < LONGEST for line in marks), marks


def test_doctor_fits_the_terminal(stoker: Stoker) -> None:
    recorded = ROOT / "tests/machines/bad-environment.json"
    looked = Terminal(stoker, [*_ENTRY, "doctor", "--machine", str(recorded)], (80, 24))
    looked.wait()
    shown = plain(looked)
    long = [line for line in shown if len(line) > LONGEST and not re.match(r"\s*→ \S+ ", line)]
    assert any("✗" in line for line in shown) and long == []


def printed_directly() -> list[str]:
    """`print` of a sentence that is too long for a line: `terminal.tell` and `say` break such ones."""
    found = []
    for path in sorted((ROOT / "src/stoker/cli").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"):
                continue
            for text in node.args:
                pieces = [one.value for one in ast.walk(text) if isinstance(one, ast.Constant)]
                fixed = "".join(piece for piece in pieces if isinstance(piece, str))
                if max(map(len, fixed.split("\n")), default=0) > LONGEST - 20:  # values need some, too
                    found.append(f"{path.name}:{node.lineno}: {fixed[:60]!r}")
    return found


def test_no_command_prints_a_long_sentence_by_itself() -> None:
    assert printed_directly() == []
