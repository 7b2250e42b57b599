"""The run directory and the commands that read it: runs, why, logs, attach, stop; detached and named runs; secrets."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from conftest import Stoker, Terminal, forget_verdict, tagged, wait_for
from stoker.contract.errors import Refusal
from stoker.contract.safe_io import refuse_other_kind
from stoker.control.record import run_index, run_record
from stoker.control.record.metrics_log import MetricsWriter, read_metrics
from stoker.control.record.run_writer import RunWriter

COUNT = "import os, sys, time\nfor i in range(int(sys.argv[1])): print('step', i, flush=True); time.sleep(0.05)\n"


def test_runs_why_and_logs(stoker: Stoker) -> None:
    stoker("run", "--name", "good", stoker.script("g.py", "print('fine')"))
    stoker("run", "--name", "bad", stoker.script("b.py", "print('before'); raise SystemExit(7)"))
    rows = json.loads(stoker("runs", "--json").out)["runs"]
    assert [(row["name"], row["status"], row["cause"], row["exit_code"]) for row in rows] == [
        ("good", "completed", None, 0),
        ("bad", "failed", "rank.exit", 7),
    ]
    table = stoker("runs").out
    assert "completed" in table and "rank.exit" in table
    assert "exit code 7" in stoker("why").out and "completed" in stoker("why", "good").out
    assert stoker("logs", "--rank", "0").out == "before\n" and stoker("logs", "good").out == "fine\n"
    stoker("run", "--name", "later", stoker.script("l.py", "print('later')"))
    advice = next(line for line in stoker("why", "bad").out.splitlines() if line.startswith("  stoker logs "))
    assert stoker(*advice.split()[1:]).out == "before\n", "an older run's advice is about that run"
    for words, says in (
        (["why", "baad"], "did you mean"),
        (["logs", "--rank", "5"], "no rank 5"),
        (["logs", "--attempt", "3"], "no attempt 3"),
    ):
        refused = stoker(*words)
        assert refused.code == 66 and says in refused.err and refused.err.count("\n") == 1
    assert stoker("why", "--runs-dir", "nowhere").code == 66


def test_the_time_of_a_run_is_that_of_all_its_starts(stoker: Stoker) -> None:
    """Not of the last one only, and not with the pause between them."""
    script = stoker.script(
        "twice.py",
        "import os, sys, time\ntime.sleep(1.5)\nfirst = not os.path.exists('again')\nopen('again', 'w')\nsys.exit(4 if first else 0)\n",
    )
    first = stoker("run", "--name", "exp", script)
    took = json.loads(stoker("runs", "--json").out)["runs"][0]["seconds"]
    time.sleep(3)
    again = stoker("run", "--name", "exp", script)
    assert again.run_dir == first.run_dir
    both = json.loads(stoker("runs", "--json").out)["runs"][0]["seconds"]
    events = [event["time"] for event in again.events]
    assert took + 1.4 < both < events[-1] - events[0] - 2.5


def test_logs_say_whose_they_are_and_that_a_rank_printed_nothing(stoker: Stoker) -> None:
    script = stoker.script(
        "two.py",
        "import os, sys, time\n"
        "if os.environ['RANK'] == '0':\n    print('zero', flush=True); open('printed', 'w'); time.sleep(60)\n"
        "while not os.path.exists('printed'): time.sleep(0.01)\nsys.exit(3)\n",
    )
    failed = stoker("run", "--nproc-per-node", "2", script)
    assert failed.verdict["rank"] == 1
    plain = stoker("logs")
    assert (plain.out, plain.err) == ("zero\n", "stoker: rank 0 of 2; rank 1 failed: --rank 1\n")
    asked = stoker("logs", "--rank", "0")
    assert (asked.out, asked.err) == ("zero\n", ""), "who names a rank knows it"
    silent = stoker("logs", "--rank", "1")
    assert (silent.code, silent.out, silent.err) == (0, "", "stoker: rank 1 printed nothing\n")
    assert stoker("run", stoker.script("one.py", "print('one')")).code == 0
    assert stoker("logs").err == "", "there is no other"


def test_why_gives_the_whole_path_of_the_record(stoker: Stoker) -> None:
    whole = stoker("run", stoker.script("ok.py", "print('ok')")).run_dir
    (stoker.cwd / "runs" / "latest").unlink()
    for words in ([], [whole.name], [os.path.relpath(whole, stoker.cwd)]):
        assert f"record: {whole}\n" in stoker("why", *words).out


def test_the_time_of_a_run_is_that_of_its_last_line(stoker: Stoker) -> None:
    """From when the command began, not from when its record did."""
    done = stoker("run", stoker.script("ok.py", "print('ok')"))
    began = json.loads((done.run_dir / "run.json").read_text())["started"]
    took = json.loads(stoker("runs", "--json").out)["runs"][0]["seconds"]
    assert took == pytest.approx(done.events[-1]["time"] - began, abs=0.002)


def test_a_name_goes_on_with_an_unfinished_run(stoker: Stoker) -> None:
    script = stoker.script(
        "resume.py",
        "import os, sys, json, stoker\nfound = stoker.resume()\nprint('resume', found and os.path.basename(found))\n"
        "base = os.path.join(os.environ['STOKER_RUN_DIR'], 'checkpoints')\nos.makedirs(base, exist_ok=True)\n"
        "if not found:\n"
        "    for step, whole in ((9, True), (10, True), (11, False)):\n"
        "        d = os.path.join(base, f'step-{step}'); os.makedirs(d); open(os.path.join(d, 'w.bin'), 'wb').write(b'x' * 10)\n"
        "        json.dump({'files': {'w.bin': {'size': 10 if whole else 20}}}, open(os.path.join(d, 'manifest.json'), 'w'))\n"
        "    os.makedirs(os.path.join(base, 'step-12')); open(os.path.join(base, 'step-13.tmp'), 'w')\n    sys.exit(4)\n",
    )
    first = stoker("run", "--name", "exp", script)
    assert first.code == 4 and first.log(0) == b"resume None\n"
    where = first.run_dir
    again = stoker("run", "--name", "exp", script)
    assert (
        again.code == 0
        and again.run_dir == where
        and b"resume step-10\n" in again.log(0, 1)
        and "starting run" in again.err
        and "its newest checkpoint" in again.err
    )
    skipped = [line for line in again.log(0, 1).decode().splitlines() if not line.startswith("resume ")]
    assert len(skipped) == 1 and skipped[0].startswith(
        f"stoker: {where}/checkpoints/step-12 is not a complete checkpoint"
    ), skipped
    assert "it has no manifest.json (1 more like it); using step-10" in skipped[0], skipped
    other = stoker("run", "--name", "exp", script, "another-argument")
    assert other.run_dir != where and "is complete: this is a new run" in other.err


def test_two_starts_of_one_name_do_not_share_it(stoker: Stoker) -> None:
    run = stoker.start("run", "--name", "exp", stoker.script("c.py", COUNT), "4000")
    assert wait_for(lambda: True if list(stoker.cwd.glob("runs/2*/attempt-0/rank-0.log")) else None, 20)
    refused = stoker("run", "--name", "exp", "c.py", "100")
    assert refused.code == 69 and "is running" in refused.err
    run.terminate()
    assert run.wait(100) == 143


def test_detach_attach_and_stop(stoker: Stoker) -> None:
    script = stoker.script("c.py", COUNT)
    done = stoker("run", "--detach", "--name", "bg", "--nproc-per-node", "2", script, "4000")
    assert done.code == 0
    assert "stoker attach" in done.out and "stoker stop" in done.out
    assert json.loads(stoker("runs", "--json").out)["runs"][0]["status"] == "running"
    launcher = json.loads((done.run_dir / "run.json").read_text())["launcher"]["pid"]
    assert os.getsid(launcher) not in (os.getsid(0), launcher)
    attached = stoker.start("attach", "bg", stderr=subprocess.PIPE)
    assert attached.stdout is not None
    lines = {attached.stdout.readline().partition(b":")[0] for _ in range(40)}
    assert {b"CPU0", b"CPU1"} <= lines
    attached.send_signal(signal.SIGINT)
    assert attached.wait(100) == 0
    assert json.loads(stoker("why", "--json").out)["status"] == "running"
    stopped = stoker("stop", "bg")
    assert stopped.code == 0 and "is stopped" in stopped.out
    assert done.verdict["status"] == "stopped" and done.verdict["exit_code"] == 143
    assert "not running" in stoker("stop", "bg").out


def test_a_shell_hears_all_lines_before_its_run_is_in_the_background(stoker: Stoker) -> None:
    script = stoker.script("f.py", "import os, sys\nsys.exit(not os.path.exists('there'))\n")
    words = ["run", "--name", "twice", "--nproc-per-node", "2", script]
    assert stoker(*words).code == 1
    (stoker.cwd / "there").touch()
    again = Terminal(stoker, ["-m", "stoker", words[0], "--detach", *words[1:]], (80, 24))
    assert again.wait() == 0
    lines = [line.rstrip("\r") for line in again.shown.decode().splitlines()]
    assert lines[0].startswith("starting run ") and "✓ No GPU found: 2 CPU ranks, gloo" in lines, lines
    assert "is in the background" in " ".join(lines) and max(map(len, lines)) <= 80, lines
    assert stoker("attach", "twice").code == 0


def test_attach_ends_with_the_runs_exit_code(stoker: Stoker) -> None:
    stoker("run", "--detach", stoker.script("f.py", "import time; time.sleep(1); print('bye'); raise SystemExit(6)"))
    attached = stoker("attach")
    assert attached.code == 6 and "CPU0:bye\n" in attached.out and "ended with exit code 6" in attached.out


def test_attach_shows_the_newest_start_alone(stoker: Stoker) -> None:
    """A run that was resumed: the error of its first start is no longer news."""
    script = stoker.script(
        "f.py",
        "import os, sys\nif not os.path.exists('there'):\n    open('there', 'w'); sys.exit('of before')\nprint('of now')\n",
    )
    assert stoker("run", "--name", "twice", script).code == 1
    first = stoker("attach", "twice")
    assert "of before" in first.out and "start 1 of" not in first.err
    assert stoker("run", "--name", "twice", script).code == 0
    seen = stoker("attach", "twice")
    assert seen.code == 0 and "CPU0:of now\n" in seen.out and "of before" not in seen.out and "failed" not in seen.out
    named = re.search(r"^stoker: start 2 of run \S+-twice; `stoker (logs \S+ --attempt 0)` shows", seen.err)
    assert named is not None and "of before" in stoker(*named[1].split()).out


def test_attach_folds_the_launchers_lines(stoker: Stoker) -> None:
    stoker("run", stoker.script("f.py", "raise ValueError('a long story ' * 20)\n"))
    seen = Terminal(stoker, ["-m", "stoker", "attach"], (80, 24))
    assert seen.wait() == 1
    text = re.sub(rb"\x1b\[[0-?]*[ -/]*[@-~]", b"", seen.shown).decode()
    lines = [line.rstrip("\r") for line in text.splitlines()]
    own = [line for line in lines if not line.startswith("CPU0:")]
    assert len(own) > 5 and [line for line in own if len(line) > 80 and " " in line.strip()] == [], own


def test_each_attempt_has_its_own_ranks_and_labels(stoker: Stoker) -> None:
    """After a host was lost the newest plan has fewer ranks, on others."""
    both = "import os, time\nprint('bye', os.environ['RANK'], flush=True)\nseen = os.environ['TORCHELASTIC_RESTART_COUNT'] + '-'\n"
    both += "open(seen + os.environ['RANK'], 'w').close()\nwhile not (os.path.exists(seen + '0') and os.path.exists(seen + '1')): time.sleep(0.01)\n"
    done = stoker(
        "run", "--nproc-per-node", "2", "--max-restarts", "1", stoker.script("f.py", both + "raise SystemExit(6)")
    )
    about = json.loads((done.run_dir / "run.json").read_text())
    about["plan"] |= {"world_size": 1, "ranks": [{"rank": 0, "label": "b/GPU0"}]}
    (done.run_dir / "run.json").write_text(json.dumps(about))
    (done.run_dir / "attempt-1" / "rank-1.log").unlink()
    events = (done.run_dir / "events.jsonl").read_text().splitlines()
    moved = [
        line.replace("CPU0", "b/GPU0") if '"rank-up"' in line and '"attempt": 1' in line else line for line in events
    ]
    (done.run_dir / "events.jsonl").write_text("\n".join(moved) + "\n")
    assert stoker("logs", "--rank", "1", "--attempt", "0").out == "bye 1\n"
    assert "has no rank 1 in attempt 1; there are 0 to 0" in stoker("logs", "--rank", "1").err
    attached = stoker("attach")
    assert attached.out.count("b/GPU0:bye 0\n") == attached.out.count("\nCPU0:bye 0\n") == 1, attached.out


def test_stop_now_takes_no_grace(stoker: Stoker) -> None:
    ignore = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(250)\n"
    done = stoker("run", "--detach", "--grace", "250s", stoker.script("i.py", ignore))
    assert wait_for(lambda: True if list(stoker.cwd.glob("runs/2*/attempt-0/rank-0.log")) and done.log(0) else None, 20)
    assert stoker("stop", "--now").code == 0
    assert done.verdict["exit_code"] == 143


def test_stop_without_a_name_ends_one_that_runs(stoker: Stoker) -> None:
    script = stoker.script("nap.py", "import time; time.sleep(100)")
    for name in ("first", "second"):
        assert stoker("run", "--detach", "--name", name, script).code == 0
    assert ["-second is stopped" in stoker("stop").out, "-first is stopped" in stoker("stop").out] == [True, True]
    third = stoker("stop")
    assert third.code == 0 and "no run in " in third.out and "-second: stopped" in third.out


def test_commands_in_our_lines_can_be_pasted(stoker: Stoker) -> None:
    failed = stoker("run", "--name", "my run", stoker.script("i.py", "import no_such_package"))
    quoted = f"'{failed.run_dir.name}'"
    assert "\nstoker: what to do: `pip install no_such_package`\n" in failed.err
    assert f"exit code 1; `stoker why {quoted}` says more\n" in failed.err
    detached = stoker(
        "run", "--detach", "--again", "--name", "my run", stoker.script("nap.py", "import time; time.sleep(100)")
    )
    quoted = f"'{detached.run_dir.name}'"
    assert f"run {detached.run_dir.name} is in the background\n" in detached.out
    assert all(f"  stoker {word} {quoted}" in detached.out for word in ("attach", "logs", "stop", "why"))
    assert "`stoker stop 'my run'` ends it" in stoker("run", "--name", "my run", "nap.py").err
    assert stoker("stop").code == 0


def test_a_refusal_is_heard_through_detach(stoker: Stoker) -> None:
    done = stoker("run", "--detach", "missing.py")
    assert done.code == 66 and "script missing.py does not exist" in done.err and not (stoker.cwd / "runs").exists()


def test_logs_follow_until_the_end(stoker: Stoker) -> None:
    run = stoker.start("run", stoker.script("c.py", COUNT), "30")
    assert wait_for(lambda: True if list(stoker.cwd.glob("runs/2*/attempt-0/rank-0.log")) else None, 20)
    followed = stoker("logs", "--follow", "--rank", "0")
    assert followed.out.splitlines() == [f"step {i}" for i in range(30)]
    assert run.wait(100) == 0


def test_four_words_outside_a_run_do_nothing(tmp_path: Path) -> None:
    code = (
        "import stoker; stoker.beat(step=1, loss=0.5); stoker.mark('x'); stoker.phase('eval'); print(stoker.resume())"
    )
    env = {key: value for key, value in os.environ.items() if not key.startswith("STOKER_")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path, check=True
    )
    assert done.stdout == "None\n" and done.stderr == "" and list(tmp_path.iterdir()) == []


def test_beats_phases_and_marks_reach_the_record(stoker: Stoker) -> None:
    script = stoker.script(
        "words.py",
        "import os, time, stoker\nfor i in range(30): stoker.beat(step=i, loss=1.0 / (i + 1), tokens=100); time.sleep(0.05)\n"
        "stoker.phase('eval'); stoker.mark('HALF')\npid = os.fork()\n"
        "if pid == 0: stoker.beat(step=999); stoker.mark('CHILD'); os._exit(0)\nos.waitpid(pid, 0)\n",
    )
    done = stoker("run", "--nproc-per-node", "2", script)
    assert done.code == 0
    kinds = [
        (event["event"], event.get("rank"), event.get("name"))
        for event in done.events
        if event["event"] in ("first-step", "phase", "mark")
    ]
    assert sorted(kinds, key=str) == sorted(
        [
            (kind, rank, name)
            for rank in (0, 1)
            for kind, name in (("first-step", None), ("phase", "eval"), ("mark", "HALF"))
        ],
        key=str,
    )
    assert {event["steps"] for event in done.events if event["event"] == "rank-exit"} == {29}


def test_a_torn_record_is_read_as_far_as_it_goes(stoker: Stoker) -> None:
    done = stoker("run", stoker.script("ok.py", "print('ok')"))
    with open(done.run_dir / "events.jsonl", "ab") as file:
        file.write(b'{"event": "half')
    (done.run_dir / "verdict.json").write_text('{"status": "comp')
    assert json.loads(stoker("why", "--json").out)["cause"] == "completed"  # the event has it
    assert [event["event"] for event in run_record.read_events(str(done.run_dir))][-1] == "verdict"
    forget_verdict(done.run_dir)
    assert json.loads(stoker("why", "--json").out)["cause"] == "launch.killed"
    (stoker.cwd / "runs" / "junk").mkdir()
    (stoker.cwd / "runs" / "junk" / "run.json").write_text("not json")
    assert len(json.loads(stoker("runs", "--json").out)["runs"]) == 1


@pytest.mark.parametrize("failing", [True, False])
def test_notify_gets_the_verdict(stoker: Stoker, failing: bool) -> None:
    code = 3 if failing else 0
    command = "cat > told; echo $STOKER_NOTIFY >> told; exit 5"
    done = stoker("run", "--notify", command, stoker.script("n.py", f"raise SystemExit({code})"))
    assert done.code == code and "--notify ended with 5" in done.err
    text, what = (stoker.cwd / "told").read_text().rsplit("}", 1)
    assert json.loads(text + "}")["exit_code"] == code and what.strip() == "ended"


def test_no_leftovers_helper_sees_what_it_should(stoker: Stoker) -> None:
    """The check every test relies on must be able to fail."""
    stray = subprocess.Popen(["sleep", "60"], env={"STOKER_RUN_ID": "x", "STOKER_RUN_DIR": str(stoker.cwd / "runs/x")})
    try:
        assert wait_for(lambda: tagged(stoker.cwd) or None, 5)
    finally:
        stray.kill()
        stray.wait()


def test_launches_of_one_second_do_not_share_a_folder(stoker: Stoker) -> None:
    script = stoker.script("s.py", "import time; time.sleep(0.2)")
    runs = [stoker.start("run", script) for _ in range(6)]
    assert [run.wait(60) for run in runs] == [0] * 6
    assert len(list(stoker.cwd.glob("runs/2*/verdict.json"))) == 6


def test_a_reopened_run_does_not_show_its_old_verdict(stoker: Stoker) -> None:
    script = stoker.script(
        "r.py",
        "import os, sys, time\nif os.environ.get('GO') != '1': sys.exit(3)\nprint('ready', flush=True)\ntime.sleep(60)\n",
    )
    assert stoker("run", "--name", "re", script).code == 3
    run = stoker.start("run", "--name", "re", script, env={"GO": "1"})
    assert wait_for(lambda: True if list(stoker.cwd.glob("runs/2*/attempt-1/rank-0.log")) else None, 20)
    run.kill()
    run.wait()
    assert json.loads(stoker("why", "--json").out)["cause"] == "launch.killed"


def test_a_huge_variable_costs_nothing(stoker: Stoker) -> None:
    done = stoker("run", stoker.script("ok.py", "print('ok')"), env={"BIG": "x" * 120_000})
    assert done.code == 0 and (done.run_dir / "run.json").stat().st_size < 60_000


def test_stop_takes_a_whole_name(stoker: Stoker) -> None:
    stoker("run", "--name", "exp10", stoker.script("ok.py", "print('ok')"))
    assert stoker("stop", "exp1").code == 66 and stoker("why", "exp1").code == 0


def test_a_run_of_another_host_is_followed_until_it_has_a_verdict(stoker: Stoker) -> None:
    done = stoker("run", stoker.script("ok.py", "print('ok')"))
    told = json.loads((done.run_dir / "run.json").read_text())
    told["launcher"]["host"] = "elsewhere"
    (done.run_dir / "run.json").write_text(json.dumps(told))
    verdict = forget_verdict(done.run_dir)
    attached = stoker.start("attach")
    with pytest.raises(subprocess.TimeoutExpired):
        attached.wait(1.5)
    verdict.rename(done.run_dir / "verdict.json")
    assert attached.wait(100) == 0


def test_a_folder_without_runs_is_named_by_its_whole_path(stoker: Stoker) -> None:
    for words in (("why",), ("logs",), ("why", "nobody")):
        done = stoker(*words)
        assert done.code == 66 and str(stoker.cwd / "runs") in done.err and done.err.count("\n") == 1, done.err
    assert str(stoker.cwd / "runs") in stoker("runs").out


# ---- damaged files ----


@pytest.mark.parametrize("name", ["stoker.log", "attempt-0/rank-0.log"])
def test_a_log_that_is_a_pipe_is_not_waited_for(stoker: Stoker, name: str) -> None:
    """Nobody reads it, and no signal ends a launcher that waits in open()."""
    script = stoker.script("fails.py", "raise SystemExit(3)")
    done = stoker("run", "--name", "a", script)
    (done.run_dir / name).unlink()
    os.mkfifo(done.run_dir / name)
    shown = stoker("logs", "a") if "rank" in name else stoker("attach", "a")
    assert shown.code == 66 and shown.err.count("\n") == 1 and "named pipe" in shown.err, shown.err
    if name == "stoker.log":
        with pytest.raises(Refusal, match="can't be written"):
            RunWriter(str(done.run_dir), "here", reopened=True)


def test_metrics_that_are_a_pipe_are_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(Refusal, match="can't be read: is a named pipe"):
        list(read_metrics(str(tmp_path)))


def test_metrics_of_a_resumed_run_are_cut_line_by_line(tmp_path: Path) -> None:
    """A run of weeks has a million lines."""
    lines = [f'{{"step":{step}}}\n' for step in range(50_000)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    tracemalloc.start()
    try:
        MetricsWriter(str(tmp_path), resumed_at=40_000).close()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:40_000])
    assert peak < 1 << 20


def test_a_record_that_no_check_foresaw_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"schema": 1}')
    monkeypatch.setattr(run_record, "_check_types", lambda data: data["schema"]["x"])
    listing = run_index.list_runs(str(tmp_path))
    assert not listing.runs and "run: it can't be read: TypeError" in listing.skipped
    with pytest.raises(Refusal, match="is damaged: it can't be read: TypeError"):
        run_index.find_run(str(tmp_path / "run"), str(tmp_path))


def test_a_file_that_somebody_named_replaces_its_own_kind_only(stoker: Stoker, tmp_path: Path) -> None:
    thesis = stoker.cwd / "thesis"
    thesis.write_text("a year of work")
    for words in (
        ("web", "--save", "nosuch", "thesis"),
        ("doctor", "--only", "host.disk", "--no-probe", "--bundle", "thesis"),
        ("doctor", "--only", "host.disk", "--no-probe", "--record", "thesis"),
    ):
        done = stoker(*words)
        assert done.code == 73 and "thesis already exists and is not a" in done.err
        assert thesis.read_text() == "a year of work"
    for name, data in (("page", b"<!DOCTYPE html><p>"), ("empty", b"")):
        (tmp_path / name).write_bytes(data)
        refuse_other_kind(str(tmp_path / name), b"<!doctype html", "an HTML page")
    with pytest.raises(Refusal, match="page already exists and is not a PNG picture"):
        refuse_other_kind(str(tmp_path / "page"), b"\x89PNG", "a PNG picture")
