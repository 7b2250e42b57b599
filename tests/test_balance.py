"""Unlike ranks: shares by measured speed, exact gradients, plans that are kept; and how gradients travel. Real ranks, gloo, a rank that is truly slow."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from conftest import at_length
from forked_ranks import Server, free_port, program, server

torch = pytest.importorskip("torch")

from stoker import balance  # noqa: E402
from stoker.contract.errors import Refusal  # noqa: E402
from stoker.training.balance.plan import STEPS, NetworkRule, Plan, Plans, Rule, apportion, equal  # noqa: E402  # noqa: E402
from stoker.training.config.resolve import recipe_settings  # noqa: E402
from stoker.training.parallel.config import local_steps, read_comm  # noqa: E402
from stoker.training.parallel.group import cut, even_micro  # noqa: E402

# ---- plans: pure ----


@pytest.mark.parametrize(
    ("samples", "speeds", "most", "shares"),
    [
        (12, (1, 1), None, (6, 6)),
        (12, (2, 1), None, (8, 4)),
        (12, (3, 1), None, (9, 3)),
        (7, (1, 1, 1), None, (3, 2, 2)),
        (64, (12, 8, 8), None, (28, 18, 18)),
        (12, (3, 1), (7, 12), (7, 5)),  # a fast card with little memory
        (4, (100, 1, 1), None, (2, 1, 1)),  # nobody is left without
        (
            2,
            (1, 5, 1),
            None,
            (0, 2, 0),
        ),  # an epoch's last step, smaller than the ranks: what is there goes to who is done first
        (0, (2, 1), None, (0, 0)),
    ],
)
def test_shares_follow_speed_add_up_and_keep_to_what_each_can_take(
    samples: int, speeds: Sequence[float], most: Sequence[int] | None, shares: tuple[int, ...]
) -> None:
    assert apportion(samples, speeds, most) == shares


def test_shares_that_fit_nowhere_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"12 samples don't fit: the ranks can take 4 \+ 5"):
        apportion(12, (1, 1), (4, 5))


def test_no_other_split_would_be_done_sooner() -> None:
    draw = random.Random(0)
    for _ in range(200):
        samples, speeds = draw.randint(3, 14), [draw.uniform(0.2, 4.0) for _ in range(3)]
        found = max(share / speed for share, speed in zip(apportion(samples, speeds), speeds, strict=True))
        others = ((a, b, samples - a - b) for a in range(1, samples - 1) for b in range(1, samples - a))
        assert found == pytest.approx(
            min(max(n / speed for n, speed in zip(one, speeds, strict=True)) for one in others)
        )


def test_every_sample_of_a_step_is_cut_to_one_rank_whatever_the_plan() -> None:
    for samples, shares, micro in (
        (12, (9, 3), 4),
        (11, (9, 3), 4),
        (1, (9, 3), 8),
        (7, (5, 1, 6), 1),
        (12, (5, 1, 6), 8),
    ):
        found = Plan(0, shares).of(samples)
        rows = []
        for rank in range(len(shares)):
            share = cut(found, rank, even_micro(shares[rank], micro))
            assert share.micro <= micro and share.micro_steps >= 1, (
                "what fits in memory, and the exchange needs all ranks"
            )
            rows += [one for number in range(share.micro_steps) for one in range(*share.rows(number))]
        assert rows == list(range(samples))


RULE = [
    ("equal ranks never", [(1.0, 1.01)] * 100, []),
    ("4 % is let be", [(1.0, 1.08)] * 100, []),
    ("2:1 after 20 steps, and once", [(1.0, 2.0)] * 20 + [(1.0, 2.0)] * 10, [(19, (8, 4))]),
    ("19 steps are not 20", [(1.0, 2.0)] * 19, []),
    (
        "four steps that say the opposite hide nothing",
        [(1.0, 2.0)] * 10 + [(2.0, 1.0), (1.0, 1.0)] * 2 + [(1.0, 2.0)] * 6,
        [(19, (8, 4))],
    ),
    ("every fourth step is too many", ([(1.0, 1.0)] + [(1.0, 2.0)] * 3) * 20, []),
    ("a rank that throttles later", [(1.0, 1.0)] * 50 + [(1.0, 3.0)] * 20, [(65, (9, 3))]),
    ("noise that changes sides gains nothing", [(1.0, 1.3), (1.3, 1.0)] * 50, []),
    ("more than 5 %, and whole numbers can't be better", [(1.0, 1.12)] * 60, []),
    ("a step nobody measured says nothing", ([(1.0, 2.0)] * 10 + [(0.0, 0.0)]) * 2, [(20, (8, 4))]),
]


@pytest.mark.parametrize(("steps", "expected"), [case[1:] for case in RULE], ids=[case[0] for case in RULE])
def test_shares_are_planned_anew_only_when_imbalance_stays(
    steps: list[tuple[float, float]], expected: list[tuple[int, tuple[int, int]]]
) -> None:
    rule = Rule(12)
    found = [(number, one) for number, seconds in enumerate(steps) if (one := rule.hear((6, 6), seconds)) is not None]
    assert [(number, one.shares) for number, one in found] == expected


def test_a_plan_that_works_is_not_planned_again_and_one_that_no_longer_does_is() -> None:
    rule = Rule(12)
    assert all(rule.hear((8, 4), (1.0, 1.0)) is None for _ in range(100))
    found = next(
        one for _ in range(STEPS) if (one := rule.hear((8, 4), (2.0, 1.0))) is not None
    )  # the fast one has become as slow as the other
    assert found.shares == (6, 6) and found.gain == pytest.approx(1 / 3)


def test_seconds_of_another_plan_are_not_counted_together() -> None:
    rule = Rule(12)
    told = [rule.hear((6, 6), (1.0, 2.0)) for _ in range(15)] + [rule.hear((7, 5), (1.0, 2.0)) for _ in range(15)]
    assert told == [None] * 30


def test_the_network_is_named_when_even_the_slowest_rank_waits_and_not_for_unlike_ranks() -> None:
    slow_rank = NetworkRule()
    assert all(slow_rank.hear((1.0, 2.0), (1.02, 0.02)) is None for _ in range(100))
    network = NetworkRule()
    told = [network.hear((1.0, 1.1), (1.1, 1.0)) for _ in range(100)]
    assert [number for number, one in enumerate(told) if one] == [STEPS - 1], "once"
    assert told[STEPS - 1].share == pytest.approx(1.0 / 2.1)


def test_plans_come_into_force_at_their_step_are_kept_and_hold_only_for_the_same_ranks_and_batch() -> None:
    plans = Plans(12, 2)
    assert plans.cut(30).shares == equal(12, 2) == (6, 6)
    with pytest.raises(AssertionError, match="a plan for step 30, and step 30 has been cut"):
        plans.add(Plan(30, (8, 4)))
    plans.add(Plan(31, (8, 4)))
    plans.add(Plan(60, (7, 5)))
    assert [plans.at(step).shares for step in (0, 30, 31, 59, 60, 1000)] == [
        (6, 6),
        (6, 6),
        (8, 4),
        (8, 4),
        (7, 5),
        (7, 5),
    ]
    told = json.loads(json.dumps(plans.told(40)))
    again = Plans(12, 2)
    assert again.go_on(told) and [again.at(step).shares for step in (40, 59, 60)] == [(8, 4), (8, 4), (7, 5)], (
        "the one to come is kept too"
    )
    for other in (Plans(12, 3), Plans(16, 2)):
        assert not other.go_on(told) and other.at(40).shares == equal(other.batch, other.ranks)
    assert not Plans(12, 2).go_on(None), "a checkpoint of a run without plans"


# ---- settings ----


@pytest.mark.parametrize("told", ["full", "bf16", "powersgd", "local:2", "local:8"])
def test_ways_to_exchange_gradients_are_read(told: str) -> None:
    assert read_comm(told) == told and local_steps(told) == {"local:2": 2, "local:8": 8}.get(told, 0)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--comm", "local"), "needs the number of steps between exchanges"),
        (("--comm", "local:1"), "needs the number of steps between exchanges"),
        (("--comm", "bf17"), "'bf17' is not one of full, bf16, powersgd, local:N"),
        (("--balance", "on"), "'on' is not one of off, auto"),
        (("--balance", "auto", "--strategy", "fsdp"), "parallel.balance auto needs parallel.strategy ddp"),
        (("--comm", "bf16", "--strategy", "fsdp"), "parallel.comm bf16 needs parallel.strategy ddp"),
        (("--comm", "local:8", "--optimizer", "adamw8bit"), "does not work with optim.kind adamw8bit"),
    ],
)
def test_settings_that_can_not_be_are_one_line(words: tuple[str, ...], line: str) -> None:
    with pytest.raises(Refusal) as refused:
        recipe_settings(["--preset", "debug", "--data", "x", *words], False, say=print)
    assert line in refused.value.line and "\n" not in refused.value.line


# ---- the recipes: ranks as torchrun would start them, forked from one process that has torch already ----

FORKS = program("""
import torch, torch._dynamo, torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook
from stoker.training.model.decoder import Decoder
from stoker.training.recipes import pretrain, stage

def slowed(times):
    '''This rank does its forward and backward `times` times: slow as another card is slow.'''
    forward = Decoder.forward
    def slow(self, *args):
        for _ in range(times - 1 if torch.is_grad_enabled() else 0):
            torch.autograd.grad(forward(self, *args), [one for one in self.parameters() if one.requires_grad])
        return forward(self, *args)
    Decoder.forward = slow

kept = []

def work(job, rank):
    if "script" in job:
        sys.argv[1:] = job["words"]
        kept.append({"__name__": "__main__"})  # what it made is not destroyed: torch 2.13's gloo can deadlock in that
        exec(compile(job["script"], "script", "exec"), kept[-1])
        return 0
    slowed(job["slow"].get(str(rank), 1))
    os.environ["STOKER_MICRO_BATCH_HALVINGS"] = str(job["halved"].get(str(rank), 0))
    return stage.run(pretrain.main, job["words"])
""")
WORDS = (
    "--tokenizer.path", "bytes", "--preset", "small", "--model.depth", "2", "--model.dim", "64", "--model.heads", "2", "--context_length", "32", "--batch.tokens", "768", "--batch.micro", "8",
    "--data.validation", "0", "--log_every", "1", "--export", "false", "--timeout", "60s", "--eval_every", "0", "--log_samples", "true", "--deterministic", "true",
)  # fmt: skip
BATCH = 24


class Trained:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = next((folder / "runs").glob("torchrun-*"))
        self.lines = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.lines if "loss" in line}

    @property
    def plans(self) -> dict[int, list[int]]:
        return {line["shares_from"]: line["shares"] for line in self.lines if "shares" in line}

    def said(self, rank: int = 0) -> str:
        return (self.folder / f"rank-{rank}.log").read_text()

    def ids(self, rank: int) -> dict[int, list[int]]:
        return {
            line["step"]: line["ids"]
            for line in map(json.loads, (self.run / f"samples-rank-{rank}.jsonl").read_text().splitlines())
        }

    def sizes(self, ranks: int) -> dict[int, list[int]]:
        """Step -> how many samples each rank learned."""
        each = [self.ids(rank) for rank in range(ranks)]
        return {step: [len(one[step]) for one in each] for step in each[0]}


class Forks:
    def __init__(self, ranks: Server, data: Path) -> None:
        self._ranks, self._data = ranks, data

    def __call__(
        self,
        ranks: int,
        folder: Path,
        *words: str,
        slow: dict[int, int] | None = None,
        halved: dict[int, int] | None = None,
    ) -> Trained:
        """A pretraining. `slow`: ranks that do their work so many times; `halved`: ranks with memory for a micro-batch halved so often."""
        given = ["--data", str(self._data), "--cache", str(self._data.parent / "cache"), *WORDS, *words]
        self._run(ranks, folder, words=given, slow=slow or {}, halved=halved or {})
        return Trained(folder)

    def script(self, text: str, ranks: int, folder: Path, *words: str) -> list[str]:
        """What each rank of a plain script printed."""
        self._run(ranks, folder, script=text, words=list(words))
        return [(folder / f"rank-{rank}.log").read_text() for rank in range(ranks)]

    def _run(self, ranks: int, folder: Path, **job: Any) -> None:
        self._ranks.begin(ranks, folder, **job)
        codes = self._ranks.codes()
        assert codes == [0] * ranks, (folder / "rank-0.log").read_text()


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    draw = random.Random(0)
    words = ["".join(draw.choice("abcdefghijklmnop") for _ in range(draw.randint(2, 7))) for _ in range(300)]
    text = tmp_path_factory.mktemp("data") / "text.txt"
    text.write_text("\n".join(" ".join(draw.choice(words) for _ in range(12)) for _ in range(3000)))
    with server(FORKS) as ranks:
        yield Forks(ranks, text)


@pytest.fixture(scope="module")
def whole(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One rank."""
    return forks(1, tmp_path_factory.mktemp("whole") / "job", "--max-steps", "48")


def close(one: dict[int, float], other: dict[int, float], rel: float) -> None:
    worst = max(one, key=lambda step: abs(one[step] - other[step]))
    assert one[worst] == pytest.approx(other[worst], rel=rel), f"step {worst}"


def test_a_slow_rank_gets_fewer_samples_and_the_run_learns_the_same_and_goes_on_with_the_plan_bit_for_bit(
    forks: Forks, whole: Trained, tmp_path: Path
) -> None:
    words = (
        "--max-steps",
        "48",
        "--balance",
        "auto",
        "--checkpoint.folder",
        str(tmp_path / "kept"),
        "--every_steps",
        "4",
        "--keep",
        "99",
    )
    alone = forks(2, tmp_path / "alone", *words, slow={1: 3})
    sizes = alone.sizes(2)
    assert sizes[0] == [12, 12] and all(sum(one) == BATCH for one in sizes.values())
    assert alone.plans and "balance: from step" in alone.said()
    first = min(alone.plans)
    assert first >= STEPS and sizes[first] == alone.plans[first] and sizes[first - 1] == [12, 12], (
        "a plan is in force from its step on"
    )
    assert sizes[first][0] > sizes[first][1], "the slow one has fewer"
    # Which samples a step has does not depend on who computes them, and neither does the loss.
    assert all(alone.ids(0)[step] + alone.ids(1)[step] == whole.ids(0)[step] for step in sizes)
    assert alone.losses.keys() == whole.losses.keys()
    close(alone.losses, whole.losses, 1e-4)

    # Another run goes on with a checkpoint made while the plan was in force: no rank is slow there, and it has the plan at once.
    step = next(step for step in range(4, 48, 4) if step >= first)
    end = min([one for one in alone.plans if one > step] + [step + STEPS, 48])
    again = forks(
        2,
        tmp_path / "again",
        "--max-steps",
        "48",
        "--balance",
        "auto",
        "--resume",
        str(tmp_path / "kept" / f"step-{step:08d}"),
    )
    assert "balance: continuing with" in again.said() and min(again.losses) == step
    same = [one for one in range(step, end) if again.sizes(2)[one] == sizes[one]]
    assert same == list(range(step, end)), "the same shares"
    assert all(again.losses[one] == alone.losses[one] for one in same), "to the last bit"

    # One rank, or another batch, knows nothing of it.
    other = forks(
        3,
        tmp_path / "other",
        "--max-steps",
        str(step + 2),
        "--balance",
        "auto",
        "--resume",
        str(tmp_path / "kept" / f"step-{step:08d}"),
    )
    assert other.sizes(3)[step] == [8, 8, 8] and "continuing with" not in other.said()


def test_unlike_micro_batches_and_a_smaller_last_step_learn_what_one_process_learns(
    forks: Forks, tmp_path: Path
) -> None:
    """An epoch of 100 samples, 24 a step: the fifth has 4; micro-batches of 5 at most."""
    words = ("--epochs", "2", "--max_samples", "100", "--batch.micro", "5", "--balance", "auto")
    one, three = (forks(ranks, tmp_path / str(ranks), *words) for ranks in (1, 3))
    assert one.losses.keys() == three.losses.keys() and len(one.losses) == 9
    close(three.losses, one.losses, 1e-5)


def test_a_rank_with_less_memory_computes_smaller_micro_batches_and_the_others_do_not(
    forks: Forks, tmp_path: Path
) -> None:
    job = forks(2, tmp_path / "job", "--max-steps", "5", "--balance", "auto", halved={1: 2})
    assert "micro-batches of 8, 2 samples at most fit the ranks" in job.said()
    other = forks(1, tmp_path / "other", "--max-steps", "5")
    close(job.losses, other.losses, 1e-5)


@at_length  # who gets how much is decided as above, and the next test counts what ranks with adapters exchange
def test_unlike_ranks_share_the_training_of_an_adapter(forks: Forks, tmp_path: Path) -> None:
    base = forks(1, tmp_path / "base", "--max-steps", "2", "--export", "true").run / "hf"
    words = ("--model.load", str(base), "--qlora", "--lora_rank", "4", "--max-steps", "32", "--learning_rate", "3e-3")
    two = forks(2, tmp_path / "two", *words, "--balance", "auto", slow={1: 3})
    first = min(two.plans)
    assert two.sizes(2)[first][0] > two.sizes(2)[first][1], "the slow one has fewer"
    close(two.losses, forks(1, tmp_path / "one", *words).losses, 1e-4)


EXCHANGED = """
import torch, torch.distributed as dist
from stoker.training.model import adapters
from stoker.training.model.config import AdapterConfig, ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.parallel.config import ParallelConfig
from stoker.training.parallel.group import Group, wrap

sent, send = [], dist._broadcast_coalesced
def count(group, tensors, *rest):
    sent.append(sum(tensor.numel() for tensor in tensors))
    return send(group, tensors, *rest)
dist._broadcast_coalesced = count
told = AdapterConfig(method="lora", lora_rank=4)
model = Decoder(ModelConfig(layers=2, dim=64, heads=4, kv_heads=2, head_dim=16, ff=128, vocab_size=256, family="llama"), 32)
adapters.freeze(model, told)
adapters.attach(model, told, 0)
group = Group(ParallelConfig(device="cpu"))
wrapped, met = wrap(model, group), []
def meet(state, bucket):
    met.append(bucket.buffer().numel())
    return torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook(None, bucket)
wrapped.register_comm_hook(None, meet)
ids = torch.zeros(2, 32, dtype=torch.int64)
wrapped(ids, ids).backward()
learned = sum(parameter.numel() for parameter in adapters.learned(model).values())
print("learned", learned, "sent", sum(sent), "met", sum(met), flush=True)
group.close()
"""


def test_ranks_exchange_what_learns_and_nothing_else(forks: Forks, tmp_path: Path) -> None:
    for line in forks.script(EXCHANGED, 2, tmp_path):
        found = re.search(r"learned (\d+) sent (\d+) met (\d+)", line)
        assert found is not None and found[1] == found[2] == found[3], line


def test_equal_shares_say_what_balance_would_gain(forks: Forks, tmp_path: Path) -> None:
    job = forks(2, tmp_path / "job", "--max-steps", "24", slow={0: 3})
    assert "ranks of different speed (" in job.said() and "--balance auto would compute" in job.said() and not job.plans
    assert all(one == [12, 12] for one in job.sizes(2).values())


# ---- how gradients travel ----


@pytest.mark.parametrize(
    ("told", "rel"), [pytest.param("bf16", 2e-3, marks=at_length), ("powersgd", 2e-2), ("local:4", 2e-2)]
)
def test_each_way_to_exchange_gradients_learns(
    forks: Forks, whole: Trained, tmp_path: Path, told: str, rel: float
) -> None:
    job = forks(2, tmp_path / "job", "--max-steps", "48", "--comm", told, "--balance", "auto")
    assert job.losses.keys() == whole.losses.keys() and job.losses[47] < job.losses[0] - 0.5
    close(job.losses, whole.losses, rel)
    assert job.losses != whole.losses, "it is not the whole exchange"


# ---- the drop-in, and the ranks' meeting: plain scripts, without `stoker run` ----

HEAD = """
import json, os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from stoker import balance
torch.set_num_threads(1)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if world > 1:
    dist.init_process_group("gloo")
draw = torch.Generator().manual_seed(1)
"""
EXACT = (
    HEAD
    + """
from stoker.training.balance.plan import Plan
x, y = torch.randn(51, 7, 5, dtype=torch.float64, generator=draw), torch.randint(0, 6, (51, 7), generator=draw)
y[torch.rand(51, 7, generator=draw) < 0.4] = -100      # unlike numbers of labels
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 300), nn.Tanh(), nn.Linear(300, 6)).double()
sampler = balance.Sampler(51, batch=12, seed=3, most=2 if rank == 1 else None)
if world > 1:
    for step, shares in ((5, (7, 2, 3)), (8, (1, 2, 9))):
        sampler.plans.add(Plan(step, shares))
loader = DataLoader(TensorDataset(x, y), batch_sampler=sampler, num_workers=int(sys.argv[1]))
model = balance.attach(DDP(net, bucket_cap_mb=0.005) if world > 1 else net, loader)      # several buckets
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
told = []
for epoch in range(2):
    for inputs, targets in loader:
        each = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none")
        if sys.argv[2] == "labels":
            labels = (targets != -100).sum()
            loss = each.sum() / labels
            sampler.count(labels)
        else:
            loss = each.view(len(inputs), -1).sum(1).mean()
        loss.backward()
        told.append([len(inputs), [p.grad.flatten()[::97].tolist() for p in net.parameters()]])
        optimizer.step()
        optimizer.zero_grad()
print(json.dumps(told))
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
"""
)


def test_the_drop_in_needs_torch_and_nothing_of_the_settings_or_the_launcher() -> None:
    look = "import sys; from stoker import balance; print([one for one in sys.modules if one.startswith(('stoker.training.config', 'stoker.control.launch', 'yaml'))])"
    assert (
        subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_the_drop_in_refuses_what_it_can_not_balance_in_words() -> None:
    with pytest.raises(ValueError, match="a batch of 0 from 10 samples can't be split over 1 rank:"):
        balance.Sampler(10, batch=0)
    with pytest.raises(TypeError, match="needs a DataLoader with batch_sampler"):
        balance.attach(torch.nn.Linear(2, 2), torch.utils.data.DataLoader([1, 2, 3]))
    sampler = balance.Sampler(10, batch=4)
    with pytest.raises(RuntimeError, match="a backward without a batch"):
        sampler.take()
    model = torch.nn.Linear(2, 2)
    assert balance.attach(model, sampler) is model and [len(one) for one in sampler] == [4, 4, 2] == [
        len(one) for one in sampler
    ], "one rank: nothing to do"


def test_the_drop_ins_epochs_go_on_as_loops_are_written() -> None:
    def sampler(batch: int = 3) -> balance.Sampler:
        return balance.Sampler(10, batch=batch, seed=1)

    whole = [list(one) for _ in range(3) for one in [list(sampler())]]
    assert whole[0] == whole[1], "a sampler of its own begins at the beginning"
    one = sampler()
    epochs = [list(one) for _ in range(3)]
    assert epochs[0] == whole[0] and epochs[0] != epochs[1] != epochs[2]
    left = sampler()
    next(iter(left))
    assert list(left) == epochs[1], "an epoch that was left early is over"
    left.set_epoch(1)
    assert list(left) == epochs[1] and left.epoch == 2, "unless it is asked for"
    stopped = sampler()
    for _ in zip(range(6), (batch for _ in range(2) for batch in stopped), strict=False):
        stopped.take()
    state = stopped.state_dict()
    went_on = sampler()
    went_on.load_state_dict(state)
    went_on.set_epoch(1)  # as a loop over epochs does
    assert list(went_on) == epochs[1][2:] and list(went_on) == epochs[2]
    with pytest.raises(ValueError, match="a batch of 3 from 10 samples, and this is 5 from 10"):
        sampler(5).load_state_dict(state)


@pytest.mark.parametrize(("workers", "mean"), [("0", "samples"), ("2", "labels")])
def test_in_anybodys_loop_unlike_shares_give_the_gradients_of_one_process(
    forks: Forks, tmp_path: Path, workers: str, mean: str
) -> None:
    """51 samples, 12 a step: every fifth step has 3. Rank 1 can take 2 at most."""
    (alone,), ranks = (
        forks.script(EXACT, 1, tmp_path / "one", "0", mean),
        forks.script(EXACT, 3, tmp_path / "three", workers, mean),
    )
    whole, parts = json.loads(alone), [json.loads(one) for one in ranks]
    sizes = [[one[step][0] for one in parts] for step in range(10)]
    assert (
        sizes == [[5, 2, 5]] * 4 + [[1, 1, 1]] + [[7, 2, 3]] * 3 + [[1, 2, 9]] + [[1, 1, 1]]
        and [one[0] for one in whole] == ([12] * 4 + [3]) * 2
    )
    for rank in range(3):
        for step in range(10):
            for mine, one in zip(parts[rank][step][1], whole[step][1], strict=True):
                assert mine == pytest.approx(one, rel=1e-9, abs=1e-14), (rank, step)


SLOW = (
    HEAD
    + """
x = torch.randn(480, 64, generator=draw)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1))
forward = net.forward
def card(inputs):      # rank 0's is four times as slow
    time.sleep(len(inputs) * (0.002 if rank == 0 else 0.0005))
    return forward(inputs)
net.forward = card
sampler = balance.Sampler(x, batch=48, seed=3)
loader = DataLoader(TensorDataset(x), batch_sampler=sampler, num_workers=2, prefetch_factor=3)
model = balance.attach(DDP(net), sampler)      # how far the workers are ahead shows by itself
if len(sys.argv) > 1:
    sampler.load_state_dict(json.loads(sys.argv[1]))
sizes = []
while sampler.done < 70:
    for (inputs,) in loader:
        model(inputs).square().mean().backward()
        sizes.append([sampler.done - 1, len(inputs)])
        if sampler.done == 70:
            break
print(json.dumps([sizes, sampler.state_dict()]))
dist.barrier()
dist.destroy_process_group()
"""
)


def test_in_anybodys_loop_a_slow_rank_gets_fewer_samples_and_a_saved_state_goes_on_with_them(
    forks: Forks, tmp_path: Path
) -> None:
    first, second = forks.script(SLOW, 2, tmp_path / "first")
    (mine, state), (theirs, other) = (json.loads(one.splitlines()[-1]) for one in (first, second))
    assert state == other and [one[0] for one in mine] == list(range(70)) and mine[0][1] == theirs[0][1] == 24
    assert all(a[1] + b[1] == 48 for a, b in zip(mine, theirs, strict=True)) and mine[-1][1] < 20 < theirs[-1][1]
    assert "stoker balance: from step" in first and "stoker balance" not in second, "rank 0 says it"
    again = forks.script(
        SLOW.replace("< 70", "< 75").replace("== 70", "== 75"), 2, tmp_path / "again", json.dumps(state)
    )
    sizes = json.loads(again[0].splitlines()[-1])[0]
    plans = Plans(48, 2)
    assert plans.go_on(state["balance"]), "the plan in force, and one that was decided in the last steps"
    assert [one[0] for one in sizes] == list(range(70, 75)) and all(
        share == plans.at(step).shares[0] for step, share in sizes
    )


def test_ranks_that_meet_after_a_bad_step_stay_as_they_are() -> None:
    """For its replay: else the weights that made the NaN are gone."""
    from stoker.training.balance.comm import Meeting

    group: Any = types.SimpleNamespace(
        device=torch.device("cpu"), sum=lambda one: one.mul_(2)
    )  # a second rank just like this one, but its share
    for bad, want in ((0.0, 2.0), (1.0, 1.0)):
        meeting, weights = Meeting(group, 1), torch.ones(3)
        meeting.learned(5)
        meeting._group.sum = lambda one: one.mul_(2) if one.dim() == 0 else one.add_(1.5)
        meeting.meet([weights], bad=torch.tensor(bad))
        assert weights.tolist() == [want] * 3


MEETING = (
    HEAD
    + """
from stoker.training.balance.comm import Meeting
from stoker.training.parallel.config import ParallelConfig
from stoker.training.parallel.group import Group

time.sleep(0.3)      # torch 2.13: a process group destroyed too soon after its last work can deadlock or abort
dist.destroy_process_group()
os.environ["MASTER_PORT"] = sys.argv[1]      # Group makes its own
group = Group(ParallelConfig(device="cpu"))
meeting = Meeting(group, 4)
weights = [torch.full((3,), float(rank)), torch.full((2, 2), 10.0 * rank)]
moments = [torch.full((3,), 1.0 + rank)]
told = []
for step in range(6):
    for one in weights:
        one.add_(1.0)
    meeting.learned(30 if rank == 0 else 10)
    if meeting.due(step):
        meeting.meet(weights)
    told.append([weights[0][0].item(), weights[1][0, 0].item(), moments[0][0].item()])
meeting.meet(weights, moments)      # a checkpoint, between two meetings
told.append([weights[0][0].item(), weights[1][0, 0].item(), moments[0][0].item()])
meeting.meet(weights, moments)      # and one at once: nothing has been learned since
told.append([weights[0][0].item(), weights[1][0, 0].item(), moments[0][0].item()])
print(json.dumps(told))
group.close()
"""
)


def test_ranks_that_learn_alone_meet_where_the_tokens_say_and_are_equal_there(forks: Forks, tmp_path: Path) -> None:
    first, second = (json.loads(one) for one in forks.script(MEETING, 2, tmp_path / "job", str(free_port())))
    assert first[2] == [3.0, 3.0, 1.0] and second[2] == [4.0, 13.0, 2.0], "each its own"
    assert first[3][:2] == second[3][:2] == [4.25, 6.5], "three quarters of the tokens were rank 0's"
    assert first[3][2] != second[3][2], "moments stay where they are"
    assert first[5][:2] == [6.25, 8.5] and first[6] == second[6] == first[7] == second[7] == [6.25, 8.5, 1.25]


def test_ranks_that_learn_alone_go_on_from_a_checkpoint_as_if_they_had_not_stopped(
    forks: Forks, tmp_path: Path
) -> None:
    """Saved between two meetings, at step 10: parameters and moments are averaged there, in the run that goes on, too."""
    words = (
        "--comm",
        "local:4",
        "--optimizer",
        "muon",
        "--checkpoint.folder",
        str(tmp_path / "kept"),
        "--every_steps",
        "10",
        "--keep",
        "9",
    )
    alone = forks(2, tmp_path / "alone", "--max-steps", "18", *words)
    again = forks(
        2, tmp_path / "again", "--max-steps", "18", *words[:4], "--resume", str(tmp_path / "kept" / "step-00000010")
    )
    assert min(again.losses) == 10 and all(again.losses[step] == alone.losses[step] for step in range(10, 18))


def test_a_network_that_takes_longer_than_the_ranks_is_named_with_what_helps(forks: Forks, tmp_path: Path) -> None:
    """One sample a rank and a wide model: next to nothing to compute, and all of its gradients to exchange."""
    job = forks(
        2,
        tmp_path / "job",
        "--max-steps",
        "30",
        "--context_length",
        "2",
        "--batch.tokens",
        "4",
        "--model.dim",
        "512",
        "--model.heads",
        "4",
    )
    lines = [line for line in job.said().splitlines() if "the network is the limit" in line]
    assert len(lines) == 1 and "comm: bf16 halves it" in lines[0] and "network" not in job.said(1)
