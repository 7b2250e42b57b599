"""The commands of README.md and of the guides, run: as they are written, or as this table says and why."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from conftest import Stoker, at_length, at_length_but, machine_json
from stoker.cli.main import MODULES, load_command

ROOT = Path(__file__).parents[2]
GUIDES = ("quickstart", "launching", "diagnosis", "training", "smallcard", "a40s", "pods", "lan", "startup", "nan")
PAGES = ("README.md", *(f"docs/{name}.md" for name in GUIDES))


@dataclass(frozen=True)
class Row:
    """A command of those pages. Without `instead` it is run as written."""

    command: str
    instead: str = ""
    why: str = ""  # there is something instead, or it is not run at all
    before: str = ""
    after: str = ""
    codes: tuple[int, ...] = (0,)
    gpus: int = 0
    says: str = ""
    needs: str = ""  # a package
    repeats: bool = False  # nearly another row: with test.sh --all only


PLAN = "a plan: the chain itself takes minutes (tests/test_speedrun.py runs one)"
DRY = "a dry run: settings, data and files are checked, nothing is trained (each stage's own tests do)"
SETUP = "makes .venv from a package index"
PARSED = "only its words are checked: "
# Two runs with a loss: what `stoker train` writes in minutes.
LOSSES = (
    "for name in exp1 exp2; do stoker run --name $name train.py && "
    """for step in 0 1; do echo "{\\"step\\": $step, \\"loss\\": $((2 - step))}"; done > runs/latest/metrics.jsonl; done"""
)
FINDINGS = (0, 1, 2)  # warnings, failures: what is found depends on the machine

TINY_QLORA = (
    "stoker train sft --model.load sft/hf --data chats.jsonl --qlora --preset small --context-length 128 --max-steps 2"
)
ROWS = [
    Row("bash speedrun.sh", "stoker speedrun --plan", f"{SETUP}; {PLAN}"),
    Row(".venv/bin/stoker chat", why=f"{PARSED}it asks a person"),
    Row(". .venv/bin/activate", why="the tests' own environment is active"),
    Row("bash speedrun.sh --plan", "stoker speedrun --plan", SETUP),
    Row("stoker speedrun --set sft:train.max_steps=800", "stoker speedrun --plan --set sft:train.max_steps=800", PLAN),
    Row("stoker speedrun --data my-data/", "stoker speedrun --plan --data my-data/", PLAN),
    Row(
        "stoker speedrun --preset d20 --data my-data/ --nproc-per-node 8",
        "stoker speedrun --plan --preset d20 --data my-data/ --nproc-per-node 8",
        PLAN,
        gpus=8,
    ),
    Row(
        'stoker chat runs/speedrun-cpu --stage sft --prompt "Anna has 3 pears. Anna gets 2 more pears. How many pears does Anna have?"',
        'stoker chat sft/hf --prompt "Anna has 3 pears."',
        "a model of two layers in place of a speedrun's",
        needs="torch",
    ),
    Row(
        "stoker export runs/speedrun-cpu my-model --stage grpo-density",
        "stoker export sft/hf my-model",
        "a model of two layers in place of a speedrun's",
        needs="torch",
    ),
    Row("bash setup.sh", why=SETUP),
    Row("stoker run train.py --lr 3e-4"),
    Row("stoker run --nproc-per-node 2 train.py"),
    Row("stoker run --dry-run train.py"),
    Row("stoker why"),
    Row("stoker why --json", says='"cause"'),
    Row("stoker logs --rank 1"),
    Row("stoker doctor", codes=FINDINGS),
    Row('eval "$(stoker completion bash)"', needs="shtab"),
    Row(
        "stoker train pretrain --data book.txt --preset small",
        "stoker train pretrain --data book.txt --preset small --dry-run",
        DRY,
    ),
    Row(
        "stoker run --detach --name exp1 --max-restarts 3 --notify 'mail -s exp1 me@example.org' train.py",
        "stoker run --detach --name exp1 --max-restarts 3 --notify 'cat > told.txt' train.py",
        "there may be no such program",
        after="stoker attach exp1",
    ),
    Row("stoker run --detach --name exp1 --max-restarts 3 train.py", after="stoker attach exp1", repeats=True),
    Row("stoker run --config me.yaml train.py"),
    Row(
        "stoker metrics", "stoker metrics --once", "it serves until it is stopped", says="stoker_last_collect_success 1"
    ),
    Row(
        "stoker run --metrics-port 9912 train.py", "stoker run --metrics-port 0 train.py", "the port may be in use here"
    ),
    Row("stoker attach exp1", before="stoker run --name exp1 train.py"),
    Row("stoker stop exp1", before="stoker run --detach --name exp1 train.py --seconds 60", says="stopped"),
    Row("stoker runs"),
    Row(
        "stoker top",
        "stoker top --once",
        "it needs a terminal: tests/control/show/test_top.py has one",
        says="no run yet",
    ),
    Row(
        "stoker web",
        "stoker web --save exp1 exp1.html",
        "it serves until it is stopped: tests/control/show/test_web.py has it",
        before=LOSSES,
        says="wrote exp1.html",
    ),
    Row("stoker plot exp1", before=LOSSES, says="last 1"),
    Row("stoker compare exp1 exp2", before=LOSSES, says="settings that differ: none"),
    Row("stoker run --name exp1 train.py", before="stoker run --name exp1 train.py", says="complete"),
    Row("stoker train pretrain --data 'texts/*.jsonl'", "stoker train pretrain --data 'texts/*.jsonl' --dry-run", DRY),
    Row(
        "stoker train pretrain --data book.txt --debug",
        "stoker train pretrain --data book.txt --debug --max-steps 2",
        "2 steps in place of 10",
        needs="torch",
    ),
    Row(
        "stoker train pretrain --config my.yaml --nproc-per-node 7 --max-restarts 3 --name exp1 --optim.learning_rate 1e-4",
        "stoker train pretrain --config my.yaml --nproc-per-node 7 --max-restarts 3 --name exp1 --optim.learning_rate 1e-4 --dry-run",
        DRY,
    ),
    Row(
        "stoker train pretrain --data book.txt --model.load path/to/llama",
        "stoker train pretrain --data book.txt --model.load sft/hf --dry-run",
        DRY,
        needs="torch",
    ),
    Row(
        "stoker train sft --model.load runs/latest/hf --data chats.jsonl",
        "stoker train sft --model.load sft/hf --data chats.jsonl --dry-run",
        DRY,
        needs="torch",
    ),
    Row(
        "stoker fit path/to/llama --gpus 2x24GB",
        "stoker fit sft/hf --gpus 2x24GB",
        "a model of two layers in place of a Llama",
        needs="torch",
        says="fits: full",
    ),
    Row("stoker data show chats.jsonl", needs="tiktoken", says="200 conversations used"),
    Row(
        "stoker train dpo --model.load sft/hf --dpo.pairs pairs.jsonl",
        "stoker train dpo --model.load sft/hf --dpo.pairs pairs.jsonl --dry-run",
        DRY,
        needs="torch",
    ),
    Row(
        "stoker train reward --model.load sft/hf --reward.pairs pairs.jsonl",
        "stoker train reward --model.load sft/hf --reward.pairs pairs.jsonl --dry-run",
        DRY,
        needs="torch",
    ),
    Row(
        "stoker train grpo --model.load sft/hf --grpo.prompts prompts.jsonl",
        "stoker train grpo --model.load sft/hf --grpo.prompts prompts.jsonl --dry-run",
        DRY,
        needs="torch",
    ),
    Row(
        "stoker train grpo --model.load sft/hf --grpo.prompts prompts.jsonl --grpo.reward rewards.py:score",
        "stoker train grpo --model.load sft/hf --grpo.prompts prompts.jsonl --grpo.reward rewards.py:score --dry-run",
        DRY,
        needs="torch",
    ),
    Row(
        "stoker train evaluate --model.load sft/hf --evaluate.tasks gsm8k/test.jsonl",
        "stoker train evaluate --model.load sft/hf --evaluate.tasks gsm8k/test.jsonl --dry-run",
        DRY,
        needs="torch",
    ),
    Row("stoker prepare --data 'web/*.parquet' --data.text_key content", needs="pyarrow"),
    Row(
        "torchrun --nproc-per-node 2 -m stoker.training.recipes.pretrain --preset debug --data book.txt",
        why=f"{PARSED}tests/test_pretrain.py runs it",
    ),
    Row(
        "stoker train sft --model.load path/to/llama --data chats.jsonl --qlora",
        TINY_QLORA,
        "a model of two layers, 2 steps",
        needs="torch",
    ),
    Row(
        'stoker chat runs/latest --prompt "What did you learn?"',
        'stoker chat runs/latest --prompt "What did you learn?" --max-tokens 4 # not sft/hf itself',
        "the run before trained an adapter of a model of two layers; 4 tokens",
        before=TINY_QLORA,
        needs="torch",
    ),
    Row(
        "stoker export runs/latest my-model --merge",
        "stoker export runs/latest my-model --merge --tokenizer sft/hf",
        "the run before trained an adapter of a model of two layers, whose tokenizer this is",
        before=TINY_QLORA,
        says="added to the weights",
        needs="torch",
    ),
    Row(
        "stoker cluster init gpu1 gpu2 gpu3",
        "stoker cluster init --help",
        "there are no such hosts (tests/control/cluster/test_hosts.py runs it on a test cluster)",
    ),
    Row(
        "stoker cluster check --hosts cluster.yaml",
        why=f"{PARSED}tests/control/cluster/test_cluster_check.py runs it on a test cluster",
    ),
    Row(
        "stoker run --hosts cluster.yaml --sync --min-hosts 2 train.py",
        why=f"{PARSED}tests/e2e/test_multihost.py runs it on a test cluster",
    ),
    Row(
        "stoker train sft --hosts cluster.yaml --preset production --model.load path/to/llama --data chats.jsonl --qlora --balance auto",
        why=f"{PARSED}there are no such hosts (tests/e2e/test_multihost.py has a test cluster)",
    ),
    Row(
        "stoker top --hosts cluster.yaml",
        why=f"{PARSED}there are no such hosts (tests/control/show/test_top.py has some)",
    ),
    Row(
        "stoker fit path/to/llama --gpus 8GB",
        "stoker fit sft/hf --gpus 8GB",
        "a model of two layers in place of a Llama",
        needs="torch",
        says="fits: full",
        repeats=True,
    ),
    Row(
        "stoker train sft --config qlora_8GB --data chats.jsonl",
        "stoker train sft --config qlora_8GB --data chats.jsonl --model.load sft/hf --dry-run",
        f"{DRY}; a model of two layers",
        gpus=1,
        needs="torch",
    ),
    Row(
        "stoker run --gpus 1,2,3 train.py",
        "stoker run --gpus 1,2,3 --dry-run train.py",
        "there are no GPUs",
        gpus=4,
        says="using 3 GPUs",
    ),
    Row(
        "stoker train grpo --config gsm8k_2000samples_4GPUs --grpo.prompts gsm8k/train.jsonl",
        "stoker train grpo --config gsm8k_2000samples_4GPUs --grpo.prompts gsm8k/test.jsonl --model.load sft/hf --dry-run",
        f"{DRY}; a model of two layers",
        gpus=4,
        needs="torch",
    ),
    Row("git clone REPOSITORY stoker && cd stoker", why="nothing is fetched here"),
    Row("export STOKER_RUNS=/workspace/runs"),
    Row(
        "stoker train pretrain --detach --name base --max-restarts 3 --data /workspace/texts --data.cache /workspace/cache",
        "stoker train pretrain --name base --max-restarts 3 --data texts/a.jsonl --data.cache cache --dry-run",
        f"{DRY}; there is no /workspace",
    ),
    Row("stoker attach base", before="stoker run --name base train.py", repeats=True),
    Row("stoker why base", before="stoker run --name base train.py", says="completed", repeats=True),
    Row("stoker run --init-slots 1 train.py", repeats=True),
    Row("stoker run --ram-limit 20GB train.py", repeats=True),
    Row("stoker nan runs/latest", why=f"{PARSED}tests/test_forensics.py has such runs"),
    Row(
        "stoker train pretrain --debug --data book.txt --nan.inject layers.1.attention@5",
        why=f"{PARSED}tests/test_forensics.py runs it",
    ),
    Row("stoker doctor --bundle ticket.tar.gz", codes=FINDINGS),
    Row("stoker clean", codes=FINDINGS),
    Row("stoker clean --pid 4711", why=f"{PARSED}pid 4711 may be anybody's"),
    Row(
        "stoker ladder train.py", "stoker ladder --dry-run train.py", "the rungs: tests/cli/test_ladder.py climbs them"
    ),
    Row("stoker burnin --minutes 10", why=f"{PARSED}tests/test_burnin.py runs it for some steps"),
    Row("stoker run --exclude-bad train.py"),
]


def written_commands() -> list[str]:
    """Once each, without their comments."""
    commands = []
    for page in PAGES:
        for block in re.findall(r"^```bash\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S):
            for line in block.splitlines():
                command = re.split(r"\s+# ", line)[0].strip()
                if command and not command.startswith("#"):
                    commands.append(command)
    return list(dict.fromkeys(commands))


def test_every_command_is_in_the_table_and_no_other() -> None:
    assert sorted(written_commands()) == sorted(row.command for row in ROWS)
    assert all(row.why for row in ROWS if row.instead), "a replacement has a reason"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150  # its figures: tests/test_figures.py


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files those commands name."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "train.py").write_text(
        "import argparse, time\nflags = argparse.ArgumentParser()\nflags.add_argument('--lr')\n"
        "flags.add_argument('--seconds', type=float, default=0.1)\ntime.sleep(flags.parse_args().seconds)\n"
    )

    def rows(name: str, made: list[dict[str, object]]) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in made))

    lines = [f"line {number} of a small book about nothing" for number in range(4000)]
    chat = [{"role": "user", "content": "how many?"}, {"role": "assistant", "content": "three"}]
    (folder / "book.txt").write_text("\n".join(lines))
    (folder / "rewards.py").write_text("def score(completion, answer):\n    return answer in completion\n")
    (folder / "me.yaml").write_text("notify: cat > told.txt\n")
    (folder / "my.yaml").write_text("data: {path: book.txt}\npreset: debug\n")
    rows("texts/a.jsonl", [{"text": line} for line in lines])
    rows("chats.jsonl", [{"messages": chat}] * 200)
    rows("pairs.jsonl", [{"prompt": "how many?", "chosen": "three", "rejected": "a lot"}] * 200)
    rows("prompts.jsonl", [{"prompt": f"{n} and 2?", "answer": str(n + 2)} for n in range(100)])
    rows("gsm8k/test.jsonl", [{"question": f"{n} and 2?", "answer": f"#### {n + 2}"} for n in range(20)])
    (folder / "my-data").mkdir()
    for name, source in {"base.txt": "book.txt", "sft.jsonl": "chats.jsonl", "pairs.jsonl": "pairs.jsonl",
                         "prompts.jsonl": "prompts.jsonl", "questions.jsonl": "prompts.jsonl"}.items():  # fmt: skip
        shutil.copy(folder / source, folder / "my-data" / name)
    return folder


@pytest.fixture(scope="module")
def tiny_model(material: Path) -> Path:
    pytest.importorskip("torch")
    from stoker.training.model import hf
    from stoker.training.model.config import ModelConfig
    from stoker.training.model.decoder import Decoder
    from stoker.training.tokenizer.tokenizer import bytes_tokenizer

    bytes_tokenizer().save(str(material / "tokenizer"))
    model = Decoder(ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, ff=48, vocab_size=320), 128)
    model.start(3)
    target = str(material / "sft" / "hf")
    hf.save(model, target, say=lambda line: None, tokenizer_folder=str(material / "tokenizer"))
    return material


RUN = [row for row in ROWS if row.instead or not row.why]


@pytest.mark.parametrize(
    "row", at_length_but([row for row in RUN if not row.repeats], RUN), ids=lambda row: row.command[:70]
)
def test_a_command(stoker: Stoker, material: Path, row: Row, request: pytest.FixtureRequest) -> None:
    if row.needs:
        pytest.importorskip(row.needs)
    if "sft/hf" in (row.instead or row.command):
        request.getfixturevalue("tiny_model")
    shutil.copytree(material, stoker.cwd, dirs_exist_ok=True)
    if "web/" in row.command:
        import pyarrow as arrow
        from pyarrow import parquet

        (stoker.cwd / "web").mkdir()
        texts = [f"line {number} of a page" for number in range(3000)]
        parquet.write_table(arrow.table({"content": texts}), stoker.cwd / "web" / "a.parquet")
    if row.gpus:
        stoker.env["STOKER_MACHINE"] = str(stoker.cwd / "box.json")
        (stoker.cwd / "box.json").write_text(json.dumps(machine_json(row.gpus)))
    (stoker.cwd / "bin").mkdir()
    command = stoker.cwd / "bin" / "stoker"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m stoker "$@"\n')
    command.chmod(0o755)
    env = stoker.environment({"PATH": f"{command.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"})

    def run(line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", line], cwd=stoker.cwd, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, timeout=240
        )  # fmt: skip

    trained = material.with_name(f"{material.name}-trained")  # a run of TINY_QLORA, once for all rows that need it
    if row.before == TINY_QLORA and trained.exists():
        shutil.copytree(trained, stoker.cwd / "runs", symlinks=True)
        row = replace(row, before="")
    if row.command in ("stoker why", "stoker why --json", "stoker logs --rank 1", "stoker runs"):
        assert run("stoker run --nproc-per-node 2 train.py").returncode == 0
    if row.before:
        before = run(row.before)
        assert before.returncode == 0, before.stdout + before.stderr
    done = run(row.instead or row.command)
    assert done.returncode in row.codes, f"{done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    assert row.says in done.stdout + done.stderr, done.stdout + done.stderr
    if row.after:
        assert run(row.after).returncode == 0
    if row.instead == TINY_QLORA:
        shutil.copytree(stoker.cwd / "runs", trained, symlinks=True)


@pytest.mark.parametrize("row", [row for row in ROWS if row.why.startswith(PARSED)], ids=lambda row: row.command[:70])
def test_the_words_of_a_command_that_is_not_run(row: Row) -> None:
    program, *words = shlex.split(row.command)
    if program == "torchrun":
        pytest.importorskip("torch")
        from torch.distributed.run import get_args_parser

        given = get_args_parser().parse_args(words)
        assert find_spec(given.training_script) is not None
        return
    assert Path(program).name == "stoker"
    name = words.pop(0)
    module = import_module(f"stoker.cli.{MODULES.get(name, name)}")
    of_subcommand = getattr(module, f"build_{words[0]}_parser", None) if words else None  # `cluster check`, `data show`
    build_parser = of_subcommand or load_command(name)[1]
    assert build_parser().parse_args(words[1:] if of_subcommand else words)


@at_length
def test_the_quick_starts_script_runs(stoker: Stoker) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/quickstart.md").read_text(), re.S)
    done = stoker.torch("run", "--nproc-per-node", "2", stoker.script("train.py", script))
    assert done.code == 0 and "step 150 loss" in done.out, done.out + done.err
