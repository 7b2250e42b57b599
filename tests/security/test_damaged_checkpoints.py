"""Checkpoints that say what no run writes: one clear line each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from stoker.contract.errors import Refusal
from stoker.contract.frozen import as_json
from stoker.training.balance.plan import Plans
from stoker.training.loop.resume import Data, position
from stoker.training.model.config import ModelConfig
from stoker.training.optim.loss_scale import LossScale
from stoker.training.recipes import build
from stoker.training.recipes.build import samples_per_step
from stoker.training.rl.config import GrpoConfig
from stoker.training.rl.task import resumed


@pytest.mark.parametrize("bent", [{"best": []}, {"best": "x"}, {"best": float("nan")}, {"samples": "2"}, {"step": -5}])
def test_positions_that_can_not_be(bent: dict[str, Any]) -> None:
    meta = {"step": 1, "samples": 2, "tokens": 3, "best": None, "data": {}, **bent}
    with pytest.raises(Refusal, match="has no step number"):
        position(meta, SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bent",
    [
        {"history": 5},
        {"history": {"first": [], "recent": [{"strange": 1}]}},
        {"history": {"first": [], "recent": ["x"]}},
        {"step": "x"},
        {"updates": None},
    ],
)
def test_histories_that_can_not_be(bent: dict[str, Any]) -> None:
    meta = {
        "stage": "grpo", "optimizer": "adamw", "step": 1, "updates": 1, "tokens": 1,
        "history": {"first": [], "recent": []}, **bent,
    }  # fmt: skip
    with pytest.raises(Refusal) as refused:
        resumed(SimpleNamespace(meta=meta, path="ck"), "adamw", GrpoConfig())  # type: ignore[arg-type]
    assert "ck" in refused.value.line and "\n" not in refused.value.line


@pytest.mark.parametrize("stored", ["a", 0, -4, True])
def test_a_batch_that_no_run_has(stored: object) -> None:
    c = SimpleNamespace(batch=SimpleNamespace(tokens=0, micro=0, accumulation=1))
    found = SimpleNamespace(meta={"batch": [stored, 1]}, path="ck")
    with pytest.raises(Refusal, match="samples a step"):
        samples_per_step(c, 4, 1, found)  # type: ignore[arg-type]


def _plan(**changes: Any) -> dict[str, Any]:
    return {"ranks": 2, "batch": 8, "plans": [{"step": 0, "shares": [5, 3]}], **changes}


@pytest.mark.parametrize(
    "told",
    [
        [1],
        "x",
        {},
        _plan(plans=[]),
        _plan(plans=None),
        _plan(plans=[{"step": 0}]),
        _plan(plans=[{"step": 0, "shares": [8]}]),
        _plan(plans=[{"step": 0, "shares": [9, -1]}]),
        _plan(plans=[{"step": 0, "shares": [8, 0]}]),
        _plan(plans=[{"step": 0, "shares": [10**6, 10**6]}]),
        _plan(plans=[{"step": 0, "shares": [5.5, 2.5]}]),
        _plan(plans=[{"step": 9, "shares": [5, 3]}, {"step": 4, "shares": [4, 4]}]),
        _plan(plans=[{"step": 10**30, "shares": [5, 3]}]),
    ],
)
def test_a_bent_plan_in_a_checkpoint_is_one_line(told: Any) -> None:
    """A list ended in a traceback, and shares of a million each were believed."""
    assert _start({"balance": _plan()}).plans.at(0).shares == (5, 3), "a sound one holds"
    with pytest.raises(Refusal, match=r"^checkpoint here can't be read: ValueError: ") as refused:
        _start({"balance": told})
    assert len(refused.value.line) < 400


@pytest.mark.parametrize("told", [{}, [], {"value": "x", "good": 0}, {"value": 2.0, "good": 10**30}])
def test_a_bent_loss_scale_in_a_checkpoint_is_one_line(told: Any) -> None:
    assert float(_start({"loss_scale": {"value": 8.0, "good": 7}}).loss_scale.value) == 8.0
    with pytest.raises(Refusal, match=r"^checkpoint here can't be read: ValueError: "):
        _start({"loss_scale": told})


def _start(meta: dict[str, Any]) -> Any:
    """Resumes from a checkpoint that says so; what it set."""
    c: Any = SimpleNamespace(
        data=SimpleNamespace(seed=0, context_length=64),
        optim=SimpleNamespace(kind="adamw"),
        train=SimpleNamespace(max_steps=9),
    )
    data = Data("key", 0, 64, 100)
    sound = {"step": 4, "samples": 8, "tokens": 512, "data": as_json(data)}
    found: Any = SimpleNamespace(meta={**sound, **meta}, path="here", read_into=lambda tensors: None)
    material, model = SimpleNamespace(key="key", tokenizer_digest="x"), SimpleNamespace(config=ModelConfig())
    counter = SimpleNamespace(set_count=lambda steps: None)
    parts: Any = SimpleNamespace(
        material=material, model=model, adapters=None, plans=Plans(8, 2), batch=8, optimizer=counter,
        loss_scale=LossScale(torch.device("cpu")),
    )  # fmt: skip
    order, voice = SimpleNamespace(count=100), SimpleNamespace(say_once=lambda line: None)
    build.start_of(c, parts, cast("Any", order), {}, found, cast("Any", voice))
    return parts


@pytest.mark.parametrize("bent", [{"skipped": 10**38}, {"skipped": -1}, {"skipped": 5}, {"waited": -2}])
def test_a_checkpoint_that_skipped_more_steps_than_it_made_is_refused(bent: dict[str, int]) -> None:
    """The optimizer counted from -1e38, and all weights were NaN after a step."""
    data = Data("key", 0, 64, 100)
    made = {"step": 4, "samples": 8, "tokens": 512, "data": as_json(data), "waited": 0, "skipped": 4}
    assert position(made, data)[0].skipped == 4
    with pytest.raises(Refusal, match="has no step number"):
        position({**made, **bent}, data)
