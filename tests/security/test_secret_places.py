"""Where a secret could get out: a real run that is given all of them, and everything that Stoker writes, prints and sends about it."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from conftest import Done, Stoker
from security.shapes import HARMLESS, NAMES, body_of, shapes
from stoker.contract import redact
from stoker.contract.redact import HIDDEN
from stoker.control.machine import processes


def _all(place: str) -> dict[str, tuple[str, str]]:
    """Each shape with a secret of its own: none is hidden because another one was recognized."""
    return {name: shapes(f"{place}, {name}")[name] for name in shapes("")}


def _secrets(*places: str) -> set[str]:
    return {secret for place in places for _, secret in _all(place).values()}


def _files(folder: Path) -> dict[str, str]:
    """All but what the ranks printed, which is theirs."""
    found = [
        path
        for path in folder.rglob("*")
        if path.is_file() and not (path.name.startswith("rank-") and path.suffix == ".log")
    ]
    return {str(path.relative_to(folder)): path.read_text(errors="replace") for path in found}


def _leaks(texts: dict[str, str], secrets: set[str]) -> list[str]:
    return [
        f"{secret} in {name}: ...{text[max(0, text.index(secret) - 60) : text.index(secret) + 60]!r}"
        for name, text in texts.items()
        for secret in secrets
        if secret in text
    ]


PLACES = ("environment", "arguments", "config", "notify", "exception")
NAMED = {
    name: f"{body_of(name)}-{number}" for number, name in enumerate(NAMES)
}  # of no shape: known by their names only
FAILING = """
import json, os
said = json.load(open("said.json"))
print("the script's own words stay as they are:", said[0][-20:])
raise ValueError("can't log in: " + " | ".join([*said, *(os.environ[name] for name in json.load(open("names.json")))]))
"""


@pytest.fixture
def failed(stoker: Stoker) -> Done:
    """One run for all shapes in all places, and all names."""
    urls = [
        f"https://me:{secret}@example.org/x?access_token={secret}"
        for secret in (body_of(f"url {name}") for name in shapes(""))
    ]
    said = [*(text for text, _ in _all("exception").values()), *urls, *HARMLESS]
    (stoker.cwd / "said.json").write_text(json.dumps(said))
    (stoker.cwd / "names.json").write_text(json.dumps(list(NAMED)))
    notify = "cat > notified.json; printf '%s' \"$MY_PASSWORD\" > given.txt; : " + " ".join(
        shlex.quote(text) for text, _ in _all("notify").values()
    )
    lines = [f"CONFIG_{number}={text}" for number, (text, _) in enumerate(_all("config").values())]
    (stoker.cwd / "run.json").write_text(json.dumps({"env": lines, "notify": notify}))  # JSON is YAML
    told = {f"SETTING_{number}": text for number, (text, _) in enumerate(_all("environment").values())}
    args = [word for text, _ in _all("arguments").values() for word in ("--setting", text)]
    return stoker(
        "run",
        "--show",
        "none",
        "--config",
        "run.json",
        stoker.script("fails.py", FAILING),
        *args,
        *HARMLESS,
        env={**told, **NAMED},
    )


def test_no_secret_in_anything_that_is_written_said_or_sent(stoker: Stoker, failed: Done) -> None:
    assert failed.code == 1 and failed.verdict["cause"] == "rank.exception"
    secrets = _secrets(*PLACES) | set(NAMED.values()) | {body_of(f"url {name}") for name in shapes("")}
    files = _files(failed.run_dir)
    assert {"run.json", "events.jsonl", "verdict.json", "stoker.log", "attempt-0/rank-0.error.json"} <= set(files)
    assert not _leaks(files, secrets)
    assert not _leaks({"stdout": failed.out, "stderr": failed.err}, secrets)
    notified = (stoker.cwd / "notified.json").read_text()
    assert json.loads(notified)["cause"] == "rank.exception" and not _leaks({"--notify": notified}, secrets)
    assert (stoker.cwd / "given.txt").read_text() == NAMED[
        "MY_PASSWORD"
    ]  # the user's command has the user's environment
    assert NAMED["MY_PASSWORD"] in failed.log(0).decode()  # and the rank's own output is as it was printed
    for words in (["why"], ["why", "--json"], ["runs", "--json"]):
        assert not _leaks({" ".join(words): stoker(*words).out}, secrets)


def test_look_alikes_in_a_run_stay_readable(failed: Done) -> None:
    run = json.loads((failed.run_dir / "run.json").read_text())
    assert [text for text in HARMLESS if text not in run["args"]] == []
    report = json.loads((failed.run_dir / "attempt-0" / "rank-0.error.json").read_text())
    assert [text for text in HARMLESS if text not in report["message"]] == []
    assert failed.verdict["summary"].startswith("rank 0") and "ValueError: can't log in" in failed.verdict["summary"]
    assert run["environment"]["PATH"] == os.environ["PATH"] and run["environment"]["MY_PASSWORD"] == HIDDEN


def test_no_secret_in_a_bundle(stoker: Stoker) -> None:
    """Nor of a record that an older Stoker wrote."""
    secrets = _secrets("environment", "record", "process") | set(NAMED.values())
    told = {f"SETTING_{number}": text for number, (text, _) in enumerate(_all("environment").values())}
    texts = [text for text, _ in _all("record").values()]
    old = stoker.cwd / "runs" / "old"
    old.mkdir(parents=True)
    (old / "run.json").write_text(
        json.dumps({"schema": 1, "args": texts, "environment": {**NAMED, "SETTING": texts[0]}})
    )
    (old / "verdict.json").write_text(json.dumps({"summary": " | ".join(texts), "evidence": texts}))
    (old / "events.jsonl").write_text(
        "".join(json.dumps({"event": "x", "said": text, "api_key": NAMED["HF_TOKEN"]}) + "\n" for text in texts)
        + '{"cut": "of'
    )
    (old / "stoker.log").write_text("\n".join(texts))
    (old.parent / "latest").symlink_to("old")
    words = [text for text, _ in _all("process").values()]
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", *words]) as other:
        try:
            done = stoker("doctor", "--bundle", "ticket.tar.gz", "--no-probe", env={**told, **NAMED})
        finally:
            other.kill()
    assert done.code in (0, 1, 2, 3) and (stoker.cwd / "ticket.tar.gz").stat().st_mode & 0o777 == 0o600
    with tarfile.open(stoker.cwd / "ticket.tar.gz") as archive:
        files = {one.name: archive.extractfile(one).read().decode() for one in archive.getmembers()}  # type: ignore[union-attr]
    assert str(other.pid) in files["stoker-doctor/processes.txt"]
    assert json.loads(files["stoker-doctor/latest-run/run.json"])["environment"]["HF_TOKEN"] == HIDDEN
    assert not _leaks({**files, "stdout": done.out, "stderr": done.err}, secrets)


def test_last_words_without_an_exception_are_quoted_without_secrets(stoker: Stoker) -> None:
    script = "import json, sys\nfor text in json.load(open('said.json')): print(text, file=sys.stderr)\nsys.exit(3)"
    for name, (text, secret) in list(_all("printed").items())[::7]:
        (stoker.cwd / "said.json").write_text(json.dumps(["x" * 9000, text]))
        done = stoker("run", "--show", "none", stoker.script("exits.py", script))
        assert done.code == 3 and done.verdict["evidence"]
        assert not _leaks({**_files(done.run_dir), "stderr": done.err}, {secret}), name


def test_a_dry_run_and_a_job_script_show_no_secret(stoker: Stoker) -> None:
    script = stoker.script("ok.py", "print('ok')")
    args = [word for text, _ in _all("arguments").values() for word in ("--setting", text)]
    secrets = _secrets("arguments") | {NAMED["HF_TOKEN"]}
    words = ["--env", f"HF_TOKEN={NAMED['HF_TOKEN']}", script, *args]
    for command in (
        ["run", "--dry-run", *words],
        ["run", "--dry-run", "--json", *words],
        ["submit", "--dry-run", "--", *words],
    ):
        done = stoker(*command)
        assert done.code == 0 and not _leaks({command[0]: done.out + done.err}, secrets)


def test_a_refusal_shows_no_secret(stoker: Stoker) -> None:
    secret = body_of("refused")
    for command in (
        ["train", "pretrain", "--data", f"https://me:{secret}@example.org/x.txt"],
        ["run", f"--frobnicate=hf_{secret}AAAA"],
        ["run", f"sk-{secret}-x.py"],
    ):
        done = stoker(*command)
        assert done.code in (64, 66) and HIDDEN in done.err and secret not in done.err


def test_commands_of_other_processes_are_shown_without_secrets() -> None:
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time; time.sleep(600)",
            "--api-key",
            "two words",
            "curl",
            "-u",
            "me:hunter2",
            "--max-tokens",
            "5",
        ]
    )
    try:
        deadline = time.monotonic() + 30
        while "--api-key" not in (processes.command(child.pid) or "") and time.monotonic() < deadline:
            time.sleep(0.01)
        shown = processes.command(child.pid) or ""
        assert shown.endswith(f"--api-key {HIDDEN} curl -u me:{HIDDEN} --max-tokens 5")
    finally:
        child.kill()
        child.wait()


def test_a_configuration_is_written_without_secrets_and_else_as_it_is() -> None:
    from stoker.contract.shape import replace
    from stoker.training.config.keys import as_yaml, config_of
    from stoker.training.config.resolve import combine

    config = config_of("small", combine("small", []))
    assert redact.whole(as_yaml(config)) == as_yaml(config)
    secret = body_of("config")
    shown = redact.whole(
        as_yaml(replace(config, data=replace(config.data, path=(f"https://me:{secret}@example.org/x.txt",))))
    )
    assert secret not in shown and f"https://me:{HIDDEN}@example.org/x.txt" in shown


# ---- modes ----


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_run_directories_are_private(stoker: Stoker, umask: int) -> None:
    script = stoker.script(
        "scratch.py",
        "import os\nfolder = os.path.dirname(os.environ['TORCHELASTIC_ERROR_FILE'])\nprint(oct(os.stat(folder).st_mode & 0o777))\nprint(oct(os.umask(0)))",
    )
    done = stoker("run", "--log-dir", "logs", script, umask=umask)
    assert (
        done.code == 0
        and done.out.splitlines()[-2].endswith("0o700")
        and done.out.splitlines()[-1].endswith(oct(umask))
    )
    assert _mode(done.run_dir) == 0o700 and _mode(done.run_dir.parent) == 0o700
    (folder,) = (stoker.cwd / "logs").iterdir()
    assert folder.name.startswith(done.run_dir.name) and _mode(folder) == 0o700
    assert _mode(done.run_dir / "run.json") == 0o666 & ~umask  # so that `chmod` of the folder alone shares a run


def test_what_is_there_keeps_its_mode(stoker: Stoker) -> None:
    runs = stoker.cwd / "runs"
    runs.mkdir()
    runs.chmod(0o775)
    script = stoker.script("fails.py", "raise SystemExit(3)")
    done = stoker("run", "--name", "shared", script)
    assert _mode(runs) == 0o775 and _mode(done.run_dir) == 0o700
    done.run_dir.chmod(0o755)
    again = stoker("run", "--name", "shared", script)
    assert again.run_dir == done.run_dir and _mode(done.run_dir) == 0o755


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user takes root")
@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_another_user_reads_nothing_until_the_owner_says_so(stoker: Stoker, umask: int, tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/") and not _mode(folder) & 0o001:
            folder.chmod(_mode(folder) | 0o011)  # the way there is open
    runs = stoker.cwd / "runs"
    runs.mkdir()
    runs.chmod(0o1777)
    done = stoker("run", stoker.script("ok.py", "print('ok')"), umask=umask)
    read = ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups", "cat"]
    files = [str(done.run_dir / name) for name in ("run.json", "events.jsonl", "stoker.log", "attempt-0/rank-0.log")]
    for path in files:
        assert subprocess.run([*read, path], capture_output=True, check=False).returncode
    done.run_dir.chmod(0o755)
    assert all(subprocess.run([*read, path], capture_output=True, check=False).returncode == 0 for path in files)


def test_folders_of_speedruns_and_jobs_are_private(tmp_path: Path) -> None:
    from stoker.control.scheduler import slurm_submit as submit
    from stoker.speedrun import state

    before = os.umask(0)
    try:
        os.close(state.hold(str(tmp_path / "runs" / "speedrun-x")))
        path = submit.write(submit.JobScript("#!/bin/bash\n", "x", {}), str(tmp_path / "jobs"), "x")
    finally:
        os.umask(before)
    assert (
        _mode(tmp_path / "runs" / "speedrun-x") == 0o700
        and _mode(Path(path).parent) == 0o700
        and _mode(tmp_path / "jobs") == 0o700
    )
