"""GRPO in the training loop: a step's numbers, the stop rules, and what a checkpoint holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import stoker
from stoker.contract.errors import EX_CONFIG, Refusal, parsing
from stoker.contract.frozen import as_json, frozen
from stoker.contract.typed_values import read_frozen
from stoker.contract.units import plural
from stoker.training.checkpoint.reading import Checkpoint
from stoker.training.loop.run import Answers, Task, Words, agree
from stoker.training.loop.say import Voice
from stoker.training.loop.speed import Speed
from stoker.training.optim.loss_scale import LossScale
from stoker.training.parallel.group import Group
from stoker.training.rl.config import GrpoConfig
from stoker.training.rl.parts import MARKED, MODEL, largest_reward, parts_of, shown
from stoker.training.rl.rollout import Age, Outcome, Paid
from stoker.training.rl.update import Learned

FIRST = 5  # steps that say how it began
KL_STEPS, ENTROPY_STEPS, LENGTH_STEPS, NOT_FINITE_STEPS = 3, 5, 5, 3
# What a stop without signal is explained by: shares of a window's answers and prompts, and nats per token.
MANY_CUT, MOSTLY_ALIKE, NEARLY_CERTAIN = 0.25, 0.5, 0.05
PAID_ALIKE = 1e-9  # sums of equal rewards may differ in their last bits
NEAR_MAXIMUM = 0.95  # share of the largest possible reward from which on nothing is left to learn
NOTHING_LEFT, HARDER = "nothing is left to learn from these prompts", "give harder ones, or train fewer steps"


@frozen
class Seen:
    """One step's numbers."""

    step: int
    reward: float
    spread: float  # standard deviation of all answers' rewards; 0 exactly where all are the same
    correct: float | None  # share that evaluation would grade correct; None: the rows have no answers
    kl: float | None  # None: not measured
    entropy: float | None
    length: float
    cut: float  # share of the answers that new_tokens cut
    finite: bool = True  # else the step changed nothing
    unlike: bool = True  # the answers to some prompt differ in reward; else nothing was taught
    identical: bool = False  # all answers to a prompt are the same text, for every prompt
    alike: float = 0.0  # share of the prompts whose answers are all the same text
    right: Paid = Paid()  # answers that are right, by the `answer` of their rows, and what the reward gave them
    wrong: Paid = Paid()
    matched: float | None = None  # mean of what exact, number and math paid; None: they are not among the rewards


@frozen
class Finding:
    line: str
    solved: bool = False  # nothing is left to learn: the end of the run, but no failure


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
        first, recent = ([read_frozen(Seen, step) for step in told[part]] for part in ("first", "recent"))
        return cls(c, first, recent)

    def finding(self) -> Finding | None:
        return judge(self.first, self.recent, self._c)

    def troubled(self) -> bool:
        """The newest step looks broken, though not yet for long enough: its weights are not worth a checkpoint."""
        last = self.recent[-1]
        if not last.finite or _kl(self._c)(last):
            return True
        collapsed = _entropy(self._c)(last) or _length(self._c, self.first)(last)
        return collapsed and not is_near_maximum(self._c, [last])

    def says_little_to_learn(self) -> str:
        """Return a warning if the reward of the first steps is already near its maximum; else nothing."""
        if not is_near_maximum(self._c, self.first):
            return ""
        return (
            f"the reward of the first {plural(len(self.first), 'step')} is already {_reward_of(self._c, self.first)}:"
            " little is left to learn from these prompts; harder ones teach more"
        )


def judge(first: Sequence[Seen], recent: Sequence[Seen], c: GrpoConfig) -> Finding | None:
    """`recent` ends with the newest step."""

    def lasting(count: int, bad: Callable[[Seen], bool]) -> str:
        """Since when, where the last `count` steps are all bad."""
        if count < 1 or len(recent) < count or not all(bad(seen) for seen in recent[-count:]):
            return ""
        return f"for {plural(count, 'step')} (since step {recent[-count].step})"

    if not recent:
        return None
    last = recent[-1]

    def finding(count: int, fact: str, advice: str) -> Finding:
        """Return a failure, or the end of a run whose reward is near its maximum. `count`: steps to judge that by."""
        window = recent[-count:]
        if not is_near_maximum(c, window):
            return Finding(f"{fact}{advice}")
        fact = f"{fact}, and the reward is {_reward_of(c, window)}"
        return Finding(f"{fact}: {NOTHING_LEFT}; {HARDER}", True)

    if since := lasting(NOT_FINITE_STEPS, lambda seen: not seen.finite):
        return Finding(
            f"the loss or its gradient was not finite {since}, and nothing was learned: lower optim.learning_rate, or"
            " use compute.dtype fp32"
        )
    hint = _hint(c, recent[-c.breaker_steps :])
    if since := lasting(c.breaker_steps, _all_right(c)):
        is_known = counts_right(c) or largest_reward(parts_of(c)) is not None
        unless = "" if is_known else f" unless your reward can give more than {last.reward:g}"
        return Finding(f"every answer was right {since}: {NOTHING_LEFT}{unless}; {HARDER}", True)
    if since := lasting(c.breaker_steps, lambda seen: seen.identical):
        advice = (
            ", so nothing is learned: raise generate.temperature or grpo.kl, lower optim.learning_rate, or start from an"
            " earlier model"
        )
        return finding(c.breaker_steps, f"all answers to a prompt were the same text, for every prompt {since}", advice)
    if since := lasting(c.breaker_steps, lambda seen: seen.spread == 0 and seen.reward == last.reward):
        fact = f"the reward was exactly {last.reward:g} for every answer {since}"
        return finding(c.breaker_steps, fact, f", so nothing is learned: {hint}")
    if since := lasting(c.breaker_steps, lambda seen: not seen.unlike):
        fact = f"all answers to a prompt had the same reward, for every prompt {since}"
        return finding(c.breaker_steps, fact, f", so nothing is learned: {hint}")
    if since := lasting(KL_STEPS, _kl(c)):
        line = f"the divergence from the first model stayed above {c.breaker_kl:g} {since}, now {last.kl:.4g}"
        return Finding(f"{line}: lower optim.learning_rate, or raise grpo.kl")
    if since := lasting(ENTROPY_STEPS, _entropy(c)):
        fact = f"the entropy per token stayed below {c.breaker_entropy:g} {since}, now {last.entropy:.2g}"
        advice = (
            ": the model is nearly certain of every token; lower optim.learning_rate, raise grpo.kl or"
            " generate.temperature"
        )
        return finding(ENTROPY_STEPS, fact, advice)
    if since := lasting(LENGTH_STEPS, _length(c, first)):
        fact = (
            f"answers shrank to {last.length:.1f} tokens, below {c.breaker_length:g} × the {_began(first):.1f} of the"
            f" first {FIRST} steps, {since}"
        )
        advice = ": lower optim.learning_rate, raise grpo.kl, or look at what the reward pays for"
        return finding(LENGTH_STEPS, fact, advice)
    since = lasting(c.breaker_steps, lambda seen: c.breaker_cut > 0 and seen.cut >= c.breaker_cut)
    if since and last.cut >= recent[-c.breaker_steps].cut:  # where fewer are cut now than then, it is learning to end
        share = "every answer was" if last.cut == 1 else f"{last.cut:.0%} of the answers were"
        fact = f"{share} cut at generate.new_tokens {since}, mean length {last.length:.1f}"
        advice = ": raise generate.new_tokens, or start from a model that ends its answers (stage sft)"
        return finding(c.breaker_steps, fact, advice)
    if since := lasting(c.breaker_steps, lambda seen: seen.matched == 0):
        some_correct = any(seen.correct for seen in recent[-c.breaker_steps :])
        fact = f"{_matching(c)} paid for no answer" if some_correct else "no answer was right"
        line = f"{fact} {since}: only {_others(c)} is learned"
        return Finding(f"{line}; {hint}; if you want that, set grpo.breaker_steps 0")
    return None


def is_near_maximum(c: GrpoConfig, window: Sequence[Seen]) -> bool:
    """Whether these steps' answers were paid nearly all that the reward can pay.

    What a user's own function can pay is not known: then nearly all answers must be correct, and not be paid worse.
    """
    if not window:
        return False
    most = largest_reward(parts_of(c))
    if most is not None:
        return most > 0 and sum(seen.reward for seen in window) >= NEAR_MAXIMUM * most * len(window)
    shares = [seen.correct for seen in window if seen.correct is not None]
    if len(shares) < len(window) or sum(shares) < NEAR_MAXIMUM * len(window):
        return False
    return all(seen.reward > 0 for seen in window) and not _blind(c, window)


def _reward_of(c: GrpoConfig, window: Sequence[Seen]) -> str:
    """The mean reward in words, with what it can be at most."""
    most = largest_reward(parts_of(c))
    mean = f"{sum(seen.reward for seen in window) / len(window):.3g}"
    return f"{mean} of at most {most:g}" if most is not None else f"{mean}, with nearly all answers correct"


def _all_right(c: GrpoConfig) -> Callable[[Seen], bool]:
    """Whether a step's answers were all right: as exact, number or math see it, or by the rows' answers."""
    if counts_right(c):
        return lambda seen: seen.matched == 1
    return lambda seen: seen.correct == 1 and not seen.unlike and seen.reward > 0


def counts_right(c: GrpoConfig) -> bool:
    """Whether being right is part of the reward: rows may have answers that a reward of one's own never looks at."""
    return any(part.kind in MARKED for part in parts_of(c))


def _hint(c: GrpoConfig, window: Sequence[Seen]) -> str:
    """What to do where nothing is learned, by what these steps show."""
    facts = [_blind(c, window), _wrong_form(c, window), _samples_alike(c, window)]
    cut = sum(seen.cut for seen in window) / max(len(window), 1)
    if cut >= MANY_CUT:
        facts.append(f"{_at_least(cut)} of the answers were cut at generate.new_tokens: raise it")
    return "; ".join(filter(None, facts)) or (
        "give prompts that the model sometimes answers correctly, train sft longer, or raise grpo.group or"
        " generate.temperature"
    )


def _blind(c: GrpoConfig, window: Sequence[Seen]) -> str:
    """What to do about a reward that does not see which answers are right; empty: it does, none were, or being right is
    part of it.
    """
    shares = [seen.correct for seen in window if seen.correct is not None]
    if counts_right(c) or not shares or not max(shares):
        return ""
    right, wrong = (_mean_paid([getattr(seen, kind) for seen in window]) for kind in ("right", "wrong"))
    reward = window[-1].reward
    if all(seen.spread == 0 and seen.reward == reward for seen in window):
        paid = f"gives {reward:g} to answers that are right"
    elif right is not None and wrong is not None and right <= wrong + PAID_ALIKE:
        paid = f"gave right answers {right:.3g} on average, wrong ones {wrong:.3g}"
    else:
        return ""
    names = ", ".join(shown(part) for part in parts_of(c))
    seen = f"{sum(shares) / len(shares):.0%} were right, by the `answer` of their rows"
    return f"{names} {paid} ({seen}); look at that first (`stoker rollouts`)"


def _wrong_form(c: GrpoConfig, window: Sequence[Seen]) -> str:
    """What to do about answers that are correct in a form that the reward does not pay for; empty: there are none."""
    shares = [seen.correct for seen in window if seen.correct is not None]
    if not counts_right(c) or not shares or not max(shares) or any(seen.matched != 0 for seen in window):
        return ""
    return (
        f"{sum(shares) / len(shares):.0%} were correct, but not in the form that {_matching(c)} pays for: ask for that form"
        " in generate.system, train sft on it, or use a reward that accepts it (number, math, regex:… or your own FILE.py:FUNCTION)"
    )


def _matching(c: GrpoConfig) -> str:
    """The rewards that compare with the row's answer."""
    return ", ".join(shown(part) for part in parts_of(c) if part.kind in MARKED)


def _mean_paid(paid: Sequence[Paid]) -> float | None:
    answers = sum(one.answers for one in paid)
    return sum(one.rewards for one in paid) / answers if answers else None


def _samples_alike(c: GrpoConfig, window: Sequence[Seen]) -> str:
    """What to do about a model that no longer tries anything else; empty: it does."""
    alike = sum(seen.alike for seen in window) / max(len(window), 1)
    measured = [seen.entropy for seen in window if seen.entropy is not None]
    entropy = sum(measured) / len(measured) if measured else None
    if alike >= MOSTLY_ALIKE:
        fact = f"for {_at_least(alike)} of the prompts all {c.group} answers were the same text"
        fact += "" if entropy is None else f" (entropy per token {entropy:.2g})"
    elif entropy is not None and entropy < NEARLY_CERTAIN:
        fact = f"the entropy per token was {entropy:.2g}, so the model is nearly certain of every token"
    else:
        return ""
    return f"{fact}: raise generate.temperature or grpo.kl, or start from an earlier model"


def _at_least(share: float) -> str:
    """Never 100% of what is not all."""
    return f"{int(share * 100 + 1e-9)}%"


def _others(c: GrpoConfig) -> str:
    names = [shown(part) for part in parts_of(c) if part.kind not in (*MARKED, MODEL)]
    return f"what {', '.join(names)} rewards" if names else "the reward model's opinion"


def _kl(c: GrpoConfig) -> Callable[[Seen], bool]:
    return lambda seen: seen.kl is not None and c.breaker_kl > 0 and seen.kl > c.breaker_kl


def _entropy(c: GrpoConfig) -> Callable[[Seen], bool]:
    return lambda seen: seen.entropy is not None and seen.entropy < c.breaker_entropy


def _length(c: GrpoConfig, first: Sequence[Seen]) -> Callable[[Seen], bool]:
    began = _began(first) if len(first) == FIRST else 0.0
    return lambda seen: seen.length < c.breaker_length * began


def _began(first: Sequence[Seen]) -> float:
    return sum(seen.length for seen in first) / max(len(first), 1)


STAGE = "grpo"


@frozen
class Position:
    step: int = 0  # steps that are done
    updates: int = 0  # optimizer steps that counted
    tokens: int = 0  # of answers so far


def resumed(found: Checkpoint | None, optimizer: str, c: GrpoConfig) -> tuple[Position, History]:
    """Where a checkpoint left it, if there is one: the step, and the numbers the breaker looks back at."""
    if found is None:
        return Position(), History(c)
    meta = found.meta
    if meta.get("stage") != STAGE:
        raise Refusal(
            f"checkpoint {found.path} is of stage {meta.get('stage', 'pretrain')}, not {STAGE}: name its model with"
            " model.load instead",
            EX_CONFIG,
        )
    if meta.get("optimizer") != optimizer:
        raise Refusal(
            f"checkpoint {found.path} has the state of optim.kind {meta.get('optimizer')}, not {optimizer}", EX_CONFIG
        )
    with parsing(f"checkpoint {found.path}"):
        counts = [meta[name] for name in ("step", "updates", "tokens")]
        if not all(type(one) is int and one >= 0 for one in counts):
            raise ValueError("it has no step number")
        return Position(*counts), History.from_json(c, meta["history"])


@frozen
class Launched:
    """A step that is done, but for telling it."""

    step: int
    outcome: Outcome
    learned: Learned
    updates: int  # optimizer steps that counted so far
    rate: float
    words: Words
    replaced: int = 0  # prompts whose answers taught nothing, and that others stood in for
    age: Age | None = None  # of the answers, where a server wrote them
    numbers: Mapping[str, float] = {}  # of grpo.rollout
    answers_s: float = 0.0  # until they were here: written by the trainers, or waited for
    learn_s: float = 0.0


class IntervalMeans:
    """Means of a step's numbers over the steps since the last printed line. Single steps of GRPO say little: the next step
    has other prompts.
    """

    def __init__(self) -> None:
        self._steps: list[dict[str, float | None]] = []

    def add(self, numbers: Mapping[str, float | None]) -> None:
        self._steps.append(dict(numbers))

    def take(self) -> dict[str, float | None]:
        """Return the mean of each number over its finite values (of none: the newest value), and begin the next interval."""
        steps, self._steps = self._steps, []
        means: dict[str, float | None] = {}
        for name, newest in steps[-1].items():
            finite = [value for step in steps if (value := step[name]) is not None and math.isfinite(value)]
            means[name] = sum(finite) / len(finite) if finite else newest
        return means


class GrpoTask(Task):
    at_once = True  # the breaker judges each step before the next one

    def __init__(
        self, c: GrpoConfig, group: Group, voice: Voice, position: Position, history: History, about: Mapping[str, Any],
        steps: int,
        loss_scale: LossScale | None = None, planned_bytes: int | None = None,
    ) -> None:  # fmt: skip
        """`about`: what `stoker export` and a resumed run need to know of a checkpoint. `steps`: of the whole run."""
        super().__init__()
        self._steps = steps
        self._planned_bytes = planned_bytes
        self._c, self._group, self._voice, self._about = c, group, voice, about
        self._loss_scale = loss_scale
        self.position, self.history = position, history
        self.solved: Finding | None = None
        self._means = IntervalMeans()
        self._speed = Speed(0, group.world, group.device)
        self._speed.begin()

    def hear(self, launched: Launched) -> Answers:
        self._tell(launched)
        finding = self.history.finding()
        if finding is not None and finding.solved:
            self.solved, self.finished = finding, True
            self._voice.say_once(finding.line)
        elif finding is not None and launched.step + 1 < self._steps:
            raise Stopped(finding.line)
        elif finding is not None:  # nothing is left to stop: the run is complete, as a resumed one would be
            self._voice.say_once(f"warning: the last step is done, but {finding.line}")
        elif launched.step + 1 == min(FIRST, self._steps) and (line := self.history.says_little_to_learn()):
            self._voice.say_once(line)
        return agree(launched.words, self._group)

    def meta(self, done: int) -> dict[str, Any]:
        so_far = {**as_json(self.position), "step": done, "history": self.history.to_json()}
        scale = {} if self._loss_scale is None else {"loss_scale": self._loss_scale.to_json()}
        return {"stage": STAGE, **so_far, **self._about, **scale}

    def troubled(self) -> bool:
        return self.history.troubled()

    def summary(self) -> str:
        return f"reward {self.history.recent[-1].reward:.3f}" if self.history.recent else "before the first step's end"

    def _parts(self, outcome: Outcome) -> dict[str, float]:
        """Each part's mean, where the settings name parts."""
        if not self._c.reward:
            return {}
        means = zip(parts_of(self._c), outcome.part_means, strict=True)
        return {f"reward_{part.label}": mean for part, mean in means if not math.isnan(mean)}

    def _line(self, rate: float, left: str) -> str:
        """Return the console line: means over the steps since the last one, but for the learning rate and the time left."""
        means = self._means.take()

        def shown(name: str, how: str) -> str:
            value = means[name]
            return "n/a" if value is None else format(value, how)

        # A reward that has its own idea of right says nothing about it.
        right = f"Right: {shown('correct', '.0%')} | " if counts_right(self._c) else ""
        return (
            f"Reward: {shown('reward', '.3f')} | {right}Loss: {shown('loss', '.4f')} | KL: {shown('kl', '.4f')} | Entropy:"
            f" {shown('entropy', '.3f')} | Length: {shown('length', '.1f')} | Cut: {shown('cut', '.0%')} | LR: {rate:.2e} |"
            f" Grad Norm: {shown('grad_norm', '.4f')} | ETA: {left}"
        )

    def _tell(self, launched: Launched) -> None:
        step, outcome, learned, rate = launched.step, launched.outcome, launched.learned, launched.rate
        tokens = int(outcome.lengths.sum())
        self.position = Position(step + 1, launched.updates, self.position.tokens + tokens)
        kl = learned.kl if self._c.kl > 0 and learned.finite else None
        numbers: dict[str, Any] = {
            "reward": outcome.reward,
            "correct": outcome.right,
            "kl": kl,
            "entropy": learned.entropy,
            "length": outcome.length,
            "cut": outcome.cut,
        }
        kinds = [part.kind for part in parts_of(self._c)]
        paid = [mean for kind, mean in zip(kinds, outcome.part_means, strict=True) if kind in MARKED]
        judged = numbers | {"entropy": learned.entropy if learned.finite else None}
        judged |= {"unlike": outcome.unlike(self._c.group), "identical": outcome.identical}
        judged |= {"alike": outcome.alike(self._c.group), "right": outcome.paid(True), "wrong": outcome.paid(False)}
        judged |= {"matched": sum(paid) / len(paid) if paid else None}
        seen = Seen(step, spread=outcome.spread, finite=learned.finite, **judged)
        self.history.add(seen)
        self._speed.step(tokens, None)
        # A non-finite loss was skipped: reported, it would look like a run that trains on with it.
        stoker.beat(step=step + 1, loss=learned.loss if learned.finite else None, tokens=self.position.tokens)
        if not learned.finite:
            self._voice.say_once(
                f"step {step}: non-finite loss or gradient (loss {learned.loss:g}, norm {learned.norm:g}); update skipped"
            )
        scale = {} if self._loss_scale is None else {"loss_scale": self._loss_scale.to_json()["value"]}
        if learned.skipped:
            self._voice.say_once(
                f"step {step}: a gradient overflowed in fp16; {learned.skipped} update(s) skipped, loss scale"
                f" {scale['loss_scale']:g} now"
            )
        if self._group.first:
            self._means.add({**numbers, "loss": learned.loss, "grad_norm": learned.norm})
        memory = {"peak_bytes": self._speed.memory(), "planned_bytes": self._planned_bytes}  # None: no GPU, no plan
        self._voice.step(
            step,
            learned.loss,
            self._speed,
            lambda left: self._line(rate, left),
            every_rank=False,
            **numbers,
            # A rollout's own number never replaces one of these.
            **{**launched.numbers, "reward_std": seen.spread, **self._parts(outcome)},
            **({"replaced": launched.replaced} if self._c.resample else {}),
            **({} if learned.mismatch is None else {"sampler_kl": learned.mismatch}),
            **_aged(launched.age, learned.capped),
            tokens=self.position.tokens,
            grad_norm=learned.norm,
            lr=rate,
            answers_s=round(launched.answers_s, 4),
            learn_s=round(launched.learn_s, 4),
            **scale,
            **{name: value for name, value in memory.items() if value is not None},
        )


def _aged(age: Age | None, capped: float | None) -> dict[str, float]:
    """Of answers that a server wrote."""
    if age is None:
        return {}
    found = {
        "staleness": age.mean,
        "staleness_max": age.most,
        "weights_version": age.newest,
        "queue": age.ready,
        "resampled_stale": age.resampled,
    }
    return found if capped is None else {**found, "cap_rate": capped}


def result(history: History, position: Position, stopped: str | None, solved: Finding | None = None) -> dict[str, Any]:
    """The stage's metrics. Solved: it ended early because there was nothing left to learn, which is no failure."""
    last = history.recent[-FIRST:]

    def mean(of: Sequence[Seen], name: str) -> float | None:
        return sum(getattr(seen, name) for seen in of) / len(of) if of else None

    newest = last[-1] if last else None
    return {
        "steps": position.step,
        "tokens": position.tokens,
        **{f"{name}_first": mean(history.first, name) for name in ("reward", "cut")},
        **{f"{name}_last": mean(last, name) for name in ("reward", "cut")},
        "kl_last": newest.kl if newest else None,
        "entropy_last": newest.entropy if newest else None,
        "length_last": newest.length if newest else None,
        "stopped": stopped,
        "solved": solved.line if solved else None,
    }
