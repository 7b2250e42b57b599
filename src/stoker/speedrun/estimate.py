"""About how long, how much memory and how much disk each link of a chain takes here. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stoker.contract.frozen import replace
from stoker.speedrun.stages import REPORT, WORLD, File, Stage
from stoker.training.config.resolve import combine
from stoker.training.stages.estimate import Estimate, Job, Pace
from stoker.training.stages.registry import STAGES
from stoker.training.stages.stage import From

CORE = Pace(2.2e10, 1e10, 6.0, 0.01, width=4)
CPU_RANK = 230e6  # bytes of a process that has imported torch: it is in the same memory as model and activations
CARDS = {"H200": Pace(3.6e14, 3.5e12, 20.0, 0.02), "H100": Pace(3.4e14, 2.5e12, 20.0, 0.02), "A100": Pace(1.4e14, 1.5e12, 20.0, 0.02),
         "B200": Pace(7e14, 6e12, 20.0, 0.02), "4090": Pace(8e13, 8e11, 20.0, 0.02), "A40": Pace(6e13, 6e11, 20.0, 0.02)}  # fmt: skip
OTHER_CARD = Pace(4e13, 5e11, 20.0, 0.02)

WORLD_SECONDS, WORLD_BYTES = 4.0, 16e6  # of size 1
REPORT_SECONDS = 6.0


def pace_of(cards: Sequence[str | None], cores: int, ranks: int, gpus: bool) -> Pace:
    """Of one rank; CPU ranks share the cores."""
    if not gpus:
        return replace(CORE, flops=CORE.flops * cores / ranks, words=f"{cores} CPU core{'s' if cores > 1 else ''}")
    name = next((name for name in cards if name), "") or ""
    return replace(
        next((pace for word, pace in CARDS.items() if word in name), OTHER_CARD),
        words=name or "GPUs of an unknown kind",
    )


def estimates(stages: Sequence[Stage], pace: Pace, ranks: int) -> dict[str, Estimate]:
    """Of every link. What loads the chain's model has the shape of the first link that makes one."""
    own = [stage for stage in stages if stage.stage not in (WORLD, REPORT)]
    values = {stage.name: _values(stage) for stage in own}
    first = {
        section: next(one for one in own if section in STAGES[one.stage].sections) for section in ("tokenizer", "model")
    }
    vocabulary = values[first["tokenizer"].name]["tokenizer.vocab_size"]
    model = {name: value for name, value in values[first["model"].name].items() if name.startswith("model.")}
    size = next((float(stage.keys["size"]) for stage in stages if stage.stage == WORLD), 0.0)
    found = {WORLD: Estimate(WORLD_SECONDS * size, disk=WORLD_BYTES * size), REPORT: Estimate(REPORT_SECONDS)}
    for stage in own:
        found[stage.name] = STAGES[stage.stage].estimate(Job({**values[stage.name], **model}, vocabulary, pace, ranks))
    beside = CPU_RANK if pace.width == CORE.width else 0.0
    return {
        stage.name: replace(one, memory=one.memory + beside) if (one := found[stage.name]).memory else one
        for stage in stages
    }


def _values(stage: Stage) -> dict[str, Any]:
    plain = {name: value for name, value in stage.keys.items() if not isinstance(value, (From, File, tuple))}
    return combine(stage.below, [plain])


def room(found: Sequence[Estimate]) -> float:
    """Bytes of disk that stages need, one after the other."""
    return sum(one.disk for one in found) + max((one.spare for one in found), default=0.0)


def left(estimated: Mapping[str, float], took: Mapping[str, float], waiting: Sequence[str]) -> float:
    """Seconds that the waiting stages take, corrected by how the done ones compare with their estimates. A tenth of the
    chain is taken to be as estimated: a stage of seconds says little about one of minutes.
    """
    known = [name for name in took if estimated.get(name, 0) > 0]
    rest = sum(estimated.get(name, 0.0) for name in waiting)
    done = sum(estimated[name] for name in known)
    certain = (done + rest) / 10
    ratio = (sum(took[name] for name in known) + certain) / (done + certain) if certain else 1.0
    return rest * ratio
