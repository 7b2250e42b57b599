"""The memory plan that the launcher made before the start, as its ranks receive it: they compare what they use with it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from stoker.contract.env_vars import MEMORY_PLAN
from stoker.contract.frozen import frozen
from stoker.training.fit.plan import Plan
from stoker.training.fit.terms import Planned
from stoker.training.fit.text import tightest


@frozen
class LaunchPlan:
    """What the launcher expects of the rank that has the least memory left."""

    planned: Planned
    micro: int
    about: str = ""  # why it is an estimate; empty if it is not

    @staticmethod
    def of(plan: Plan) -> LaunchPlan:
        return LaunchPlan(tightest(plan).planned, plan.settings.micro, plan.about)

    def to_environment(self) -> dict[str, str]:
        planned = self.planned
        text = {"terms": planned.terms, "phase": planned.phase, "micro": self.micro, "about": self.about}
        return {MEMORY_PLAN: json.dumps(text)}


def launch_plan(environment: Mapping[str, str]) -> LaunchPlan | None:
    """Return the launcher's plan; None where it made none: under torchrun, on a CPU, for what the plan does not cover."""
    text = environment.get(MEMORY_PLAN, "")
    if not text:
        return None
    data = json.loads(text)
    planned = Planned(data["terms"], data["phase"], {})
    return LaunchPlan(planned, data["micro"], data["about"])
