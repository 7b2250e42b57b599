"""Words of commands that Stoker runs, prints or documents: no secret in them, and nothing that a shell would run."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.contract.evidence import ExitContext, RankError
from stoker.control.doctor.checks import net
from stoker.control.machine.examination import NetworkState
from test_catalogue import FOREIGN, end, verdict

pytest.importorskip("torch")
from stoker.cli import docs

ROOT = Path(__file__).resolve().parents[2]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> Iterator[str]:
    """Every line of a block of code in the documentation."""
    for page in PAGES:
        for block in re.findall(r"^```[a-z]*\n(.*?)^```", page.read_text(), re.M | re.S):
            yield from block.splitlines()


def documented(words: str) -> str:
    (line,) = [line for line in commands() if words in line]
    return line


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def type_it(line: str, tmp_path: Path, **more: str) -> None:
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    env = {**os.environ, "HOME": str(tmp_path), "PATH": path, "OUT": str(tmp_path), **more}
    subprocess.run(["bash", "-c", f"umask 022; {line}"], env=env, check=True)


TRAPS = [
    "203.0.113.9; touch trapped",
    "$(touch trapped)",
    "10.0.0.2%eth0;touch${IFS}trapped",
    "x' ; touch trapped ; echo '",
]


def typed(line: str, folder: Path) -> list[str]:
    """The words that a shell makes of a line whose first one is a program; what else it runs can leave a file."""
    program = line.split()[0]
    argv = ["bash", "-c", f"{program}() {{ printf '%s\\n' \"$@\"; }}; {line}"]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=True)
    assert not [*folder.iterdir()], line
    return done.stdout.splitlines()


def test_the_secret_of_a_meeting_is_never_readable_by_others(tmp_path: Path) -> None:
    program(tmp_path / "bin", "openssl", 'stat -c %a "$HOME/.rdzv-secret" > "$OUT/mode"; echo 0123')
    type_it(documented("openssl rand -hex 32 >"), tmp_path)
    assert (tmp_path / "mode").read_text() == "600\n", "whoever opened it before a chmod reads it afterwards"
    assert stat.S_IMODE((tmp_path / ".rdzv-secret").stat().st_mode) == 0o600


def test_the_servers_token_is_on_no_command_line(tmp_path: Path) -> None:
    program(tmp_path / "bin", "curl", 'printf "%s\\n" "$@" > "$OUT/words"; cat > "$OUT/input"')
    type_it(documented("curl http://127.0.0.1:8000/v1/weights"), tmp_path, TOKEN="sesame-7")
    words = (tmp_path / "words").read_text()
    assert "sesame-7" not in words and "-H\n@-\n" in words
    assert (tmp_path / "input").read_text() == "Authorization: Bearer sesame-7\n"


def test_no_documented_command_has_a_secret_among_its_words() -> None:
    lines = [line.partition("#")[0] for line in commands()]
    assert len(lines) > 300
    told = [
        line
        for line in lines
        if re.search(r"Bearer|--api-key |--notify \S*(ntfy|slack|discord|https?):|curl .*-u ", line)
    ]
    assert not [line for line in told if "<<<" not in line]


def test_no_documented_server_of_answers_listens_on_all_interfaces() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    started = re.findall(r"(?:vllm serve|vllm-serve|sglang\.launch_server) [^`\n]*", text)
    assert len(started) >= 5 and not [line for line in started if "--host 127.0.0.1" not in line]


def test_a_run_that_a_host_names_is_one_word_of_a_command() -> None:
    holder = {"pid": 727, "memory": 100 << 30, "command": "x", "user": "bob", "run": "a; reboot", "ours": False}
    told = verdict(end(FOREIGN, around=ExitContext(holders=(holder,))))
    assert told.cause == "oom.gpu-foreign"
    assert shlex.split(told.fix[0], comments=True) == ["stoker", "stop", "a; reboot"]


@pytest.mark.parametrize("name", ["einops; reboot", "einops", "$(reboot)", "-r http://203.0.113.9/list"])
def test_only_a_modules_name_is_installed(name: str) -> None:
    error = RankError("ModuleNotFoundError", f"No module named '{name}'", "t.py", 1, "<module>", import_name=name)
    told = verdict(end(error))
    installs = [fix for fix in told.fix if fix.startswith("pip install")]
    assert told.cause == "env.import" and [*map(str.split, installs)] == (
        [["pip", "install", "einops", *["#", "the", "package", "may", "have", "another", "name"]]]
        if name == "einops"
        else []
    )


@pytest.mark.parametrize("trap", TRAPS)
def test_a_recorded_machines_name_is_one_word_of_a_command(trap: str, tmp_path: Path) -> None:
    (found,) = net.hostname(NetworkState(trap, (), ("eth0",), None, None, "no such name"))
    assert typed(found.fix.partition(" >> ")[0], tmp_path) == [f"127.0.1.1 {trap}"]


def test_a_strangers_run_name_runs_nothing_by_tab(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("$(touch pwned)", "`touch pwned`", "x$(touch pwned)", "good-1.a_b", ";touch pwned", "a b", "~", "*"):
        (runs / f"20261117-101010-{name}").mkdir(parents=True)
    (tmp_path / "x$(touch pwned)").touch()  # would be put on the line as it is
    script = f'{docs.PREAMBLE["bash"]}\n_stoker_runs ""; _stoker_runs 2026; _stoker_runs x'
    asked = subprocess.run(
        ["bash", "--norc", "-c", script],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "STOKER_RUNS": str(runs)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not (tmp_path / "pwned").exists()
    assert set(asked.stdout.split()) == {"latest", "good-1.a_b", "20261117-101010-good-1.a_b"}
