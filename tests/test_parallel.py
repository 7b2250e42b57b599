"""Who computes which samples of a step, and that an uneven split learns what one process learns. Pure: no process group."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")


import numpy as np  # noqa: E402

from stoker.training.data.order import Order  # noqa: E402
from stoker.training.loop.feeder import Course  # noqa: E402
from stoker.training.parallel.group import even_micro, split  # noqa: E402

WORLDS = (1, 2, 3, 5, 7, 8, 16)


@pytest.mark.parametrize("equal", [False, True], ids=["ddp", "fsdp"])
def test_every_sample_is_computed_by_exactly_one_rank_in_exactly_one_micro_batch(equal: bool) -> None:
    for samples, ranks, micro in itertools.product((0, 1, 2, 3, 7, 11, 12, 16, 48, 97), WORLDS, (1, 2, 3, 8)):
        shares = [split(samples, ranks, rank, micro, equal) for rank in range(ranks)]
        rows = [range(*share.rows(number)) for share in shares for number in range(share.micro_steps)]
        assert [one for row in rows for one in row] == list(range(samples)), (samples, ranks, micro)
        assert all(len(row) <= micro for row in rows)
        sizes = {share.end - share.begin for share in shares}
        assert max(sizes) - min(sizes) <= 1, "as even as can be"
        assert min(share.micro_steps for share in shares) >= 1, (
            "the exchange of gradients needs all ranks, also one that has nothing to compute"
        )
        if equal:
            assert len({share.micro_steps for share in shares}) == 1, "FSDP's gathers need as many calls on every rank"
        else:
            assert all(share.micro_steps == max(-(-(share.end - share.begin) // micro), 1) for share in shares), (
                "no micro-step for nothing"
            )


def test_the_micro_batch_wastes_as_little_as_can_be_and_never_grows() -> None:
    assert even_micro(12, 8) == 6 and even_micro(16, 8) == 8 and even_micro(7, 8) == 7 and even_micro(9, 8) == 5
    for share, most in itertools.product(range(1, 60), range(1, 20)):
        micro = even_micro(share, most)
        steps = -(-share // micro)
        assert 1 <= micro <= most and steps == -(-share // most), (
            "not larger than asked for, and not one micro-step more"
        )
        assert steps * micro - share < steps, "less than one row of padding per micro-step"


def test_a_course_covers_each_epoch_once_and_ends_with_what_is_left() -> None:
    order, course = Order(10, seed=3), Course(batch=4, start=0, total=20)
    steps = [course.of_step(number) for number in range(5)]
    ids = np.concatenate([order.ids(*step) for step in steps])
    assert (
        steps[-1] == (16, 20)
        and sorted(ids[:10]) == sorted(ids[10:]) == list(range(10))
        and list(ids[:10]) != list(ids[10:])
    )
    assert Course(4, 0, 18).of_step(4) == (16, 18), "the last step of a share of an epoch is smaller"
    later = Course(batch=3, start=8, total=20)  # another batch after a resume: goes on where the other was
    assert [later.of_step(number) for number in range(4)] == [(8, 11), (11, 14), (14, 17), (17, 20)]
    assert Course(4, 0, 0).of_step(100) == (400, 404), "without a total it has no end"


@pytest.mark.parametrize(
    ("samples", "ranks", "micro"), [(11, 3, 2), (11, 5, 2), (11, 7, 1), (3, 7, 2), (16, 16, 4), (9, 2, 8)]
)
@pytest.mark.parametrize("equal", [False, True], ids=["ddp", "fsdp"])
def test_weighted_by_tokens_an_uneven_split_gives_the_gradient_of_one_process(
    samples: int, ranks: int, micro: int, equal: bool
) -> None:
    """Each rank: the sum of ranks ÷ all labels × its token losses, over its micro-batches, padded and masked; then the mean over ranks, as DDP takes it."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(6, 4, dtype=torch.float64, generator=generator)
    x = torch.randn(samples, 5, 4, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 6, (samples, 5), generator=generator)
    y[torch.rand(samples, 5, generator=generator) < 0.4] = -100  # unlike numbers of labels per sample, as in chats
    labels = int((y != -100).sum())

    def gradient(inputs: torch.Tensor, targets: torch.Tensor, scale: float) -> torch.Tensor:
        own = weight.clone().requires_grad_()
        loss = torch.nn.functional.cross_entropy(
            (inputs @ own.T).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
        )
        (loss * scale).backward()
        assert own.grad is not None
        return own.grad

    whole = gradient(x, y, 1 / labels)
    summed = torch.zeros_like(whole)
    for rank in range(ranks):
        share = split(samples, ranks, rank, micro, equal)
        for number in range(share.micro_steps):
            begin, end = share.rows(number)
            inputs, targets = torch.zeros(micro, 5, 4, dtype=torch.float64), torch.full((micro, 5), -100)
            inputs[: end - begin], targets[: end - begin] = x[begin:end], y[begin:end]
            summed += gradient(inputs, targets, ranks / labels)
    torch.testing.assert_close(summed / ranks, whole, rtol=1e-13, atol=1e-15)


ASKS_FOR_MUCH = """
import sys
import torch
from stoker.contract import host_memory
from stoker.training.parallel.config import ParallelConfig
from stoker.training.parallel.group import Group

host_memory.read_memory = lambda: (8 << 30, 1 << 30, 8 << 30)
Group(ParallelConfig(strategy="ddp", device="cpu"))
torch.zeros(int(sys.argv[1]) << 20, dtype=torch.uint8)
"""


@pytest.mark.parametrize(("ranks", "megabytes", "given"), [(1, 900, True), (1, 1100, False), (2, 600, False)])
def test_a_rank_on_the_cpu_takes_no_more_than_its_part_of_what_is_free(ranks: int, megabytes: int, given: bool) -> None:
    more = {"LOCAL_WORLD_SIZE": str(ranks), "WORLD_SIZE": "1", "RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", ASKS_FOR_MUCH, str(megabytes)],
        env={**os.environ, **more},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == given, done.stderr
    assert given or "can't allocate memory" in done.stderr
