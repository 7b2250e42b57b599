"""Run records that are damaged or odd: each is one line, and hides no other run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker
from stoker.contract import errors
from stoker.contract.evidence import Verdict
from stoker.contract.safe_io import write_json
from stoker.control.record import log_tail, run_index, run_record

pytestmark = pytest.mark.timeout(120)  # a command that waits for a pipe waits for ever
ESC = "\x1b]0;owned\x07\x1b[2J\u202e"
HANGS_S = 100
GOOD: dict[str, Any] = {
    "schema": 1,
    "name": "x",
    "started": 5.0,
    "launcher": {"pid": 1, "start": 1, "host": os.uname().nodename},
    "plan": {"world_size": 1},
}


def _text(data: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / "run.json").write_text(data if isinstance(data, str) else json.dumps(data))

    return make


def _with(**changes: Any) -> Callable[[Path], None]:
    return _text({**GOOD, **changes})


def _fifo(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        _text(GOOD)(folder)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def _link(name: str, target: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        _text(GOOD)(folder)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return make


def _folder(folder: Path) -> None:
    (folder / "run.json").mkdir()


def _binary(folder: Path) -> None:
    (folder / "run.json").write_bytes(bytes(range(256)) * 4)


def _wrong_verdict(folder: Path) -> None:
    _text(GOOD)(folder)
    (folder / "verdict.json").write_text('{"status": [], "cause": 1}')


# What the record says, and a word of what is reported; "": it is read as far as it goes.
DAMAGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (_text(""), "not JSON"),
    "torn": (_text('{"name": "x", "star'), "not JSON"),
    "binary": (_binary, "not JSON"),
    "not an object": (_text("[1, 2]"), "not a JSON object"),
    "deeply nested": (_text("[" * 200_000), "not JSON"),
    "a named pipe": (_fifo("run.json"), "named pipe"),
    "a folder": (_folder, "folder"),
    "a link to itself": (_link("run.json", "run.json"), "symbolic link"),
    "started is text": (_with(started="x"), "started"),
    "started is NaN": (_text('{"started": NaN}'), "started"),
    "launcher is a list": (_with(launcher=[]), "launcher"),
    "pid is text": (_with(launcher={"pid": "1"}), "pid"),
    "start is a list": (_with(launcher={"pid": 1, "start": [1]}), "start"),
    "host is a number": (_with(launcher={"pid": 1, "start": 1, "host": 7}), "host"),
    "name is a number": (_with(name=5), "name"),
    "plan is a number": (_with(plan=3), "plan"),
    "world size is text": (_with(plan={"world_size": "many"}), "world_size"),
    "environment is a list": (_with(environment=["SLURM_JOB_ID"]), "environment"),
    "events are a named pipe": (_fifo("events.jsonl"), "named pipe"),
    "verdict is a named pipe": (_fifo("verdict.json"), ""),
    "verdict of wrong types": (_wrong_verdict, ""),
    "name with escapes": (_with(name=ESC), ""),
    "nothing but a name": (_text({"name": "x"}), ""),
}


def damage(root: Path, kind: str) -> Path:
    folder = root / f"20260101-000000-{kind.replace(' ', '-')}"
    folder.mkdir(parents=True)
    DAMAGED[kind][0](folder)
    return folder


@pytest.mark.parametrize("kind", DAMAGED)
def test_one_damaged_record_is_skipped_and_reported(tmp_path: Path, kind: str) -> None:
    folder = damage(tmp_path, kind)
    (tmp_path / "2026-good").mkdir()
    write_json(str(tmp_path / "2026-good" / "run.json"), {**GOOD, "name": "good"})
    listing = run_index.list_runs(str(tmp_path))
    word = DAMAGED[kind][1]
    assert [run.id for run in listing.runs if run.name == "good"] == ["2026-good"] and len(listing.runs) == (
        1 if word else 2
    )
    assert word in listing.skipped and "\n" not in listing.skipped and listing.skipped.isprintable(), listing.skipped
    assert run_index.find_run("good", str(tmp_path)).id == "2026-good"
    for run in listing.runs:
        assert run_record.run_status(run) == "lost" and run_record.is_over(run)
        assert (
            run.attempts == []
            and list(run_record.read_events(run.dir)) == []
            and run_record.read_last_event_time(run.dir) is None
        )
        assert list(log_tail.list_rank_logs(run)) == [] and log_tail.read_rank_labels(run) == {}
    if word:
        with pytest.raises(errors.Refusal, match="damaged"):
            run_index.find_run(str(folder), str(tmp_path))
        with pytest.raises(errors.Refusal, match="damaged"):
            run_index.find_run(folder.name, str(tmp_path))


def test_every_command_gets_past_all_of_them(stoker: Stoker) -> None:
    root = stoker.cwd / "runs"
    for kind in DAMAGED:
        damage(root, kind)
    (root / "latest").symlink_to("latest")  # a loop
    script = stoker.script("ok.py", "print('fine')")
    good = stoker("run", "--name", "good", script)
    assert good.code == 0 and good.run_dir.name.endswith("-good") and good.err.count("damaged") == 1
    for words in (
        ("runs",),
        ("runs", "--json"),
        ("runs", "--all"),
        ("why", "good"),
        ("why",),
        ("logs", "good"),
        ("attach", "good"),
        ("stop", "good"),
        ("stop",),
        ("clean", "--runs-dir", "runs"),
        ("run", "--again", "--name", "good", script),
        ("run", "--name", "x", script),
    ):
        done = stoker(*words, timeout=HANGS_S)
        assert done.code == 0 and "Traceback" not in done.err and "\x1b" not in done.out + done.err, (
            words,
            done.code,
            done.err,
        )
        by_link = words in (("why",), ("stop",)) or words[0] == "clean"  # they had no need to look at all of them
        assert done.err.count("damaged") == (0 if by_link else 1), (words, done.err)
    (root / "latest").unlink()
    assert "good" in stoker("why").out or "x" in stoker("why").out
    for kind in DAMAGED:
        for command in ("why", "logs", "stop", "attach"):
            if DAMAGED[kind][1]:
                done = stoker(command, f"runs/20260101-000000-{kind.replace(' ', '-')}")
                assert done.code == 65 and done.err.count("\n") == 1 and "Traceback" not in done.err, (
                    kind,
                    command,
                    done.err,
                )
                break  # one path for all four: finder.find


VERDICT = {"status": "failed", "cause": "rank.exit", "summary": "s", "exit_code": 1, "evidence": ["e"], "fix": ["f"]}


@pytest.mark.parametrize(
    "wrong",
    [{"status": 5}, {"cause": None}, {"summary": ["x"]}, {"exit_code": "1"}, {"exit_code": True}, {"exit_code": 1 << 90}, {"rank": "0"}, {"host": 3}, {"gpu": []},
     {"evidence": "text"}, {"evidence": [1]}, {"evidence": {"a": 1}}, {"fix": [None]}, {"retryable": "no"}, {"detected_s": "soon"}, {"detected_s": float("nan")},
     {"run": 7}, {"attempt": None}, {"schema": "1"}],
)  # fmt: skip
def test_a_verdict_of_wrong_types_is_none(wrong: dict[str, Any]) -> None:
    assert Verdict.from_json(VERDICT).to_json() == Verdict.from_json(Verdict.from_json(VERDICT).to_json()).to_json()
    with pytest.raises(TypeError):
        Verdict.from_json({**VERDICT, **wrong})
    with pytest.raises(TypeError):
        Verdict.from_json(["status"])  # type: ignore[arg-type]


@pytest.mark.parametrize("there", ["a folder", "a file", "stale", "dangling", "loop"])
def test_the_link_to_the_newest_run_is_best_effort(stoker: Stoker, there: str) -> None:
    root = stoker.cwd / "runs"
    root.mkdir()
    if there == "a folder":
        (root / "latest").mkdir()
        (root / "latest" / "mine.txt").touch()
    elif there == "a file":
        (root / "latest").touch()
    elif there == "stale":
        for pid in range(1, 5000):
            (root / f"latest.{pid}.tmp").symlink_to("nowhere")
    else:
        (root / "latest").symlink_to("nowhere" if there == "dangling" else "latest")
    done = stoker("run", stoker.script("ok.py", "print('fine')"))
    assert done.code == 0 and done.err.count("could not be updated") == (1 if there == "a folder" else 0)
    assert "completed" in stoker("why").out
    assert not [path for path in root.iterdir() if path.name.endswith(".tmp")] or there == "stale"


def test_a_temporary_file_that_lies_there_is_neither_used_nor_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / f"x.json.{os.getpid()}.tmp").symlink_to(precious)
    write_json(str(tmp_path / "x.json"), {"a": 1})
    assert precious.read_text() == "kept" and json.loads((tmp_path / "x.json").read_text()) == {"a": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "x.json", f"x.json.{os.getpid()}.tmp"]
