"""What the eighteenth review found: a port on another address, a mail server that never stops talking, bent plans in checkpoints."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from conftest import wait_for  # noqa: E402
from localuser import ATTACKER, needs_root, start_as  # noqa: E402
from stoker.contract import listeners  # noqa: E402
from stoker.contract.names import Refusal  # noqa: E402
from stoker.contract.shape import as_json  # noqa: E402
from stoker.control.roles.ready import MISSES, Watching  # noqa: E402
from stoker.control.roles.role import Ready  # noqa: E402
from stoker.training.balance.plan import Plans  # noqa: E402
from stoker.training.loop.resume import Data, position  # noqa: E402
from stoker.training.model.config import ModelConfig  # noqa: E402
from stoker.training.optim.loss_scale import LossScale  # noqa: E402
from stoker.training.recipes import build  # noqa: E402


def listening(address: str, port: int = 0, dual: bool = False) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    if ":" in address:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not dual)
    made.bind((address, port))
    made.listen()
    return made


class Neighbour:
    """Another user, who listens until this is closed."""

    def __init__(self, address: str, port: int = 0, dual: bool = False) -> None:
        needs_root()
        told, over = os.pipe(), os.pipe()

        def listen() -> None:
            with listening(address, port, dual) as made:
                os.write(told[1], str(made.getsockname()[1]).encode())
                os.close(over[1])
                os.read(over[0], 1)

        self._pid, self._over = start_as(ATTACKER, listen), over[1]
        os.close(told[1])
        os.close(over[0])
        self.port = int(os.read(told[0], 10))
        os.close(told[0])

    def __enter__(self) -> Neighbour:
        return self

    def __exit__(self, *problem: object) -> None:
        os.close(self._over)
        assert os.waitpid(self._pid, 0)[1] == 0


@pytest.mark.parametrize("address", ["127.0.0.2", "::"])
def test_a_neighbours_port_on_another_address_stops_no_role(address: str) -> None:
    """It ended the job: a role that was ready counted as gone."""
    with listening("127.0.0.1") as own:
        port = own.getsockname()[1]
        rule = Ready("port", "", check=0.05)
        watching = Watching(rule, [("127.0.0.1", port)], 0.0, 1)
        assert watching.ready.wait(10)
        with Neighbour(address, port):
            assert listeners.listening_users("127.0.0.1", port) == {os.getuid()}
            for _ in range(MISSES + 2):
                own.accept()[0].close()  # one look each
        watching.close()
        assert not watching.unhealthy, watching.unhealthy


@pytest.mark.parametrize(("address", "dual"), [("127.0.0.1", False), ("0.0.0.0", False), ("::", True)])
def test_a_neighbour_who_would_be_asked_in_the_roles_place_is_found(address: str, dual: bool) -> None:
    with Neighbour(address, dual=dual) as neighbour:
        assert listeners.listening_users("127.0.0.1", neighbour.port) == {ATTACKER}
        assert listeners.listening_users("localhost", neighbour.port) == {ATTACKER}
        watching = Watching(Ready("port", ""), [("127.0.0.1", neighbour.port)], 0.0, 1)
        wrong = wait_for(lambda: watching.newest or None, 10)
        watching.close()
        assert wrong is not None and "is in use by" in wrong and not watching.ready.is_set()


# ---- checkpoints: what they say of the run ----


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


@pytest.mark.parametrize("bent", [{"skipped": 10**38}, {"skipped": -1}, {"skipped": 5}, {"waited": 10**38}])
def test_a_checkpoint_that_skipped_more_steps_than_it_made_is_refused(bent: dict[str, int]) -> None:
    """The optimizer counted from -1e38, and all weights were NaN after a step."""
    data = Data("key", 0, 64, 100)
    made = {"step": 4, "samples": 8, "tokens": 512, "data": as_json(data), "waited": 0, "skipped": 4}
    assert position(made, data)[0].skipped == 4
    with pytest.raises(Refusal, match="has no step number"):
        position({**made, **bent}, data)
