"""A stage is one object: one from outside the package, in a file of its own, trains and takes its place in the chain."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Stoker, at_length, wait_for
from stoker.contract.errors import Refusal
from stoker.contract.frozen import replace
from stoker.training.config.keys import KEYS, values_of
from stoker.training.stages import registry
from stoker.training.stages.registry import STAGES, load
from stoker.training.stages.stage import From, Stage

TOY = """
import sys

from stoker.training.stages.blocks import Heading, Text
from stoker.training.stages.significance import untested_row
from stoker.training.stages.stage import RUNS, From, Link, Stage

STAGE = Stage(
    name="toy",
    about="counts the letters of a prompt",
    recipe="toy.py",
    sections=RUNS,
    inputs=("model.load",),
    outputs=("letters.txt",),
    common=("model.load", "generate.system"),
    links=(Link("toy", {"model.load": From("sft", "hf")}, "sft"),),
    headline=lambda metrics: f"{metrics['letters']} letters",
    report=lambda metrics: (Heading("Toy"), Text(f"It counted {metrics['letters']} letters.")),
    effects=lambda link: [untested_row("Toy", "letters", 0, link.metrics["letters"], higher_is_better=True)],
    worth_knowing=lambda metrics: ["Letters were counted."],
)


def main(argv):
    from stoker.training.recipes import stage

    c = stage.settings(argv, "toy")
    stage.finish(c, "toy", {"letters": len(c.generate.system)})
    return 0


if __name__ == "__main__":
    from stoker.training.recipes import stage

    sys.exit(stage.run(main))
"""


@pytest.fixture
def toy(stoker: Stoker) -> dict[str, str]:
    stoker.script("toy.py", TOY)
    (stoker.cwd / "model").mkdir()
    return {"STOKER_STAGES": str(stoker.cwd / "toy.py")}


def test_a_stage_in_a_file_of_its_own_trains(stoker: Stoker, toy: dict[str, str]) -> None:
    pytest.importorskip("torch")
    listed = stoker("train", "--help", env=toy)
    assert "  toy        counts the letters of a prompt" in listed.out
    words = (
        "--model.load",
        "model",
        "--tokenizer",
        "bytes",
        "--generate.system",
        "four",
        "--nproc-per-node",
        "1",
        "--device",
        "cpu",
    )
    done = stoker("train", "toy", *words, "--name", "first", env=toy)
    assert done.code == 0, done.err
    (run,) = (stoker.cwd / "runs").glob("*-first")
    assert json.loads((run / "result.json").read_text())["metrics"] == {"letters": 4}
    missing = stoker("train", "toy", env=toy)
    assert missing.code == 64 and "stage toy needs a model" in missing.err


@at_length
def test_it_takes_its_place_in_the_chain_and_runs_there(stoker: Stoker, toy: dict[str, str]) -> None:
    pytest.importorskip("torch")
    plan = json.loads(stoker("speedrun", "--preset", "cpu", "--plan", "--json", env=toy).out)
    (row,) = (row for row in plan["stages"] if row["name"] == "toy")
    assert row["inputs"] == ["sft"] and row["outputs"] == ["letters.txt"]
    names = [row["name"] for row in plan["stages"]]
    assert names.index("sft") < names.index("toy") < names.index("report")
    given = ("--set", "toy:model.load=model", "--set", "toy:tokenizer.path=bytes", "--set", "toy:generate.system=four")
    done = stoker("speedrun", "--preset", "cpu", "--only", "toy", *given, env=toy)
    assert done.code == 0 and "toy ✓" in done.out and "4 letters" in done.out, done.out + done.err
    report = stoker("speedrun", "--preset", "cpu", "--only", "report", env=toy)
    assert report.code == 0, report.out + report.err
    text = (stoker.cwd / "runs/speedrun-cpu/report.md").read_text()
    for said in (
        "It counted 4 letters.",
        "| Toy<br>letters | 0 → 4 | up, as hoped (not tested) |",
        "- Letters were counted.",
    ):
        assert said in text, said


def test_a_model_of_the_chain_is_loaded_once_to_be_evaluated() -> None:
    """One stage asks everything of it; that this opens the weights once, test_evaluate has."""
    evaluated = [link.keys["model.load"] for link, kind in registry.links() if kind.measures]
    made = [From(link.name, "hf") for link, _ in registry.links() if link.title]
    assert sorted(evaluated, key=str) == sorted(made, key=str)


def test_the_report_knows_no_stage_by_name() -> None:
    """What it says of one comes from the stage's object."""
    names = {*STAGES, *(link.name for stage in STAGES.values() for link in stage.links)}
    for path in (Path(registry.__file__).parents[2] / "speedrun").glob("*.py"):
        if path.name.startswith("report") or path.name in ("gather.py", "plan.py", "keys.py"):
            texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
            assert not names & {text for text in texts if isinstance(text, str)}, path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (TOY.replace('name="toy"', 'name="sft"'), "there is a stage sft already, in "),
        (TOY.replace('name="toy"', 'name="world"'), "the name world is reserved"),
        (TOY.replace('    about="counts the letters of a prompt",\n', ""), "its stage toy lacks about"),
        (TOY.replace("sections=RUNS", 'sections=RUNS | {"toys"}'), "sections that no configuration has: toys"),
        (TOY.replace('Link("toy"', 'Link("sft"'), "its link sft of the chain is there already"),
        ("STAGE = 1\n", "it defines no STAGE = Stage(...)"),
        ("import absent_module\n", "it can't be loaded: ModuleNotFoundError: No module named 'absent_module'"),
    ],
)
def test_a_stage_that_can_not_be_is_one_line_that_names_its_file(stoker: Stoker, text: str, says: str) -> None:
    stoker.script("toy.py", text)
    path = stoker.cwd / "toy.py"
    done = stoker("train", "pretrain", "--data", "absent", env={"STOKER_STAGES": str(path)})
    (line,) = done.err.splitlines()
    assert done.code == 78 and line.startswith(f"stoker: stage file {path}: ") and says in line


RESERVING = """
import os, subprocess, sys
from stoker.cli.machines import observe_machine
from stoker.speedrun.child import Reserved

reserved = Reserved("speedrun-toy", observe_machine(), "1", os.environ, print)
run = [sys.executable, "-m", "stoker", "run", "--nproc-per-node", "1"]
for _ in range(2):  # two stages
    lent = {**os.environ, **reserved.environment}
    stage = subprocess.run([*run, "--gpus", "0", "ok.py"], env=lent, capture_output=True, text=True)
    print(stage.returncode, stage.stderr)
    other = subprocess.run([*run, "--gpus", "0", "ok.py"], capture_output=True, text=True)
    print(other.returncode, other.stderr)
reserved.close()
after = subprocess.run([*run, "--gpus", "0", "ok.py"], capture_output=True, text=True)
print(after.returncode, after.stderr)
"""


def test_a_chains_gpus_are_its_stages_and_nobody_elses(stoker: Stoker, box: Callable[..., dict[str, str]]) -> None:
    stoker.script("ok.py", "import os; print('on', os.environ['CUDA_VISIBLE_DEVICES'])")
    env = {**stoker.env, **box(2), "STOKER_GPU_LOCKS": str(stoker.cwd / "locks")}
    done = subprocess.run(
        [sys.executable, "-c", RESERVING],
        cwd=stoker.cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    codes = [line.split()[0] for line in done.stdout.splitlines() if line[:2].strip().isdigit()]
    assert codes == ["0", "69", "0", "69", "0"], done.stdout + done.stderr
    assert done.stdout.count("GPU 0 is in use by run speedrun-toy (agent pid ") == 2


LENDING = """
import os, sys
from stoker.cli.machines import observe_machine
from stoker.speedrun.child import Children
from stoker.speedrun.child import Reserved

reserved = Reserved("speedrun-toy", observe_machine(), "1", os.environ, print)
stage = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); open('began', 'w'); sys.stdin = open('end'); sys.stdin.read()"
with Children(reserved.handles) as children:
    children.run([sys.executable, "-c", stage], {**os.environ, **reserved.environment}, None, lambda: None)
"""


def test_a_killed_chains_gpus_stay_locked_until_its_stage_has_ended(
    stoker: Stoker, box: Callable[..., dict[str, str]]
) -> None:
    os.mkfifo(stoker.cwd / "end")
    env = {**stoker.env, **box(1), "STOKER_GPU_LOCKS": str(stoker.cwd / "locks")}
    chain = subprocess.Popen([sys.executable, "-c", LENDING], cwd=stoker.cwd, env=env)
    assert wait_for(lambda: (stoker.cwd / "began").exists() or None, 60)
    chain.kill()
    chain.wait()
    stoker.script("ok.py", "print('ok')")
    run = ("run", "--nproc-per-node", "1", "--gpus", "0", "ok.py")
    other = stoker(*run, env=env)
    assert other.code == 69 and "GPU 0 is in use by" in other.err, other.err
    (stoker.cwd / "end").write_text("")
    assert wait_for(lambda: stoker(*run, env=env).code == 0 or None, 60), "it ended, and nobody holds them"


def test_every_built_in_stage_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, stage in STAGES.items():
        assert stage.name == name and stage.common and Path(stage.source).is_file()
        assert stage.links or name == "dpo", "in the chain, but for one that is run on its own"
    with pytest.raises(Refusal, match="is reserved"):
        registry.register(load(""), replace(STAGES["sft"], name="report"), "here.py")
    assert not isinstance(STAGES, Stage)


@pytest.mark.parametrize("stage", list(STAGES))
def test_help_is_two_screens_of_the_stages_own_keys(stoker: Stoker, stage: str) -> None:
    short, whole = stoker("train", stage, "--help", env={"COLUMNS": "80"}), stoker("train", stage, "--help-all")
    assert short.code == whole.code == 0
    lines = short.out.splitlines()
    assert len(lines) <= 115 and max(map(len, lines)) <= 140
    for key in STAGES[stage].common:
        assert f"--{key}" in short.out
    for name in {"reward", "density", "grpo", "diversity"} - STAGES[stage].sections:
        assert f"  --{name}." not in whole.out, "another stage's keys"
    assert "--optim.beta2" in whole.out and "--optim.beta2" not in short.out


@pytest.mark.parametrize(("stage", "key"), [("dpo", "dpo.pairs"), ("reward", "reward.pairs"), ("grpo", "grpo.prompts")])
def test_data_is_the_file_that_a_stage_learns_from(stoker: Stoker, stage: str, key: str) -> None:
    refused = stoker("train", stage, "--model.load", "owner/model", "--data", "absent.jsonl")
    assert f"--data absent.jsonl is used as --{key}" in refused.out + refused.err
    assert refused.code == 66 and refused.err.splitlines()[-1].startswith(f"stoker: {key} absent.jsonl does not exist")


@pytest.mark.parametrize("stage", ["sft", "dpo", "grpo"])
def test_help_lists_the_flag_that_runs_a_complete_run_again(stoker: Stoker, stage: str) -> None:
    assert "  --again " in stoker("train", stage, "--help").out


def test_run_help_has_every_exit_code_of_a_refusal(stoker: Stoker) -> None:
    page = (Path(__file__).parents[1] / "docs" / "launching.md").read_text()
    (codes,) = re.findall(r"^\| (6[\d ]+) \| refused: ", page, re.M)
    assert set(codes.split()) <= set(re.findall(r"\b\d\d\b", stoker("run", "--help").out.partition("refusals:")[2]))


def test_a_flag_of_another_stage_is_refused_and_a_shared_config_file_is_not(stoker: Stoker, tmp_path: Path) -> None:
    refused = stoker("train", "tokenizer", "--data", "absent.txt", "--grpo.kl", "0.1")
    (line,) = refused.err.splitlines()
    assert (
        refused.code == 64
        and line == "stoker: --grpo.kl: stage tokenizer does not read grpo.kl, which applies to stage grpo"
    )
    (tmp_path / "shared.yaml").write_text("grpo: {kl: 0.1}\n")
    shared = stoker("train", "tokenizer", "--data", "absent.txt", "--config", str(tmp_path / "shared.yaml"))
    assert shared.code == 66 and "absent.txt does not exist" in shared.err


def test_no_object_of_the_training_loop_gets_attributes_after_it_was_made() -> None:
    """Set in __init__, of the class or of the one it inherits from."""
    late = []
    for package in ("loop", "rl", "recipes", "stages"):
        for path in (Path(registry.__file__).parents[1] / package).glob("*.py"):
            for made in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)):
                early: set[str] = (
                    {"finished", "score"} if any(ast.unparse(base) == "Task" for base in made.bases) else set()
                )
                later: dict[str, str] = {}
                for method in (node for node in made.body if isinstance(node, ast.FunctionDef)):
                    for node in ast.walk(method):
                        if (
                            isinstance(node, ast.Attribute)
                            and isinstance(node.ctx, ast.Store)
                            and ast.unparse(node.value) == "self"
                        ):
                            early.add(node.attr) if method.name == "__init__" else later.setdefault(
                                node.attr, method.name
                            )
                late += [
                    f"{path.name}: {made.name}.{name} in {where}" for name, where in later.items() if name not in early
                ]
    assert not late


def test_a_chain_whose_gpus_are_in_use_is_refused_before_its_first_stage(
    stoker: Stoker, box: Callable[..., dict[str, str]]
) -> None:
    env = {**stoker.env, **box(1), "STOKER_GPU_LOCKS": str(stoker.cwd / "locks")}
    holding = RESERVING.partition("run = [")[0] + "print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", holding], cwd=stoker.cwd, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdin is not None and other.stdout.readline() == b"held\n"
        done = stoker("speedrun", "--preset", "gpu", env=env)
        other.stdin.close()
    assert done.code == 69 and "GPU 0 is in use by run speedrun-toy (agent pid " in done.err
    assert done.err.strip().endswith("; start again when they are free") and "world …" not in done.out


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch", reason="torch is not installed")
    from stoker.training.model import hf
    from stoker.training.model.config import ModelConfig
    from stoker.training.model.decoder import Decoder
    from stoker.training.tokenizer.tokenizer import bytes_tokenizer

    folder = tmp_path_factory.mktemp("tiny")
    bytes_tokenizer().save(str(folder / "tokenizer"))
    model = Decoder(ModelConfig(layers=2, dim=64, heads=2, kv_heads=2, head_dim=32, ff=128, vocab_size=272), 4096)
    model.start(3)
    hf.save(model, str(folder / "model"), say=lambda line: None, tokenizer_folder=str(folder / "tokenizer"))
    return folder / "model"


@pytest.mark.parametrize("gpus", [0, 1], ids=["cpu", "gpu"])
@pytest.mark.parametrize("stage", list(STAGES))
def test_every_default_in_help_is_that_of_a_run(
    stage: str, gpus: int, tiny_model: Path, stoker: Stoker, tmp_path: Path, box: Callable[..., dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from stoker.cli import run, train
    from stoker.control.plan.request import Request
    from stoker.training.config.flags import SHORT_NAMES, parse, shown_value
    from stoker.training.config.layers import gather
    from stoker.training.config.resolve import settle

    kind, machine = STAGES[stage], box(gpus)
    messages = [{"role": "user", "content": "one and one? " * 9}, {"role": "assistant", "content": "two. " * 40}]
    row = {
        "messages": messages,
        "text": "one and one are two. " * 30,
        "prompt": "1 + 1?",
        "answer": "2",
        "chosen": "two",
        "rejected": "six",
    }
    chat = kind.defaults.get("data.kind") == "chat"
    rows = {key: row[key] for key in ("messages",)} if chat else {key: row[key] for key in row if key != "messages"}
    (tmp_path / "rows.jsonl").write_text((json.dumps(rows) + "\n") * 3000)
    words = [stage]
    for key in kind.inputs:
        words += [f"--{key}", str(tiny_model if KEYS[key].spec.metavar == "DIR" else tmp_path / "rows.jsonl")]
    words += ["--tokenizer.path", "bytes"] if stage == "pretrain" else []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {**os.environ, **machine})
    started: list[Request] = []
    monkeypatch.setattr(run, "start", lambda request, ended: started.append(request) or 0)
    assert train.main(words) == 0
    config = settle(gather(parse(started[0].args), {}), bool(gpus), kind.defaults).config
    values = values_of(config)
    given = {word.removeprefix("--") for word in words if word.startswith("--")}

    printed: dict[str, str] = {}
    for option in ("--help", "--help-all"):
        done = stoker("train", stage, option, env={**machine, "COLUMNS": "1000"})
        assert done.code == 0
        for line in re.sub(r"\n {4,}", " ", done.out).splitlines():
            match = re.match(r"  (?:--[\w-]+, )?--(\w+\.\w+) (.*)", line)
            if match and match[1] in KEYS:
                found = re.search(r"\(((?:default|derived): .*)\)$", match[2])
                printed[match[1]] = found[1] if found else ""
    assert set(kind.common) <= set(printed)
    for key, text in printed.items():
        if key in given or text.startswith("derived: "):
            continue
        value = shown_value(key, values[key])
        default = text.removeprefix("default: ").partition("; derived: ")[0]
        assert default == ("" if value == "none" else value), (key, text, value)
    if kind.learning is not None:
        rules = {key for key, text in printed.items() if text.startswith("derived: ")}
        assert "train.max_steps" in rules and (
            stage == "pretrain" or {"optim.learning_rate", "data.context_length"} <= rules
        )
        short = stoker("train", stage, "--help", env={**machine, "COLUMNS": "300"}).out
        shown = [f"--{name}" for key, name in SHORT_NAMES.items() if key in kind.common]
        shown += ["--lora", "--qlora"] if "adapter.method" in kind.common else []
        assert "--lr" in shown and "--log-to" in shown and all(f"  {name}" in short for name in shown)
