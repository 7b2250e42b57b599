"""`stoker speedrun`'s options, and its command as it was typed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from stoker.contract.frozen import frozen, option

_WHAT, _WHICH, _HOW = "what is trained", "which stages", "how"


@frozen
class SpeedrunOptions:
    preset: str | None = option(
        "cpu, gpu, d20 or d32 (default: by the hardware)", default=None, metavar="NAME", group=_WHAT
    )
    data: str | None = option(
        "folder with your own base*, midtrain*, sft*, pairs*, prompts*, questions* files; what is missing comes from"
        " the built-in data set",
        default=None,
        metavar="FOLDER",
        group=_WHAT,
    )
    set: tuple[str, ...] = option(
        "a config key for every stage that has it (optim.learning_rate=1e-3), or for one (sft:train.max_steps=200)",
        default=(),
        metavar="[STAGE:]KEY=VALUE",
        many=True,
        group=_WHAT,
    )
    seed: int = option(
        "of the built-in data set, the weights and the order of the data", default=0, metavar="N", group=_WHAT
    )
    name: str = option(
        "another speedrun of the same preset, in a folder of its own", default="", metavar="NAME", group=_WHAT
    )

    begin: str | None = option(
        "begin with this stage: what it needs must be there",
        default=None,
        flags=("--from",),
        metavar="STAGE",
        group=_WHICH,
    )
    until: str | None = option("end with this stage", default=None, metavar="STAGE", group=_WHICH)
    only: str | None = option("this stage alone", default=None, metavar="STAGE", group=_WHICH)
    plan: bool = option(
        "print the stages, their inputs, sizes, and about how much time, memory and disk they take; run nothing",
        default=False,
        group=_WHICH,
    )
    json: bool = option("the plan as JSON (with --plan)", default=False, group=_WHICH)

    nproc_per_node: str | None = option(
        "ranks of each stage, as `stoker run` has it", default=None, metavar="N", group=_HOW
    )
    max_restarts: int = option(
        "of each stage, after a failure that another attempt can survive", default=2, metavar="N", group=_HOW
    )
    runs_dir: str | None = option(
        "folder of the run directories (default: $STOKER_RUNS, else ./runs)", default=None, metavar="DIR", group=_HOW
    )
    price_per_hour: float | None = option(
        "what this machine costs an hour: the report says what each stage did",
        default=None,
        metavar="PRICE",
        group=_HOW,
    )
    verbose: bool = option("all that the stages say, on this console", default=False, group=_HOW)

    @property
    def says_what(self) -> bool:
        """Something of what is trained was given, beside the preset."""
        return bool(self.set or self.seed) or self.data is not None


def command(argv: Sequence[str], *choice: str) -> str:
    """As it was typed, for other stages and to be run."""
    return shlex.join(["stoker", "speedrun", *_without_choice(argv), *choice])


def _without_choice(argv: Sequence[str]) -> list[str]:
    kept: list[str] = []
    skip = False
    for word in argv:
        name = word.partition("=")[0]
        if skip:
            skip = False
        elif name in ("--from", "--begin", "--until", "--only"):
            skip = "=" not in word
        elif name not in ("--plan", "--json"):
            kept.append(word)
    return kept
