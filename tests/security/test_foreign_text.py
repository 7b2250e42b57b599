"""Text from other users, data, models and hosts: on a terminal it is text and nothing else, and it can't pretend to be a line of Stoker's."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker, gpu_json, machine_json
from stoker.cli import clean as clean_command
from stoker.cli.main import main
from stoker.contract import terminal
from stoker.contract.errors import Refusal
from stoker.contract.text import dump_json, escape, escape_lines
from stoker.control.cluster import hosts_writer, ssh
from stoker.control.doctor.stale_files import Lock
from stoker.control.launch.console import Console

pytestmark = pytest.mark.timeout(120)

# Sets the window's title, clears the screen, colours, an 8-bit CSI, a bell, text that runs backwards, and a line that looks like ours.
EVIL = "\x1b]0;owned\x07\x1b[2J\x1b[31m\x9b1mred\r\u202ekcab\u200b\x08\nstoker: forged line"
ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def check_text(text: str) -> None:
    found = ACTS.search(text)
    assert found is None, (found, text[-2000:])
    assert not any(line.startswith("stoker: forged") for line in text.splitlines()), text[-2000:]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "machine.json").write_text(json.dumps(machine_json(0)))
    monkeypatch.setenv("STOKER_MACHINE", str(tmp_path / "machine.json"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ✓ → ünïcode 你好 🙂", "plain ✓ → ünïcode 你好 🙂"), ("\x1b[31m", "\\x1b[31m"), ("a\rb\nc\td", "a\\rb\\nc\\td"), ("\x9b", "\\x9b"),
        ("\u202e", "\\u202e"), ("\udcff", "\\xff"), ("\ud800", "\\ud800"), ("\x7f\x00", "\\x7f\\x00"), ("back\\slash", "back\\slash"),
        ("5\u00a0%, 1\u202f000", "5\u00a0%, 1\u202f000"), ("👨\u200d👩\u200d👧", "👨\u200d👩\u200d👧"), ("\U000e0041", "\\U000e0041"),
    ],
)  # fmt: skip
def test_what_a_terminal_would_act_on_is_escaped(text: str, shown: str) -> None:
    assert escape(text) == shown
    assert escape_lines(f"{text}\n\tx") == (f"{shown}\n\tx" if "\t" not in text else "a\\rb\nc\td\n\tx")


def test_a_refusal_is_one_line_and_bounded() -> None:
    refusal = Refusal(f"bad {EVIL} end", more=("second \x1b", "third"))
    assert refusal.line.count("\n") == 2
    check_text(refusal.line)
    long = Refusal("a" * 100_000 + " do this")
    assert len(long.line) < 20_000 and long.line.endswith("do this")


def evil_file(name: str, content: Any) -> str:
    Path(name).write_text(content if isinstance(content, str) else json.dumps(content))
    return name


def evil_data(content: Any) -> list[str]:
    evil_file("rows.jsonl", content)
    return ["prepare", "--data", "rows.jsonl", "--tokenizer.path", "bytes", "--data.context_length", "16"]


def evil_model(**config: Any) -> list[str]:
    os.makedirs("model", exist_ok=True)
    evil_file("model/config.json", config)
    return ["export", "model", "out"]


def script() -> str:
    return evil_file("ok.py", "print(1)\n")


REFUSED: dict[str, Callable[[], list[str]]] = {
    "a command": lambda: [EVIL],
    "an option": lambda: ["run", f"--{EVIL}", script()],
    "a script's name": lambda: ["run", "--dry-run", f"{EVIL}.py"],
    "a script's text": lambda: ["run", "--dry-run", evil_file("bad.py", f"x = '{EVIL[:12]}' +\n")],
    "a config's key": lambda: ["run", "--dry-run", "--config", evil_file("c.json", {EVIL: 1}), script()],
    "a config's value": lambda: ["run", "--dry-run", "--config", evil_file("c.json", {"master_port": EVIL}), script()],
    "a config's name": lambda: ["run", "--dry-run", "--config", f"{EVIL}.yaml", script()],
    "a training config's key": lambda: [
        "train",
        "pretrain",
        "--dry-run",
        "--data",
        script(),
        "--config",
        evil_file("c.json", {"optim": {EVIL: 1}}),
    ],
    "a training config's value": lambda: [
        "train",
        "pretrain",
        "--dry-run",
        "--data",
        script(),
        "--config",
        evil_file("c.json", {"optim": {"kind": EVIL}}),
    ],
    "a stage": lambda: ["train", EVIL],
    "a host's name": lambda: [
        "run",
        "--dry-run",
        "--hosts",
        evil_file("h.json", {"hosts": [{"host": EVIL}]}),
        script(),
    ],
    "a host's key": lambda: ["run", "--dry-run", "--hosts", evil_file("h.json", {"hosts": [{EVIL: 1}]}), script()],
    "a list of hosts": lambda: ["run", "--dry-run", "--hosts", f"a,{EVIL}", script()],
    "a row's keys": lambda: evil_data({EVIL: "x"}),
    "a row's text": lambda: evil_data(f'{{"text": {EVIL[:9]}'),
    "a data file's name": lambda: ["prepare", "--data", f"{EVIL}.txt"],
    "a model's architecture": lambda: evil_model(architectures=[EVIL]),
    "a model's type": lambda: evil_model(model_type=EVIL),
    "a model's folder": lambda: ["export", f"./{EVIL.replace('/', '')}", "out"],
    "a run's name": lambda: ["why", EVIL],
    "a run's folder": lambda: ["runs", "--runs-dir", EVIL],
    "a check's name": lambda: ["doctor", "--only", EVIL],
    "a recorded machine": lambda: ["doctor", "--machine", evil_file("m.json", {"machine": {EVIL: 1}})],
    "ranks to show": lambda: ["run", "--dry-run", "--show", EVIL, script()],
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_quote_foreign_text_safely(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    main(REFUSED[case]())
    out, err = capfd.readouterr()
    check_text(out + err)
    assert "owned" in out + err or case in ("a row's text", "a script's text", "a recorded machine"), (
        "the foreign text is not even quoted: the test tests nothing"
    )


def evil_run(root: Path) -> dict[str, Any]:
    """A run directory that somebody else wrote."""
    run = root / "20260101-000000-evil"
    run.mkdir(parents=True)
    (run / "run.json").write_text(
        json.dumps(
            {"name": EVIL, "started": 1.0, "launcher": {"pid": 1, "start": 1, "host": ""}, "plan": {"world_size": 1}}
        )
    )
    verdict = {
        "status": EVIL,
        "cause": EVIL,
        "summary": EVIL,
        "exit_code": 1,
        "rank": 0,
        "host": EVIL,
        "evidence": [EVIL],
        "fix": [EVIL],
        "schema": 1,
        "run": EVIL,
        "attempt": 0,
    }
    (run / "verdict.json").write_text(json.dumps(verdict))
    (run / "events.jsonl").write_text(json.dumps({"event": "restart", "cause": EVIL, "time": 1.0}) + "\n")
    return verdict


def test_the_record_of_a_run_is_shown_safely(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    verdict = evil_run(tmp_path / "runs")
    for argv in (["why"], ["runs"], ["why", "20260101-000000-evil"]):
        assert main(argv) == 0
        out, err = capfd.readouterr()
        check_text(out + err)
        assert "owned" in out
    assert main(["why", "--json"]) == 0
    out, _ = capfd.readouterr()
    check_text(out)
    assert json.loads(out)["summary"] == verdict["summary"]
    assert main(["runs", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["runs"][0]["name"] == EVIL


def test_what_nvml_and_proc_say_is_shown_safely(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = {"pid": 4242, "memory": 10**9, "command": f"python {EVIL}", "user": EVIL, "run": EVIL, "age": 3.0}
    card = gpu_json(0, name=EVIL, memory_used=20 * 10**9, holders=[holder])
    (tmp_path / "machine.json").write_text(json.dumps(machine_json([card], hostname=EVIL, driver=EVIL)))
    path = tmp_path / "examination.json"
    whole = json.loads((Path(__file__).parents[1] / "machines" / "box8-healthy.json").read_text())
    whole["machine"] |= machine_json([card], hostname=EVIL, driver=EVIL, gpu_error=EVIL)
    path.write_text(json.dumps(whole))
    for argv in (
        ["doctor", "--machine", str(path)],
        ["clean"],
        ["run", "--dry-run", script()],
        ["run", "--nproc-per-node", "9", script()],
    ):
        main(argv)
        out, err = capfd.readouterr()
        check_text(out + err)
        assert "owned" in out + err or argv[0] == "run"
    main(["doctor", "--machine", str(path), "--json"])
    out, _ = capfd.readouterr()
    check_text(out)
    assert json.loads(out)["examination"]["machine"]["gpus"][0]["name"] == EVIL
    monkeypatch.setattr(
        clean_command.stale_files,
        "find_locks",
        lambda: ([Lock(f"GPU-{EVIL}", True, EVIL)], [f"{EVIL} is no lock file"]),
    )
    main(["clean"])
    out, _ = capfd.readouterr()
    check_text(out)
    assert "held by" in out


def test_a_process_with_a_hostile_command_line_is_shown_safely(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tag = {"STOKER_RUN_ID": "20260101-gone", "STOKER_RUN_DIR": str(tmp_path / "runs" / "20260101-gone")}
    (tmp_path / "runs").mkdir()
    command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)", EVIL]
    with subprocess.Popen(
        command, env={**os.environ, **tag}, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
            main(["clean", "--runs-dir", str(tmp_path / "runs")])
            out, err = capfd.readouterr()
        finally:
            process.kill()
    check_text(out + err)
    assert str(process.pid) in out


def test_an_exception_is_quoted_safely_and_the_ranks_own_output_stays_its_own(stoker: Stoker) -> None:
    stoker.script("bad.py", f"print('theirs \\x1b[32mgreen', flush=True)\nraise RuntimeError({EVIL!r})\n")
    done = stoker("run", "--name", "evil", "bad.py")
    ours = [line for line in done.err.split("\n") if line.startswith(("stoker:", "✓"))]
    assert done.code == 1 and any("RuntimeError" in line for line in ours)
    for line in ours:
        check_text(line)
    assert "theirs \x1b[32mgreen" in done.out + done.err, "what a rank prints is the rank's own"
    assert "theirs green" in stoker("logs", "evil").out, "colours stay out of the log"
    check_text(stoker("why", "evil").out)
    check_text((done.run_dir / "stoker.log").read_text())


def test_a_rank_may_write_anything_as_its_error_file(stoker: Stoker) -> None:
    texts = [
        "[" * 100_000,
        "[1]",
        '{"type": 5, "message": [1]}',
        json.dumps({"message": {"message": EVIL, "extraInfo": {"py_callstack": EVIL}}}),
        '{"type": "X"}',
        "\\xff\\xfe",
    ]
    for text in texts:
        stoker.script(
            "bad.py", f"import os, sys\nopen(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write({text!r})\nsys.exit(3)\n"
        )
        done = stoker("run", "bad.py")
        assert done.code == 3 and "Traceback" not in done.err, done.err
        check_text(done.err)


def test_a_banner_of_ssh_is_quoted_safely() -> None:
    check_text(escape(ssh.explain_failure("a", f"Permission denied ({EVIL})", 255)))
    reader, writer = os.pipe()
    console = Console(writer, writer)
    console.say(2, ssh.explain_failure("a", EVIL.rpartition("\n")[0], 255))
    console.put(2, b"theirs \x1b[1m\n")
    console.close()
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        ours, theirs = file.read().splitlines()
    check_text(ours.decode())
    assert theirs == b"theirs \x1b[1m"


def test_a_hosts_file_gets_no_lines_from_a_hosts_answer() -> None:
    assert "\n" not in escape(EVIL) and hosts_writer._yaml(EVIL).count("\n") == 0
    assert json.loads(hosts_writer._yaml(EVIL)) == EVIL


def test_prints_are_cleaned_and_progress_bars_still_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with terminal.masked_output():
        print("theirs:", EVIL)
        sys.stdout.writelines(["\x1b[1m", "x\n"])
        terminal.draw_bar(f"50 % {EVIL}")
        terminal.clear_bar()
        with terminal.masked_output():  # a command that calls another
            print("\x07")
        assert sys.stdout.getvalue() == out.getvalue()
    assert sys.stdout is out and sys.stderr is err
    check_text(
        out.getvalue().replace("\nstoker: forged", "\n forged")
    )  # an end of line is print's own: one-line texts are cleaned where they are put in
    own = ("\r\x1b[K", "\x1b[?7l", "\x1b[?7h")  # back to the line's beginning; no wrapping at its end
    assert err.getvalue().startswith("\r\x1b[K\x1b[?7l50 % ") and err.getvalue().endswith("\x1b[?7h\r\x1b[K")
    drawn = err.getvalue()
    for code in own:
        drawn = drawn.replace(code, "")
    check_text(drawn)


@pytest.mark.parametrize("value", ["plain ✓", EVIL, "\x7f", "\U000e0041", "\udc80", "nbsp\u00a0"])
def test_json_for_people_stays_json(value: str) -> None:
    text = dump_json({"key": value, value: [1]})
    assert json.loads(text) == {"key": value, value: [1]}
    assert escape_lines(text) == text


def test_names_that_are_not_utf8_are_handled(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Files called so, line ends in names, and a runs folder of that kind."""
    name = os.fsdecode(b"data \xff\n\x1b[31m.txt")
    (tmp_path / name).write_text("some text to train on " * 400)
    argv = ["prepare", "--data", name, "--tokenizer.path", "bytes", "--data.context_length", "16"]
    assert main([*argv, "--data.num_workers", "2"]) == 0
    assert main([*argv, "--json"]) == 0
    out, err = capfd.readouterr()
    check_text(out + err)
    folder = os.fsdecode(b"fold\xfe\n")
    (tmp_path / folder).mkdir()
    (tmp_path / name).rename(tmp_path / folder / name)
    assert main(["prepare", "--data", folder, "--tokenizer.path", "bytes", "--data.context_length", "16"]) == 0
    check_text("".join(capfd.readouterr()))


@pytest.mark.parametrize("detach", [False, True])
def test_a_script_and_a_runs_folder_with_strange_names_work(stoker: Stoker, detach: bool) -> None:
    folder = os.fsdecode(b"runs \xff\n\x1b")
    (stoker.cwd / os.fsdecode(b"script \xfe\n.py")).write_text("print('it ran')\n")
    done = stoker("run", *(["--detach"] if detach else []), "--runs-dir", folder, os.fsdecode(b"script \xfe\n.py"))
    assert done.code == 0 and "Traceback" not in done.err, done.err
    check_text(done.err)
    if detach:
        assert "is in the background" in done.out
        check_text(done.out)
        wait = stoker("attach", "--runs-dir", folder)
        assert "Traceback" not in wait.err
    done = stoker("why", "--runs-dir", folder)
    assert done.code == 0, done.err
    check_text(done.out + done.err)
