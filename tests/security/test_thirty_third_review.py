"""What the thirty-third review found in the control plane."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker
from stoker import calling
from stoker.cli import run as run_command
from stoker.contract import layout
from stoker.contract.names import Refusal
from stoker.control.cluster import reducing
from stoker.control.launch import ladder
from stoker.control.launch.request import Request
from stoker.control.scheduler import slurm_submit

# ---- secrets that a file has on the command lines of processes that we start ----

CONFIG = "notify: slack:http://127.0.0.1:9/services/notify7xq\nenv: [HF_TOKEN=hf_env7xq, NAME=text]\n"
HANDED = ["--env=HF_TOKEN=hf_env7xq", "--env=NAME=text", "--notify=slack:http://127.0.0.1:9/services/notify7xq"]


def configured(folder: Path) -> Request:
    """As docs/launching.md advises it: the address is in a file, because command lines are visible to all users."""
    (folder / "me.yaml").write_text(CONFIG)
    (folder / "train.py").write_text("")
    return run_command.parse(["--config", str(folder / "me.yaml"), "--ladder", str(folder / "train.py"), "--env=own"])


class Started(Exception):
    """Instead of a process."""


@pytest.mark.parametrize("rung", [False, True])
def test_a_rung_has_no_secret_of_a_config_file_on_its_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rung: bool
) -> None:
    """`stoker run --config me.yaml --ladder train.py`: every user of the machine could read them in /proc/PID/cmdline."""
    found: dict[str, Any] = {}

    def started(argv: list[str], env: dict[str, str], *_: object) -> None:
        found.update(argv=argv, env=env)
        raise Started

    monkeypatch.setattr(ladder, "start", started)
    climber = ladder.Ladder(configured(tmp_path), 20, print)
    with pytest.raises(Started):
        climber._rung(1, "rung 1 of 1") if rung else climber._look()
    assert "7xq" not in " ".join(found["argv"])
    assert found["argv"][-1] == "--env=own"  # the script's own
    # And the rung has them all the same.
    given = found["argv"][found["argv"].index("run") + 1 :]
    monkeypatch.setattr(sys, "argv", ["stoker", "run", *given])
    monkeypatch.setattr(os, "environ", found["env"].copy())
    asked: list[Request] = []
    monkeypatch.setattr(run_command, "start", lambda request: asked.append(request) or 0)
    assert run_command.main(given) == 0
    options = asked[0].options
    assert options.env[:2] == ("HF_TOKEN=hf_env7xq", "NAME=text")
    assert options.notify == (None if rung else "slack:http://127.0.0.1:9/services/notify7xq")
    assert asked[0].args == ("--env=own",)
    # Its ranks have what they are given, and no more.
    assert not any("7xq" in value for value in os.environ.values())
    assert sys.argv[2] == "--env=HF_TOKEN=hf_env7xq"  # for the record, which hides it


def test_the_launcher_of_a_function_has_no_address_on_its_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """`stoker.launch(function, notify="slack:…")`"""
    found: dict[str, Any] = {}

    def ran(words: list[str], environment: dict[str, str]) -> int:
        found.update(words=words, environment=environment)
        raise Started

    monkeypatch.setattr(calling, "_run", ran)
    with pytest.raises(Started):
        calling.launch(print, (), 1, {"HF_TOKEN": "hf_env7xq"}, {"notify": HANDED[2].partition("=")[2]})
    assert "7xq" not in " ".join(found["words"])
    assert json.loads(found["environment"]["STOKER_HANDED"]) == HANDED[2:]


# ---- other folders that came with a checkout ----


def test_a_job_is_not_submitted_where_its_output_could_go_elsewhere(tmp_path: Path) -> None:
    """`runs/slurm/1234.out` led to ~/.bashrc: Slurm appends what job 1234 prints to what its output's name leads to."""
    theirs, folder = tmp_path / "bashrc", tmp_path / "runs" / "slurm"
    folder.mkdir(parents=True, mode=0o700)
    script = slurm_submit.JobScript("#!/bin/bash\n", "exp", {})
    assert os.path.dirname(slurm_submit.write(script, str(folder.parent), "exp")) == str(folder)
    (folder / "1234.out").symlink_to(theirs)
    with pytest.raises(Refusal, match=r"1234\.out is a symbolic link"):
        slurm_submit.write(script, str(folder.parent), "exp")


def test_the_roles_of_a_job_are_not_recorded_behind_a_link(stoker: Stoker) -> None:
    """A job's directory that came with a checkout, whose name is given again."""
    (stoker.cwd / "fails.py").write_text("import sys; sys.exit(3)")
    job = ("run", "--name", "job", "--role", "one:1:fails.py", "--role", "two:1:fails.py")
    assert stoker(*job).code == 3
    (folder,) = stoker.cwd.glob("runs/*-job")
    (folder / "roles").rename(stoker.cwd / "before")
    (folder / "roles").symlink_to(stoker.cwd / "elsewhere")
    (stoker.cwd / "elsewhere").mkdir()
    again = stoker(*job)
    assert again.code == 73 and "is a symbolic link" in again.err
    assert os.listdir(stoker.cwd / "elsewhere") == []


RECIPES = [
    "checkpoints",
    "answers",
    "published",
    "attempt-1",
    "metrics.jsonl",
    "tensorboard",
    "wandb",
    "hf",
    "roles/one",
]


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_that_is_continued_has_no_link_that_leads_out_of_it(tmp_path: Path, name: str) -> None:
    """Of one that came with a checkout: `checkpoints` led to another run's, which were resumed from and then removed as its own
    old ones; `published` to folders that were removed; `attempt-1` to where logs were written.
    """
    run, elsewhere = tmp_path / "20260101-000000-b", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(elsewhere)
    with pytest.raises(Refusal, match=f"{name} is a symbolic link that leads out of"):
        layout.check_entries(str(run), layout.ROLES)
    (run / name).unlink()
    (run / "inside").mkdir()
    (run / name).symlink_to(run / "inside")
    layout.check_entries(str(run), layout.ROLES)


@pytest.mark.parametrize("name", ["stoker.log", "metrics.jsonl", "history/seconds.jsonl"])
@pytest.mark.parametrize("kind", ["holes", "pipe"])
def test_a_run_with_holes_or_a_pipe_in_the_place_of_its_files_is_refused(stoker: Stoker, name: str, kind: str) -> None:
    """By whatever command: all of them would have to know a limit, or not to wait."""
    (stoker.cwd / "fails.py").write_text("import sys; sys.exit(3)")
    words = ("run", "--name", "x", "--nproc-per-node", "1", "fails.py")
    assert stoker(*words).code == 3 and stoker("why", "x").code == 0
    (folder,) = stoker.cwd.glob("runs/*-x")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        with (folder / name).open("wb") as file:
            file.truncate(8 << 30)
    for command in (("why", "x"), words):
        done = stoker(*command)
        assert done.code == 73 and done.err.count("\n") == 1, done.err
        assert f"{name} {'consists of holes' if kind == 'holes' else 'is a named pipe'}" in done.err


def test_a_scripts_own_links_and_those_of_libraries_are_let_be(tmp_path: Path) -> None:
    (tmp_path / "run" / "wandb").mkdir(parents=True)
    for name in ("run/data", "run/wandb/debug-core.log"):  # W&B makes that one itself
        (tmp_path / name).symlink_to(tmp_path)
    layout.check_entries(str(tmp_path / "run"), layout.ROLES, ours_only=True)
    (tmp_path / "run" / "data").unlink()
    layout.check_entries(str(tmp_path / "run"), layout.ROLES)


@pytest.mark.parametrize("name", ["checkpoints", "attempt-1"])
def test_the_launcher_refuses_such_a_run(stoker: Stoker, name: str) -> None:
    (stoker.cwd / "fails.py").write_text("import sys; sys.exit(3)")
    words = ("run", "--name", "x", "--nproc-per-node", "1", "fails.py")
    assert stoker(*words).code == 3
    (folder,) = stoker.cwd.glob("runs/*-x")
    (stoker.cwd / "elsewhere").mkdir()
    (folder / name).symlink_to(stoker.cwd / "elsewhere")
    again = stoker(*words)
    assert again.code == 73 and f"{name} is a symbolic link" in again.err, again.err
    assert os.listdir(stoker.cwd / "elsewhere") == []


# ---- a hosts file that is closed to others ----


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_a_hosts_file_is_never_more_open_than_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """`stoker cluster check --tune` wrote it anew under the umask, and closed it then: of 100 times another user who was told of
    new files there had it open 64 times before that, and read its env.
    """
    path = tmp_path / "cluster.yaml"
    path.write_text("hosts: [{host: a}, {host: b}]\nenv:\n  HF_TOKEN: hf_7xq\n")
    path.chmod(mode)
    seen: list[int] = []
    opened = os.open

    def watched(name: Any, flags: int, *more: Any, **others: Any) -> int:
        handle = opened(name, flags, *more, **others)
        seen.append(os.fstat(handle).st_mode & 0o777) if flags & os.O_CREAT else None
        return handle

    monkeypatch.setattr(os, "open", watched)
    reducing.keep(str(path), {"HF_TOKEN": "hf_7xq", "NCCL_ALGO": "Ring"})
    assert seen == [0o600]
    assert path.stat().st_mode & 0o777 == mode and "NCCL_ALGO" in path.read_text()
