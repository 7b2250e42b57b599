"""The thirty-fifth review: other users of the machine, hostile hosts, clients."""

from __future__ import annotations

from typing import Any

import pytest
import test_protocol

from stoker.control.launch.console import LineCutter
from stoker.control.launch.shortlines import OwnLines, RoleLines, ShortLines
from stoker.control.watch.straggler import Stragglers
from stoker.control.watch.watcher import Watcher

hostile = test_protocol.evil  # a run whose host says what a test likes

# ---- 1. a host's line on the launcher's terminal, which shortens and folds what recipes print ----


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("begin", [b"stoker: ", b"INFO | [GPU 0] "])
def test_a_command_in_a_command_is_not_folded_without_end(begin: bytes) -> None:
    told = b"to continue: stoker run x " * 3000
    shown = LineCutter(b"GPU0:", ShortLines(b"GPU0:", steps=True)).feed(begin + told + b"\n")
    assert b"".join(shown.split()).count(b"stokerrunx") == 3000


def test_a_label_of_any_number_of_digits_is_no_rank() -> None:
    lines = RoleLines(b"[a] ", OwnLines(False, lambda: 0), recipe=False)
    told = b"GPU" + b"9" * 5000 + b": x"
    assert lines(told) == told


# ---- 2. one host's words and the watch over all ranks ----


def test_a_loss_that_is_no_number_costs_its_host_and_not_the_watch(hostile: Any) -> None:
    done, _ = hostile("start", test_protocol.line(**{"is": "beats", "ranks": {"0": [1, 1, 1, 1.0, [[1, "x" * 5000]]]}}))
    err = done.stderr.decode()
    assert done.returncode == 70 and "it is broken: it sends a loss" in err and "watching failed" not in err, err


NO_OPERATIONS: list[Any] = [
    7, "x", [7], [None], [{"ops": 7}], [{"name": "0", "ops": [7]}], [{"name": "0", "ops": [{"order": []}]}],
    [{"name": "0", "ops": [{"order": "x", "usual": True}, {"order": 1, "usual": False}]}],
]  # fmt: skip


@pytest.mark.parametrize("collectives", NO_OPERATIONS, ids=range(len(NO_OPERATIONS)))
def test_operations_of_a_failed_rank_may_be_anything(collectives: Any) -> None:
    watcher = Watcher(2, 60.0, frozenset(["a"]), 0.0)
    watcher.failed(0, collectives, [["f", "x.py", 3]])
    watcher.failed(1, [{"name": "0", "ops": [{"seq": 1, "p2p": 0, "name": "gloo:barrier", "order": 1}]}], [])
    assert watcher.last_word(sizes_differ=False) is None, "nothing that was said blames a rank"


@pytest.mark.parametrize("timings", [7, "x", [7], [[]], [["0", 1]], [[{}, 1, 1]], [["0", [], 1]], [["0", 1, "x"]]])
def test_times_of_collectives_may_be_anything(timings: Any) -> None:
    stragglers = Stragglers(2)
    clock = 0.0
    while not (asked := stragglers.question(clock, {0: 99, 1: 99})) and clock < 1000:
        clock += 1.0
        for rank in (0, 1):
            stragglers.stepped(rank, int(clock), 1, 1.0, clock)
    assert asked == {"timings": True}
    good = [["0", number, number * 10**9] for number in range(50)]
    stragglers.answered("a", {"0": {"timings": timings}, "1": {"timings": good}})
    stragglers.conclude({})
    assert not stragglers.found
