"""`stoker speedrun`: the plan is pure, a stage runs once per key, and what is killed goes on. A stand-in for `stoker train` writes run directories as it does."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from conftest import Stoker, at_length, machine_json, wait_for
from stoker.cli.runs import main as runs_command
from stoker.cli.speedrun import main
from stoker.cli.why import main as why_command
from stoker.contract.errors import (
    EX_CANTCREAT,
    EX_CONFIG,
    EX_DATAERR,
    EX_NOINPUT,
    EX_TEMPFAIL,
    EX_UNAVAILABLE,
    EX_USAGE,
    Refusal,
)
from stoker.contract.frozen import replace
from stoker.contract.units import format_bytes, format_duration
from stoker.speedrun import course, estimate, presets, rows, state
from stoker.speedrun.child import Children, cards_of, watt_hours
from stoker.speedrun.drive import TooLong, Tools, too_long
from stoker.speedrun.keys import Code, keys_of
from stoker.speedrun.material import find, forms_of_row, role_of
from stoker.speedrun.stages import OUR_WORLD, Data, File, Stage, chain, config_of_stage, dependents, selected
from stoker.training.config.amount import Amount
from stoker.training.config.derived import Situation, derive
from stoker.training.config.schema import Config
from stoker.training.evaluate.asking import refuse_long
from stoker.training.evaluate.tasks import read_tasks
from stoker.training.model.config import ModelConfig
from stoker.training.stages.evaluate import PROMPTS
from stoker.training.stages.registry import STAGES as KINDS
from stoker.training.stages.registry import learning

# What `stoker train` does to the disk, without torch. "orders.json" beside it says how stages shall go wrong; "calls.jsonl" what was asked for.
TRAIN = """
import json, os, re, signal, sys, time

here = os.path.dirname(os.path.abspath(__file__))
stage, words = sys.argv[1], sys.argv[2:]
def after(flag): return words[words.index(flag) + 1]
keys = dict(word[2:].split("=", 1) for word in words if re.match(r"--[a-z]+\\.", word))
for name in ("model.load", "grpo.weights", "grpo.reward_model", "tokenizer.path", "diversity.baseline", "data.path"):
    assert name not in keys or os.path.exists(keys[name]), f"{name} {keys[name]} is not there"
root, name = after("--runs-dir"), after("--name")
short = name.rpartition("-")[0]
orders = json.load(open(here + "/orders.json")).get(short, {}) if os.path.exists(here + "/orders.json") else {}
same = sorted(one for one in os.listdir(root) if re.fullmatch(r"[0-9]{8}-[0-9]{6}-" + name + "(-[0-9]+)?", one)) if os.path.isdir(root) else []
run = os.path.join(root, same[-1] if same and "--again" not in words else f"20260101-00000{len(same)}-{name}")
os.makedirs(run, exist_ok=True)
number = len([one for one in os.listdir(run) if one.startswith("attempt-")])
os.makedirs(f"{run}/attempt-{number}")
start = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19])
record = open(run + "/events.jsonl", "a")  # as a launcher has it: by that it is known
json.dump({"schema": 1, "name": name, "started": time.time(), "launcher": {"pid": os.getpid(), "start": start, "host": os.uname().nodename}}, open(run + "/run.json", "w"))
with open(here + "/calls.jsonl", "a") as file:
    file.write(json.dumps({"stage": stage, "name": short, "run": os.path.basename(run), "keys": keys, "pid": os.getpid(), "words": words,
                           "variables": [one for one in os.environ if one.startswith("STOKER_TRAIN_")]}) + "\\n")
if os.path.exists(run + "/verdict.json"):
    os.unlink(run + "/verdict.json")
def end(status, code, summary):
    json.dump({"schema": 1, "status": status, "cause": "x", "summary": summary, "exit_code": code, "fix": ["do this"]}, open(run + "/verdict.json", "w"))
    sys.exit(code)
if "hang" in orders:
    def told(number, frame):
        while orders["hang"] and not os.path.exists(here + "/" + orders["hang"]):
            time.sleep(0.02)
        end("stopped", 128 + number, "stopped")
    signal.signal(signal.SIGTERM, told)
    signal.signal(signal.SIGINT, told)
    open(here + "/hanging", "w").close()
    time.sleep(60)
if "refuse" in orders:
    os.rmdir(f"{run}/attempt-{number}"); os.unlink(run + "/run.json"); os.unlink(run + "/events.jsonl"); os.rmdir(run)
    print("stoker: " + orders["refuse"], file=sys.stderr)
    sys.exit(65)
if "fail" in orders:
    end("failed", orders["fail"], f"rank 0 of {short} fell over")
for folder in ("hf", "tokenizer"):
    os.makedirs(f"{run}/{folder}", exist_ok=True)
open(run + "/weights.jsonl", "w").close()
metrics = {"val_bits_per_byte": 1.5, "accuracy": 0.93, "stopped": orders.get("stopped")}
if not orders.get("nothing"):
    json.dump({"schema": 1, "stage": stage, "metrics": metrics, "model": "hf"}, open(run + "/result.json", "w"))
end("completed", 0, "all ranks ended with exit code 0") if not orders.get("stopped") else end("failed", 70, "the reward was 0 for 10 steps")
"""
REPORT = "import sys; [open(sys.argv[1] + '/report.' + end, 'w').close() for end in ('md', 'html')]"


class Speedrun:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.long: tuple[str, ...] = ()  # recipes that are asked too much
        (home / "train.py").write_text(TRAIN)
        self.tools = Tools(
            train=(sys.executable, "-S", str(home / "train.py")),
            report=(sys.executable, "-S", "-c", REPORT),
            world=self.world,
            too_long=self.too_long,
        )

    @staticmethod
    def world(folder: str, keys: Any) -> None:
        for role in OUR_WORLD.places:
            Path(folder, f"{role}.jsonl").write_text("{}\n")

    def too_long(self, recipe: str, config: Config, tokenizer: str) -> TooLong | None:
        assert tokenizer.endswith("/tokenizer")
        return TooLong("questions with their answers", 6, 24, 311, config) if recipe in self.long else None

    def __call__(self, *args: str) -> int:
        (self.home / "calls.jsonl").unlink(missing_ok=True)
        try:
            return main(list(args), self.tools)
        except Refusal as refusal:
            print(f"stoker: {refusal.line}")
            return refusal.code

    def order(self, **orders: Any) -> None:
        (self.home / "orders.json").write_text(
            json.dumps({name.replace("_", "-"): order for name, order in orders.items()})
        )

    @property
    def calls(self) -> list[dict[str, Any]]:
        path = self.home / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def ran(self) -> list[str]:
        return [call["name"] for call in self.calls]

    @property
    def folder(self) -> Path:
        return self.home / "runs" / "speedrun-cpu"

    @property
    def entries(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in json.loads((self.folder / "chain.json").read_text())["stages"]}

    def start(self, *args: str) -> subprocess.Popen[bytes]:
        """As a process of its own, for signals."""
        program = (
            f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom pathlib import Path\nfrom test_speedrun import Speedrun\n"
            f"from stoker.cli.speedrun import main\ncode = main({list(args)!r}, Speedrun(Path({str(self.home)!r})).tools)\nsys.exit(code)"
        )
        return subprocess.Popen(
            [sys.executable, "-c", program], cwd=self.home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )


@pytest.fixture
def speedrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Speedrun:
    machine = tmp_path / "machine.json"
    machine.write_text(json.dumps(machine_json(0)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STOKER_MACHINE", str(machine))
    monkeypatch.delenv("STOKER_RUNS", raising=False)
    monkeypatch.setattr(course.shutil, "disk_usage", lambda path: Disk(free=10**13))
    return Speedrun(tmp_path)


class Disk(NamedTuple):
    """For a disk of another size than this machine's."""

    free: int


CPU = presets.PRESETS["cpu"]
STAGES = chain(CPU, OUR_WORLD, 0)
NAMES = [stage.name for stage in STAGES]
AFTER_SFT = {
    "eval-sft",
    "reward",
    "density",
    "grpo-uniform",
    "eval-grpo-uniform",
    "grpo-density",
    "eval-grpo-density",
    "diversity",
    "report",
}


def same_code(recipe: str) -> str:
    return "code"


def no_files(path: str) -> str:
    raise AssertionError(f"{path} is no file here")


def with_set(*texts: str, stages: tuple[Stage, ...] = STAGES) -> tuple[Stage, ...]:
    return course.overridden(stages, [course.override_of(text, stages) for text in texts], no_files)


def changed(after: tuple[Stage, ...], code: Callable[[str], str] = same_code) -> set[str]:
    old, new = keys_of(STAGES, same_code), keys_of(after, code)
    return {name for name in old if old[name] != new[name]}


SFT_RATE = float(next(stage for stage in STAGES if stage.name == "sft").keys["optim.learning_rate"])


@pytest.mark.parametrize("preset", presets.PRESETS)
@pytest.mark.parametrize("samples", [1, 1000, 10**7])
def test_a_preset_sets_all_that_its_stages_would_derive(preset: str, samples: int) -> None:
    """They were tuned: neither the model's size nor the amount of data may change them."""
    stages = [stage for stage in chain(presets.PRESETS[preset], OUR_WORLD, 0) if stage.stage in learning()]
    assert len(stages) == 6
    for stage in stages:
        at = Situation(
            ModelConfig(kv_heads=12, head_dim=64, ff=2048, vocab_size=768), Amount(samples, samples, "rows"), 8
        )
        assert derive(learning()[stage.stage], config_of_stage(stage), stage.keys, at) == {}, stage.name


@pytest.mark.parametrize(
    ("setting", "runs_again"),
    [
        ("sft:train.max_steps=7", {"sft"} | AFTER_SFT),
        ("midtrain:optim.learning_rate=1e-5", {"midtrain", "eval-midtrain", "sft"} | AFTER_SFT),
        ("optim.learning_rate=0.5", set(NAMES) - {"world", "tokenizer"}),
        ("model.layers=2", set(NAMES) - {"world", "tokenizer"}),
        ("tokenizer.vocab_size=512", set(NAMES) - {"world"}),
        ("vocab-size=512", None),
        ("evaluate:evaluate.most=3", {name for name in NAMES if name.startswith("eval-")} | {"report"}),
        ("evaluate.most=3", {name for name in NAMES if name.startswith("eval-")} | {"report"}),
        ("grpo-density:grpo.kl=0.5", {"grpo-density", "eval-grpo-density", "diversity", "report"}),
        (
            "grpo.kl=0.5",
            {"grpo-uniform", "eval-grpo-uniform", "grpo-density", "eval-grpo-density", "diversity", "report"},
        ),
        ("density.power=0.5", {"density", "grpo-density", "eval-grpo-density", "diversity", "report"}),
        ("eval-sft:evaluate.draws=5", {"eval-sft", "report"}),
        ("world:size=0.5", set(NAMES)),
        ("train.eval_tokens=1000", {name for name in NAMES if name.startswith("eval-")} | {"report"}),
        ("train.log_every=3", set()),
        ("checkpoint.every=3s", set()),
        (f"sft:optim.learning_rate={SFT_RATE:.6f}", set()),
        (f"sft:optim.learning_rate={SFT_RATE:e}", set()),
    ],
)
def test_one_setting_changes_the_keys_of_exactly_what_depends_on_it(setting: str, runs_again: set[str] | None) -> None:
    if runs_again is None:  # vocab_size is a key of two sections
        with pytest.raises(Refusal, match="no key"):
            with_set(setting)
        return
    assert changed(with_set(setting)) == runs_again


def test_code_and_bytes_are_part_of_a_key() -> None:
    assert changed(STAGES, lambda recipe: "new" if recipe == "reward" else "code") == {
        "reward",
        "grpo-uniform",
        "eval-grpo-uniform",
        "grpo-density",
        "eval-grpo-density",
        "diversity",
        "report",
    }
    own = Data({**OUR_WORLD.places, "pairs": (File("pairs.jsonl", "1"),)})
    other = Data({**OUR_WORLD.places, "pairs": (File("elsewhere.jsonl", "1"),)})
    edited = Data({**OUR_WORLD.places, "pairs": (File("pairs.jsonl", "2"),)})
    first, moved, last = (keys_of(chain(CPU, data, 0), same_code) for data in (own, other, edited))
    assert first == moved
    assert {name for name in first if first[name] != last[name]} == dependents(STAGES, "reward") | {"reward", "report"}
    assert not set(keys_of(chain(CPU, OUR_WORLD, 1), same_code).values()) & set(keys_of(STAGES, same_code).values()) - {
        keys_of(STAGES, same_code)["tokenizer"]
    }


def test_files_that_a_pattern_names_are_part_of_a_key(tmp_path: Path) -> None:
    pattern, seen = f"base:data.path={tmp_path}/*.jsonl", []
    for name, text in (("a", "1"), ("a", "2"), ("b", "3")):
        (tmp_path / f"{name}.jsonl").write_text(text)
        told = course.overridden(STAGES, [course.override_of(pattern, STAGES)], lambda path: Path(path).read_text())
        place = next(stage for stage in told if stage.name == "base").keys["data.path"][0]
        assert place.path == f"{tmp_path}/*.jsonl"
        seen.append(keys_of(told, same_code)["base"])
    assert len(set(seen)) == 3


def test_stages_stand_after_what_they_need_and_another_model_needs_no_midtraining() -> None:
    for place, stage in enumerate(STAGES):
        assert set(stage.inputs) <= set(NAMES[:place])
    sft = next(stage for stage in with_set("sft:model.load=owner/name") if stage.name == "sft")
    assert sft.inputs == ("world",)
    assert "world" not in [
        stage.name for stage in chain(CPU, Data({role: (File(role, role),) for role in OUR_WORLD.places}), 0)
    ]


def test_the_code_of_a_stage_is_what_its_recipe_imports(tmp_path: Path) -> None:
    for path, text in {
        "training/recipes/sft.py": "from stoker.training.loop import (\n    steps,\n)\n",
        "training/recipes/grpo.py": "import stoker.training.rl.loss\n",
        "training/loop/__init__.py": "",
        "training/loop/steps.py": "def f():\n    from stoker.training.model.decoder import Decoder\n",
        "training/rl/loss.py": "",
        "training/model/decoder.py": "from stoker.control.record import metrics_log\n",
        "control/record/metrics_log.py": "",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    def digests() -> list[str]:
        code = Code(str(tmp_path))
        return [code.digest(recipe) for recipe in ("sft", "grpo", "unheard-of")]

    def after(path: str) -> list[bool]:
        before = digests()
        (tmp_path / path).write_text((tmp_path / path).read_text() + "# more\n")
        return [old != new for old, new in zip(before, digests(), strict=True)]

    assert after("training/model/decoder.py") == [True, False, True]
    assert after("training/rl/loss.py") == [False, True, True]
    assert after("training/loop/__init__.py") == [True, False, True]
    assert after("control/record/metrics_log.py") == [False, False, False]


def test_every_real_recipe_is_found() -> None:
    whole = Code().digest("no such recipe")
    assert len({Code().digest(stage.stage) for stage in STAGES} - {whole}) == len({stage.stage for stage in STAGES})


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("learning_rate", "KEY=VALUE"), ("=3", "KEY=VALUE"), ("stf:train.max_steps=3", "did you mean sft"), ("optim.learnin_rate=3", "did you mean optim.learning_rate"),
        ("optim.learning_rate=fast", "not a number"), ("model.load=x", "say in which"), ("data.path=x", "say in which"), ("world:colour=red", "level, size, seed"),
        ("world:size=big", "not a number"), ("needs.gpus=3", "no stage uses needs.gpus"),
    ],
)  # fmt: skip
def test_settings_that_can_not_be_are_refused(setting: str, said: str) -> None:
    with pytest.raises(Refusal, match=said) as refused:
        with_set(setting)
    assert refused.value.code == EX_USAGE


def test_which_stages_are_asked_for() -> None:
    assert selected(STAGES, None, None, None) == tuple(NAMES)
    assert selected(STAGES, "sft", "eval-sft", None) == ("sft", "eval-sft")
    assert selected(STAGES, None, None, "density") == ("density",)
    for begin, until, only in (("sft", "base", None), (None, "sfft", None), ("sft", None, "base")):
        with pytest.raises(Refusal):
            selected(STAGES, begin, until, only)


def test_estimates_grow_with_the_work_and_learn_from_what_was_measured() -> None:
    slow, fast = estimate.pace_of([], 1, 1, False), estimate.pace_of(["NVIDIA H200"], 8, 1, True)
    here, there = estimate.estimates(STAGES, slow, 1), estimate.estimates(STAGES, fast, 1)
    more = estimate.estimates(with_set("sft:train.max_steps=3000", "model.layers=8"), slow, 1)
    assert (
        more["sft"].seconds > 5 * here["sft"].seconds
        and more["base"].memory > here["base"].memory
        and more["base"].disk > here["base"].disk
    )
    assert there["base"].seconds < here["base"].seconds and here["base"].parameters == pytest.approx(516_960, rel=0.01)
    shared = estimate.estimates(
        with_set("model.heads=8", "model.kv_heads=2", "model.head_dim=16", "model.dim=128"), fast, 1
    )
    alike = estimate.estimates(
        with_set("model.heads=8", "model.kv_heads=8", "model.head_dim=16", "model.dim=128"), fast, 1
    )
    kept = alike["eval-sft"].memory - 4 * alike["eval-sft"].parameters - 2 * alike["eval-sft"].parameters
    assert shared["eval-sft"].memory - 6 * shared["eval-sft"].parameters == pytest.approx(kept / 4), (
        "keys and values of two heads, not of the whole width"
    )
    assert (
        there["density"].memory == 4 * there["density"].parameters
        and there["grpo-uniform"].memory > there["sft"].memory
    )
    adamw = estimate.estimates(with_set("base:optim.kind=adamw"), slow, 1)["base"]
    assert here["base"].disk == pytest.approx(10.9e6, rel=0.1) and adamw.disk == 28 * adamw.parameters, (
        "as a run of it was measured: Muon has one moment"
    )
    assert 90e6 < estimate.room(list(here.values())) < 115e6, "91 MB stay of a whole chain"
    about = {"short": 4.0, "long": 300.0, "other": 250.0}
    assert 500 < estimate.left(about, {"short": 1.0}, ["long", "other"]) < 550, "three seconds less say little"
    assert 125 < estimate.left(about, {"short": 1.0, "long": 150.0}, ["other"]) < 150, "half of the time, so far"
    assert estimate.left(about, {"short": 4.0, "long": 300.0}, ["other"]) == pytest.approx(250)


def test_every_preset_makes_a_chain_that_stoker_train_would_take() -> None:
    from stoker.training.config.check import check
    from stoker.training.config.keys import config_of
    from stoker.training.config.resolve import combine

    for preset in presets.PRESETS.values():
        for stage in chain(preset, OUR_WORLD, 0):
            if stage.stage in ("world", "report"):
                continue
            plain = {
                key: value
                for key, value in stage.keys.items()
                if key in stage.keys and isinstance(value, (bool, int, float, str))
            }
            given = {
                key: "somewhere" for key in set(stage.keys) - set(plain) if key not in ("data.path", "evaluate.tasks")
            }
            check(config_of(stage.below, combine(stage.below, [{**plain, **given}])))
            assert set(KINDS[stage.stage].inputs) <= set(stage.keys), stage.name


def test_a_plan_is_printed_and_nothing_is_made(speedrun: Speedrun, capsys: pytest.CaptureFixture[str]) -> None:
    assert speedrun("--plan") == 0
    said = capsys.readouterr().out
    assert all(name in said for name in NAMES) and "about" in said and "preset cpu" in said
    assert speedrun("--plan", "--json", "--preset", "d20", "--until", "sft") == 0
    plan = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in plan["stages"] if row["selected"]] == NAMES[: NAMES.index("sft") + 1]
    assert plan["stages"][-1]["about"]["seconds"] > 0 and plan["about"]["disk"] > 1e9
    assert not speedrun.folder.parent.exists() and not speedrun.calls


def test_a_plan_says_what_a_cpu_rank_takes_and_fits_the_terminal(
    speedrun: Speedrun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that has only imported torch has 230 MB; ranks of this chain were seen with 0.4 GB."""
    assert speedrun("--plan", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert 350e6 < plan["about"]["memory"] < 600e6
    assert all(row["about"]["memory"] == 0 or row["about"]["memory"] > 230e6 for row in plan["stages"])
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert speedrun("--plan") == 0
    said = capsys.readouterr().out
    sentences = [line for line in said.splitlines() if str(speedrun.folder) not in line]  # a path can't be broken
    assert max(map(len, sentences)) <= 80 and "preset cpu" in said and "memory in each rank" in " ".join(said.split())


@at_length
def test_a_stage_is_announced_by_the_pace_that_was_measured(
    speedrun: Speedrun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here every stage takes next to nothing, so that the printed times of the last ones are below the plan."""
    assert speedrun("--plan", "--json") == 0
    planned = {row["name"]: row["about"]["seconds"] for row in json.loads(capsys.readouterr().out)["stages"]}
    assert speedrun() == 0
    said = capsys.readouterr().out
    (announced,) = re.findall(r"\] grpo-density … about (.+)", said)
    assert announced != format_duration(planned["grpo-density"]), said


def test_a_plan_leaves_out_columns_that_the_terminal_has_no_room_for(
    speedrun: Speedrun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(columns: int, terminal: bool = True) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
        assert speedrun("--plan") == 0
        table = capsys.readouterr().out.split("\n\n")[1].splitlines()
        assert len(table) == 1 + len(NAMES) and (not terminal or max(map(len, table)) <= columns)
        return [*re.split(r"  +", table[0].strip())]

    assert said(200) == said(80, terminal=False) == ["stage", "made from", "size", "time", "memory", "disk", "state"]
    assert said(100) == ["stage", "size", "time", "memory", "disk", "state"]
    assert said(80) == ["stage", "size", "time", "disk", "state"]


@at_length
def test_a_disk_without_room_is_refused_before_anything_is_made(
    speedrun: Speedrun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert speedrun("--plan", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    needed = plan["about"]["disk"]
    assert plan["refused"] is None
    monkeypatch.setattr(course.shutil, "disk_usage", lambda path: Disk(free=int(0.7 * needed)))
    assert speedrun("--plan") == 0
    line = f"about {format_bytes(needed)} of disk are needed, {format_bytes(int(0.7 * needed))} are free in {speedrun.home}"
    assert f"would be refused here: {line}" in capsys.readouterr().out
    assert speedrun() == EX_CANTCREAT and line in capsys.readouterr().out and not speedrun.folder.parent.exists()
    assert speedrun("--until", "tokenizer") == 0, "room for these"
    monkeypatch.setattr(course.shutil, "disk_usage", lambda path: Disk(free=int(0.85 * needed)))
    assert speedrun() == 0, "an estimate may be a little too high"
    monkeypatch.setattr(course.shutil, "disk_usage", lambda path: Disk(free=0))
    assert speedrun() == 0 and speedrun("--only", "report") == 0, "nothing more is needed"


def test_what_a_stopped_stage_has_written_needs_no_room_again(
    speedrun: Speedrun, monkeypatch: pytest.MonkeyPatch
) -> None:
    speedrun.order(base={"fail": 3})
    assert speedrun("--until", "base") == 3
    base = estimate.estimates(STAGES, estimate.pace_of([], 1, 1, False), 1)["base"]
    monkeypatch.setattr(course.shutil, "disk_usage", lambda path: Disk(free=int(base.spare)))
    speedrun.order()
    assert speedrun("--until", "base") == EX_CANTCREAT
    (speedrun.folder / speedrun.entries["base"]["run"] / "step-1").write_bytes(bytes(int(base.disk)))
    assert speedrun("--until", "base") == 0


def test_the_chain_runs_once_and_a_changed_setting_runs_what_depends_on_it(
    speedrun: Speedrun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert speedrun("--price-per-hour", "3600") == 0
    assert speedrun.ran == [name for name in NAMES if name not in ("world", "report")]
    said = capsys.readouterr().out
    assert "sft ✓" in said and "1.500 bits per byte" in said and "about" in said and "report.md" in said
    ended = said[said.index("report ✓") :].splitlines()
    assert re.fullmatch(r"all 16 stages are done, in .+ s", ended[1]), ended
    assert "`stoker chat runs/speedrun-cpu`" in ended[2] and "runs/speedrun-cpu/report.html" in ended[2], ended
    entries = speedrun.entries
    assert {entry["status"] for entry in entries.values()} == {"done"} and entries["sft"]["attempts"] == 1
    assert runs_command([]) == 0
    assert capsys.readouterr().out == (
        f"runs/speedrun-cpu is a speedrun, completed: {len(NAMES)} of {len(NAMES)} stages done;"
        " `stoker runs --runs-dir runs/speedrun-cpu/stages` lists the runs of its stages\n"
    )
    for words in ([], ["speedrun-cpu"], ["runs/speedrun-cpu"]):
        with pytest.raises(Refusal, match=r"is a speedrun.*--runs-dir runs/speedrun-cpu/stages"):
            why_command(words)
    assert runs_command(["--json"]) == 0 and json.loads(capsys.readouterr().out)["speedruns"][0]["done"] == len(NAMES)
    assert (
        entries["sft"]["cost"] == pytest.approx(entries["sft"]["seconds"], abs=0.01)
        and entries["sft"]["energy_wh"] is None
    )
    assert (speedrun.folder / entries["sft"]["run"] / "result.json").exists()
    by_name = {call["name"]: call for call in speedrun.calls}
    assert (
        by_name["grpo-density"]["keys"]["grpo.weights"].endswith("weights.jsonl")
        and "grpo.weights" not in by_name["grpo-uniform"]["keys"]
    )
    assert (
        by_name["eval-base"]["keys"]["evaluate.chat"] == "false" and "evaluate.chat" not in by_name["eval-sft"]["keys"]
    )
    assert by_name["sft"]["keys"]["model.load"] == str(speedrun.folder / entries["midtrain"]["run"] / "hf")

    assert speedrun() == 0
    assert "finished" in capsys.readouterr().out and not speedrun.ran
    assert speedrun("--set", "density.power=0.5") == 0
    assert speedrun.ran == ["density", "grpo-density", "eval-grpo-density", "diversity"]
    assert speedrun() == 0  # back again: the runs of before are still known
    assert not speedrun.ran and speedrun.entries["density"]["seconds"] >= 0


def test_a_stage_that_fails_stops_the_chain_and_says_why(
    speedrun: Speedrun, capsys: pytest.CaptureFixture[str]
) -> None:
    speedrun.order(reward={"fail": 3})
    assert speedrun() == 3
    said = capsys.readouterr().out
    assert "rank 0 of reward fell over; do this" in said and speedrun.ran[-1] == "reward"
    assert (
        "because they need reward: grpo-uniform, eval-grpo-uniform, grpo-density, eval-grpo-density, diversity" in said
    )
    assert re.search("not reached, though it does not need reward: density ", said)
    assert speedrun.entries["reward"]["status"] == "failed" and speedrun.entries["density"]["status"] == "waiting"
    assert runs_command([]) == 0 and "is a speedrun, failed at stage reward: 8 of" in capsys.readouterr().out
    speedrun.order()
    assert speedrun() == 0
    assert speedrun.ran[0] == "reward" and speedrun.entries["reward"]["attempts"] == 2  # the same run went on


def test_a_failed_evaluation_does_not_end_the_chain(speedrun: Speedrun, capsys: pytest.CaptureFixture[str]) -> None:
    speedrun.order(eval_base={"fail": 65}, diversity={"fail": 3})
    assert speedrun() == 65
    assert speedrun.ran == [name for name in NAMES if name not in ("world", "report")]
    said = capsys.readouterr().out
    assert "rank 0 of eval-base fell over" in said and "failed: eval-base, diversity; no later stage needs them" in said
    assert {name: entry["status"] for name, entry in speedrun.entries.items() if entry["status"] != "done"} == {
        "eval-base": "failed",
        "diversity": "failed",
        "report": "partial",
    }
    speedrun.order()
    assert (
        speedrun() == 0
        and speedrun.ran == ["eval-base", "diversity"]
        and speedrun.entries["report"]["status"] == "done"
    )


def test_what_is_too_long_to_be_asked_is_said_as_soon_as_there_is_a_tokenizer(
    speedrun: Speedrun, capsys: pytest.CaptureFixture[str]
) -> None:
    speedrun.long = ("evaluate",)
    assert speedrun("--until", "eval-midtrain") == 0
    said = capsys.readouterr().out
    line = "eval-base, eval-midtrain will fail: 6 of 24 questions with their answers are longer than 192 tokens, the longest has 311: "
    assert f"{line}--set evaluate:data.context_length=512\n" in said and said.index(line) < said.index("base …")
    speedrun.long = ("grpo",)
    for _ in range(2):
        assert speedrun() == EX_DATAERR and not speedrun.ran
        assert (
            "grpo-uniform, grpo-density will fail: 6 of 24" in (said := capsys.readouterr().out)
            and "--set grpo:data.context_length=512" in said
        )


def test_lengths_are_those_that_the_recipes_will_find(tmp_path: Path) -> None:
    stage = next(stage for stage in with_set("generate.new_tokens=24") if stage.name == "eval-sft")
    path = lines(tmp_path / "questions.jsonl", *[{"prompt": "a" * long, "answer": "b"} for long in (10, 150)])
    config = config_of_stage(replace(stage, keys={**stage.keys, "evaluate.tasks": (File(path, ""),)}))
    found = too_long("evaluate", config, "bytes")
    assert found is not None and (found.long, found.total) == (1, 2) and found.longest > 192
    with pytest.raises(Refusal, match="1 of 2 are longer than 192"):
        refuse_long([found.longest, 1], config.data.context_length, "")
    assert "batch.tokens=256" in replace(found, config=replace(config, batch=replace(config.batch, tokens=192))).line(
        "evaluate"
    )


@pytest.mark.parametrize(
    ("order", "code", "said"),
    [
        ({"refuse": "no room for it"}, 65, "no room for it"),
        ({"nothing": True}, 70, "left no result.json"),
        ({"stopped": "reward 0"}, 70, "the reward was 0 for 10 steps"),
    ],
)
def test_without_a_result_a_stage_is_not_done(
    speedrun: Speedrun, capsys: pytest.CaptureFixture[str], order: dict[str, Any], code: int, said: str
) -> None:
    speedrun.order(tokenizer=order)
    assert speedrun("--until", "tokenizer") == code
    assert said in capsys.readouterr().out and speedrun.entries["tokenizer"]["status"] == "failed"
    speedrun.order()
    assert speedrun("--until", "tokenizer") == 0
    assert speedrun.ran == ["tokenizer"] and ("--again" in speedrun.calls[0]["words"]) == ("nothing" in order)


def test_killed_it_goes_on_in_the_same_run_once_its_launcher_has_ended(speedrun: Speedrun) -> None:
    speedrun.order(base={"hang": "leave"})
    first = speedrun.start("--until", "base")
    assert wait_for(lambda: (speedrun.home / "hanging").exists() or None, 60)
    before = speedrun.calls
    first.kill()
    first.communicate()
    speedrun.order()
    second = speedrun.start("--until", "base")
    assert second.stdout is not None
    said = iter(second.stdout.readline, b"")
    waits = next(line for line in said if b"is still ending" in line)  # it got SIGTERM and saves
    assert f"(pid {before[-1]['pid']})".encode() in waits
    (speedrun.home / "leave").touch()
    rest, _ = second.communicate(timeout=60)
    assert second.returncode == 0, rest.decode()
    again = speedrun.calls[len(before) :]
    assert [(call["name"], call["run"]) for call in again] == [("base", before[-1]["run"])]
    assert speedrun.entries["base"]["attempts"] == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_stage_and_the_same_command_goes_on(speedrun: Speedrun, number: signal.Signals) -> None:
    speedrun.order(base={"hang": ""})
    process = speedrun.start()
    assert wait_for(lambda: (speedrun.home / "hanging").exists() or None, 30)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, out.decode()
    assert b"stopped in stage base; the same command resumes it: stoker speedrun" in out
    assert speedrun.entries["base"]["status"] == "stopped"
    speedrun.order()
    assert speedrun("--until", "base") == 0
    assert speedrun.ran == ["base"]


def test_a_launcher_that_was_killed_is_said_to_be_and_the_same_command_goes_on(speedrun: Speedrun) -> None:
    speedrun.order(base={"hang": ""})
    process = speedrun.start("--until", "base")
    assert wait_for(lambda: (speedrun.home / "hanging").exists() or None, 30)
    os.kill(speedrun.calls[-1]["pid"], signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 137 and b"its launcher was ended by SIGKILL" in out, out.decode()
    speedrun.order()
    assert speedrun("--until", "base") == 0 and speedrun.ran == ["base"]


def test_a_stage_that_ended_while_nobody_looked_is_done_with_its_time_and_attempts(speedrun: Speedrun) -> None:
    assert speedrun("--until", "tokenizer") == 0
    path = speedrun.folder / "chain.json"
    chain_json = json.loads(path.read_text())
    row = next(row for row in chain_json["stages"] if row["name"] == "tokenizer")
    result = speedrun.folder / row["run"] / "result.json"
    row |= {"status": "running", "began": result.stat().st_mtime - 100, "seconds": 0.0, "attempts": 0}
    path.write_text(json.dumps(chain_json))
    assert speedrun("--until", "base") == 0 and speedrun.ran == ["base"]
    assert (
        speedrun.entries["tokenizer"]["seconds"] == pytest.approx(100, abs=5)
        and speedrun.entries["tokenizer"]["attempts"] == 1
    )
    path.unlink()  # the record of all is lost: the runs still tell
    assert speedrun("--until", "base") == 0 and not speedrun.ran


def test_two_at_once_are_refused(speedrun: Speedrun, capsys: pytest.CaptureFixture[str]) -> None:
    speedrun.order(base={"hang": ""})
    process = speedrun.start()
    assert wait_for(lambda: (speedrun.home / "hanging").exists() or None, 30)
    calls = (speedrun.home / "calls.jsonl").read_text()
    try:
        assert speedrun() == EX_TEMPFAIL
        assert f"another speedrun (pid {process.pid})" in capsys.readouterr().out
        assert not speedrun.calls and "base" in calls
        assert runs_command([]) == 0 and "is a speedrun, running at stage base: 2 of" in capsys.readouterr().out
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert runs_command([]) == 0 and "is a speedrun, unfinished at stage base: 2 of" in capsys.readouterr().out


def test_a_finished_chain_ends_at_once_and_imports_no_torch(
    speedrun: Speedrun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert speedrun("--until", "base") == 0
    assert speedrun("--only", "base") == 0 and "finished: 1 stage complete in" in capsys.readouterr().out
    program = "import sys\nfrom stoker.cli.speedrun import main\ncode = main(['--until', 'base'])\nprint(code, [name for name in {} if name in sys.modules])"
    heavy = ("torch", "numpy", "matplotlib", "tokenizers", "pyarrow", "stoker.speedrun.drive")
    done = subprocess.run(
        [sys.executable, "-c", program.format(heavy)], cwd=speedrun.home, capture_output=True, text=True, check=True
    )
    assert "finished: 3 stages complete in runs/speedrun-cpu" in done.stdout and done.stdout.endswith("0 []\n"), (
        done.stdout
    )


def test_a_stage_whose_inputs_are_missing_names_the_command_that_makes_them(
    speedrun: Speedrun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert speedrun("--seed", "3", "--only", "grpo-density") == EX_NOINPUT
    said = capsys.readouterr().out
    assert (
        "stage grpo-density needs what world, sft, reward, density make" in said
        and "`stoker speedrun --seed 3 --until density`" in said
    )
    assert speedrun("--seed", "3", "--from=sft") == EX_NOINPUT
    assert "--until midtrain`" in capsys.readouterr().out
    assert speedrun("--seed", "3", "--until", "sft") == 0
    assert speedrun("--seed", "3", "--from", "grpo-uniform") == EX_NOINPUT
    assert "need what reward, density make" in (said := capsys.readouterr().out) and "--until density`" in said
    assert speedrun("--seed", "3", "--only", "reward") == 0
    assert speedrun.ran == ["reward"]
    shutil.rmtree(speedrun.folder / speedrun.entries["sft"]["run"] / "hf")
    assert speedrun("--seed", "3", "--only", "density") == 70
    assert "its hf is gone: remove runs/speedrun-cpu/stages/" in capsys.readouterr().out


def test_a_plan_says_that_its_inputs_are_missing(speedrun: Speedrun, capsys: pytest.CaptureFixture[str]) -> None:
    assert speedrun("--plan", "--from", "sft") == 0
    said = capsys.readouterr().out
    assert "would be refused here: stages sft, " in said and "`stoker speedrun --until midtrain` makes it" in said


def test_where_there_is_no_speedrun_there_is_nothing_to_report(
    speedrun: Speedrun, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "no speedrun in runs/speedrun-cpu: `stoker speedrun` makes one"
    assert (
        speedrun("--only", "report") == EX_NOINPUT
        and line in capsys.readouterr().out
        and not speedrun.folder.parent.exists()
    )
    assert speedrun("--only", "report", "--plan") == 0 and f"would be refused here: {line}" in capsys.readouterr().out


@at_length
def test_a_report_is_made_of_what_there_is(speedrun: Speedrun) -> None:
    assert speedrun("--until", "tokenizer") == 0
    assert speedrun("--only", "report") == 0
    assert speedrun.entries["report"]["status"] == "partial"
    assert speedrun() == 0
    assert speedrun.entries["report"]["status"] == "done"
    before = (speedrun.folder / "report.md").stat().st_mtime_ns
    assert speedrun("--only", "report") == 0 and speedrun.entries["report"]["status"] == "done"
    assert (speedrun.folder / "report.md").stat().st_mtime_ns > before, "made again whenever it is asked for"


@at_length
def test_a_bare_report_is_of_the_chain_as_it_was_run_and_rewrites_nothing_else(
    speedrun: Speedrun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert speedrun("--set", "sft:train.max_steps=7") == 0
    before = (speedrun.folder / "chain.json").read_bytes()
    (speedrun.folder / "report.md").unlink()
    capsys.readouterr()
    assert speedrun("--only", "report") == 0
    assert (speedrun.folder / "report.md").exists() and (speedrun.folder / "chain.json").read_bytes() == before
    assert "was run with other settings" in capsys.readouterr().out
    assert speedrun("--only", "report", "--price-per-hour", "2") == 0
    assert {**json.loads(before), "price_per_hour": 2.0} == json.loads((speedrun.folder / "chain.json").read_bytes())


def test_the_hint_after_a_failure_has_the_options_that_were_given(
    speedrun: Speedrun, capsys: pytest.CaptureFixture[str]
) -> None:
    speedrun.order(sft={"fail": 3})
    assert speedrun("--seed", "3", "--set", "sft:train.max_steps=7", "--until", "sft") == 3
    assert "`stoker speedrun --seed 3 --set sft:train.max_steps=7 --only report`" in (said := capsys.readouterr().out)
    assert "not run, because" not in said


def test_held_out_prompts_are_not_trained_on_and_questions_are_read_before_anything_starts(
    speedrun: Speedrun, capsys: pytest.CaptureFixture[str]
) -> None:
    data = speedrun.home / "data"
    data.mkdir()
    lines(data / "prompts.jsonl", {"prompt": "a", "answer": "b"})
    lines(data / "prompts-held-out.jsonl", {"prompt": "c", "answer": "d"})
    lines(data / "questions.jsonl", {"prompt": "1 + 1?", "answer": 2})
    assert speedrun("--data", "data", "--until", "grpo-uniform") == 0
    calls = {call["name"]: call for call in speedrun.calls}
    assert calls["grpo-uniform"]["keys"]["grpo.prompts"] == str(data / "prompts.jsonl")
    tasks = [word.partition("=")[2] for word in calls["eval-sft"]["words"] if word.startswith("--evaluate.tasks=")]
    assert [os.path.basename(task) for task in tasks] == ["questions.jsonl", "prompts-held-out.jsonl"]
    capsys.readouterr()
    lines(data / "questions.jsonl", {"prompt": "1 + 1?", "answer": None})
    assert (
        speedrun("--data", "data") == EX_DATAERR
        and not speedrun.ran
        and "no row can be asked" in capsys.readouterr().out
    )


@pytest.mark.parametrize("name", ["prompts-test.jsonl", "prompts-val.jsonl", "gsm8k/prompts-held-out-2.parquet"])
def test_held_out_prompts_are_known_to_the_report_whatever_their_file_is_called(speedrun: Speedrun, name: str) -> None:
    lines(speedrun.home / "data" / "prompts.jsonl", {"prompt": "a", "answer": "b"})
    write = parquet if name.endswith("parquet") else lines
    write(speedrun.home / "data" / name, {"prompt": "c", "answer": "d"})
    assert speedrun("--data", "data", "--until", "eval-base") == 0
    tasks = [word.partition("=")[2] for word in speedrun.calls[-1]["words"] if word.startswith("--evaluate.tasks=")]
    assert [task.name for task in read_tasks(tasks[1:], 0)] == [PROMPTS]
    assert read_tasks(tasks[1:], 0)[0].questions[0].answer == "d"


def test_training_variables_stay_outside(
    speedrun: Speedrun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STOKER_TRAIN_OPTIM_LEARNING_RATE", "7")
    assert speedrun("--until", "tokenizer") == 0
    assert (
        speedrun.calls[0]["variables"] == []
        and "STOKER_TRAIN_OPTIM_LEARNING_RATE is not passed on" in capsys.readouterr().out
    )


def test_presets_are_refused_where_they_can_not_be(
    speedrun: Speedrun,
    box: Callable[..., dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert speedrun("--preset", "gpu") == EX_UNAVAILABLE
    assert speedrun("--preset", "d2") == EX_USAGE
    monkeypatch.setenv("STOKER_MACHINE", box(1)["STOKER_MACHINE"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert speedrun("--preset", "d20") == EX_USAGE and "real data" in capsys.readouterr().out
    assert speedrun("--plan") == 0 and "preset gpu" in (said := capsys.readouterr().out) and "A40" in said


def test_a_preset_for_real_data_needs_base_text_and_its_plan_says_what_is_lacking(
    speedrun: Speedrun,
    box: Callable[..., dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert speedrun("--preset", "d20", "--plan") == 0
    assert "would be refused here: preset d20 needs a GPU" in capsys.readouterr().out
    monkeypatch.setenv("STOKER_MACHINE", box(1)["STOKER_MACHINE"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    lines(speedrun.home / "data" / "sft.jsonl", CHAT)
    assert (
        speedrun("--preset", "d20", "--data", "data") == EX_USAGE
        and "with text to pretrain on" in capsys.readouterr().out
    )
    assert speedrun("--preset", "d20", "--data", "data", "--plan", "--json") == 0
    assert "needs real data" in json.loads(capsys.readouterr().out)["refused"]
    (speedrun.home / "data" / "base.txt").write_text("Once.")
    assert speedrun("--preset", "d20", "--data", "data", "--plan") == 0 and "refused" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--set", "sft:data.path=/x"), EX_NOINPUT, "stage sft: /x does not exist"), (("--set", "reward:reward.pairs=gone.jsonl"), EX_NOINPUT, "reward.pairs gone.jsonl"),
        (("--set", "sft:model.load=./gone"), EX_NOINPUT, "model.load ./gone"), (("--set", "generate.temperature=0"), EX_USAGE, "stage grpo-uniform: generate.temperature 0"),
        (("--set", "diversity:diversity.rounds=3"), EX_CONFIG, "stage diversity: diversity.rounds 3"), (("--nproc-per-node", "0"), EX_USAGE, "--nproc-per-node 0"),
        (("--set", "sft:optim.learning_rate=-1"), EX_USAGE, "stage sft: optim.learning_rate -1"),
        (("--price-per-hour", "-1"), EX_USAGE, "--price-per-hour -1"), (("--set", "sft:model.load=owner/name"), 0, ""), (("--nproc-per-node", "auto"), 0, ""),
        (("--set", "generate.temperature=0", "--until", "sft"), 0, ""), (("--set", "sft:data.validation=0.1"), 0, ""),
    ],
)  # fmt: skip
def test_what_a_stage_would_refuse_is_refused_by_the_plan(
    speedrun: Speedrun, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, said: str
) -> None:
    assert speedrun("--plan", *words) == code
    assert said in capsys.readouterr().out


CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
PAIR = {"prompt": "Hi", "chosen": "Hello.", "rejected": "What?"}


def lines(path: Path, *found: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return str(path)


def parquet(path: Path, *found: Any) -> str:
    import pyarrow as arrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(arrow.Table.from_pylist(list(found)), path)
    return str(path)


@pytest.mark.parametrize(
    ("path", "row", "role"),
    [
        ("base.jsonl", {"text": "a"}, "base"), ("web/part-0.jsonl", {"text": "a"}, "base"), ("base-held-out.jsonl", {"text": "a"}, "base-held-out"),
        ("sft.jsonl", CHAT, "sft"), ("chats-val.jsonl", CHAT, "sft-held-out"), ("midtrain/x.jsonl", CHAT, "midtrain"), ("x.jsonl", CHAT, "sft"),
        ("preferences.jsonl", PAIR, "pairs"), ("test.jsonl", PAIR, "pairs-held-out"), ("prompts.jsonl", {"prompt": "a", "answer": "b"}, "prompts"),
        ("prompts-held-out.jsonl", {"prompt": "a", "answer": "b"}, "prompts-held-out"), ("prompts_val.jsonl", {"prompt": "a", "answer": 3}, "prompts-held-out"),
        ("gsm8k/train.jsonl", {"question": "a", "answer": "#### 3"}, "prompts"), ("gsm8k/test.jsonl", {"question": "a", "answer": "#### 3"}, "questions"),
        ("ARC-Easy-Test.jsonl", {"question": {"stem": "a", "choices": []}, "answerKey": "A"}, "questions"), ("questions.jsonl", {"prompt": "a", "answer": "b"}, "questions"),
        ("ARC-Easy/ARC-Easy-Train.jsonl", {"question": {"stem": "a", "choices": []}, "answerKey": "A"}, None),
        ("all/auxiliary_train-00000-of-00001.parquet", {"question": "a", "choices": [], "answer": 1}, None),
        ("arc/train-00000-of-00001.parquet", {"question": "a", "choices": {}, "answerKey": "A"}, None), ("main/train-0.parquet", {"question": "a", "answer": "3"}, "prompts"),
        ("questions/train.jsonl", {"question": "a", "choices": [], "answer": 1}, "questions"),
        ("other.jsonl", {"strange": 1}, None), ("list.jsonl", [1], None),
        ("sharegpt.json", {"conversations": [{"from": "human", "value": "a"}]}, "sft"), ("alpaca.csv", {"instruction": "a", "output": "b", "text": "c"}, "sft"),
        ("hh/train.jsonl.gz", {"chosen": "\n\nHuman: a", "rejected": "\n\nHuman: b"}, "pairs"), ("hh/test.jsonl.gz", {"chosen": "a", "rejected": "b"}, "pairs-held-out"),
        ("ultra.jsonl.zst", {"prompt": "a", "chosen": [], "rejected": [], "messages": []}, "pairs"), ("sft.jsonl", {"prompt": "a", "chosen": [], "rejected": [], "messages": []}, "sft"),
        ("base.jsonl", {"text": "a", "instruction": "b", "output": "c"}, "base"), ("sft.jsonl", {"question": "a", "answer": "#### 3"}, "sft"),
    ],
)  # fmt: skip
def test_files_are_known_by_their_name_and_their_rows(path: str, row: Any, role: str | None) -> None:
    assert role_of(path, forms_of_row(row)) == role


def test_a_name_that_does_not_fit_what_is_inside_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="called sft and its first row has no conversation"):
        role_of("sft.jsonl", ("text",))
    (tmp_path / "sft.jsonl").write_text(json.dumps([CHAT]))
    with pytest.raises(Refusal, match="line 1 is a JSON list, not an object with keys"):
        find(str(tmp_path))
    (tmp_path / "sft.jsonl").rename(tmp_path / "sft.json")
    assert find(str(tmp_path)).roles == {"sft": (str(tmp_path / "sft.json"),)}
    for name in ("pairs.jsonl.gz", "some.jsonl.gz"):  # damaged, whatever it is called
        (tmp_path / name).write_bytes(gzip.compress(json.dumps(PAIR).encode() * 99)[:-20])
        with pytest.raises(Refusal, match=f"{name} is damaged"):
            find(str(tmp_path))
        (tmp_path / name).unlink()


def test_of_published_questions_the_test_half_is_asked(tmp_path: Path) -> None:
    arc = {
        "question": {"stem": "a", "choices": [{"label": "A", "text": "x"}, {"label": "B", "text": "y"}]},
        "answerKey": "A",
    }
    for half in ("Train", "Dev", "Test"):
        lines(tmp_path / "ARC-Easy" / f"ARC-Easy-{half}.jsonl", arc)
    for half in ("auxiliary_train", "dev", "validation", "test"):
        parquet(
            tmp_path / "all" / f"{half}-00000-of-00001.parquet", {"question": "a", "choices": ["x", "y"], "answer": 0}
        )
    lines(tmp_path / "other" / "dev.jsonl", arc)  # all there is of it
    lines(tmp_path / "questions-dev.jsonl", arc), lines(tmp_path / "questions-test.jsonl", arc)
    found = find(str(tmp_path))
    assert {os.path.relpath(path, tmp_path) for path in found.roles["questions"]} == {
        "ARC-Easy/ARC-Easy-Test.jsonl",
        "all/test-00000-of-00001.parquet",
        "other/dev.jsonl",
        "questions-dev.jsonl",
        "questions-test.jsonl",
    }
    assert sorted(os.path.basename(path) for path in found.unused) == [
        "ARC-Easy-Dev.jsonl",
        "ARC-Easy-Train.jsonl",
        "auxiliary_train-00000-of-00001.parquet",
        "dev-00000-of-00001.parquet",
        "validation-00000-of-00001.parquet",
    ]


def test_a_folder_of_data_takes_the_place_of_the_world_where_it_can(
    speedrun: Speedrun, capsys: pytest.CaptureFixture[str]
) -> None:
    data = speedrun.home / "data"
    (data / "mmlu" / "test").mkdir(parents=True)
    for name in ("law_test.csv", "art_test.csv"):
        (data / "mmlu" / "test" / name).write_text("q,1,2,3,4,A\n")
    (data / "book.txt").write_text("Once.")
    lines(data / "sft.jsonl", *[CHAT] * 200, {"messages": [{"role": "wizard", "content": "x"}]})
    lines(data / "pairs-a.jsonl", PAIR), lines(data / "pairs-b.jsonl", PAIR)
    (data / "notes.pdf").write_text("x")
    assert speedrun("--data", "data", "--plan") == 0
    assert not (speedrun.folder / "data").exists()
    capsys.readouterr()
    assert speedrun("--data", "data", "--until", "reward") == 0
    said = capsys.readouterr().out
    assert "1 of 201 rows can't be used: message 1 has the role 'wizard'" in said and "(row 201); left out" in said
    assert (
        "from the built-in world, because the folder has none: midtrain, prompts" in said
        and "not used: notes.pdf" in said
    )
    calls = {call["name"]: call["keys"] for call in speedrun.calls}
    assert (
        calls["base"]["data.path"] == str(data / "book.txt")
        and calls["base"]["data.validation"] == "0.01"
        and "evaluate.texts" not in calls["eval-sft"]
    )
    assert (
        len(Path(calls["sft"]["data.path"]).read_text().splitlines()) == 200
        and len(Path(calls["reward"]["reward.pairs"]).read_text().splitlines()) == 2
    )
    words = next(call["words"] for call in speedrun.calls if call["name"] == "eval-sft")
    tasks = [word.partition("=")[2] for word in words if word.startswith("--evaluate.tasks=")]
    assert tasks[0] == str(data / "mmlu" / "test") and [os.path.basename(task) for task in tasks[1:]] == [
        "prompts-held-out.jsonl"
    ]  # the prompts are the world's
    os.utime(data / "book.txt", (1, 1))
    assert speedrun("--data", "data", "--until", "reward") == 0 and not speedrun.ran  # other time, same bytes
    (data / "book.txt").write_text("Twice.")
    assert speedrun("--data", "data", "--until", "tokenizer") == 0 and speedrun.ran[0] == "tokenizer"


@pytest.mark.parametrize(
    ("name", "bad", "said"),
    [
        ("sft.jsonl", {"messages": [{"role": "user", "content": "x"}]}, "no message is the assistant's"), ("sft.jsonl", {"messages": [{"role": "bot", "content": "x"}]}, "message 1 has the role 'bot'"),
        ("pairs.jsonl", {**PAIR, "rejected": "Hello."}, "chosen and rejected are the same text"), ("prompts.jsonl", {"prompt": "x", "answer": ""}, "without an answer"),
    ],
)  # fmt: skip
def test_rows_that_can_not_be_used_are_left_out_below_one_percent_and_refused_from_there(
    tmp_path: Path, name: str, bad: Any, said: str
) -> None:
    role = name.partition(".")[0]
    good = {"sft": CHAT, "pairs": PAIR, "prompts": {"prompt": "a", "answer": "b"}}[role]
    path = lines(tmp_path / name, *[good] * 99, bad)
    found = rows.check_rows(role, path)
    assert (found.total, found.bad) == (100, 1)
    with pytest.raises(Refusal, match=f"1 of 100 rows can't be used: .*{said}.*row 100") as refused:
        rows.judge(path, found)
    assert refused.value.code == EX_DATAERR
    more = lines(tmp_path / name, *[good] * 100, bad)
    assert "left out" in rows.judge(more, rows.check_rows(role, more))


@at_length
def test_data_as_published_is_recognised_as_data_show_does(
    speedrun: Speedrun, stoker: Stoker, capsys: pytest.CaptureFixture[str]
) -> None:
    """ShareGPT in one JSON array, Alpaca as csv, hh-rlhf's dialogues and UltraFeedback's messages, packed."""
    data = speedrun.home / "data"
    data.mkdir()
    asked, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}
    sharegpt = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}
    (data / "chats.json").write_text(json.dumps([sharegpt] * 4, indent=1))
    (data / "alpaca.csv").write_text("instruction,input,output\n" + "Say hello.,,Hello.\n" * 3)
    hh = {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello.", "rejected": "\n\nHuman: Hi\n\nAssistant: What?"}
    ultra = {
        "prompt": "Hi", "messages": [asked, answer], "chosen": [asked, answer], "rejected": [asked, {**answer, "content": "What?"}], "score_chosen": 8.0,
    }  # fmt: skip
    for name, row in (("hh.jsonl.gz", hh), ("ultra.jsonl.gz", ultra)):
        (data / name).write_bytes(gzip.compress((json.dumps(row) + "\n").encode() * 5))
    assert speedrun("--data", "data", "--until", "reward") == 0
    said = capsys.readouterr().out
    assert "sft: alpaca.csv, chats.json; pairs: hh.jsonl.gz, ultra.jsonl.gz" in said
    calls = {call["name"]: call for call in speedrun.calls}
    words = calls["sft"]["words"]
    assert [str(data / name) in " ".join(words) for name in ("alpaca.csv", "chats.json")] == [True, True]
    pairs = Path(calls["reward"]["keys"]["reward.pairs"]).read_text().splitlines()
    assert [json.loads(line) for line in pairs] == [hh] * 5 + [ultra] * 5
    shown = {name: stoker("data", "show", str(data / name), "--json") for name in os.listdir(data)}
    formats = {name: json.loads(done.out)["files"][0]["format"] for name, done in shown.items()}
    assert formats == {
        "chats.json": "sharegpt", "alpaca.csv": "alpaca", "hh.jsonl.gz": "preference", "ultra.jsonl.gz": "preference",
    }  # fmt: skip


def test_a_file_with_two_formats_is_refused_with_its_row(
    speedrun: Speedrun, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(speedrun.home / "data" / "sft.jsonl", *[CHAT] * 300, {"instruction": "a", "output": "b"})
    assert speedrun("--data", "data", "--plan") == EX_DATAERR
    assert f"{path}, line 301: the row is of format alpaca" in capsys.readouterr().out


def test_prompts_and_pairs_in_parquet_become_the_lines_their_stages_read(speedrun: Speedrun) -> None:
    data = speedrun.home / "data"
    parquet(
        data / "main" / "train-00000-of-00001.parquet", {"question": "1 + 1?", "answer": "#### 2"}
    )  # the hub's GSM8K
    parquet(data / "main" / "test-00000-of-00001.parquet", {"question": "1 + 2?", "answer": "#### 3"})
    parquet(data / "pairs.parquet", PAIR)
    assert speedrun("--data", "data", "--until", "grpo-uniform") == 0
    calls = {call["name"]: call["keys"] for call in speedrun.calls}
    assert json.loads(Path(calls["grpo-uniform"]["grpo.prompts"]).read_text()) == {
        "question": "1 + 1?",
        "answer": "#### 2",
    }
    assert json.loads(Path(calls["reward"]["reward.pairs"]).read_text()) == PAIR


def test_what_is_in_parquet_and_base_text_is_looked_at_before_anything_starts(
    speedrun: Speedrun, capsys: pytest.CaptureFixture[str]
) -> None:
    data = speedrun.home / "data"
    wizard = {"messages": [{"role": "wizard", "content": "x"}]}
    parquet(data / "sft.parquet", *[CHAT] * 9, wizard)
    assert speedrun("--data", "data", "--plan") == EX_DATAERR
    said = capsys.readouterr().out
    assert (
        "1 of 10 rows can't be used: message 1 has the role 'wizard'" in said
        and "(row 10); that is 1 % or more" in said
    )
    parquet(data / "sft.parquet", *[CHAT] * 200, wizard)
    assert speedrun("--data", "data", "--plan") == 0
    (data / "sft.parquet").unlink()
    for name, text, said in (
        ("base.jsonl", '{"text": "a"}\n{"text": null}\n', "line 2: 'text' is null"),
        ("base.jsonl", '{"text": "a"}\n{"text": "b', "line 2 is not JSON"),
        ("base.txt", "", "base.txt is empty"),
        ("base-held-out.txt", " \n", "only whitespace"),
        ("base.jsonl", '{"text": ""}\n', "holds no text"),
    ):
        (data / name).write_text(text)
        assert speedrun("--data", "data", "--plan") == EX_DATAERR and said in capsys.readouterr().out, name
        (data / name).unlink()


def test_a_held_out_part_without_its_training_part_is_said_to_be_unused(
    speedrun: Speedrun, capsys: pytest.CaptureFixture[str]
) -> None:
    lines(speedrun.home / "data" / "sft-held-out.jsonl", CHAT)
    assert speedrun("--data", "data", "--plan") == 0
    assert "not used: sft-held-out.jsonl, because the folder has no sft" in capsys.readouterr().out


def test_a_folder_with_nothing_usable_is_refused_with_what_was_looked_for(
    tmp_path: Path, speedrun: Speedrun, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert (
        speedrun("--data", "empty") == EX_DATAERR
        and "looked for base*" in (said := capsys.readouterr().out)
        and "it is empty" in said
    )
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "a.png").write_text("x")
    lines(tmp_path / "odd" / "b.jsonl", {"strange": 1})
    assert speedrun("--data", "odd") == EX_DATAERR and "found a.png, b.jsonl" in capsys.readouterr().out
    assert speedrun("--data", "nowhere") == EX_NOINPUT


def test_a_setting_that_names_a_file_counts_by_its_bytes(speedrun: Speedrun) -> None:
    path = lines(speedrun.home / "mine.jsonl", CHAT)
    setting = ("--set", f"sft:data.path={path}", "--until", "sft")
    assert (
        speedrun(*setting) == 0
        and next(call for call in speedrun.calls if call["name"] == "sft")["keys"]["data.path"] == path
    )
    lines(speedrun.home / "mine.jsonl", CHAT, CHAT)
    assert speedrun(*setting) == 0 and speedrun.ran == ["sft"]


def test_what_is_said_of_a_stage(tmp_path: Path) -> None:
    assert (
        KINDS["evaluate"].headline({"all": {"accuracy": 0.625, "sampled_accuracy": None, "cut_accuracy": 0.0}})
        == "62.5% of held-out questions right"
    )
    cut = {"accuracy": 0.625, "sampled_accuracy": 0.5, "cut_accuracy": 0.25}
    assert (
        KINDS["evaluate"].headline({"all": cut})
        == "62.5% of held-out questions right, 50.0% of sampled answers, 25.0% cut at the token limit"
    )
    both = {"questions": {"accuracy": 0.763, "total": 600}, PROMPTS: {"accuracy": 0.9, "total": 1400}}
    told = KINDS["evaluate"].headline({"all": cut, "tasks": both})
    expected = (
        "right: 76.3% of 600 questions of all kinds, 90.0% of 1,400 prompts like GRPO's, 25.0% cut at the token limit"
    )
    assert told == expected, "as the report has them, and not the share of both together"
    weights = {"prompts": 4000, "weight_min": 0.3, "weight_max": 3.1}
    assert KINDS["density"].headline(weights).startswith("4000 prompts, weights from 0.30 to 3.10")
    token = {"bytes_per_token": 2.85, "words_bytes_per_token": 4.36}
    assert KINDS["tokenizer"].headline(token) == "2.85 bytes of text per token (whole words have 4.36)"
    assert KINDS["grpo"].headline({"reward_first": 0.25, "reward_last": 0.5}) == "reward 0.250 at first, 0.500 at last"
    assert KINDS["sft"].headline({}) == "" and state.progress(str(tmp_path), 10) == ""
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "loss": 2.0}\n{"step": 5, "lo')
    assert state.progress(str(tmp_path), 10) == "step 5 of 10, loss 2.000"
    (tmp_path / "verdict.json").write_text(
        json.dumps(
            {
                "status": "failed",
                "summary": "rank 0 ended with exit code 65",
                "evidence": ["exit code 65", "stoker: too long"],
            }
        )
    )
    assert state.trouble(str(tmp_path), 65, "nowhere", 0) == ("too long", "")
    failed = {"status": "failed", "summary": "boom", "fix": ["stoker train sft --name 1-sft   # to start it again"]}
    (tmp_path / "verdict.json").write_text(json.dumps(failed))
    assert state.trouble(str(tmp_path), 1, "nowhere", 0) == ("boom", ""), "the speedrun's own command resumes its stage"
    before, after = {"GPU-a": 5, "GPU-b": 7}, {"GPU-a": 3_600_005, "GPU-b": 1}
    assert watt_hours(before, after, ["GPU-a"]) == 1.0, "the others of a shared box are not counted"
    assert (
        watt_hours(before, after, ["GPU-a", "GPU-b"]) is None
        and watt_hours(None, after, ["GPU-a"]) is None
        and watt_hours(before, after, []) is None
    )
    assert (
        cards_of({"plan": {"ranks": [{"gpu": "GPU-b"}, {"gpu": "GPU-a"}, {"gpu": "GPU-b"}, {"gpu": None}]}})
        == ["GPU-a", "GPU-b"]
        and cards_of({}) == []
    )


def test_a_stages_log_grows(tmp_path: Path) -> None:
    log = tmp_path / "stage.log"
    for _ in range(2):
        assert Children().run(["echo", "hello"], os.environ, str(log), lambda: None) == 0
    assert log.read_text() == "hello\nhello\n"


def test_the_first_row_of_a_table_is_looked_for_in_its_first_lines(tmp_path: Path) -> None:
    """Cells that each have a line's end made one row of a whole file, twelve times its size in memory."""
    from stoker.speedrun import material

    (tmp_path / "a.csv").write_text('"what\nis it?",a,b,c,d,A\n')
    assert material._is_mmlu(str(tmp_path / "a.csv"))
    (tmp_path / "b.csv").write_bytes(b'"x\n",' * 100_000 + b"\xff")  # where it is no UTF-8 it is not read
    assert not material._is_mmlu(str(tmp_path / "b.csv"))
