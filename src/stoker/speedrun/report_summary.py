"""What a tired reader needs first: a few numbers per stage, what got worse, what to distrust. Pure: a Chain in, blocks
out.
"""

from __future__ import annotations

from collections.abc import Iterator

from stoker.contract.frozen import frozen
from stoker.contract.units import format_duration
from stoker.speedrun.gather import BEFORE, MODELS, Chain, Evaluation
from stoker.speedrun.report_chain import hardware_lines, missing, total_of
from stoker.training.stages.blocks import Block, Bullets, Cell, Heading, Table, Text, tone_of
from stoker.training.stages.evaluate import PROMPTS, TASKS
from stoker.training.stages.registry import links
from stoker.training.stages.significance import ABSENT, Change, Marks, Measured, change, judged, percent, points
from stoker.training.stages.stage import variant

MANY_CUT = 0.02  # a share of cut answers that makes a score doubtful
ALL = "all"
NOT_EVALUATED = Evaluation(Marks(), {}, {}, None, ())


def summary(chain: Chain) -> Iterator[Block]:
    seconds, on = total_of(chain, "seconds"), hardware_lines(chain.hardware)
    took = format_duration(seconds) if seconds is not None else "time unknown"
    evaluations = chain.evaluations
    lines = [
        f"Preset {chain.preset or ABSENT}, seed {chain.seed or ABSENT}: {took} on"
        f" {on[0] if on else 'unknown hardware'}."
    ]
    name = next(reversed(evaluations), "")
    if name and evaluations[name].questions.greedy.value is not None:
        right = evaluations[name].questions.greedy
        lines.append(
            f"The last model, {MODELS[name]}, answers {percent(right.value)} of"
            f" {f'{right.total:,} ' if right.total else ''}held-out questions of all kinds right."
        )
    yield Text(" ".join(lines), lead=True)
    yield from missing(chain)
    if evaluations:
        yield from _first_table(chain, evaluations)
    points_to_know = tuple(_worth_knowing(chain, evaluations))
    if points_to_know:
        yield Heading("Worth knowing")
        yield Bullets(points_to_know)


def _first_table(chain: Chain, evaluations: dict[str, Evaluation]) -> Iterator[Block]:
    rows = []
    for name, found in evaluations.items():
        old = (chain.evaluation(BEFORE[name]) if name in BEFORE else None) or NOT_EVALUATED
        prompts, old_prompts = found.prompts or Marks(), old.prompts or Marks()
        cells = (
            _compared(found.questions.greedy, old.questions.greedy),
            _compared(prompts.greedy, old_prompts.greedy),
            _compared(found.everything.form, old.everything.form),
            _compared(found.everything.cut, old.everything.cut, higher_is_better=False),
        )
        rows.append((Cell(MODELS[name]), *cells))
    yield Table(
        (
            "After stage",
            "Questions right",
            f"{TASKS[PROMPTS][0].upper()}{TASKS[PROMPTS][1:]} right",
            "In the expected form",
            "Cut at the token limit",
        ),
        tuple(rows),
    )
    yield Text(
        "All questions and prompts are held out from training. Right: the answer says the right thing, however it is"
        ' worded. In the expected form: it stands alone or after "The answer is", right or wrong. Cut: the answer was'
        " not finished when it reached the token limit. Below each share is the change in points from the model that"
        " the stage began with: ▲ and ▼ are significant (95 %), ≈ is not. Below, forgotten means: significantly worse"
        " than after an earlier stage."
    )


def _compared(now: Measured, before: Measured, higher_is_better: bool = True) -> Cell:
    found = change(before, now)
    verdict = judged(found, higher_is_better)
    if now.value is None or not found.tested or found.difference is None:
        return Cell(percent(now.value))
    arrow = "▲" if found.difference > 0 else "▼"
    if not found.beyond_noise:
        arrow = "≈"
    return Cell(percent(now.value), f"{arrow} {100 * found.difference:+.1f}", tone_of(verdict))


def _worth_knowing(chain: Chain, evaluations: dict[str, Evaluation]) -> Iterator[str]:
    yield from _about_forgetting(chain, evaluations)
    yield from _about_gains(chain)
    for link, kind in links():
        done = chain.result(link.name)
        yield from kind.worth_knowing(done.metrics) if done is not None else ()
    yield from _about_cut(evaluations)


def _about_gains(chain: Chain) -> Iterator[str]:
    """What the stages that are judged by their prompts added to the models they began with."""
    gains: dict[tuple[str, str], list[str]] = {}
    for link, kind in links():
        gain, asked = _gain(chain, link.name) if kind.judged_by_prompts else (Change(None), "")
        if gain.difference is not None:
            word = variant(link, kind)
            stage = link.title.removesuffix(word).strip()
            compared = f"{stage} compared with {MODELS[BEFORE[link.name]]}"
            gains.setdefault((compared, asked), []).append(f"{word} {points(gain).split(' (')[0]}, {judged(gain)}")
    for (compared, asked), lines in gains.items():
        yield f"{compared}, on {asked}: {', '.join(lines)}."


def _gain(chain: Chain, name: str) -> tuple[Change, str]:
    """Greedy answers to held-out prompts like its own, or to all questions where there are none."""
    old, new = chain.evaluation(BEFORE.get(name, "")), chain.evaluation(name)
    if old is None or new is None:
        return Change(None), ""
    if old.prompts and new.prompts:
        return change(old.prompts.greedy, new.prompts.greedy), "held-out prompts like its own"
    return change(old.everything.greedy, new.everything.greedy), "all questions (no prompts like its own were held out)"


def _about_cut(evaluations: dict[str, Evaluation]) -> Iterator[str]:
    """The larger share of greedy and sampled answers, where it is large enough to doubt a score."""
    shares = {
        name: max(found.everything.cut.value or 0.0, found.everything.sampled_cut.value or 0.0)
        for name, found in evaluations.items()
    }
    many = {name: value for name, value in shares.items() if value >= MANY_CUT}
    if many:
        limit = next(
            (f"{evaluations[name].new_tokens} tokens" for name in many if evaluations[name].new_tokens),
            "the token limit",
        )
        listed = ", ".join(f"{percent(value)} after {MODELS[name]}" for name, value in many.items())
        yield (
            f"Answers cut at {limit}: {listed}. A cut answer is mostly a wrong one, so these scores are too low. Raise"
            " generate.new_tokens."
        )


def _about_forgetting(chain: Chain, evaluations: dict[str, Evaluation]) -> Iterator[str]:
    """One line per measure that a stage made worse, and one line if there is none: a reader must not have to look for
    it.
    """
    worse: dict[tuple[str, str], list[Regression]] = {}
    parts = any(found.files for found in evaluations.values())
    for found in regressions(chain):
        if found.measure != ALL or not parts:
            worse.setdefault((found.measure, found.best), []).append(found)
    last = [name for name in evaluations if name not in {BEFORE.get(other) for other in evaluations}]
    for lasting in (True, False):
        for (measure, best), stages in worse.items():
            if any(one.stage in last for one in stages) == lasting:
                after = ", ".join(f"{percent(one.now.value)} after {MODELS[one.stage]}" for one in stages)
                word = "Forgotten" if lasting else "Worse for a while"
                yield f"{word}, {measure}: {percent(stages[0].before.value)} right after {MODELS[best]}, but {after}."
    if not worse and len(evaluations) > 1:
        yield "Nothing was forgotten: no stage is significantly worse than an earlier one on any measure."


@frozen
class Regression:
    """A stage that is significantly worse on a measure than the best stage before it."""

    stage: str
    measure: str
    best: str  # the earlier stage
    before: Measured
    now: Measured


def regressions(chain: Chain) -> tuple[Regression, ...]:
    """By the same test as everywhere in the report, each measure and stage by itself."""
    worse = []
    for name in MODELS:
        own, earlier = (
            chain.evaluation(name),
            [(before, found) for before in _before(name) if (found := chain.evaluation(before)) is not None],
        )
        for measure, now in right_by_measure(own).items() if own else ():
            known = [
                (before, old)
                for before, found in earlier
                if (old := right_by_measure(found).get(measure, Measured())).value is not None
            ]
            if not known or now.value is None:
                continue
            best, old = max(known, key=lambda pair: pair[1].value or 0.0)
            moved = change(old, now)
            if moved.beyond_noise and moved.difference is not None and moved.difference < 0:
                worse.append(Regression(name, measure, best, old, now))
    return tuple(worse)


def _before(name: str) -> Iterator[str]:
    while name in BEFORE:
        name = BEFORE[name]
        yield name


def right_by_measure(found: Evaluation) -> dict[str, Measured]:
    """Right answers by content, of all questions and of each part of them."""
    files = {TASKS.get(name, f"file {name}"): one.greedy for name, one in found.files.items()}
    kinds = {f"{kind} questions": one.greedy for kind, one in found.kinds.items()}
    return {ALL: found.everything.greedy, **files, **kinds, "all, sampled answers": found.everything.sampled}
