"""Clock skew as NTP has it: a clock that was read somewhere within a round trip is known to half of that trip."""

from __future__ import annotations

from stoker.control.cluster.asking import Asking


def skews(asking: Asking, hosts: list[str], times: int = 3) -> dict[str, tuple[float, float]]:
    """host -> (half the round trip, seconds it is ahead of us), of its quickest answer."""
    best: dict[str, tuple[float, float]] = {}
    for _ in range(times):  # one after the other: side by side they would wait for each other
        question = asking.ask("clock", {name: {} for name in hosts}, 5.0)
        for name, answer in asking.answers(question, 3.0).items():
            if "time" in answer:
                half = (question.heard[name] - question.asked) / 2
                seen = (half, answer["time"] - question.asked - half)
                best[name] = min(best.get(name, seen), seen)
    return best
