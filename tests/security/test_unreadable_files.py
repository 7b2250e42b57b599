"""Files that a reader may not understand, or wait for for ever. Each ends in one clear line and an exit code from 64 to 78: no traceback, no hang, no memory without end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from unreadable_files import CASES

from conftest import at_length_but, machine_json
from stoker.cli.main import main

pytestmark = pytest.mark.timeout(250)


@pytest.fixture(autouse=True)
def no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "machine.json").write_text(json.dumps(machine_json(0)))
    monkeypatch.setenv("STOKER_MACHINE", str(tmp_path / "machine.json"))
    monkeypatch.chdir(tmp_path)


def check_refusal(code: int, err: str) -> None:
    assert 64 <= code <= 78, (code, err[-2000:])
    assert "Traceback" not in err and "\x1b" not in err and "\x07" not in err, err[-2000:]
    *before, last = err.splitlines() or [""]
    assert last.startswith("stoker: ") or any(line.startswith("stoker: ") for line in before), err[-2000:]
    assert len(last) < 20_000 and sum(line.startswith("stoker: ") for line in err.splitlines()) <= 3, err[-2000:]


HANGS_S = 120.0  # alone each takes below 5 s; a busy machine takes its time


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_file_is_refused_in_one_line(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / "hostile"
    where.mkdir()
    argv = CASES[case](where)
    began = time.monotonic()
    code = main(argv)
    took = time.monotonic() - began
    check_refusal(code, capfd.readouterr().err)
    assert took < HANGS_S, f"{took:.1f} s"


FINE = {
    "an empty config": ("settings.yaml", b""),
    "a config with a byte-order mark": ("settings.yaml", b"\xef\xbb\xbfshow: none\n"),
    "JSON with a byte-order mark": ("settings.json", b"\xef\xbb\xbf{}"),
    "JSON with comments": ("settings.json", b'{"show": "none", /* why */ // also\n }'),
    "JSON in a YAML file": ("settings.yaml", b'{"show": "none"}'),
    "brackets in a text": ("settings.yaml", b"name: 'a[[[[b'\n# [[[[[ }}}\n"),
    "aliases that are few": ("settings.yaml", b"notify: &a 'true'\nname: *a\n"),
}


@pytest.mark.parametrize("case", FINE)
def test_unusual_files_that_are_fine_are_read(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    name, content = FINE[case]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "ok.py").write_text("print(1)\n")
    assert main(["run", "--dry-run", "--config", name, "ok.py"]) == 0, capfd.readouterr().err


NOBODY = 54321


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user without an entry in the password database")
@pytest.mark.parametrize("home", at_length_but(["none", "/proc"], ["none", "/nonexistent", "/proc"]))
def test_a_user_whom_nobody_knows(home: str) -> None:
    """As in many containers: a uid without a name, HOME unset or not writable."""
    # With the right to read what root keeps for itself: an interpreter in /root, say.
    as_nobody = [
        "setpriv",
        f"--reuid={NOBODY}",
        f"--regid={NOBODY}",
        "--clear-groups",
        "--inh-caps=+dac_read_search",
        "--ambient-caps=+dac_read_search",
    ]
    if subprocess.run([*as_nobody, sys.executable, "-c", "import stoker"], capture_output=True, check=False).returncode:
        pytest.skip(f"uid {NOBODY} can't start {sys.executable} here")
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "XDG_CACHE_HOME")
    }
    env |= {} if home == "none" else {"HOME": home}
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o777)
        Path(place, "machine.json").write_text(json.dumps(machine_json(0)))
        Path(place, "ok.py").write_text("print('it ran')\n")
        Path(place, "cluster.yaml").write_text("hosts: [{host: 127.0.0.1, user: somebody, slots: 1}]\n")
        Path(place, "data.txt").write_text("some text to train on " * 400)
        env["STOKER_MACHINE"] = os.path.join(place, "machine.json")
        prepare = ["prepare", "--data", "data.txt", "--tokenizer.path", "bytes", "--data.context_length", "16"]
        for argv, codes in (
            (["run", "ok.py"], [0]),
            (prepare, [0]),
            (["doctor", "--only", "host."], [0, 1, 2, 3]),
            (["clean"], [0, 1, 3]),
            (["clean", "--cache"], [0]),
            (["run", "--dry-run", "--hosts", "cluster.yaml", "ok.py"], range(64, 79)),
            (["runs"], [0]),
        ):
            done = subprocess.run(
                [*as_nobody, sys.executable, "-m", "stoker", *argv],
                cwd=place,
                env=env,
                capture_output=True,
                check=False,
            )
            assert done.returncode in codes and b"Traceback" not in done.stderr, (argv, done)
        assert not os.path.exists(os.path.join(place, "~"))


@pytest.mark.parametrize(
    ("problem", "code", "words"),
    [(RecursionError("deep"), 65, "nested too deeply"), (MemoryError(), 71, "out of memory")],
)
def test_the_last_resort_is_a_line_that_says_where(
    problem: BaseException, code: int, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other exceptions are bugs, and keep their traceback."""

    def fail(argv: list[str]) -> int:
        raise problem

    monkeypatch.setattr("stoker.cli.runs.main", fail)
    assert main(["runs"]) == code
    err = capsys.readouterr().err
    assert words in err and "in _run_command (" in err and err.count("\n") == 1
    monkeypatch.setattr("stoker.cli.runs.main", lambda argv: {}["a bug"])
    with pytest.raises(KeyError):
        main(["runs"])
