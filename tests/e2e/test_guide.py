"""docs/grpo.md: its files as they are written there, its jobs with small programs in the place of sglang, vLLM and TRL."""

from __future__ import annotations

import json
import re
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker, gpu_json, machine_json

PAGE = (Path(__file__).parents[2] / "docs" / "grpo.md").read_text()
FILES = dict(re.findall(r"```(?:python|yaml)\n(?:# (\S+)\n)(.*?)```", PAGE, re.S))
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.S) for line in block.splitlines()]
JOBS = [name for name in FILES if name.endswith(".yaml")]

# What sglang, vLLM, TRL's server and a judge answer to what the page asks them, and no more.
SERVES = """
import http.server, json, os, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.reply({})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/generate":
            texts = asked["text"]
            made = {"text": " 4"} if isinstance(texts, str) else [{"text": " 4"} for _ in texts]
            self.reply(made)
        elif self.path == "/v1/completions":
            assert asked["prompt"] and asked["max_tokens"] and asked["model"]
            self.reply({"choices": [{"text": " 4"}]})
        else:
            self.reply([float("#### 7" in one["answer"]) for one in asked])
    def reply(self, data):
        body = json.dumps(data).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def log_message(self, *_): pass
print("sees", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""
TRAINS = """
import os
if os.environ["RANK"] == "0" and "ask" in {ask!r}:
    from ask import ask
    assert ask(["1 + 3 =", "2 + 2 ="]) == [" 4", " 4"]
print("asked", os.environ["STOKER_ROLE_SERVER"], "sees", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
"""


def laid_out(stoker: Stoker, dead: tuple[int, ...] = ()) -> dict[str, str]:
    """The page's files, what stands in for the programs it names, and a machine of four A40. Returns the environment."""
    cards = [gpu_json(n, **({"error": "Unable to determine the device handle"} if n in dead else {})) for n in range(4)]
    assert all(card["name"] == "NVIDIA A40" for card in cards)
    (stoker.cwd / "box.json").write_text(json.dumps(machine_json(cards)))
    for name, text in FILES.items():
        stoker.script(name, text)
    (stoker.cwd / "sglang").mkdir()
    for name in ("sglang/__init__.py", "sglang/launch_server.py", "judge.py"):
        (stoker.cwd / name).write_text("" if name.endswith("__init__.py") else SERVES)
    stoker.script("train.py", TRAINS.format(ask="ask"))
    programs = stoker.cwd / "bin"
    programs.mkdir()
    for name in ("vllm", "trl"):
        (programs / name).write_text(f"#!{sys.executable}\n{SERVES}")
        (programs / name).chmod((programs / name).stat().st_mode | stat.S_IXUSR)
    path = f"{programs}:{stoker.environment()['PATH']}"
    return {"STOKER_MACHINE": str(stoker.cwd / "box.json"), "PATH": path}


def test_the_page_has_what_is_tested() -> None:
    assert set(JOBS) == {"judge.yaml", "sglang.yaml", "vllm.yaml", "trl.yaml"}
    assert {"rewards.py", "judged.py", "ask.py", "train_trl.py"} < FILES.keys()
    for name in FILES:
        if name.endswith(".py"):
            compile(FILES[name], name, "exec")


@pytest.mark.parametrize(
    ("said", "worth"),
    [
        ("48/2 = 24, so 48 + 24 = 72\n#### 72", 1.0),
        ("#### 72.0", 1.0),
        ("#### $1,072", 0.0),
        ("That makes 72.", 0.5),
        ("72 and then 24", 0.0),
        ("nothing", 0.0),
    ],
)
def test_the_pages_reward(said: str, worth: float) -> None:
    rewards: dict[str, Any] = {}
    exec(FILES["rewards.py"], rewards)
    row = json.loads(re.findall(r"```json\n(.*?)```", PAGE, re.S)[0])
    assert row["question"] and rewards["score"](said, row["answer"]) == worth


@pytest.mark.parametrize("name", JOBS)
def test_the_pages_jobs_serve_on_gpu_0_and_train_on_the_others(stoker: Stoker, name: str) -> None:
    done = stoker("run", "--dry-run", "--json", "--roles", name, env=laid_out(stoker))
    assert done.code == 0, done.err
    places = [(one["role"], one["gpu"]["index"]) for one in json.loads(done.out)["places"]]
    assert places == [("judge" if name == "judge.yaml" else "server", 0), *(("trainer", n) for n in (1, 2, 3))]


@pytest.mark.parametrize("name", ["sglang.yaml", "vllm.yaml"])
def test_the_pages_jobs_run(stoker: Stoker, name: str) -> None:
    env = laid_out(stoker)
    stoker.script("train.py", TRAINS.format(ask="ask" if name == "sglang.yaml" else ""))
    words = next(line for line in COMMANDS if line.startswith("stoker run --roles sglang.yaml")).split()[1:]
    done = stoker(*words[:2], name, *words[3:], env=env)
    assert done.code == 0, done.out + done.err
    cards = [gpu_json(n)["uuid"] for n in range(4)]
    assert f"sees {cards[0]}\n" in done.out and done.out.count("asked 127.0.0.1:") == 3
    assert done.out.count(f"sees {','.join(cards[1:])}") == 3, "each trainer has its own as its local rank"
    assert done.verdict["summary"] == "trainer ended with exit code 0; server stopped"


def test_a_dead_gpu_0_is_refused_with_what_the_page_says(stoker: Stoker) -> None:
    env = laid_out(stoker, dead=(0,))
    (command,) = [line for line in COMMANDS if "sglang.d1t1p1+d3t1p1" in line]
    done = stoker(*(word.strip("'") for word in command.split()[1:]), env=env)
    (line,) = re.findall(r"^    (stoker: --allocation .*)$", PAGE, re.M)
    assert (done.code, done.err.strip()) == (69, line)
    fits = line.split("; ")[1].split()[0]
    done = stoker("run", "--allocation", fits, "--roles", "sglang.yaml", "--dry-run", env=env)
    assert (
        done.code == 0
        and "role server: 1 rank on GPU1" in done.out
        and "role trainer: 2 ranks on GPU2, GPU3" in done.out
    ), done.out + done.err
    (other,) = [line for line in COMMANDS if "vllm:d1t2" in line]
    done = stoker(*(word.strip("'") for word in other.split()[1:]), env=env)
    assert done.code == 69 and "vllm:d1t2+fsdp:d1 would fit" in done.err, done.err
