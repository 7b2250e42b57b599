"""Prompts with a checkable answer, which of them a step asks, and its answers: the same for any number of ranks."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.contract.errors import EX_DATAERR, Refusal
from stoker.contract.frozen import frozen, replace
from stoker.contract.units import plural
from stoker.rollout import Rollout as PublicRollout
from stoker.rollout import Turn
from stoker.training.data.order import Order
from stoker.training.generate.config import GenerateConfig
from stoker.training.model.decoder import Decoder
from stoker.training.parallel.group import Group, split
from stoker.training.rl.asking import ServerFailed
from stoker.training.rl.config import GrpoConfig
from stoker.training.rl.parts import shown
from stoker.training.rl.remote import OtherWeights
from stoker.training.rl.sampler import Ask, InTrainer, Sampler
from stoker.training.rl.scoring import Judged, RewardFailed, Rewards, tokens_of
from stoker.training.rl.waiting import StopRequested
from stoker.training.serve.batch import BatchEngine
from stoker.training.serve.text import Text
from stoker.training.tokenizer import chat
from stoker.training.tokenizer.tokenizer import Tokenizer

# Of the rows: fewer that can't be used are left out and said, more are a file that is not what it should be.
TOLERATED = 0.01
NAMED = 3
Draw = Callable[[int, int, int], list[int]]  # of step, seed and how many


@frozen
class Prompt:
    row: int  # of the file, from 0: what the density stage's weights count in
    asked: Any  # a text, or messages: what the reward model is shown
    ids: Sequence[int]  # 4 bytes each: every rank holds all prompts
    answer: str | None  # None: the row has none


def needs_answer(answer: str | None) -> str:
    return "without an answer" if answer is None else ""


def read(
    rows: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, room: int, path: str, system: str = "",
    lacking: Callable[[str | None], str] = needs_answer,
) -> tuple[list[Prompt], list[str]]:  # fmt: skip
    """`room`: tokens a prompt may have. `system`: said before each that has no such message. `lacking`: what is wrong with
    a row's answer, in words.

    Gives the prompts and what to say about those that were left out.
    """
    chat.check(tokenizer)
    found: list[Prompt] = []
    wrong: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        made = _prompt(number, row, tokenizer, system, lacking)
        problem = made if isinstance(made, str) else ""
        if not isinstance(made, str) and len(made.ids) > room:
            problem = "longer than data.context_length minus generate.new_tokens"
        if problem:
            wrong.setdefault(problem, []).append(number + 1)
        elif isinstance(made, Prompt):
            found.append(made)
    lines = [_named(problem, numbers, len(rows), path) for problem, numbers in wrong.items()]
    if sum(map(len, wrong.values())) >= TOLERATED * len(rows) and wrong:
        hint = f"; {room} tokens fit" if any("context_length" in problem for problem in wrong) else ""
        line = f"{'; '.join(lines)}{hint}: too many to leave out"
        keys = ", ".join(map(str, list(rows[0])[:8]))
        fix = f"; rows need prompt or question, and answer; the first row has {keys}" if not found else ""
        raise Refusal(f"{line}{fix}", EX_DATAERR)
    return found, [f"{line}: left out" for line in lines]


def _prompt(
    number: int, row: Mapping[str, Any], tokenizer: Tokenizer, system: str, lacking: Callable[[str | None], str]
) -> Prompt | str:
    """Or what is wrong with it."""
    asked, answer = row.get("prompt", row.get("question")), row.get("answer")
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str) or not answer.strip():
        answer = None
    if unfit := lacking(answer):
        return unfit
    messages = _messages(asked)
    if isinstance(messages, str):
        return messages
    if system and not any(role == "system" for role, _ in messages):
        messages = [("system", system.encode("utf-8", "surrogatepass")), *messages]
    try:
        return Prompt(number, asked, array("i", chat.prompt(tokenizer, messages)), answer)
    except chat.Unfit as problem:
        return f"that can't be used as a prompt: {problem.line}"


def _messages(asked: Any) -> list[tuple[str, bytes]] | str:
    if isinstance(asked, str) and asked.strip():
        return [("user", asked.encode("utf-8", "surrogatepass"))]
    if not isinstance(asked, list) or not asked:
        return "without a prompt"
    messages = []
    for one in asked:
        if not isinstance(one, dict) or one.get("role") not in chat.ROLES or not isinstance(one.get("content"), str):
            return f"with a message that has no content or a role other than {', '.join(chat.ROLES)}"
        messages.append((str(one["role"]), one["content"].encode("utf-8", "surrogatepass")))
    return "whose last message is the assistant's" if messages[-1][0] == chat.LEARNED else messages


def _named(problem: str, numbers: Sequence[int], total: int, path: str) -> str:
    which = ", ".join(map(str, numbers[:NAMED])) + (", …" if len(numbers) > NAMED else "")
    plural = "s" if len(numbers) > 1 else ""
    return f"grpo.prompts {path}: {len(numbers)} of {total} rows {problem} (row{plural} {which})"


def draw_of(rows: Sequence[Mapping[str, Any]] | None, prompts: Sequence[Prompt], count: int, path: str) -> Draw:
    """`rows`: of the density stage's weights.jsonl; None: in epochs. `count`: rows of the prompts' file."""
    if rows is None:
        return partial(in_epochs, len(prompts))
    kept: NDArray[np.float64] = weights(rows, count, path)[[prompt.row for prompt in prompts]]
    if not kept.any():
        raise Refusal(f"grpo.weights {path}: every weight is 0, no prompt would be sampled", EX_DATAERR)
    return partial(draw, kept)


def in_epochs(prompts: int, step: int, seed: int, count: int) -> list[int]:
    """Every prompt once before any comes again. A function of (seed, step), the same for any number of ranks."""
    return [int(place) for place in Order(prompts, seed).ids(step * count, (step + 1) * count)]


def weights(rows: Sequence[Mapping[str, Any]], count: int, path: str) -> NDArray[np.float64]:
    """Of each row of the prompts' file, from the density stage's weights.jsonl."""
    found = np.full(count, math.nan)
    for number, row in enumerate(rows, 1):
        index, weight = row.get("index"), row.get("weight")
        if (
            not isinstance(index, int)
            or isinstance(weight, bool)
            or not isinstance(weight, (int, float))
            or not 0 <= weight < math.inf
        ):
            raise Refusal(
                f"grpo.weights {path}, row {number}: a row needs an index and a weight of 0 or more, found"
                f" {dict(row)!r:.120}",
                EX_DATAERR,
            )
        if 0 <= index < count:
            found[index] = weight
    if len(rows) != count or np.isnan(found).any():
        line = (
            f"grpo.weights {path} has weights of {plural(len(rows), 'prompt')} and grpo.prompts {plural(count, 'row')}"
        )
        raise Refusal(
            f"{line}: they don't belong together; make them again with stage density, from this prompts file",
            EX_DATAERR,
        )
    return found


def expected(weights: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """How often a step of `count` samples each on average: by weight, but never twice while others are left."""
    times: NDArray[np.float64] = count * weights / weights.sum()
    if count > np.count_nonzero(weights):
        return times
    while (times > 1 + 1e-12).any():
        full = times >= 1
        rest = np.where(full, 0.0, weights)
        left = count - np.count_nonzero(full)
        times = np.where(full, 1.0, left * rest / rest.sum() if left else 0.0)
    return times


def draw(weights: NDArray[np.float64], step: int, seed: int, count: int) -> list[int]:
    """Which prompts a step asks, by their weights: a function of (seed, step), the same for any number of ranks.

    Systematic sampling over a shuffled order: one offset, then every whole number along the summed shares. Exact.
    """
    random = np.random.Generator(np.random.Philox(number_from("draw", seed, step)))
    order = random.permutation(len(weights))
    edges = np.cumsum(expected(weights, count)[order])
    places = np.searchsorted(edges * (count / edges[-1]), random.random() + np.arange(count), side="right")
    return [int(order[place]) for place in np.minimum(places, len(order) - 1)]


def number_from(*parts: object) -> int:
    """63 bits that depend on all of these."""
    digest = hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@frozen
class Answer:
    place: int  # among all of the step, of all ranks
    prompt: Prompt
    ids: tuple[int, ...]  # the stop token is the last, where there is one
    text: str  # without it
    whole: bool  # it ended by itself
    sampled: tuple[float, ...] = ()  # log-probabilities of its ids where it was written; empty: not kept
    versions: tuple[int, ...] = ()  # steps behind the weights that wrote each id; empty: all before this one
    learn: tuple[bool, ...] = ()  # whether each id is learned; empty: all are
    turns: int = 1  # that were sampled
    transcript: str = ""  # all turns as rollouts.jsonl shows them; empty: the text is all there is
    messages: tuple[dict[str, str], ...] = ()  # what followed the prompt, where there is more than one answer
    reward: float | None = None  # what grpo.rollout gave it
    parts: Mapping[str, float] = {}  # named numbers of grpo.rollout, for the log
    failed: str = ""  # why there is no rollout, in one line


def answer_of(
    place: int, prompt: Prompt, rollout: PublicRollout, tokenizer: Tokenizer, stop: Collection[int],
    versions: Sequence[int] = (),
) -> Answer:  # fmt: skip
    """Return a rollout as it is learned. `versions`: of the weights that wrote each sampled token.

    What precedes the first learned token is the prompt; what follows the last one is not read.
    """
    flags = [learned_flags(turn) for turn in rollout.turns]
    ids = tuple(token for turn in rollout.turns for token in turn.token_ids)
    learn = tuple(flag for some in flags for flag in some)
    first, end = learn.index(True), len(learn) - learn[::-1].index(True)
    sampled = [turn for turn, some in zip(rollout.turns, flags, strict=True) if any(some)]
    last, whole = sampled[-1], ids[end - 1] in stop
    logprobs: list[float] = []
    if all(len(turn.logprobs) == len(turn.token_ids) for turn in sampled):
        for turn, some in zip(rollout.turns, flags, strict=True):
            logprobs += turn.logprobs if any(some) else (0.0,) * len(some)
        logprobs = logprobs[first:end]
    text = last.text if last.text is not None else tokenizer.decode(without_stop(last.token_ids, stop))
    mask = learn[first:end]
    answer = Answer(
        place, replace(prompt, ids=ids[:first]), ids[first:end], text, whole, tuple(logprobs), tuple(versions),
        reward=rollout.reward, parts=rollout.parts, turns=len(sampled),
    )  # fmt: skip
    if len(rollout.turns) <= 2 and all(mask):
        return answer
    texts = [(turn.role, turn.text) for turn in rollout.turns[1:]]
    shown = [
        (role or "environment", tokenizer.decode(turn.token_ids) if text is None else text)
        for (role, text), turn in zip(texts, rollout.turns[1:], strict=True)
    ]
    transcript = "\n".join(f"[{role}] {text}" for role, text in shown)
    messages = tuple({"role": role, "content": text} for role, text in shown)
    return replace(answer, learn=mask, transcript=transcript, messages=messages)


def learned_flags(turn: Turn) -> tuple[bool, ...]:
    """Return for each token of a turn whether it is learned."""
    if isinstance(turn.learn, bool):
        return (turn.learn,) * len(turn.token_ids)
    return tuple(turn.learn)


def without_stop(ids: Sequence[int], stop: Collection[int]) -> Sequence[int]:
    return ids[:-1] if ids and ids[-1] in stop else ids


class Rollout:
    """An answer depends on the seeds and its own place in the step: on no number of ranks or rows."""

    def __init__(self, sampler: Sampler, tokenizer: Tokenizer, stop: Collection[int], group: int, ranks: Group) -> None:
        self.sampler, self._tokenizer, self._stop = sampler, tokenizer, frozenset(stop)
        self._group, self._ranks = group, ranks

    def begin(self, prompts: Sequence[Prompt], *seeds: int) -> None:
        """They will be asked for: whoever can may write their answers from now on."""
        self.sampler.begin(self._ask(prompts, seeds, None))

    def __call__(self, prompts: Sequence[Prompt], *seeds: int, only: Collection[int] | None = None) -> list[Answer]:
        """This rank's answers to the step's prompts, `group` in a row to each. `only`: to those at these places."""
        ask = self._ask(prompts, seeds, only)
        found: list[Answer] = []
        for place, written in zip(ask.places, self.sampler.take(ask), strict=True):
            prompt = prompts[place // self._group]
            rollout = PublicRollout([Turn(prompt.ids), Turn(written.ids, True, written.logprobs)])
            found.append(answer_of(place, prompt, rollout, self._tokenizer, self._stop, written.versions))
        return found

    def _ask(self, prompts: Sequence[Prompt], seeds: tuple[int, ...], only: Collection[int] | None) -> Ask:
        share = split(len(prompts), self._ranks.world, self._ranks.rank, 1, False)
        asked_here = [number for number in range(share.begin, share.end) if only is None or number in only]
        places = [number * self._group + one for number in asked_here for one in range(self._group)]
        ids = {number: tuple(prompts[number].ids) for number in asked_here}
        asked = tuple(ids[place // self._group] for place in places)
        return Ask(seeds, number_from("answers", *seeds), asked, tuple(places))


class Roller(Protocol):
    """Makes rollouts to a step's prompts: Rollout, or a user's function (rollout_hook.py)."""

    sampler: Sampler

    def begin(self, prompts: Sequence[Prompt], *seeds: int) -> None: ...

    def __call__(self, prompts: Sequence[Prompt], *seeds: int, only: Collection[int] | None = None) -> list[Answer]: ...


def in_trainer(
    model: Decoder, tokenizer: Tokenizer, longest: int, c: GenerateConfig, grpo: GrpoConfig, ranks: Group
) -> InTrainer:
    """`longest`: tokens of the longest prompt: the cache need not be larger."""
    share = -(-grpo.prompts_per_step // ranks.world)
    rows, length = min(c.rows, share * grpo.group), longest + c.new_tokens
    kept: dict[str, Any] = {"codes": c.bits == "4", "logprobs": grpo.importance_cap > 0}
    if grpo.rollout:  # it is shown the log-probabilities, and may give texts that end a completion
        kept |= {
            "logprobs": True,
            "text_of": lambda request: Text(lambda token: tokenizer.decode_bytes([token]), request.stop_texts),
        }
    engine = BatchEngine(model, rows=rows, length=length, vocab=tokenizer.vocab_size, **kept)
    return InTrainer(engine, c.new_tokens, frozenset(tokenizer.stop_ids), c.sampling)


@frozen
class Paid:
    """What some of a step's answers were given."""

    answers: int = 0
    rewards: float = 0.0  # their sum


@frozen
class Outcome:
    """Of all answers of a step, on every rank. Each [answers], float64 on the host."""

    rewards: Tensor
    correct: Tensor  # NaN where the row has no answer
    lengths: Tensor
    whole: Tensor
    same: Tensor  # as the first answer to its prompt
    parts: Tensor  # [parts, answers], before their weights

    @property
    def usable(self) -> Tensor:
        """Whether each answer has a reward: else it is left out of its group, and not learned."""
        return ~self.rewards.isnan()

    @property
    def count(self) -> int:
        return int(self.usable.sum())

    @property
    def constant(self) -> bool:
        rewards = self.rewards[self.usable]
        return bool((rewards == rewards[:1]).all())

    def _differs(self, group: int) -> Tensor:
        """Return for each prompt whether its answers' rewards differ."""
        table = self.rewards.view(-1, group)
        low, high = (torch.where(table.isnan(), fill, table) for fill in (math.inf, -math.inf))
        return high.max(1).values > low.min(1).values

    def unlike(self, group: int) -> bool:
        """Whether a prompt's answers differ in reward: else no advantage is other than 0, and nothing is taught."""
        return bool(self._differs(group).any())

    def without_signal(self, group: int) -> list[int]:
        """Places, among the step's prompts, of those whose answers all have one reward."""
        return [int(place) for place in (~self._differs(group)).nonzero()[:, 0]]

    def replaced(self, other: Outcome, prompts: Sequence[int], group: int) -> Outcome:
        """With the other's numbers of these prompts' answers."""
        taken = torch.zeros(len(self.rewards) // group, dtype=torch.bool)
        taken[list(prompts)] = True
        taken = taken.repeat_interleave(group)
        return Outcome(**{name: torch.where(taken, getattr(other, name), mine) for name, mine in vars(self).items()})

    @property
    def identical(self) -> bool:
        """All answers to a prompt are the same text, for every prompt."""
        return bool(self.same.all())

    def alike(self, group: int) -> float:
        """Share of the prompts whose answers are all the same text."""
        return float(self.same.view(-1, group).bool().all(1).double().mean())

    def paid(self, right: bool) -> Paid:
        """The answers that are right, or those that are wrong; none where the row has no answer to compare with."""
        chosen = self.rewards[(self.correct == float(right)) & self.usable]
        return Paid(len(chosen), float(chosen.sum()))

    @property
    def reward(self) -> float:
        # The value itself: a mean of equals may differ in its last bit.
        rewards = self.rewards[self.usable]
        return float(rewards[0] if self.constant else rewards.mean())

    @property
    def length(self) -> float:
        """Mean number of tokens that were written."""
        return float(self.lengths[self.usable].mean())

    @property
    def cut(self) -> float:
        """Share of the answers that the token limit cut."""
        return float(1 - self.whole[self.usable].mean())

    @property
    def part_means(self) -> list[float]:
        """Mean of each part over the answers it applies to; NaN: to none."""
        return [float(part[~part.isnan()].mean()) for part in self.parts]

    @property
    def right(self) -> float | None:
        """Share of right answers; None: no row of the step has an answer to compare with."""
        known = self.correct[~self.correct.isnan() & self.usable]
        return float(known.mean()) if len(known) else None

    @property
    def spread(self) -> float:
        return 0.0 if self.constant else float(self.rewards[self.usable].std(unbiased=False))


Failure = RewardFailed | ServerFailed | OtherWeights | StopRequested
FAILURES: tuple[type[Failure], ...] = (StopRequested, RewardFailed, ServerFailed, OtherWeights)


def outcome(
    answers: Sequence[Answer], rewards: Rewards, count: int, group: int, ranks: Group, failure: Failure | None = None
) -> tuple[Judged, Outcome]:
    """Each rank fills in its own places, and the sum is everybody's: one small exchange a step. A reward that failed on
    one rank fails on all, with its line. `failure`: why this rank has no answers; so it fails, too.
    """
    judged = Judged([], [], [])
    try:
        judged = judged if failure else rewards(answers)
    except RewardFailed as problem:
        failure = problem
    table = torch.zeros(6 + len(rewards.parts), count, dtype=torch.float64)
    table[5, 0] = float(bool(failure))
    beside: dict[int, Sequence[int]] = {}  # the first answer of each group
    for number, answer in enumerate(answers if not failure else ()):
        right, is_usable = judged.correct[number], not math.isnan(judged.rewards[number])
        numbers = [judged.rewards[number], math.nan if right is None else float(right)]
        same = not is_usable or answer.ids == beside.setdefault(answer.place // group, answer.ids)
        numbers += [float(is_usable and tokens_of(answer)), float(answer.whole), float(same)]
        table[:5, answer.place] = torch.tensor(numbers, dtype=torch.float64)
        table[6:, answer.place] = torch.tensor([part[number] for part in judged.parts], dtype=torch.float64)
    table = ranks.sum(table.to(ranks.device)).cpu()
    if table[5, 0]:
        own = None if failure is None else (FAILURES.index(type(failure)), str(failure))
        kind, line = min((one for one in ranks.all(own) if one is not None), key=lambda one: one[0] > 0)  # a stop first
        raise FAILURES[kind](line)
    rewarded, correct, lengths, whole, same = table[:5]
    if rewarded.isnan().all():
        raise RewardFailed(_why_none(answers, rewards, ranks))
    return judged, Outcome(rewarded, correct, lengths, whole, same, table[6:])


def _why_none(answers: Sequence[Answer], rewards: Rewards, ranks: Group) -> str:
    """Why no answer of the step has a reward. All ranks call it."""
    failed = ranks.all(next((answer.failed for answer in answers if answer.failed), ""))
    if line := next(filter(None, failed), ""):
        return f"{line}; no rollout of the step was left"
    names = ", ".join(shown(part) for part in rewards.parts)
    return f"reward {names} returned None for every answer of the step: is there a return in every branch?"


@frozen
class Step:
    """What a step learns from: this rank's answers, what they are worth, and all ranks' numbers."""

    answers: list[Answer]
    judged: Judged
    outcome: Outcome
    replaced: int = 0  # prompts whose answers taught nothing, and that others stood in for
    age: Age | None = None  # None: all of it was written by the newest weights
    numbers: Mapping[str, float] = {}  # of grpo.rollout, for metrics.jsonl


@frozen
class Age:
    """Of a step's tokens, of all ranks: by how many steps the weights that wrote them are behind those that learn."""

    mean: float
    most: int
    ready: int  # answers of later steps that are here already
    newest: int = 0  # version of the newest weights that wrote one of them
    resampled: int = 0  # completions discarded since the step before: their weights were too old


def age_of(answers: Sequence[Answer], step: int, sampler: Sampler, ranks: Group) -> Age:
    behind = [step - version for answer in answers for version in answer.versions]
    mine = (
        sum(behind),
        len(behind),
        max(behind, default=0),
        min(behind, default=step),
        sampler.ready,
        sampler.take_resampled(),
    )
    total, tokens, most, least, here, resampled = zip(*ranks.all(mine), strict=True)
    return Age(sum(total) / max(sum(tokens), 1), max(most), sum(here), step - min(least), sum(resampled))


def rollout_numbers(answers: Sequence[Answer], outcome: Outcome, ranks: Group) -> dict[str, float]:
    """Return a step's numbers of grpo.rollout over all ranks: failures, turns, the share of masked tokens, named parts."""
    whole = [answer for answer in answers if not answer.failed]
    sums: dict[str, tuple[float, int]] = {
        "rollouts_failed": (len(answers) - len(whole), 0),
        "turns": (sum(answer.turns for answer in whole), len(whole)),
        "masked": (sum(len(a.ids) - tokens_of(a) for a in whole), sum(len(a.ids) for a in whole)),
    }
    for answer in whole:
        for name, value in answer.parts.items():
            total, count = sums.get(f"reward_{name}", (0.0, 0))
            sums[f"reward_{name}"] = (total + value, count + 1)
    every = ranks.all(sums)
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for one in every for name in one):
        total, count = (sum(values) for values in zip(*(one.get(name, (0.0, 0)) for one in every), strict=True))
        found[name] = total if name == "rollouts_failed" else total / max(count, 1)
    return found


class Asking:
    """A step's prompts, their answers and rewards. Groups without signal are replaced by other prompts, up to
    `grpo.resample` times: the same ones on all ranks, since all know all rewards. `steps`: of the run; answers of steps
    ahead are begun, `grpo.staleness` of them.
    """

    def __init__(
        self, prompts: Sequence[Prompt], draw: Draw, rollout: Roller, rewards: Rewards, c: GrpoConfig, ranks: Group,
        steps: int = 0,
    ) -> None:  # fmt: skip
        self._prompts, self._draw, self._rollout, self._rewards, self._c, self._ranks = (
            prompts, draw, rollout, rewards, c, ranks,
        )  # fmt: skip
        self._steps = steps

    def __call__(self, step: int, seed: int) -> Step:
        count, group = self._c.prompts_per_step, self._c.group
        last = min(step + self._c.staleness, self._steps - 1)
        for ahead in range(step, last + 1) if self._c.staleness else ():
            self._rollout.begin([self._prompts[index] for index in self._draw(ahead, seed, count)], seed, ahead)
        drawn = self._draw(step, seed, count)
        made = self._judged([self._prompts[index] for index in drawn], (seed, step), None)
        used = set(drawn)
        for attempt in range(1, self._c.resample + 1):
            places = made.outcome.without_signal(group)
            if not places:
                break
            kept = {index for place, index in enumerate(drawn) if place not in places}
            others = self._others(step, number_from("again", seed, attempt) % 2**31, len(places), used, kept)
            for place, index in zip(places, others, strict=True):
                drawn[place] = index
            asked = [self._prompts[index] for index in drawn]
            made = _merged(made, self._judged(asked, (seed, step, attempt), frozenset(places)), places, group)
        if self._c.rollout:
            made = replace(made, numbers=rollout_numbers(made.answers, made.outcome, self._ranks))
        if not self._c.server:
            return made
        return replace(made, age=age_of(made.answers, step, self._rollout.sampler, self._ranks))

    def _judged(self, asked: Sequence[Prompt], seeds: tuple[int, ...], only: frozenset[int] | None) -> Step:
        answers: list[Answer] = []
        failure: Failure | None = None
        try:
            answers = self._rollout(asked, *seeds, only=only)
        except FAILURES as problem:  # all ranks hear of it where they exchange their numbers
            failure = problem
        count, group = len(asked) * self._c.group, self._c.group
        return Step(answers, *outcome(answers, self._rewards, count, group, self._ranks, failure))

    def _others(self, step: int, seed: int, count: int, used: set[int], kept: Collection[int]) -> list[int]:
        """Prompts this step has not asked; where all were asked, some again, whose new answers may differ: those that
        are not `kept` first.
        """
        wanted = min(len(self._prompts), count + len(used))
        drawn = list(dict.fromkeys(self._draw(step, seed, wanted)))
        fresh = [index for index in drawn if index not in used][:count]
        used.update(fresh)
        again = [index for index in drawn if index not in kept] or drawn
        return [*fresh, *(again[number % len(again)] for number in range(count - len(fresh)))]


def _merged(made: Step, fresh: Step, places: Sequence[int], group: int) -> Step:
    judged = fresh.judged
    at = {answer.place: number for number, answer in enumerate(fresh.answers)}
    taken = [at.get(answer.place) for answer in made.answers]

    def each(mine: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        return [one if number is None else others[number] for one, number in zip(mine, taken, strict=True)]

    before = made.judged
    parts = [
        each(mine, others) for mine, others in zip(before.parts, judged.parts or [[]] * len(before.parts), strict=True)
    ]
    both = Judged(each(before.rewards, judged.rewards), each(before.correct, judged.correct), parts)
    outcome = made.outcome.replaced(fresh.outcome, places, group)
    return Step(each(made.answers, fresh.answers), both, outcome, made.replaced + len(places))
