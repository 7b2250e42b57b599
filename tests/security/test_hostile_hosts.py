"""What a hostile host, another user's record or a stranger's folder may cost us: a line, not the launcher. Work is bounded by the kernel (CPU time and
memory of a child), not by a clock.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from conftest import Stoker, at_length
from stoker.contract.protocol import ProtocolError
from stoker.control.cluster.asking import Asking
from stoker.control.launch.membership import Lost
from stoker.control.machine.model import machine_from_json

SRC = Path(__file__).parents[2] / "src"
CPU_S, MEMORY = 20, 2 << 30


def bounded(code: str, *words: str) -> str:
    """What that program prints; it ends by a signal, or a MemoryError, where it needs more than that."""

    def limits() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    argv = [sys.executable, "-c", code, *words]
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, preexec_fn=limits, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-1000:])
    return done.stdout


# ---- a stranger's folder ----


def test_a_probe_of_a_plan_runs_nothing_of_the_working_directory(stoker: Stoker) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
              "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 256, "rms_norm_eps": 1e-5}  # fmt: skip
    (stoker.cwd / "config.json").write_text(json.dumps(config))
    (stoker.cwd / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    for name in ("json", "shlex", "stoker"):
        (stoker.cwd / f"{name}.py").write_text("open('owned', 'w').close()\nraise SystemExit('owned')\n")
    machine = Path(__file__).parents[1] / "machines" / "h200.json"
    argv = [sys.executable, "-P", "-m", "stoker", "fit", ".", "--data", "rows.jsonl", "--probe"]
    env = {**stoker.environment({"STOKER_MACHINE": str(machine)}), "PYTHONPATH": str(SRC)}
    done = subprocess.run(argv, cwd=stoker.cwd, env=env, capture_output=True, text=True, check=False)
    assert "probe: stoker train sft" in done.stderr, done.stderr
    assert not (stoker.cwd / "owned").exists() and "owned" not in done.stderr, done.stderr


def test_no_program_of_ours_is_started_with_the_working_directory_on_its_path() -> None:
    """`python -m` puts it first; -P does not. A rank is started as its user asks."""
    found = []
    for path in (SRC / "stoker").rglob("*.py"):
        for argv in re.findall(r"sys\.executable,[^\]\)]*", path.read_text()):
            if '"-m"' in argv and '"-P"' not in argv:
                found.append((path.name, argv))
    assert found == []


# ---- a hostile host ----


@pytest.mark.parametrize("cores", [-1, 10_000, 10**12])
def test_a_machine_of_absurd_size_is_refused(cores: int) -> None:
    machine = {"schema": 1, "hostname": "x", "cores": cores, "memory_total": 1, "memory_available": 1}
    with pytest.raises(ValueError, match="cores"):
        machine_from_json(machine)
    assert machine_from_json({**machine, "cores": 512}).cores == 512


INSPECTED = """
import json, sys
from stoker.control.watch.watcher import Watcher
watch = Watcher(2, 300.0, frozenset(["evil"]), 0.0)
watch.failing()
(order,) = watch.look(1000.0)
def rank(sizes, name="gloo:all_reduce"):
    op = {"seq": 1, "p2p": 0, "name": name, "sizes": sizes, "done": False, "order": 1}
    frames = [["f" * long, "x.py", 1, []]]
    return {"state": "S", "groups": [{"name": "0", "about": "default_pg", "ops": [op]}], "samples": [[{"main": True, "frames": frames}]]}
long = int(sys.argv[2])
told = {"0": rank([[2, 3]]), "1": rank(eval(sys.argv[1]))}
watch.answered("evil", order.order["ask"], json.dumps(told).encode(), 1001.0)
actions = watch.look(1001.0)
print(max(len(str(action)) for action in actions))
"""


@pytest.mark.parametrize(
    ("sizes", "long"),
    [
        ('[[3_000_000_000, "x"]]', 1),
        ("[[int('9' * 39)] * 100_000]", 1),
        ("[[1] * 1_000_000]", 1),
        ("[[4, -3], ['x' * 10_000_000]]", 1),
        ("[[2, 4]]", 10_000_000),
    ],
    ids=["a text that is repeated", "a product without end", "a million lengths", "a long text", "a long name"],
)
def test_an_inspection_costs_little_and_says_little(sizes: str, long: int) -> None:
    assert int(bounded(INSPECTED, sizes, str(long))) < 100_000


def test_sizes_that_differ_are_still_told_apart() -> None:
    assert "of shape [2, 4]" in bounded(INSPECTED + "print(watch.stall)", "[[2, 4]]", "1")


def test_groups_are_read_once() -> None:
    bounded(
        "from stoker.control.watch.watcher import Watcher\nWatcher(4000, 1.0, frozenset('a'), 0.0).groups('a=*;' * 4_000_000)"
    )


def test_words_without_content_come_to_an_end() -> None:
    class Agent:
        host, gone = "evil", ""

        def say(self, _: Any) -> None: ...

    asking = Asking(cast(Any, [Agent()]), lambda _: None)
    question = asking.ask("torch", {"evil": {}}, 1.0)
    word = {"is": "probe", "ask": question.name, "what": "torch", "more": True}
    with pytest.raises(ProtocolError, match="does not come to an end"):
        for _ in range(1_000_000):
            asking.hear("evil", word, b"")


def test_answers_to_all_questions_together_are_bounded() -> None:
    class Agent:
        host, gone = "evil", ""

        def say(self, _: Any) -> None: ...

    asking = Asking(cast(Any, [Agent()]), lambda _: None)
    payload = b'{"error": "' + b"x" * (1 << 20) + b'"}'
    with pytest.raises(ProtocolError, match="does not come to an end"):
        for _ in range(64):
            question = asking.ask("torch", {"evil": {}}, 1.0)
            asking.hear("evil", {"is": "probe", "ask": question.name, "what": "torch"}, payload)


def test_former_lives_of_a_host_are_forgotten_in_time() -> None:
    lost = Lost("cut off", [[1, 1]])
    for life in range(1000):
        lost.remember([[life, 7], [life + 1, 7]])
    assert len(lost.former) <= 100 and lost.former[-2:] == [[999, 7], [1000, 7]]


RETURNING = """
{base}
_answer = answer
def answer(order):
    if order["do"] == "open":
        with open(LIVES, "a") as file: print("life", len(order["former"]), file=file)
        say({{"is": "host", "machine": MACHINE, "held": {{}}, "selves": [[1 << 20, 2]] * 100_000, "found": ["x"] * 100_000, "visible": None}})
        if order["former"]:
            for number in range(40):
                say({{"is": "probe", "ask": "join-x", "what": "x%d" % number}}, b'{{"error": "' + b"x" * (1 << 20) + b'"}}')
            with open(LIVES, "a") as file: print("all taken", file=file)
        return
    if order["do"] == "start":
        _answer(order)
        os._exit(1)
    _answer(order)
LIVES = {lives!r}
main()
"""


@at_length
def test_a_host_that_comes_and_goes_fills_no_memory(stoker: Stoker, tmp_path: Path) -> None:
    folder, lives = tmp_path / "bin", tmp_path / "lives"
    folder.mkdir()
    base = (
        Path(__file__)
        .with_name("hostile_agent.py")
        .read_text()
        .rpartition("\nmain()")[0]
        .replace("from __future__ import annotations\n", "")
    )
    body = RETURNING.format(base=base, lives=str(lives))
    (folder / "ssh").write_text(f"#!{sys.executable} -IS\n{body}")
    (folder / "ssh").chmod(0o755)
    script = stoker.script(
        "wait.py",
        f"import time\nfor _ in range(300):\n    time.sleep(0.1)\n    if open({str(lives)!r}).read().count('life') > 2: break\n",
    )
    env = {"PATH": f"{folder}:{stoker.env['PATH']}", "HOSTILE_AT": "none", "HOSTILE_FILE": os.devnull}
    flags = ("--hosts", "localhost,evil.example", "--min-hosts", "1", "--nproc-per-node", "1", "--no-preflight")
    done = stoker("run", *flags, script, env=env)
    words = lives.read_text().splitlines()
    counts = [int(word.split()[1]) for word in words if word.startswith("life")]
    # It was cut off in the middle of its answers, and tried again.
    assert len(counts) > 2 and 0 < max(counts) <= 100 and "all taken" not in words, (words[:20], done.err)


def test_a_far_end_that_complains_without_end_fills_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a copy. Where its complaints go to a file, that file grows: none may be open but the pipes."""
    from stoker.control.cluster import copying, ssh
    from stoker.control.cluster.hosts import from_mapping

    source, files = tmp_path / "source", tmp_path / "files"
    source.mkdir()
    (source / "a.txt").write_text("a" * 100)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # 8 MB of complaints, what its stderr is, and then it goes.
    far = f"cat >/dev/null & head -c 8000000 /dev/zero | tr '\\0' x >&2; readlink /proc/$$/fd/2 > {files}; echo the last word >&2; exit 3"
    monkeypatch.setattr(ssh, "ssh_command", lambda *_: ["sh", "-c", far])
    hosts = from_mapping({"hosts": [{"host": "far.example", "workdir": "/there"}]}, "cluster.yaml", written=False)
    load = copying.sync_load(hosts, str(source), lambda line: None)
    with pytest.raises(copying.NotCopied) as refused:
        copying.copy(hosts, load, lambda line: None)
    assert files.read_text().startswith("pipe:"), files.read_text()
    assert len(str(refused.value)) < 2000 and "far.example" in str(refused.value)
