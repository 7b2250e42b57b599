"""An all-reduce over the hosts with their own torch, one rank a host: what the network gives a training step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from stoker.control.cluster.asking import STORE, TIMES, Asking, Question, fitting
from stoker.control.cluster.compare import build
from stoker.control.cluster.facts import Facts, OneHost, Reduce
from stoker.control.cluster.hosts import Hosts

REDUCE_S = 20.0
TARGET_S = 0.12  # what one all-reduce should take: long enough to time, short enough to repeat
REPEATS = 5
TRAVELS = ("NCCL_", "GLOO_", "TORCH_")


def may_reduce(facts: Facts) -> bool:
    """Only where it can end: two hosts, torch on all of them, and every pair lets full packets through."""
    hosts = _able(facts)
    alike = len({build(one) for one in hosts}) == 1
    return (
        len(hosts) > 1
        and len(hosts) == len(facts.there)
        and alike
        and bool(facts.pairs)
        and all(not pair.closed and pair.big for pair in facts.pairs)
    )


def _able(facts: Facts) -> list[OneHost]:
    return [one for one in facts.there if one.address and one.torch and one.torch.version]


def backend_of(facts: Facts) -> str:
    cards = all(
        one.examination and one.examination.machine.gpus and one.torch and one.torch.cuda and one.torch.nccl
        for one in facts.there
    )
    return "nccl" if cards else "gloo"


def interface_env(one: OneHost) -> dict[str, str]:
    return {name: one.interface for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if one.interface}


def run_env(facts: Facts, hosts: Hosts) -> dict[str, dict[str, str]]:
    """What a run's ranks would get, by host."""
    travels = {name: value for name, value in os.environ.items() if name.startswith(TRAVELS)}
    return {one.name: {**interface_env(one), **hosts.env, **travels} for one in facts.there}


def reduce(
    asking: Asking, worker: Question, facts: Facts, env: Mapping[str, Mapping[str, str]], repeats: int = REPEATS
) -> Reduce:
    """`worker`: the open question to each host's torch. Rank 0's store takes a free port, which the others are then
    told.
    """
    hosts, backend = _able(facts), backend_of(facts)
    orders = {
        one.name: {
            "do": "reduce",
            "rank": rank,
            "world": len(hosts),
            "address": hosts[0].address,
            "backend": backend,
            "seconds": REDUCE_S,
            "target": TARGET_S,
            "repeats": repeats,
            "env": {**env[one.name], **_card(one, backend)},
        }
        for rank, one in enumerate(hosts)
    }
    said = {name: len(worker.more[name]) for name in orders}
    first, *others = orders
    asking.tell(worker, {first: orders[first]})
    store = fitting(STORE, _next(asking, worker, first, said[first]), "its store")
    if "port" not in store:
        return Reduce(len(hosts), backend, error=f"{first}: {store.get('error', 'no store')}")
    said[first] += 1
    asking.tell(worker, {name: {**orders[name], "port": store["port"]} for name in others})
    words = {name: fitting(TIMES, _next(asking, worker, name, said[name]), "its times") for name in orders}
    wrong = [
        f"{name}: {word.get('error', 'no times')}"
        for name, word in words.items()
        if not word.get("times") or min(word["times"]) <= 0
    ]
    if wrong:
        return Reduce(len(hosts), backend, error="; ".join(wrong[:3]))
    return Reduce(len(hosts), backend, words[first]["bytes"], tuple(words[first]["times"]))


def _next(asking: Asking, worker: Question, name: str, said: int) -> dict[str, Any]:
    asking.wait(REDUCE_S + 3.0, lambda host: len(worker.more[host]) > said or host in worker.answers, [name])
    found: dict[str, Any] = (
        worker.more[name][said] if len(worker.more[name]) > said else worker.answers.get(name) or {"error": "no answer"}
    )
    return found


def _card(one: OneHost, backend: str) -> dict[str, str]:
    """The card with most room."""
    gpus = (
        [gpu for gpu in one.examination.machine.gpus if not gpu.error] if one.examination and backend == "nccl" else []
    )
    if not gpus:
        return {}
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": max(gpus, key=lambda gpu: gpu.memory_free or 0).uuid,
    }
