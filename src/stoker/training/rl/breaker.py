"""The stop rules: a run that learns nothing any more, or has broken its model, ends with the reason. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stoker.contract.shape import as_json, shape
from stoker.training.rl.config import GrpoConfig

FIRST = 5  # steps that say how it began
KL_STEPS, ENTROPY_STEPS, LENGTH_STEPS, NOT_FINITE_STEPS = 3, 5, 5, 3


@shape
class Seen:
    """One step's numbers."""

    step: int
    reward: float
    spread: float  # standard deviation of all answers' rewards; 0 exactly where all are the same
    correct: float  # share of right answers
    kl: float | None  # None: not measured
    entropy: float | None
    length: float
    cut: float  # share of the answers that new_tokens cut
    finite: bool = True  # else the step changed nothing
    unlike: bool = True  # the answers to some prompt differ in reward; else nothing was taught


@shape
class Finding:
    line: str
    solved: bool = False  # every answer is right: the end of the run, but no failure


class Stopped(Exception):
    """The breaker's line."""


class History:
    """The first steps and the latest: all that the breaker and the result look at, and little enough for a checkpoint."""

    def __init__(self, c: GrpoConfig, first: Sequence[Seen] = (), recent: Sequence[Seen] = ()) -> None:
        self._c, self.first, self.recent = c, list(first), list(recent)

    def add(self, seen: Seen) -> None:
        if len(self.first) < FIRST:
            self.first.append(seen)
        self.recent = [*self.recent, seen][-max(self._c.breaker_steps, FIRST) :]

    def to_json(self) -> dict[str, object]:
        return {"first": as_json(self.first), "recent": as_json(self.recent)}

    @classmethod
    def from_json(cls, c: GrpoConfig, told: dict[str, list[dict[str, object]]]) -> History:
        return cls(c, *([Seen(**one) for one in told[part]] for part in ("first", "recent")))  # type: ignore[arg-type]

    def finding(self) -> Finding | None:
        return judge(self.first, self.recent, self._c)

    def troubled(self) -> bool:
        """The newest step looks broken, though not yet for long enough: its weights are not worth a checkpoint."""
        last = self.recent[-1]
        return not last.finite or _kl(self._c)(last) or _entropy(self._c)(last) or _length(self._c, self.first)(last)


def judge(first: Sequence[Seen], recent: Sequence[Seen], c: GrpoConfig) -> Finding | None:
    """`recent` ends with the newest step."""

    def lasting(count: int, bad: Callable[[Seen], bool]) -> str:
        """Since when, where the last `count` steps are all bad."""
        if count < 1 or len(recent) < count or not all(bad(seen) for seen in recent[-count:]):
            return ""
        return f"for {count} steps (since step {recent[-count].step})"

    if not recent:
        return None
    last = recent[-1]
    if since := lasting(NOT_FINITE_STEPS, lambda seen: not seen.finite):
        return Finding(
            f"the loss or its gradient was no number {since}, and nothing was learned: lower optim.learning_rate, or"
            " use compute.dtype fp32"
        )
    hint = (
        "give prompts that the model sometimes answers rightly, train sft longer, or raise grpo.group or"
        " generate.temperature"
    )
    if since := lasting(c.breaker_steps, lambda seen: seen.correct == 1):
        return Finding(
            f"every answer was right {since}: nothing is left to learn from these prompts; give harder ones, or train"
            " fewer steps",
            True,
        )
    if since := lasting(c.breaker_steps, lambda seen: seen.spread == 0 and seen.reward == last.reward):
        return Finding(
            f"the reward was exactly {last.reward:g} for every answer {since}, so nothing is learned: {hint}"
        )
    if since := lasting(c.breaker_steps, lambda seen: not seen.unlike):
        return Finding(
            f"all answers to a prompt had the same reward, for every prompt {since}, so nothing is learned: {hint}"
        )
    if since := lasting(KL_STEPS, _kl(c)):
        line = f"the divergence from the model it began with stayed above {c.breaker_kl:g} {since}, now {last.kl:.4g}"
        return Finding(f"{line}: lower optim.learning_rate, or raise grpo.kl")
    if since := lasting(ENTROPY_STEPS, _entropy(c)):
        line = (
            f"the entropy per token stayed below {c.breaker_entropy:g} {since}, now {last.entropy:.2g}, so that all"
            " answers to a prompt are the same"
        )
        return Finding(f"{line}: lower optim.learning_rate, raise grpo.kl or generate.temperature")
    if since := lasting(LENGTH_STEPS, _length(c, first)):
        line = (
            f"answers shrank to {last.length:.1f} tokens, below {c.breaker_length:g} × the {_began(first):.1f} of the"
            f" first {FIRST} steps, {since}"
        )
        return Finding(f"{line}: lower optim.learning_rate, raise grpo.kl, or look at what the reward pays for")
    if since := lasting(c.breaker_steps, lambda seen: seen.cut == 1):
        line = f"every answer was cut at generate.new_tokens {since}, mean length {last.length:.1f}"
        return Finding(f"{line}: raise generate.new_tokens, or begin with a model that ends its answers (stage sft)")
    if since := lasting(c.breaker_steps, lambda seen: seen.correct == 0):
        line = f"no answer was right {since}: only the reward model's opinion is learned"
        return Finding(f"{line}; {hint}; where that opinion is all you want, grpo.breaker_steps 0")
    return None


def _kl(c: GrpoConfig) -> Callable[[Seen], bool]:
    return lambda seen: seen.kl is not None and c.breaker_kl > 0 and seen.kl > c.breaker_kl


def _entropy(c: GrpoConfig) -> Callable[[Seen], bool]:
    return lambda seen: seen.entropy is not None and seen.entropy < c.breaker_entropy


def _length(c: GrpoConfig, first: Sequence[Seen]) -> Callable[[Seen], bool]:
    began = _began(first) if len(first) == FIRST else 0.0
    return lambda seen: seen.length < c.breaker_length * began


def _began(first: Sequence[Seen]) -> float:
    return sum(seen.length for seen in first) / max(len(first), 1)
