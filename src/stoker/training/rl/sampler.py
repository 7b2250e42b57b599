"""Who writes a step's answers: one interface, whether an engine inside the trainers does it or servers that are asked over
HTTP (remote.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from stoker.contract.frozen import frozen
from stoker.training.serve.batch import BatchEngine


@frozen
class Ask:
    """What this rank wants of a step. An answer depends on its prompt, the seed and its place alone."""

    seeds: tuple[int, ...]  # these and `seed` name it: the run's seed, the step, and the attempt behind the first
    seed: int
    prompts: tuple[tuple[int, ...], ...]
    places: tuple[int, ...]  # among all answers of the step, one for each prompt; those of a prompt are in a row


@frozen
class Written:
    ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()  # at the temperature of the sampling; empty: not kept
    versions: tuple[int, ...] = ()  # of the weights that wrote each; empty: the newest


class Sampler(Protocol):
    length: int  # tokens of a prompt and its answer

    def refresh(self, version: int) -> None:
        """The model's weights are those after `version` steps. All ranks call it before they take answers of that step."""
        ...

    def begin(self, ask: Ask) -> None:
        """Its answers will be wanted: they may be written from now on."""
        ...

    def take(self, ask: Ask) -> list[Written]: ...

    @property
    def ready(self) -> int:
        """Answers that are here and that nobody has taken."""
        ...

    def take_resampled(self) -> int:
        """Return how many completions were discarded since the last call, and sampled again, as their weights were too old."""
        ...

    @property
    def engine(self) -> BatchEngine | None:
        """What writes them in this process."""
        ...

    def close(self) -> None: ...


class InTrainer:
    """`how`: temperature and the like, as BatchEngine.generate takes them."""

    def __init__(self, engine: BatchEngine, new_tokens: int, stop: Collection[int], how: Mapping[str, Any]) -> None:
        self.engine, self.length, self.ready = engine, engine.length, 0
        self._new_tokens, self._stop, self._how = new_tokens, stop, how
        self._version: int | None = None

    def refresh(self, version: int) -> None:
        if self._version not in (None, version):
            self.engine.refresh()
        self._version = version

    def begin(self, ask: Ask) -> None:
        """The trainers' GPUs have no time for it before."""

    def take(self, ask: Ask) -> list[Written]:
        found: Sequence[Sequence[int]] = self.engine.generate(
            ask.prompts, new_tokens=self._new_tokens, stop=self._stop, **self._how, seed=ask.seed, indexes=ask.places
        )
        return [Written(tuple(ids), tuple(kept)) for ids, kept in zip(found, self.engine.logprobs, strict=True)]

    def take_resampled(self) -> int:
        return 0

    def close(self) -> None:
        """It holds nothing but memory."""
