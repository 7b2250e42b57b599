"""Which GPUs each role gets: dealt out in the order of the roles, each GPU once. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stoker.contract.names import EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.quantities import counted
from stoker.contract.shape import shape
from stoker.control.roles.role import RoleSpec


@shape
class Card:
    """A GPU that can be used."""

    uuid: str
    label: str
    index: int


def deal(
    specs: Sequence[RoleSpec], cards: Sequence[Card], share: Mapping[str, str] | None = None
) -> dict[str, tuple[Card, ...]]:
    """Role -> its GPUs; none for one that runs on the CPU. `share`: role -> another whose GPUs it uses, too."""
    wanted = {spec.name: spec.count * each(spec, cards) for spec in specs}
    for name, other in (share or {}).items():
        if wanted[name] != wanted[other]:
            raise Refusal(f"roles {name} and {other} share GPUs and want {wanted[name]} and {wanted[other]}", EX_USAGE)
    own = [spec.name for spec in specs if spec.name not in (share or {})]
    total = sum(wanted[name] for name in own)
    if total > len(cards):
        parts = ", ".join(f"{name} {wanted[name]}" for name in own if wanted[name])
        line = f"the roles need {counted(total, 'GPU')} ({parts}) and {len(cards)} can be used"
        advice = "lower a count, or gpus: 0 in the roles file for a role that runs on the CPU"
        raise Refusal(f"{line}: {advice}", EX_UNAVAILABLE, cause="gpu.too-few")
    found: dict[str, tuple[Card, ...]] = {}
    first = 0
    for name in own:
        found[name] = tuple(cards[first : first + wanted[name]])
        first += wanted[name]
    return {spec.name: found[(share or {}).get(spec.name, spec.name)] for spec in specs}


def each(spec: RoleSpec, cards: Sequence[Card]) -> int:
    """GPUs of one replica."""
    if spec.gpus is None:
        return 1 if cards else 0
    return spec.gpus
