"""Where a secret could get out: real runs that are given some, and all that Stoker writes, prints and sends about them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import Done, Stoker
from stoker import calling
from stoker.cli import run as run_command
from stoker.contract import masking, terminal
from stoker.contract.evidence import Verdict
from stoker.contract.masking import MASK
from stoker.control.agent.agent import Agent
from stoker.control.launch import ladder
from stoker.control.launch.torchrun_files import write_launcher_error
from stoker.control.machine import procfs
from stoker.control.plan.request import Request

LETTERS = "aBcDeFgHiJkLmNoPqRsTuVwXyZ012345678"
KEY = "\n".join(["-----BEGIN " + "PRIVATE KEY-----", *[LETTERS * 2] * 15, "-----END " + "PRIVATE KEY-----"])


def secret(place: str) -> str:
    """Another for each place: what is known from one must not help to hide the other."""
    return f"{place.replace(' ', '-')}-swordfish-17"


def texts(place: str) -> list[str]:
    """Texts as people carry them, each with the secret of this place: by a name, in a URL, in a header, in a token."""
    hidden = secret(place)
    return [
        f"https://me:{hidden}@example.org/x",
        f"Authorization: Bearer {hidden}",
        f'{{"client_secret": "{hidden}"}}',
        f"glpat-{hidden}-{LETTERS}",
        f"password={hidden}",
    ]


# Of no shape: only their names say that they are secrets.
NAMED = {
    name: f"{name.lower()}-of-no-shape" for name in ("HF_TOKEN", "MY_PASSWORD", "WANDB_API_KEY", "GH_PAT", "PGPASSWORD")
}
READABLE = ("max_tokens=512", "--num-tokens", "1000", "tokenizer.path=models/gpt2", "pad_token_id=0", "sort_keys=True")
FAILING = """
import json, os
print("the script's own words stay as they are:", os.environ["MY_PASSWORD"])
raise ValueError("can't log in: " + " | ".join([*json.load(open("exception.json")), *(os.environ[name] for name in json.load(open("names.json")))]))
"""


def files_in(folder: Path) -> dict[str, str]:
    """All but what the ranks printed, which is theirs."""
    paths = [path for path in folder.rglob("*") if path.is_file() and not re.fullmatch(r"rank-\d+\.log", path.name)]
    return {str(path.relative_to(folder)): path.read_text(errors="replace") for path in paths}


def leaks(texts: dict[str, str], *places: str) -> list[str]:
    secrets = [*map(secret, places), *NAMED.values()]
    return [
        f"{one} in {name}: ...{text[max(0, text.index(one) - 60) : text.index(one) + 60]!r}"
        for name, text in texts.items()
        for one in secrets
        if one in text
    ]


@pytest.fixture
def failed(stoker: Stoker) -> Done:
    """A run that is given secrets in all places, and quotes them in its exception."""
    (stoker.cwd / "exception.json").write_text(json.dumps([*texts("exception"), *READABLE]))
    (stoker.cwd / "names.json").write_text(json.dumps(list(NAMED)))
    notify = "cat > notified.json; printf '%s' \"$MY_PASSWORD\" > given.txt; : " + shlex.join(texts("notify"))
    lines = [f"CONFIG_{number}={text}" for number, text in enumerate(texts("config"))]
    (stoker.cwd / "run.json").write_text(json.dumps({"env": lines, "notify": notify}))  # JSON is YAML
    given = {f"SETTING_{number}": text for number, text in enumerate(texts("environment"))}
    args = [word for text in texts("arguments") for word in ("--setting", text)]
    script = stoker.script("fails.py", FAILING)
    return stoker("run", "--show", "none", "--config", "run.json", script, *args, *READABLE, env={**given, **NAMED})


def test_no_secret_in_anything_that_is_written_printed_or_sent(stoker: Stoker, failed: Done) -> None:
    assert failed.code == 1 and failed.verdict["cause"] == "rank.exception"
    places = ("environment", "arguments", "config", "notify", "exception")
    files = files_in(failed.run_dir)
    assert {"run.json", "events.jsonl", "verdict.json", "stoker.log", "attempt-0/rank-0.error.json"} <= set(files)
    assert not leaks(files, *places)
    assert not leaks({"stdout": failed.out, "stderr": failed.err}, *places)
    notified = (stoker.cwd / "notified.json").read_text()
    assert json.loads(notified)["cause"] == "rank.exception" and not leaks({"--notify": notified}, *places)
    for words in (["why"], ["why", "--json"], ["runs", "--json"]):
        assert not leaks({" ".join(words): stoker(*words).out}, *places)


def test_what_is_no_secret_stays_readable(stoker: Stoker, failed: Done) -> None:
    run = json.loads((failed.run_dir / "run.json").read_text())
    assert run["args"][-len(READABLE) :] == list(READABLE)
    report = json.loads((failed.run_dir / "attempt-0" / "rank-0.error.json").read_text())
    assert [text for text in READABLE if text not in report["message"]] == []
    assert failed.verdict["summary"].startswith("rank 0") and "ValueError: can't log in" in failed.verdict["summary"]
    # The user's own command has the user's environment, and the rank's output is as it was printed.
    assert (stoker.cwd / "given.txt").read_text() == NAMED["MY_PASSWORD"]
    assert NAMED["MY_PASSWORD"] in failed.log(0).decode()


def test_the_record_has_no_other_variables_than_those_it_needs(failed: Done) -> None:
    environment = json.loads((failed.run_dir / "run.json").read_text())["environment"]
    assert environment["PATH"] == os.environ["PATH"] and environment["HF_TOKEN"] == MASK
    assert not {"MY_PASSWORD", "SETTING_0", "CONFIG_0", "OLDPWD"} & set(environment)


def test_no_secret_in_a_bundle(stoker: Stoker) -> None:
    """Nor one of a record that an older Stoker wrote."""
    old = stoker.cwd / "runs" / "old"
    old.mkdir(parents=True)
    written = texts("record")
    run = {"schema": 1, "args": written, "environment": {**NAMED, "SETTING": written[0]}}
    (old / "run.json").write_text(json.dumps(run))
    (old / "verdict.json").write_text(json.dumps({"summary": " | ".join(written), "evidence": written}))
    rows = [json.dumps({"event": "x", "text": text, "api_key": NAMED["HF_TOKEN"]}) for text in written]
    (old / "events.jsonl").write_text("\n".join(rows) + '\n{"cut": "of')
    (old / "stoker.log").write_text("\n".join(written))
    (old.parent / "latest").symlink_to("old")
    words = ["--api-key", secret("process"), *texts("process")]
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", *words]) as other:
        try:
            done = stoker("doctor", "--bundle", "ticket.tar.gz", "--no-probe", env=NAMED)
        finally:
            other.kill()
    assert done.code in (0, 1, 2, 3) and (stoker.cwd / "ticket.tar.gz").stat().st_mode & 0o777 == 0o600
    with tarfile.open(stoker.cwd / "ticket.tar.gz") as archive:
        files = {one.name: archive.extractfile(one).read().decode() for one in archive.getmembers()}  # type: ignore[union-attr]
    assert str(other.pid) in files["stoker-doctor/processes.txt"]
    assert json.loads(files["stoker-doctor/latest-run/run.json"])["environment"]["HF_TOKEN"] == MASK
    assert not leaks({**files, "stdout": done.out, "stderr": done.err}, "record", "process")


def test_last_lines_without_an_exception_are_quoted_without_secrets(stoker: Stoker) -> None:
    """A private key whose first line is not quoted has no known shape."""
    printed = "\n".join(["x" * 3000, *texts("printed"), KEY])
    script = stoker.script("exits.py", f"import sys\nprint({printed!r}, file=sys.stderr)\nsys.exit(3)")
    done = stoker("run", "--show", "none", script)
    files = {**files_in(done.run_dir), "stderr": done.err}
    assert done.code == 3 and done.verdict["evidence"]
    assert not leaks(files, "printed") and not [name for name, text in files.items() if LETTERS in text]


def test_a_failed_import_is_quoted_without_a_key(stoker: Stoker) -> None:
    (stoker.cwd / "settings_of_mine.py").write_text(f"raise ValueError('bad key:\\n' + {KEY!r})")
    done = stoker("ladder", "--json", stoker.script("train.py", "import settings_of_mine"))
    assert '"env.import"' in done.out and LETTERS not in done.out + done.err
    assert not [path for path in Path(stoker.cwd, "runs").rglob("*.json") if LETTERS in path.read_text()]


def test_a_phase_is_kept_without_a_token(stoker: Stoker) -> None:
    script = stoker.script(
        "train.py",
        f"import time, stoker\nstoker.beat(step=1, loss=1.0)\nstoker.phase('loading hf_{LETTERS}')\ntime.sleep(2.5)\n",
    )
    assert stoker("run", "--nproc-per-node", "1", script).code == 0
    kept = {path.name: path.read_text() for path in (stoker.latest / "history").iterdir()}
    assert f"loading {MASK}" in kept["seconds.jsonl"]
    assert not [name for name, text in {**kept, **files_in(stoker.latest)}.items() if LETTERS in text]


def test_the_launchers_error_file_has_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    verdict = Verdict("refused", "launch.x", "no host at https://me:hunter2hunter2@example.org", 69)
    write_launcher_error(verdict, "", lambda line: None)
    assert "hunter2" not in (tmp_path / "error.json").read_text()


def test_an_agent_masks_what_only_its_host_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator can't: another host's variables are never sent to it."""
    monkeypatch.setattr(masking, "_secrets", None)
    monkeypatch.setenv("SVC_PASSWORD", "variable-of-this-host")
    agent = Agent(heartbeat_fd=-1, guardian_fd=-1, guardian=0, stdin_fd=-1)
    agent._specs = {0: {"env": {"HF_TOKEN": "variable-of-the-rank"}, "argv": ["t.py", "--api-key", "argument-of-it"]}}
    report = {"message": "no variable-of-this-host, variable-of-the-rank, argument-of-it"}
    assert agent._mask_report(report) == {"message": f"no {MASK}, {MASK}, {MASK}"}


def test_a_dry_run_and_a_job_script_show_no_secret(stoker: Stoker) -> None:
    script = stoker.script("ok.py", "print('ok')")
    args = [word for text in texts("arguments") for word in ("--setting", text)]
    words = ["--env", f"HF_TOKEN={NAMED['HF_TOKEN']}", script, *args, "--api-key", secret("arguments")]
    for command in (
        ["run", "--dry-run", *words],
        ["run", "--dry-run", "--json", *words],
        ["submit", "--dry-run", "--", *words],
    ):
        done = stoker(*command)
        assert done.code == 0 and not leaks({command[0]: done.out + done.err}, "arguments")


def test_a_refusal_shows_no_secret(stoker: Stoker) -> None:
    hidden = secret("refused")
    for command in (
        ["train", "pretrain", "--data", f"https://me:{hidden}@example.org/x.txt"],
        ["run", f"--frobnicate=hf_{LETTERS}"],
        ["run", f"sk-{hidden}-x.py"],
    ):
        done = stoker(*command)
        assert done.code in (64, 66) and MASK in done.err and hidden not in done.err and LETTERS not in done.err


def test_every_print_of_a_command_is_masked(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.masked_output():
        print(json.dumps({"client_secret": "hunter2xyz"}))
        terminal.print_text("login with password=hunter2xyz")
        terminal.print_status("login with password=hunter2xyz", terminal.ERROR)
        terminal.print_coloured([("login with password=hunter2xyz", "red")])
    shown = capsys.readouterr()
    assert "hunter2xyz" not in shown.out + shown.err and (shown.out + shown.err).count(MASK) == 4


def test_an_address_with_its_token_is_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Who starts `stoker web` needs it."""
    with terminal.masked_output():
        terminal.print_secret(f"http://127.0.0.1:8000/?token={LETTERS}")
    assert capsys.readouterr().out == f"http://127.0.0.1:8000/?token={LETTERS}\n"


def test_commands_of_other_processes_are_shown_without_secrets() -> None:
    words = ["--api-key", "two words", "DB_PASSWORD=hunter2", "--max-tokens", "5"]
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", *words])
    try:
        deadline = time.monotonic() + 30
        while "--api-key" not in (procfs.read_command_line(child.pid) or "") and time.monotonic() < deadline:
            time.sleep(0.01)
        shown = procfs.read_command_line(child.pid) or ""
        assert shown.endswith(f"--api-key {MASK} DB_PASSWORD={MASK} --max-tokens 5")
    finally:
        child.kill()
        child.wait()


def test_a_configuration_is_written_without_secrets_and_else_as_it_is() -> None:
    from stoker.contract.frozen import replace
    from stoker.contract.masking import mask_text
    from stoker.training.config.keys import as_yaml, config_of
    from stoker.training.config.resolve import combine

    config = config_of("small", combine("small", []))
    assert mask_text(as_yaml(config)) == as_yaml(config)
    hidden = secret("config")
    data = replace(config.data, path=(f"https://me:{hidden}@example.org/x.txt",))
    shown = mask_text(as_yaml(replace(config, data=data)))
    assert hidden not in shown and f"https://me:{MASK}@example.org/x.txt" in shown


# ---- command lines of processes that we start: every user of the machine can read them ----

CONFIG = "notify: slack:http://127.0.0.1:9/services/notify7xq\nenv: [HF_TOKEN=hf_env7xq, NAME=text]\n"
NOTIFY = "slack:http://127.0.0.1:9/services/notify7xq"


def configured(folder: Path) -> Request:
    """Return a request as docs/launching.md advises it: the address is in a file."""
    (folder / "me.yaml").write_text(CONFIG)
    (folder / "train.py").write_text("")
    return run_command.parse(["--config", str(folder / "me.yaml"), "--ladder", str(folder / "train.py"), "--env=own"])


class Started(Exception):
    """Instead of a process."""


@pytest.mark.parametrize("is_rung", [False, True])
def test_a_rung_has_no_secret_of_a_config_file_on_its_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_rung: bool
) -> None:
    seen: dict[str, Any] = {}

    def started(argv: list[str], env: dict[str, str], *_: object) -> None:
        seen.update(argv=argv, env=env)
        raise Started

    monkeypatch.setattr(ladder, "start_child", started)
    climber = ladder.Ladder(configured(tmp_path), 20, print)
    with pytest.raises(Started):
        climber._try_rung(1, "rung 1 of 1") if is_rung else climber._read_plan()
    assert "7xq" not in " ".join(seen["argv"])
    assert seen["argv"][-1] == "--env=own"  # the script's own
    # And the rung has them all the same.
    given = seen["argv"][seen["argv"].index("run") + 1 :]
    monkeypatch.setattr(sys, "argv", ["stoker", "run", *given])
    monkeypatch.setattr(os, "environ", seen["env"].copy())
    requests: list[Request] = []
    monkeypatch.setattr(run_command, "start", lambda request: requests.append(request) or 0)
    assert run_command.main(given) == 0
    options = requests[0].options
    assert options.env[:2] == ("HF_TOKEN=hf_env7xq", "NAME=text")
    assert options.notify == (None if is_rung else NOTIFY)
    assert requests[0].args == ("--env=own",)
    # Its ranks have what they are given, and no more.
    assert not any("7xq" in value for value in os.environ.values())
    assert sys.argv[2] == "--env=HF_TOKEN=hf_env7xq"  # for the record, which hides it


def test_the_launcher_of_a_function_has_no_address_on_its_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """`stoker.launch(function, notify="slack:…")`"""
    seen: dict[str, Any] = {}

    def ran(words: list[str], environment: dict[str, str]) -> int:
        seen.update(words=words, environment=environment)
        raise Started

    monkeypatch.setattr(calling, "_run_launcher", ran)
    with pytest.raises(Started):
        calling.launch(print, (), 1, {"HF_TOKEN": "hf_env7xq"}, {"notify": NOTIFY})
    assert "7xq" not in " ".join(seen["words"])
    assert json.loads(seen["environment"]["STOKER_HANDED"]) == [f"--notify={NOTIFY}"]
