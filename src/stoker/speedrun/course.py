"""A speedrun, settled: its stages and their keys, which of them are asked for, what is done. Made without starting
anything.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from stoker.contract import layout
from stoker.contract.names import EX_USAGE, Refusal
from stoker.contract.shape import shape
from stoker.contract.untrusted import is_count
from stoker.control.machine.model import Machine
from stoker.control.record.writer import make_private
from stoker.speedrun import overrides
from stoker.speedrun.checks import check_options, check_stages
from stoker.speedrun.estimate import estimates, pace_of
from stoker.speedrun.keys import Code, keys_of
from stoker.speedrun.options import SpeedrunOptions
from stoker.speedrun.presets import Preset, choose, what_it_lacks
from stoker.speedrun.stages import OUR_WORLD, REPORT, Data, File, Stage, chain, selected
from stoker.speedrun.state import Entry, check_own, entries, recorded_otherwise
from stoker.training.data.ours import own_cache
from stoker.training.stages.estimate import Estimate

CACHE = "cache"
# for a model this small a second thread adds 60 % (9.2 to 14.6 K tok/s); a second rank should add more, which has not
# been timed
CPU_RANKS = 4


@shape
class Course:
    folder: str
    preset: Preset
    options: SpeedrunOptions
    machine: Machine
    stages: tuple[Stage, ...]
    keys: Mapping[str, str]
    selected: tuple[str, ...]
    entries: Mapping[str, Entry]
    estimates: Mapping[str, Estimate]
    estimated_for: str  # what hardware
    lines: tuple[str, ...]  # to be said
    prepare: Callable[[], None]  # writes what stages read and is not there yet
    gpus: bool = False  # stages train on them
    nproc_per_node: str | None = None  # of each stage; None: `stoker run` decides
    as_recorded: bool = False  # a report of the chain that chain.json tells of, whatever its settings were
    refused: str = ""  # why a plan could not be run here

    @property
    def finished(self) -> bool:
        return not self.waiting

    @property
    def waiting(self) -> tuple[str, ...]:
        """Asked for and not done."""
        return tuple(name for name in self.selected if not self.entries[name].done)

    def about(self) -> dict[str, Any]:
        """The head of chain.json."""
        cards = [{"index": gpu.index, "name": gpu.name, "memory_total": gpu.memory_total} for gpu in self.machine.gpus]
        box = self.machine
        hardware = {
            "hostname": box.hostname,
            "cores": box.cores,
            "memory_total": box.memory_total,
            "gpus": cards,
            "driver": box.driver,
            "platform": box.platform,
            "python": box.python,
        }
        return {
            "preset": self.preset.name,
            "seed": self.options.seed,
            "hardware": hardware,
            "price_per_hour": self.options.price_per_hour,
        }


def settle(options: SpeedrunOptions, machine: Machine, gpus: bool, environment: Mapping[str, str]) -> Course:
    preset, line = choose(options.preset, gpus)
    lacking = what_it_lacks(preset, gpus, options.data is not None)
    if lacking is not None and not options.plan:  # a plan for another machine may be made anywhere
        raise lacking
    check_options(options)
    if "/" in options.name or options.name in (".", ".."):
        raise Refusal(f"--name {options.name!r} can't be part of a folder's name", EX_USAGE)
    root = layout.runs_root(options.runs_dir, dict(environment), write=True)
    if root == layout.private_runs(dict(environment)):
        make_private(root)
    folder = os.path.abspath(os.path.join(root, f"speedrun-{preset.name}{f'-{options.name}' if options.name else ''}"))
    check_own(folder)
    data, prepare = _data(options, folder)
    lacking = what_it_lacks(preset, gpus, any(isinstance(place, File) for place in data.places["base"]))
    if lacking is not None and not options.plan:
        raise lacking
    stages = _with_settings(chain(preset, data, options.seed), options)
    keys = keys_of(stages, Code().digest)
    on_cpu = not (gpus or preset.gpus)
    ranks = _ranks(options.nproc_per_node, min(machine.cores, CPU_RANKS) if on_cpu else len(machine.gpus))
    wanted = selected(stages, options.begin, options.until, options.only)
    found = entries(folder, stages, keys)
    counted = on_cpu or is_count(options.nproc_per_node or "")
    check_stages(
        [stage for stage in stages if stage.name in wanted and not found[stage.name].done],
        ranks if counted else None,
        on_cpu,
    )
    pace = pace_of([gpu.name for gpu in machine.gpus], machine.cores, ranks, not on_cpu)
    return Course(
        folder=folder,
        preset=preset,
        options=options,
        machine=machine,
        stages=stages,
        keys=keys,
        selected=wanted,
        entries=found,
        estimates=estimates(stages, pace, ranks),
        estimated_for=f"{ranks} rank{'s' if ranks > 1 else ''}, {pace.words}",
        lines=(line, *data.lines),
        prepare=prepare,
        gpus=not on_cpu,
        nproc_per_node=str(ranks) if on_cpu and options.nproc_per_node is None else options.nproc_per_node,
        as_recorded=options.only == REPORT and not options.says_what and recorded_otherwise(folder, keys),
        refused=lacking.line if lacking else "",
    )


def _data(options: SpeedrunOptions, folder: str) -> tuple[Data, Callable[[], None]]:
    if options.data is None:
        return OUR_WORLD, lambda: None
    from stoker.speedrun.material import material

    return material(options.data, folder, own_cache(CACHE, _say))


def _with_settings(stages: Sequence[Stage], options: SpeedrunOptions) -> tuple[Stage, ...]:
    if not options.set:
        return tuple(stages)
    from stoker.speedrun.material import digest_of

    digest = partial(digest_of, cache=own_cache(CACHE, _say))
    return overrides.apply(stages, [overrides.parse(text, stages) for text in options.set], digest)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _ranks(asked: str | None, usual: int) -> int:
    return int(asked) if asked is not None and is_count(asked) and int(asked) > 0 else max(usual, 1)
