"""`stoker run` started by hand on each of several machines, with torchrun's flags: this one's place among them, and the
store they share.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from stoker.control.launch.muster import Muster
from stoker.control.launch.nodes import equal, meeting, numbered
from stoker.control.launch.plan import RunPlan
from stoker.control.launch.request import Request

ROUTE_S = 10.0


def join(
    muster: Muster, request: Request, plan: RunPlan, say: Callable[[str], None]
) -> tuple[RunPlan, tuple[str, int], str]:
    """The plan with its numbers in the whole job, the store's address and port, and the interface towards the others."""
    told = meeting(request, os.environ)
    assert told is not None
    if told.rank is not None:
        nodes = equal(told, len(plan.places))
        if nodes.rank == 0:
            muster.reserve(told.address, told.port)
    else:
        from stoker.control.launch import rendezvous

        nodes = rendezvous.meet(
            told, len(plan.places), lambda: muster.reserve(told.address, 0)[1], lambda: muster.pause(0.02), say
        )
    return numbered(plan, nodes), (nodes.address, nodes.port), _interface(muster, told.address)


def _interface(muster: Muster, address: str) -> str:
    """Towards machine 0, or on that one the interface that has the address."""
    answer = muster.probe("route", {"": {"to": [address]}}, ROUTE_S)[""]
    way = answer.get("routes", {}).get(address, {})
    owner = next((name for name, mine in answer.get("addresses", {}).items() if way.get("address") in mine), None)
    return owner or way.get("interface") or ""
