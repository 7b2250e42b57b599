"""What a stage is: what it needs, what it makes, which settings it reads, what it costs, and how it is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from stoker.contract.frozen import frozen
from stoker.training.config.derived import Learning
from stoker.training.config.schema import Config
from stoker.training.stages.blocks import Block
from stoker.training.stages.estimate import Estimate, Job
from stoker.training.stages.significance import Row

if TYPE_CHECKING:  # a stage is known without one
    from stoker.training.tokenizer.tokenizer import Tokenizer

    Words: TypeAlias = Tokenizer
else:
    Words = Any

Metrics = Mapping[str, Any]  # of a stage's result.json


RUNS = frozenset(("data", "batch", "parallel", "compute", "train"))  # the sections that a stage with ranks reads


def keys_of(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names.split())


@frozen
class From:
    """A path in the run directory of another link of the chain."""

    stage: str
    path: str


@frozen
class Rows:
    """The chain's data for a role (base, midtrain, sft, pairs, prompts, questions, or one with -held-out), if any."""

    role: str
    many: bool = False  # all files of the role; else the first
    otherwise: str | None = None  # the value where there is none
    task: str = ""  # the name that an evaluation gives it


@frozen
class Link:
    """A stage's place in the chain: `stoker speedrun` runs it there."""

    name: str
    keys: Mapping[str, Any]  # values may be From, Rows, or several of them in a tuple
    after: str = ""  # the link that it follows
    title: str = ""  # in the report, of one that makes a model
    short: str = ""  # the title where there is little room
    versus: tuple[str, str] | None = None  # another link whose model it is compared with, and the comparison's title


@frozen
class Reported:
    """A link of the chain as its effect is reported."""

    title: str
    metrics: Metrics | None  # None: it is not done
    given: Mapping[str, Metrics]  # a key -> the metrics of the link that its value came from
    # (questions, prompts, strict: some of them) -> these shares of the model it began with and of its own
    answers: Callable[..., Iterable[Row]]


@frozen
class Curves:
    """A figure of what links log at every step, in a section of its own. Without `panels`: the loss."""

    figure: str
    heading: str
    caption: str
    panels: Mapping[str, str] = {}  # a metric -> its label
    optional: tuple[str, str, str] = ("", "", "")  # a metric, its label, and words for {more} in the caption
    about: Callable[[Mapping[str, Metrics]], Iterable[Block]] = lambda given: ()  # of a link, by what it was given


@frozen
class Stage:
    name: str = ""
    about: str = ""  # one line for `stoker train --help`
    recipe: str = ""  # the module that trains, or the path of a script; of a built-in stage the registry knows it
    sections: frozenset[str] = frozenset()
    inputs: tuple[str, ...] = ()  # keys that must name something
    outputs: tuple[str, ...] = ()  # what later stages take from its run directory
    common: tuple[str, ...] = ()  # keys people set most
    links: tuple[Link, ...] = ()
    learning: Learning | None = None  # how it trains where nobody says otherwise; None: it does not
    defaults: Mapping[str, Any] = {}  # over a preset's, below all that was given
    prepares: bool = False  # `data.path` becomes tokens before ranks start
    measures: bool = False  # a model that is there: in the chain right behind the link that made it
    one_process: bool = False  # whatever the number of GPUs
    check: Callable[[Config], None] = lambda config: None  # raises Refusal for settings that can't work
    estimate: Callable[[Job], Estimate] = lambda job: Estimate(job.pace.start)
    headline: Callable[[Metrics], str] = lambda metrics: ""  # its most important numbers
    report: Callable[[Metrics], Iterable[Block]] = lambda metrics: ()  # its section of the report
    effects: Callable[[Reported], Iterable[Row]] = lambda link: ()  # did it help?
    worth_knowing: Callable[[Metrics], Iterable[str]] = lambda metrics: ()  # for the report's summary
    curves: Curves | None = None
    judged_by_prompts: bool = False  # its models answer held-out prompts like those they learned from
    # (what, tokens of each row with its answer): rows that are longer than data.context_length would be refused
    lengths: Callable[[Config, Words], Sequence[tuple[str, list[int]]]] | None = None
    source: str = ""  # the file that defines it; the registry fills it in

    def files(self, values: Mapping[str, Any]) -> list[tuple[str, str]]:
        """(key, path) of what must be there, data.path and a model's hub id aside."""
        return [
            (key, values[key])
            for key in self.inputs
            if key not in ("data.path", "model.load") and isinstance(values[key], str)
        ]

    @property
    def is_script(self) -> bool:
        return self.recipe.endswith(".py")


def variant(link: Link, kind: Stage) -> str:
    """`uniform` of grpo-uniform; empty where the stage is in the chain once."""
    return link.name.removeprefix(f"{kind.name}-") if len(kind.links) > 1 and link.title else ""


def joined(*parts: tuple[str, float | None]) -> str:
    """A headline of those numbers that there are."""
    return ", ".join(text.format(value) for text, value in parts if value is not None)
