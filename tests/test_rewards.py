"""What an answer is worth: names and weights, built-in parts, mathematics, and rewards of one's own in a process of their own."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import wait_for
from stoker.contract.errors import EX_CONFIG, EX_DATAERR, EX_NOINPUT, EX_USAGE, Refusal
from stoker.training.config.flags import parse
from stoker.training.config.layers import gather
from stoker.training.evaluate.answering import Written, mark
from stoker.training.evaluate.mathematics import same_value
from stoker.training.evaluate.tasks import read_tasks
from stoker.training.rl import parts as parts_module
from stoker.training.rl.config import GrpoConfig
from stoker.training.rl.parts import check, lacking, parts_of
from stoker.training.rl.scoring import RewardFailed, Rewards, Worker, columns_of

ROWS = [
    {"prompt": "1 + 1?", "answer": "2", "level": 3},
    {"prompt": [{"role": "user", "content": "Hi"}], "tone": "kind"},
]


def answers(*texts: str, row: int = 0) -> list[Any]:
    """As of rl/rollout.py, two fields of which no reward looks at."""
    given: Any = ROWS[row]
    prompt = SimpleNamespace(row=row, asked=given["prompt"], answer=given.get("answer"))
    return [SimpleNamespace(prompt=prompt, text=text, ids=(1,) * len(text), whole=True) for text in texts]


def refused(*told: str, code: int = EX_USAGE, **more: Any) -> str:
    with pytest.raises(Refusal) as problem:
        check(GrpoConfig(reward=told, **more))
    assert problem.value.code == code and "\n" not in problem.value.line
    return problem.value.line


# ---- names, weights, files ----


def test_names_and_weights() -> None:
    assert [(part.kind, part.weight) for part in parts_of(GrpoConfig())] == [("exact", 1.0)]
    model = parts_of(GrpoConfig(reward_model="rm", reward_weight=0.3))
    assert [(part.kind, part.weight) for part in model] == [("exact", 1.0), ("model", 0.3)]
    told = ("a/b.py:score=2", "math", "length=-0.1", "regex:x=y=0.5", "regex:a=b", "model", "score.py:score")
    found = parts_of(GrpoConfig(reward=told, reward_model="rm", reward_weight=0.3))
    assert [(part.kind, part.argument, part.weight, part.label) for part in found] == [
        ("code", "score", 2.0, "score"), ("math", "", 1.0, "math"), ("length", "", -0.1, "length"), ("regex", "x=y", 0.5, "regex"),
        ("regex", "a=b", 1.0, "regex_2"), ("model", "", 0.3, "model"), ("code", "score", 1.0, "score_2"),
    ]  # fmt: skip


def test_what_cant_be_is_one_line_before_anything_is_started(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("import os\ndef score(completion):\n    return 1\nLIMIT = 3\n")
    check(GrpoConfig(reward=(f"{file}:score",)))
    for told, words in (
        ("exat", "did you mean exact?"),
        ("nonsense", "there are exact, number, math"),
        ("exact:7", "takes nothing after a colon"),
        ("exact=much", "'much' is not a number"),
        ("exact=nan", "'nan' is not a number"),
        ("regex:(", "not a valid pattern"),
        ("regex", "no pattern"),
        ("format:xml", "no format 'xml'; there are think, boxed, stated, json"),
        ("length:0", "not a number of tokens"),
        ("rewards.py", "add the function's name: rewards.py:score"),
        ("model", "grpo.reward_model"),
    ):
        assert words in refused(told), told
    assert "can't be read" in refused(f"{tmp_path}/none.py:score", code=EX_NOINPUT)
    assert "did you mean score?" in refused(f"{file}:scores", code=EX_DATAERR)
    file.write_text("def score(completion):\n    return (1\n")
    assert "line 2: '(' was never closed" in refused(f"{file}:score", code=EX_DATAERR)
    file.write_bytes(b"\x00\xff")
    assert "not valid Python" in refused(f"{file}:score", code=EX_DATAERR)


def test_a_misspelt_parameter_is_found_before_the_start(tmp_path: Path) -> None:
    file, prompts = tmp_path / "rewards.py", tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "2+2?"}\n{"prompt": "3+3?", "answer": "6"}\n')

    def asks(parameters: str) -> None:
        file.write_text(f"def score({parameters}):\n    return 1.0\n")
        check(GrpoConfig(reward=(f"{file}:score",), prompts=str(prompts)))

    for parameters in ("completion, answer", "prompts, completions, answer, *, more=1", "row, other=None, **rest"):
        asks(parameters)  # the second row has an answer
    for parameters, name in (("completion, answr", "answr"), ("completions, row", "row"), ("*, answr", "answr")):
        with pytest.raises(Refusal, match=f"rewards.py:score has an unknown parameter '{name}'") as refused:
            asks(parameters)
        assert refused.value.code == EX_DATAERR and ("did you mean" in refused.value.line.lower()), refused.value.line
    file.write_text("import functools\n@functools.cache\ndef score(completion, answr):\n    return 1.0\n")
    check(GrpoConfig(reward=(f"{file}:score",), prompts=str(prompts)))  # whatever a decorator makes of it


def test_a_config_file_of_ones_own_names_code_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "configs").mkdir()
    (tmp_path / "work" / "rewards.py").write_text("def score(completion):\n    return 1.0\n")
    path = tmp_path / "configs" / "c.yaml"
    path.write_text("grpo:\n  reward: [rewards.py:score, length=0.1]\n")
    monkeypatch.chdir(tmp_path / "work")
    layers = gather(parse(["--config", str(path)]), {})
    given = layers.told("grpo.reward")
    assert given is not None and given[0] == ("rewards.py:score", "length=0.1")
    check(GrpoConfig(reward=given[0]))
    monkeypatch.chdir(tmp_path / "configs")  # as other paths in a config file, it is not relative to that file
    with pytest.raises(Refusal) as problem:
        check(GrpoConfig(reward=given[0]))
    assert problem.value.code == EX_NOINPUT


def test_code_in_a_config_file_that_is_not_ones_own_is_refused(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--someone--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    text = "grpo:\n  reward: [rewards.py:score, length=0.1]\n"
    downloaded, open_to_all = snapshot / "c.yaml", tmp_path / "c.yaml"
    for path in (downloaded, open_to_all):
        path.write_text(text)
    open_to_all.chmod(0o666)
    link = tmp_path / "link.yaml"
    link.symlink_to(downloaded)
    for path in (downloaded, open_to_all, link):
        with pytest.raises(Refusal) as problem:
            gather(parse(["--config", str(path)]), {})
        assert (
            problem.value.code == EX_CONFIG and "--grpo.reward" in problem.value.line and "\n" not in problem.value.line
        )
        told = gather(parse(["--config", str(path), "--grpo.reward", "r.py:f", "--grpo.reward", "length"]), {})
        assert told.told("grpo.reward")[0] == ("r.py:f", "length")  # type: ignore[index]
    downloaded.write_text("grpo:\n  reward: [number, length=0.1]\n")
    assert gather(parse(["--config", str(downloaded)]), {}).told("grpo.reward")[0] == ("number", "length=0.1")  # type: ignore[index]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
def test_code_in_another_users_config_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("grpo:\n  reward: rewards.py:score\n")
    os.chown(path, 65534, 65534)
    with pytest.raises(Refusal, match="belongs to") as problem:
        gather(parse(["--config", str(path)]), {})
    assert problem.value.code == EX_CONFIG


# ---- built-in parts ----


def worth(reward: str, *texts: str) -> list[float]:
    return Rewards(parts_of(GrpoConfig(reward=(reward,))), ROWS, 20, None, None)(answers(*texts)).rewards


def test_built_in_parts() -> None:
    assert worth("exact", "2", "The answer is 2.", "I think 2 of them", "3") == [1, 1, 0, 0]
    assert worth("number=0.5", "1 + 1 = 2", "2 or 3", "so it is 2.0") == [0.5, 0, 0.5]
    assert worth("math", "so \\boxed{\\frac{4}{2}}", "\\boxed{3}") == [1, 0]
    assert worth("length", "x" * 5, "x" * 20, "x" * 40) == [0.75, 0, 0]
    assert worth("length:8", "x" * 4, "x" * 12, "x" * 40) == [1, 0.5, 0]
    assert worth("format:think", "<think>hm</think> 2", "<think></think>2", "2") == [1, 0, 0]
    assert worth("format:boxed", "\\boxed{2}", "#### 2") == [1, 0]
    assert worth("format:stated", "#### 2", "2") == [1, 0] and worth("format:json", '{"a": 2}', "a") == [1, 0]


def test_parts_add_up_with_their_weights_and_are_told_apart() -> None:
    told = Rewards(parts_of(GrpoConfig(reward=("exact=2", "length=0.5"))), ROWS, 4, None, None)(answers("2", "33"))
    assert told.rewards == [2 + 0.5 * 0.75, 0.25] and told.parts == [[1, 0], [0.75, 0.5]]
    assert told.correct == [True, False]
    nothing = Rewards(parts_of(GrpoConfig(reward=("length",))), ROWS, 4, None, None)(answers("Hi", row=1))
    assert nothing.correct == [None] and nothing.rewards == [0.5]


GRADED = [
    ({"prompt": "What colour is the car?", "answer": "red", "kind": "colour"}, "The car is red.", True),
    ({"prompt": "What colour is the bus?", "answer": "blue", "kind": "colour"}, "The bus is blue or red.", False),
    ({"prompt": "What colour is the van?", "answer": "green", "kind": "colour"}, "The van is red.", False),
    ({"prompt": "What is 1 + 1?", "answer": 2}, "1 + 1 = 2", True),
    ({"prompt": "What is 1 + 2?", "answer": "3"}, "1 + 2", False),
    ({"prompt": "What is a half?", "answer": "1/2"}, "It is \\boxed{\\frac{1}{2}}", True),
    ({"prompt": "Who has 7 pears?", "answer": "Anna", "alternatives": ["Ben"]}, "Anna, not Ben", False),
    ({"question": "How many?", "answer": "2 + 2 = 4\n#### 4"}, "There are 4.", True),
]


@pytest.mark.parametrize("reward", ["exact", "math", "length"])
@pytest.mark.parametrize("truncated", [False, True])
def test_correct_is_what_evaluation_says_whatever_the_reward_pays_for(
    tmp_path: Path, reward: str, truncated: bool
) -> None:
    """The same file, the same texts: as evaluation marks them, and as a GRPO step counts and records them."""
    by_form = [[case for case in GRADED if key in case[0]] for key in ("prompt", "question")]
    for number, cases in enumerate(by_form):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row, _, _ in cases))
        (task,) = read_tasks([str(path)], 0)
        (few,) = read_tasks([str(path)], 1)
        evaluated = [mark(task, Written(text, truncated), place).correct for place, (_, text, _) in enumerate(cases)]
        assert mark(few, Written(cases[0][1], truncated), 0).correct == evaluated[0]
        rows = [row for row, _, _ in cases]
        rewards = Rewards(parts_of(GrpoConfig(reward=(reward,))), rows, 20, None, None)
        prompts = [
            SimpleNamespace(row=place, asked=row.get("prompt", row.get("question")), answer=str(row["answer"]))
            for place, row in enumerate(rows)
        ]
        made: Any = [
            SimpleNamespace(prompt=prompt, text=text, ids=(1,), whole=not truncated)
            for prompt, (_, text, _) in zip(prompts, cases, strict=True)
        ]
        assert rewards(made).correct == evaluated
        if not truncated:
            assert evaluated == [correct for _, _, correct in cases]


def test_rows_that_evaluation_can_not_ask_have_no_grade() -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "?", "answer": ""}, {"prompt": "?", "answer": "a", "kind": 3}, {"prompt": "?"},
        {"question": "?", "choices": ["a", "b"], "answer": 1}, {"answer": "a"},
    ]  # fmt: skip
    rewards = Rewards(parts_of(GrpoConfig(reward=("length",))), rows, 20, None, None)
    made: Any = [
        SimpleNamespace(prompt=SimpleNamespace(row=place, asked="?", answer=None), text="a", ids=(1,), whole=True)
        for place in range(len(rows))
    ]
    assert rewards(made).correct == [None] * len(rows)


def test_rows_need_an_answer_only_where_one_is_compared() -> None:
    assert lacking(parts_of(GrpoConfig()))(None) == "without an answer"
    assert lacking(parts_of(GrpoConfig(reward=("length", "regex:x"))))(None) == ""
    number = lacking(parts_of(GrpoConfig(reward=("number",))))
    assert "not a number" in number("blue") and number("6 + 1 = 7\n#### 1,007") == ""


@pytest.mark.parametrize(
    ("said", "wanted", "same"),
    [
        ("\\boxed{\\frac{1}{2}}", "0.5", True), ("\\boxed{\\dfrac12}", "\\frac{1}{2}", True), ("The answer is $1\\frac{1}{2}$.", "1.5", True),
        ("\\boxed{50\\%}", "0.5", True), ("#### 1,234", "1234", True), ("\\boxed{x = 7}", "7", True), ("\\boxed{-\\frac{2}{4}}", "-1/2", True),
        ("\\boxed{2\\sqrt{3}}", "2\\sqrt{3}", True), ("\\boxed{(1, \\frac{2}{4})}", "(1, 0.5)", True), ("\\boxed{[1, 2)}", "(1, 2)", False),
        ("\\boxed{3 \\text{ cm}}", "3", True), ("\\boxed{2^{10}}", "2^{10}", True), ("It is\n2^10", "1024", True), ("\\boxed{7}", "8", False),
        ("", "7", False), ("\\boxed{}", "7", False), ("\\boxed{1/0}", "7", False), ("\\boxed{9^9^9^9}", "7", False), ("(" * 500 + "7", "7", False),
        ("\\boxed{\\pi}", "\\pi", True), ("\\boxed{3.14}", "\\pi", False), ("\\boxed{90^\\circ}", "90", True), ("-" * 300 + "7", "7", False),
    ],
)  # fmt: skip
def test_mathematics(said: str, wanted: str, same: bool) -> None:
    assert same_value(said, wanted) is same


def test_what_was_cut_before_its_value_has_none() -> None:
    assert (
        same_value("so 7", "so 7")
        and not same_value("7", "7", cut=True)
        and same_value("\\boxed{7} and", "7", cut=True)
    )


# ---- rewards of one's own ----


@pytest.fixture
def judge(tmp_path: Path) -> Iterator[Any]:
    """(code, told rewards) to rewards; the function is `score`."""
    made: list[Worker] = []

    def start(code: str, *told: str, seconds: float = 60.0) -> Rewards:
        file = tmp_path / f"rewards{len(made)}.py"
        file.write_text(textwrap.dedent(code))
        parts = parts_of(GrpoConfig(reward=told or (f"{file}:score",)))
        made.append(Worker([part for part in parts if part.apart], columns_of(ROWS), seconds))
        return Rewards(parts, ROWS, 20, made[-1], None)

    yield start
    for worker in made:
        worker.close()


FORMS = {
    "one": "def score(completion, answer): return completion == answer",
    "one, async": "import asyncio\nasync def score(completion, answer):\n    await asyncio.sleep(0.01)\n    return completion == answer",
    "all": "def score(prompts, completions, answer, **more): return [float(c == a) for c, a in zip(completions, answer)]",
    "all, async": "async def score(completions, rows): return [c == row.get('answer') for c, row in zip(completions, rows)]",
    "row": "def score(prompt, completion, row, level=None): return float(row.get('answer') == completion and level == 3)",
    "prints": "import sys\ndef score(completion, answer):\n    print('hello'); sys.stdin.read(1); return completion == answer",
    "numpy": "import numpy as np\ndef score(completions, answer): return np.array([c == a for c, a in zip(completions, answer)], dtype=np.float32)",
}  # fmt: skip


@pytest.mark.parametrize("code", FORMS.values(), ids=FORMS)
def test_functions_of_every_form(judge: Any, code: str) -> None:
    rewards = judge(code)
    assert rewards(answers("2", "3") + answers("Hi", row=1)).rewards == [1, 0, 0]
    assert rewards(answers("2")).rewards == [1] and rewards([]).rewards == []


def test_none_means_that_a_reward_does_not_apply(judge: Any) -> None:
    code = """
    def score(completion): return None if completion == "2" else 0.25
    def all_of_them(completions): return [None if text == "3" else 1.0 for text in completions]
    """
    rewards = judge(code)
    file = rewards.parts[0].file
    rewards = judge(code, f"{file}:score=2", f"{file}:all_of_them", "length=0.5")
    told = rewards(answers("2", "3", "44"))
    assert told.rewards == pytest.approx([1 + 0.5 * 0.95, 2 * 0.25 + 0.5 * 0.95, 2 * 0.25 + 1 + 0.5 * 0.9])
    assert [[math.isnan(value) for value in part] for part in told.parts[:2]] == [
        [True, False, False],
        [False, True, False],
    ]
    alone = judge(code, f"{file}:score")(answers("2", "3"))
    assert math.isnan(alone.rewards[0]) and alone.rewards[1] == 0.25 and alone.correct == [True, False]


def test_completions_are_messages_where_the_prompt_is(judge: Any) -> None:
    by_trl = """
    def score(prompts, completions, **columns):
        return [len(c[0]["content"]) if isinstance(p, list) else -len(c) for p, c in zip(prompts, completions)]
    """
    both = [*answers("Hello", row=1), *answers("22")]
    assert judge(by_trl)(both).rewards == [5, -2]
    one = "def score(completion): return completion == [{'role': 'assistant', 'content': 'Hello'}]"
    assert judge(one)(both).rewards == [1, 0]
    assert judge("", "regex:^Hel")(both).rewards == [1, 0]
    failing = "def score(completion): return 1 / (len(completion) - 1)"
    with pytest.raises(RewardFailed, match=r"prompt .*Hi.*, answer 'Hello'"):
        judge(failing)(both)


def test_patterns_run_apart_and_end_at_the_time_limit(judge: Any) -> None:
    assert judge("", "regex:^[0-9]+$")(answers("22", "2a")).rewards == [1, 0]
    with pytest.raises(RewardFailed, match=r"regex.*longer than grpo.reward_timeout|no answer within"):
        judge("", "regex:(a+)+$", seconds=0.3)(answers("a" * 40 + "b"))


FAILURES = {
    "division": ("def score(completion):\n    x = 1\n    return x / (len(completion) - 2)", r"rewards0.py, line 3: ZeroDivisionError.*prompt '1 \+ 1\?', answer 'no'"),
    "deeper": ("import json\ndef score(completion):\n    return json.loads(completion)", r"rewards0.py, line 3: JSONDecodeError.*prompt '1 \+ 1\?'"),
    "async": ("async def score(completion):\n    if completion == 'no':\n        raise ValueError('x\\ny')\n    return 1", r"line 3: ValueError: x y; prompt"),
    "batch": ("def score(completions):\n    raise KeyError('a')", r"line 2: KeyError: 'a'; one of 2 answers at once, the first: prompt"),
    "nan": ("def score(completion): return float('nan')", r"returned nan; prompt"),
    "infinite": ("def score(completion): return 1e999", r"returned inf; prompt"),
    "text": ("def score(completion): return '1'", r"returned '1' \(str\), not a number"),
    "list": ("def score(completion): return [1, 2]", r"not a number; a function that gets all answers at once has a parameter called completions"),
    "length": ("def score(completions): return [1.0]", r"returned 1 number for 2 answers"),
    "batch type": ("def score(completions): return 1.0", r"it must return a list of 2 numbers"),
    "batch returns None": ("def score(completions): pass", r"returned None; it must return a list of 2 numbers"),
    "exits": ("import sys\ndef score(completion): sys.exit(3)", r"line 2: SystemExit: 3"),
    "dies": ("import os\ndef score(completion):\n    if completion == 'no':\n        os._exit(3)\n    return 1", r"reward rewards0.py:score failed: rewards0.py, line 4: its process ended with exit code 3; prompt '1 \+ 1\?', answer 'no'"),
    "dies at once with all": ("import os\ndef score(completions): os._exit(0)", r"rewards0.py, line 2: its process ended with exit code 0; one of 2 answers at once, the first: prompt '1 \+ 1\?', answer 'yes'"),
    "is killed": ("import os\ndef score(completion):\n    os.kill(os.getpid(), 9)", r"rewards0.py, line 3: its process was killed by signal 9 \(out of memory\?\); prompt '1 \+ 1\?', answer 'yes'"),
    "crashes": ("import ctypes\ndef inner():\n    ctypes.string_at(0)\ndef score(completion):\n    return inner()", r"rewards0.py, line 3: its process was killed by signal 11; prompt '1 \+ 1\?', answer 'yes'"),
    "is killed while it computes": ("import os, subprocess, time\ndef score(completion):\n    begin = time.process_time()\n    while time.process_time() < begin + 0.5:\n        pass\n    subprocess.run(['kill', '-9', str(os.getpid())])", r"rewards0.py, line [456]: its process was killed by signal 9"),
    "too long": ("def score(completion):\n    while True:\n        try:\n            pass\n        except Exception: pass", r"rewards0.py, line \d: it took longer than grpo.reward_timeout; prompt '1 \+ 1\?', answer 'yes'"),
}  # fmt: skip


@pytest.mark.parametrize(("code", "line"), FAILURES.values(), ids=FAILURES)
def test_a_failure_is_one_line_with_file_line_and_prompt(judge: Any, code: str, line: str) -> None:
    rewards = judge(code, seconds=0.5 if "while True" in code else 60.0)
    with pytest.raises(RewardFailed, match=line) as problem:
        rewards(answers("yes", "no"))
    assert "\n" not in str(problem.value) and "Traceback" not in str(problem.value)


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("import nothing_like_this\ndef score(completion): return 1", "line 1: ModuleNotFoundError: No module named 'nothing_like_this'"),
        ("def score(answer_text): return 1", "has an unknown parameter 'answer_text'; there are prompt, completion, row, answer, level, tone"),
        ("def score(completion, /): return 1", "is positional-only"),
        ("score = 3", "score is '3' (int) there, not a function"),
        ("raise RuntimeError('no')\ndef score(completion): return 1", "line 1: RuntimeError: no"),
    ],
)  # fmt: skip
def test_what_cant_be_loaded_is_refused_before_training(judge: Any, code: str, line: str) -> None:
    with pytest.raises(Refusal) as problem:
        judge(code)
    assert line in problem.value.line and problem.value.code == EX_DATAERR


def test_functions_share_a_process_and_import_what_lies_beside_them(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("BASE = 40\n")
    (tmp_path / "r.py").write_text(
        "import os\nfrom beside import BASE\ndef one(completion): return BASE + 2\ndef pid(completion): return os.getpid()\n"
    )
    told = GrpoConfig(reward=(f"{tmp_path}/r.py:one=0.5", f"{tmp_path}/r.py:pid"))
    worker = Worker(parts_of(told), ["prompt"], 60.0)
    found = Rewards(parts_of(told), ROWS, 20, worker, None)(answers("x"))
    worker.close()
    assert found.parts[0] == [42.0] and found.parts[1] != [os.getpid()] and found.rewards[0] == 21.0 + found.parts[1][0]


def test_it_ends_with_the_rank_whatever_it_is_doing(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        f"import os, time\ndef score(completion):\n    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()) + '\\n')\n    while True: time.sleep(1)\n"
    )
    rank = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(f"""
        from types import SimpleNamespace as N
        from stoker.training.rl.config import GrpoConfig
        from stoker.training.rl.parts import parts_of
        from stoker.training.rl.scoring import Rewards, Worker
        parts = parts_of(GrpoConfig(reward=("{tmp_path}/r.py:score",)))
        rewards = Rewards(parts, [{{"prompt": "?"}}], 4, Worker(parts, ["prompt"], 60.0), None)
        rewards([N(prompt=N(row=0, asked="?", answer=None), text="", ids=(1,), whole=True)])
        """)],
        cwd=Path(parts_module.__file__).parents[3],
    )  # fmt: skip
    pid = wait_for(
        lambda: (
            text if (tmp_path / "pid").exists() and (text := (tmp_path / "pid").read_text()).endswith("\n") else None
        ),
        60,
    )
    assert pid and Path(f"/proc/{int(pid)}").exists()
    os.kill(rank.pid, signal.SIGKILL)
    rank.wait(100)
    assert wait_for(lambda: True if not Path(f"/proc/{int(pid)}").exists() else None, 30), (
        "the worker outlived its rank"
    )
