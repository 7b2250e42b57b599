"""grpo.rollout: a user's file in a real worker process, over an engine that answers by table; then the examples in real runs."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import test_guide  # noqa: E402
from conftest import at_length  # noqa: E402
from forked_ranks import server  # noqa: E402
from stoker.contract.errors import EX_CONFIG, EX_DATAERR, EX_NOINPUT, EX_SOFTWARE, EX_USAGE, Refusal  # noqa: E402
from stoker.control.record.rollouts_log import read_rollouts  # noqa: E402
from stoker.training.config.flags import parse  # noqa: E402
from stoker.training.config.layers import gather  # noqa: E402
from stoker.training.generate.config import GenerateConfig  # noqa: E402
from stoker.training.parallel.config import ParallelConfig  # noqa: E402
from stoker.training.parallel.group import Group  # noqa: E402
from stoker.training.rl.config import GrpoConfig  # noqa: E402
from stoker.training.rl.parts import check, parts_of  # noqa: E402
from stoker.training.rl.rollout import Answer, Prompt, outcome, rollout_numbers  # noqa: E402
from stoker.training.rl.rollout_hook import RolloutHook, prompts_of  # noqa: E402
from stoker.training.rl.sampler import InTrainer  # noqa: E402
from stoker.training.rl.scoring import RewardFailed, Rewards  # noqa: E402
from stoker.training.rl.update import Row, advantages, arrange  # noqa: E402
from stoker.training.rl.waiting import StopRequested  # noqa: E402
from stoker.training.serve.request import LENGTH, STOP, Request  # noqa: E402
from stoker.training.serve.request import Answer as Completed  # noqa: E402
from stoker.training.tokenizer import chat  # noqa: E402
from stoker.training.tokenizer.tokenizer import bytes_tokenizer  # noqa: E402
from test_grpo import FORKS, Forks, Job, model_that_answers_with_a_digit  # noqa: E402
from test_grpo_server import FORKS as SERVED  # noqa: E402
from test_grpo_server import Serving, without_ages  # noqa: E402

ROOT = Path(__file__).parents[1]
TOKENIZER = bytes_tokenizer()
END = TOKENIZER.special[chat.STOP]
ROWS: list[dict[str, Any]] = [{"prompt": f"question {number}", "number": number, "answer": "a"} for number in range(3)]


class Engine:
    """Answers with a letter that depends on prompt and seed alone, and the end of the turn."""

    length, keeps_logprobs = 200, True

    def __init__(self) -> None:
        self.batches: list[list[Request]] = []

    def complete(self, requests: list[Request]) -> list[Completed]:
        self.batches.append(requests)
        return [self._one(request) for request in requests]

    def _one(self, request: Request) -> Completed:
        letter = ord("a") + (request.seed + sum(request.prompt)) % 26
        ids = ((letter,) * 3 + (END,))[: request.new_tokens]
        logprobs = tuple(-0.5 - place for place in range(len(ids)))
        return Completed(request.id, ids, "", STOP if ids[-1] == END else LENGTH, (), logprobs)


class Hook:
    """A file of rollouts in its worker. `answers`: two rollouts to each row."""

    def __init__(self, folder: Path, code: str, **told: Any) -> None:
        (folder / "game.py").write_text("from stoker.rollout import *\nimport asyncio\n" + textwrap.dedent(code))
        self.engine, self.said = Engine(), list[str]()
        self.c = GrpoConfig(rollout=f"{folder}/game.py:rollout", group=2, **told)
        sampler: Any = InTrainer(self.engine, 8, [END], {})  # type: ignore[arg-type]
        self.ranks = Group(ParallelConfig(device="cpu"))
        generate = GenerateConfig(new_tokens=8)
        self.rollout = RolloutHook(
            sampler, TOKENIZER, "bytes", self.c, self.ranks, ROWS, generate, self.said.append
        )  # fmt: skip

    def answers(self, step: int = 0) -> list[Answer]:
        return self.rollout(prompts_of(ROWS, "", lambda answer: ""), 0, step)


@pytest.fixture
def hook(tmp_path: Path) -> Iterator[Callable[..., Hook]]:
    made: list[Hook] = []

    def start(code: str, **told: Any) -> Hook:
        made.append(Hook(tmp_path, code, **told))
        return made[-1]

    yield start
    for one in made:
        one.rollout.close()


TWO_TURNS = """
    async def rollout(client, row, seed):
        chat = client.conversation(row["prompt"])
        first = await chat.sample()
        chat.add({"role": "user", "content": "again"})
        second = await chat.sample(max_tokens=2)
        return chat.rollout(row["number"] + 0.5, {"first": ord(first.text[0])})
"""


def test_a_stop_is_heard_while_the_process_of_rollouts_reads_nothing(hook: Callable[..., Hook]) -> None:
    made = hook("""
        import time
        async def rollout(client, row, seed):
            time.sleep(60)
    """)
    made.rollout._start(prompts_of(ROWS, "", lambda answer: ""), (0, 0), None)
    made.rollout._should_stop = lambda: True
    made.rollout._send(start=["x" * 200_000])  # more than a pipe takes
    with pytest.raises(StopRequested):
        made.answers()


def test_types_are_light() -> None:
    code = "import sys, stoker.rollout; sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'yaml')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_two_turns_are_one_sequence_in_which_only_sampled_tokens_are_learned(hook: Callable[..., Hook]) -> None:
    made = hook(TWO_TURNS)
    answers = made.answers()
    assert [answer.place for answer in answers] == list(range(6)) and not made.said
    assert [answer.reward for answer in answers] == [0.5, 0.5, 1.5, 1.5, 2.5, 2.5]
    for answer, row in zip(answers, [0, 0, 1, 1, 2, 2], strict=True):
        assert tuple(answer.prompt.ids) == tuple(chat.prompt(TOKENIZER, [("user", b"question %d" % row)]))
        between = chat.prompt(TOKENIZER, [("user", b"x"), ("assistant", b"y"), ("user", b"again")])
        between = between[len(chat.answered(TOKENIZER, [("user", b"x")], "y")) :]
        first, second = answer.ids[0], answer.ids[-1]
        assert answer.ids == (first,) * 3 + (END, *between) + (second,) * 2
        assert answer.learn == (True,) * 4 + (False,) * len(between) + (True,) * 2
        assert [value for value, on in zip(answer.sampled, answer.learn, strict=True) if on] == [
            -0.5,
            -1.5,
            -2.5,
            -3.5,
            -0.5,
            -1.5,
        ]
        assert answer.turns == 2 and not answer.whole and answer.parts == {"first": first}
        assert answer.transcript == f"[assistant] {chr(first) * 3}\n[user] again\n[assistant] {chr(second) * 2}"
    # All six waited each time: two batches. Rollouts to a prompt differ by their seeds.
    assert [len(batch) for batch in made.engine.batches] == [6, 6]
    assert len({request.seed for batch in made.engine.batches for request in batch}) == 12


def test_the_rollout_of_the_page(hook: Callable[..., Hook]) -> None:
    answers = hook(test_guide.FILES["twice.py"]).answers()
    assert all(answer.turns == 2 and not answer.failed for answer in answers)
    assert {answer.reward for answer in answers} <= {0.0, 1.0} and {"kept"} == set(answers[0].parts)


def test_the_same_seed_gives_the_same_rollouts_whatever_waits_in_between(hook: Callable[..., Hook]) -> None:
    plain = hook(TWO_TURNS)
    slow = hook(TWO_TURNS.replace("chat.add", "await asyncio.sleep(0.02 * (seed % 7))\n        chat.add"))
    threaded = hook(
        TWO_TURNS.replace(
            "chat.add", "await asyncio.to_thread(__import__('time').sleep, 0.01 * (seed % 5))\n        chat.add"
        )
    )
    answers = plain.answers(step=3)
    assert slow.answers(step=3) == answers and threaded.answers(step=3) == answers
    assert [len(batch) for batch in slow.engine.batches] == [6, 6], "all are waited for"
    assert plain.answers(step=4) != answers


def test_a_seed_of_ones_own_gives_a_prompt_the_same_completion(hook: Callable[..., Hook]) -> None:
    made = hook("""
        async def rollout(client, row, seed):
            one, other = await asyncio.gather(client.sample("a", seed=7), client.sample("a", seed=7))
            third, fourth = await client.sample("a"), await client.sample("a")
            assert one == other and one.text != "" and one.finish_reason == "stop"
            prompt = Turn(client.render("a"))
            return Rollout([prompt, Turn.sampled(one)], 1.0, {"differ": third != fourth})
    """)
    answers = made.answers()
    assert not made.said and len({answer.ids for answer in answers}) == 1
    assert any(answer.parts["differ"] for answer in answers)


def test_what_does_not_wait_for_the_policy_delays_the_others_by_the_grace_time_only(hook: Callable[..., Hook]) -> None:
    made = hook("""
        go = asyncio.Event()
        async def rollout(client, row, seed):
            if row["number"] == 0:
                await asyncio.wait_for(go.wait(), 60)
            chat = client.conversation("a")
            await chat.sample()
            go.set()
            return chat.rollout(1.0)
    """)
    assert [answer.failed for answer in made.answers()] == [""] * 6
    assert [len(batch) for batch in made.engine.batches] == [4, 2]


def test_stop_texts_end_a_completion_and_the_tokens_behind_them_are_not_part_of_it(hook: Callable[..., Hook]) -> None:
    made = hook("""
        async def rollout(client, row, seed):
            free = await client.sample("a", seed=1)
            cut = await client.sample("a", seed=1, stop=free.text[:2])
            assert (cut.text, cut.finish_reason, len(cut.token_ids)) == ("", "stop", 2), cut
            return Rollout([Turn(cut.prompt_ids), Turn.sampled(cut)], 1.0)
    """)
    answers = made.answers()
    assert not made.said and {len(answer.ids) for answer in answers} == {2}


BAD = {
    "raises": ("raise ValueError('no\\nluck')", r"game.py, line \d+: ValueError: no luck"),
    "exits": ("import sys; sys.exit(3)", r"game.py, line \d+: SystemExit: 3"),
    "returns None": ("return None", "returned NoneType; it must return a stoker.rollout.Rollout"),
    "returns a text": ("return 'nonsense'", "returned str; it must return"),
    "reward is a text": ("return Rollout(good.turns, 'much')", "returned reward 'much', which is not a number"),
    "reward is nan": ("return Rollout(good.turns, float('nan'))", "returned reward nan"),
    "part is no number": ("return Rollout(good.turns, 1.0, {'a': None})", "returned a None, which is not a number"),
    "turn is no turn": ("return Rollout(['a'], 1.0)", "turn 1 is str; it must be a stoker.rollout.Turn"),
    "mask of another length": ("return Rollout([Turn([1, 2], [True])], 1.0)", "has 2 token ids, and learn has 1 values"),
    "ids of no token": ("return Rollout([Turn([99999])], 1.0)", "turn 1 has token ids that are not the tokenizer's"),
    "learns nothing": ("return Rollout(good.turns[:1], 1.0)", "it learns no token"),
    "tokens of its own": ("return Rollout([good.turns[0], Turn([104, 105], True)], 1.0)", "turn 2 learns 2 tokens that were not sampled for this rollout"),
    "another's tokens": ("return Rollout([Turn(foreign.prompt_ids), Turn.sampled(foreign)], 1.0)", "turn 2 learns 4 tokens that were not sampled for this rollout"),
    "another prompt": ("return Rollout([Turn(client.render('other')), good.turns[1]], 1.0)", "not sampled for this rollout behind the"),
    "no prompt": ("return Rollout(good.turns[1:], 1.0)", "turn 1 learns 4 tokens that were not sampled"),
    "hangs": ("await asyncio.Event().wait()", "it took longer than grpo.rollout_timeout"),
    "hangs and ignores it": ("while True:\n    try: await asyncio.sleep(60)\n    except BaseException: pass", "grpo.rollout_timeout"),
    "blocks": ("while True: pass", r"game.py, line \d+: it took longer than grpo.rollout_timeout"),
    "sleeps": ("import time; time.sleep(600)", r"game.py, line \d+: it took longer than grpo.rollout_timeout"),
    "a tool that never returns": ("import subprocess; subprocess.run(['sleep', '600'])", "it took longer than grpo.rollout_timeout"),
    "no messages": ("await client.sample([])", "the prompt of sample is empty, or not a list of the tokenizer's ids"),
    "a role that is none": ("client.render([{'role': 'robot', 'content': 'x'}])", "a message needs a role"),
    "too long a prompt": ("await client.sample('x' * 500)", "ContextFull: the prompt has 5"),
    "max_tokens": ("await client.sample('x', max_tokens=0)", "max_tokens 0 is not a whole number from 1 up"),
}  # fmt: skip


@pytest.mark.parametrize(("code", "line"), BAD.values(), ids=BAD)
def test_a_rollout_that_fails_is_one_line_and_left_out(hook: Callable[..., Hook], code: str, line: str) -> None:
    made = hook(
        """
        foreign = None
        async def rollout(client, row, seed):
            global foreign
            chat = client.conversation(row["prompt"])
            first = await chat.sample()
            foreign = foreign or first
            good = chat.rollout(1.0)
            if row["number"] == 1:
                CODE
            return good
        """.replace("CODE", textwrap.indent(code, " " * 16).strip()),
        rollout_timeout=0.5,
    )
    answers = made.answers()
    assert [bool(answer.failed) for answer in answers] == [False, False, True, True, False, False], made.said
    assert len(made.said) == 2
    for said in made.said:
        assert said.startswith("rollout game.py:rollout, prompt 2: ") and said.endswith("; left out of the step"), said
        assert "\n" not in said
    assert re.search(line, made.said[0]), made.said[0]
    # The next step is as good.
    assert [bool(answer.failed) for answer in made.answers(1)] == [False, False, True, True, False, False]


@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 9)", "__import__('ctypes').string_at(0)"])
def test_a_worker_that_dies_ends_the_run_with_file_line_and_prompt(hook: Callable[..., Hook], end: str) -> None:
    made = hook(f"""
        import os
        async def rollout(client, row, seed):
            if row["number"] == 2:
                {end}
            await asyncio.sleep(60)
    """)
    with pytest.raises(
        RewardFailed, match=r"rollout game.py:rollout failed: its process .* in game.py, line 7, prompt 3"
    ):
        made.answers()


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("def rollout(client, row, seed): pass", "rollout must be an async function"),
        ("raise RuntimeError('no')", "game.py, line 3: RuntimeError: no"),
        ("rollout = 3", "rollout must be an async function"),
    ],
)
def test_what_cant_be_loaded_is_refused_before_training(hook: Callable[..., Hook], code: str, line: str) -> None:
    with pytest.raises(Refusal) as problem:
        hook(code)
    assert line in problem.value.line and problem.value.code == EX_DATAERR and "\n" not in problem.value.line


def test_settings_that_cant_be_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "game.py"
    file.write_text("async def rollout(client, row, seed):\n    pass\n")
    check(GrpoConfig(rollout=f"{file}:rollout"))
    for told, words, code in (
        (f"{file}", "name a file and a function, such as", EX_USAGE),
        ("game:rollout", "name a file and a function", EX_USAGE),
        (f"{file}:rolout", "did you mean rollout?", EX_DATAERR),
        (f"{tmp_path}/none.py:rollout", "can't be read", EX_NOINPUT),
    ):
        with pytest.raises(Refusal) as problem:
            check(GrpoConfig(rollout=told))
        assert words in problem.value.line and problem.value.code == code, problem.value.line


def test_a_config_file_of_somebody_else_names_no_code(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("grpo:\n  rollout: game.py:rollout\n")
    given = gather(parse(["--config", str(path)]), {}).told("grpo.rollout")
    assert given is not None and given[0] == "game.py:rollout"
    path.chmod(0o666)
    with pytest.raises(Refusal, match=r"--grpo\.rollout") as problem:
        gather(parse(["--config", str(path)]), {})
    assert problem.value.code == EX_CONFIG


# ---- what the learner makes of it ----


def judged_by(c: GrpoConfig, answers: list[Answer]) -> Any:
    rewards = Rewards(parts_of(c), ROWS, 8, None, None)
    return outcome(answers, rewards, len(answers), 2, Group(ParallelConfig(device="cpu")))


def answer(place: int, reward: float | None, **told: Any) -> Answer:
    return Answer(place, Prompt(place // 2, "?", (1, 2), None), (3,) * (place + 1), "x", True, reward=reward, **told)


def test_failed_rollouts_are_left_out_of_their_groups() -> None:
    answers = [
        answer(0, 1.0),
        answer(1, 0.0),
        answer(2, 5.0),
        answer(3, None, failed="line"),
        answer(4, 2.0),
        answer(5, None),
    ]
    judged, found = judged_by(GrpoConfig(rollout="r.py:f", group=2), answers)
    assert found.usable.tolist() == [True, True, True, False, True, False]
    assert found.lengths.tolist() == [1, 2, 3, 0, 5, 0] and found.reward == 2.0 and found.length == 11 / 4
    assert found.without_signal(2) == [1, 2] and found.unlike(2) and found.part_means == [2.0]
    above = advantages(torch.tensor(judged.rewards).view(-1, 2), True).flatten().tolist()
    assert above[0] == pytest.approx(1, abs=1e-3) and above[1] == pytest.approx(-1, abs=1e-3) and above[2:] == [0] * 4
    numbers = rollout_numbers(answers, found, Group(ParallelConfig(device="cpu")))
    assert numbers == {"rollouts_failed": 1, "turns": 1.0, "masked": 0.0}
    with pytest.raises(RewardFailed, match="line; no rollout of the step was left"):
        judged_by(GrpoConfig(rollout="r.py:f", group=2), [answer(0, None, failed="line"), answer(1, None)])
    with pytest.raises(RewardFailed, match="reward rollout returned None for every answer of the step"):
        judged_by(GrpoConfig(rollout="r.py:f", group=2), [answer(0, None), answer(1, None)])


def test_rewards_of_settings_are_added_to_the_rollouts_own() -> None:
    c = GrpoConfig(rollout="r.py:f", reward=("length:1=0.5",), group=2)
    judged, _ = judged_by(c, [answer(0, 1.0), answer(1, None)])
    assert judged.rewards == [1.5, 0.0] and [part.label for part in parts_of(c)] == ["rollout", "length"]


def test_advantages_with_missing_rewards_are_those_of_the_others() -> None:
    rewards = torch.tensor([[1.0, 0.0, float("nan"), 3.0], [1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    for scaled in (False, True):
        found = advantages(rewards, scaled)
        assert torch.equal(found[1:], advantages(rewards[1:], scaled))
        assert torch.equal(found[0, [0, 1, 3]], advantages(rewards[:1, [0, 1, 3]], scaled)[0]) and found[0, 2] == 0


def test_masked_tokens_are_read_and_not_learned() -> None:
    rows = [
        Row((1, 2), (3, 4, 5, 6), 1.0, (0.1, 0.0, 0.0, 0.4), (True, False, False, True)),
        Row((1,), (7, 8), -1.0, (0.7, 0.8)),
    ]
    (batch,) = arrange(rows, 8, 16, torch.device("cpu"))
    assert batch.inputs[:, :6].tolist() == [[1, 7, 0, 0, 0, 0], [1, 2, 3, 4, 5, 0]]
    assert batch.where.tolist() == [0, 1, 16 + 1, 16 + 4] and batch.targets.tolist() == [7, 8, 3, 6]
    assert batch.advantages.tolist() == [-1, -1, 1, 1] and batch.sampled is not None
    assert batch.sampled.tolist() == pytest.approx([0.7, 0.8, 0.1, 0.4])


# ---- real runs of the examples ----


def load_benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("rollout_examples", ROOT / "benchmarks" / "rollout_examples.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BENCHMARK = load_benchmark()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def model(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            torch.set_num_threads(1)
            BENCHMARK.make_model(made[name], name, 0, 60, dim=32)
        return made[name]

    return model


@pytest.fixture(scope="module")
def ranks() -> Iterator[Any]:
    with server(FORKS) as forks:
        yield forks


def run(ranks: Any, models: Callable[[str], Path], folder: Path, name: str, count: int = 1, *more: str) -> Job:
    words = BENCHMARK.words_of(models(name), name, 0, 3)
    ranks.begin(
        count, folder, words=[*words, "--grpo.prompts_per_step", "4", "--grpo.group", "8", "--timeout", "60s", *more]
    )
    return Job(folder, ranks.codes())


def test_the_guessing_game_runs_the_same_on_any_number_of_ranks(
    ranks: Any, models: Callable[[str], Path], tmp_path: Path
) -> None:
    alone = run(ranks, models, tmp_path / "1", "guessing")
    assert alone.codes == [0], alone.said()
    two = run(ranks, models, tmp_path / "2", "guessing", 2)
    assert two.codes == [0, 0], two.said()
    for mine, theirs in zip(alone.metrics, two.metrics, strict=True):
        assert mine["rollouts_failed"] == 0 and 1 < mine["turns"] <= 3 and 0 < mine["masked"] < 1
        assert mine["reward_guesses"] == mine["turns"]
        for name in ("reward", "turns", "masked", "length", "reward_found"):
            assert mine[name] == pytest.approx(theirs[name]), (mine["step"], name)
    rollouts = list(read_rollouts(str(alone.run)))
    assert len(rollouts) == 3 * 4 * 8
    several = next(one for one in rollouts if one.parts["guesses"] > 1)
    assert several.answer.startswith("[assistant] ") and "\n[user] " in several.answer, several.answer
    assert {"rollout", "found", "guesses"} == set(several.parts)


def test_the_calculator_runs_its_tool_in_a_process_with_limits(
    ranks: Any, models: Callable[[str], Path], tmp_path: Path
) -> None:
    job = run(ranks, models, tmp_path, "calculator", 1, "--max-steps", "1")
    assert job.codes == [0], job.said()
    assert job.metrics[0]["rollouts_failed"] == 0 and 0 <= job.metrics[0]["reward"] <= 1
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import calculator

        texts = ["2*3", "7/0", "9**9**9**9", "'x'*9", "__import__('os')"]

        async def all_of_them() -> list[str]:
            return list(await asyncio.gather(*map(calculator.calculate, texts)))

        assert asyncio.run(all_of_them()) == ["6", "error", "error", "error", "error"]
    finally:
        sys.path.remove(str(ROOT / "examples"))


def test_a_run_whose_rollouts_all_fail_ends_with_the_first_line(
    ranks: Any, models: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "game.py").write_text("async def rollout(client, row, seed):\n    return 1 / (row['secret'] * 0)\n")
    job = run(ranks, models, tmp_path / "job", "guessing", 1, "--grpo.rollout", f"{tmp_path}/game.py:rollout")
    assert job.codes == [EX_SOFTWARE] and "Traceback" not in job.said(), job.said()
    assert (
        "game.py, line 2: ZeroDivisionError: division by zero; no rollout of the step was left (step 0)" in job.said()
    )
    refused = run(ranks, models, tmp_path / "refused", "guessing", 1, "--grpo.rollout", f"{tmp_path}/game.py:other")
    assert refused.codes == [EX_DATAERR] and "has no function 'other'" in refused.said()


@at_length
@pytest.mark.parametrize("name", ["guessing", "calculator"])
def test_the_examples_learn(name: str, ranks: Any, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    BENCHMARK.make_model(tmp_path, name, 0, BENCHMARK.STEPS[name][0])
    ranks.begin(1, tmp_path / "job", words=BENCHMARK.words_of(tmp_path, name, 0, 60))
    job = Job(tmp_path / "job", ranks.codes())
    assert job.codes == [0], job.said()
    rewards = [line["reward"] for line in job.metrics]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.05, rewards


RAW = """
from stoker.rollout import Rollout, Turn

async def rollout(client, row, seed):
    prompt = client.render(row["prompt"])
    first = await client.sample(prompt, max_tokens=1)
    between = client.encode("?")
    second = await client.sample([*prompt, *first.token_ids, *between], max_tokens=2)
    turns = [Turn(prompt), Turn.sampled(first), Turn(between), Turn.sampled(second)]
    parts = {"versions": len(second.weight_versions)}
    return Rollout(turns, (first.text + second.text).count("7"), parts)
"""


def test_with_a_server_the_rollouts_are_the_same(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    given = tmp_path_factory.mktemp("digits")
    model_that_answers_with_a_digit(given)
    (tmp_path / "raw.py").write_text(RAW)
    own = ("--grpo.rollout", f"{tmp_path}/raw.py:rollout", "--max-steps", "3", "--export", "false")
    serving = Serving(given / "hf", tmp_path_factory.getbasetemp())
    try:
        with server(SERVED) as made:
            forks = Forks(made, given)
            alone = forks(1, tmp_path / "alone", *own)
            assert alone.codes == [0], alone.said()
            served = forks(1, tmp_path / "served", *own, "--grpo.server", serving.url)
            assert served.codes == [0], served.said()
            ahead = forks(2, tmp_path / "ahead", *own, "--grpo.server", serving.url, "--grpo.staleness", "1")
            assert ahead.codes == [0, 0], ahead.said()
    finally:
        serving.close()
    own_names = {"reward_versions"}
    for mine, theirs in zip(without_ages(alone.metrics), without_ages(served.metrics), strict=True):
        assert mine.keys() == theirs.keys() and mine["turns"] == 2
        assert {name: mine[name] for name in mine.keys() - own_names} == {
            name: theirs[name] for name in theirs.keys() - own_names
        }
        assert mine["reward_versions"] == 0 and 1 <= theirs["reward_versions"] <= 2
    assert [line["staleness_max"] for line in served.metrics] == [0] * 3
    assert [line["rollouts_failed"] for line in ahead.metrics] == [0] * 3
    assert max(line["staleness_max"] for line in ahead.metrics) <= 1
