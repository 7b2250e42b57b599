"""The models stage by stage, with every measure: the report's table of details. Pure: a Chain in, blocks out."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.speedrun.gather import Chain, Evaluation
from stoker.speedrun.report_results import MODELS, random_guess, share_cell
from stoker.speedrun.report_summary import Regression, regressions, right_by_measure
from stoker.training.stages.blocks import BAD, Block, Cell, Figure, Heading, Table, Text
from stoker.training.stages.significance import Measured, between, number, percent

RISEN = 1.1  # bits per byte above this many times the base model's need an explanation


def models_table(chain: Chain) -> Iterator[Block]:
    yield Heading("The models, stage by stage")
    found = {name: chain.evaluation(name) for name in MODELS}
    evaluated = {name: one for name, one in found.items() if one is not None}
    if not evaluated:
        yield Text("No model was evaluated yet.")
        return
    asked = next((one.everything.greedy.total for one in evaluated.values() if one.everything.greedy.total), None)
    held_out = f"{asked:,} held-out questions and prompts" if asked else "held-out questions"
    yield Text(
        f"Shares of {held_out}, with the 95 % interval below each share. Answers are greedy, where not called sampled:"
        " the model always takes its most likely token. Sampled: each token is picked at random by its probability. ▼"
        " marks a stage that is significantly worse than the best stage before it."
    )
    worse = {(one.stage, one.measure): one for one in regressions(chain)}
    measures = dict.fromkeys(measure for one in evaluated.values() for measure in _measures(one))
    rows = [_row(measure, evaluated, worse) for measure in measures]
    rows.append(
        (
            Cell("bits per byte of plain text", "lower is better"),
            *(Cell(number(one.bits_per_byte if one else None)) for one in found.values()),
        )
    )
    yield Table(("", *MODELS.values()), tuple(rows))
    yield from _about_bits(chain, evaluated)
    yield Figure("accuracy", "Right answers to held-out questions after each stage, with 95 % intervals")
    yield Figure("kinds", "Right answers (greedy) by kind of question, with 95 % intervals; u: uniform, d: density")


def _measures(found: Evaluation) -> dict[str, Measured]:
    everything = found.everything
    return {
        **right_by_measure(found),
        "in the expected form": everything.form,
        "right and in the expected form": everything.strict,
        "cut at the token limit": everything.cut,
        "cut, sampled answers": everything.sampled_cut,
    }


def _row(measure: str, evaluated: dict[str, Evaluation], worse: dict[tuple[str, str], Regression]) -> tuple[Cell, ...]:
    cells = []
    for name in MODELS:
        value = _measures(evaluated[name]).get(measure, Measured()) if name in evaluated else Measured()
        lost = worse.get((name, measure))
        if lost is None:
            cells.append(share_cell(value))
        else:
            cells.append(Cell(f"▼ {percent(value.value)}", f"{between(value)}\nbelow {MODELS[lost.best]}", BAD))
    return (Cell(measure), *cells)


def _about_bits(chain: Chain, evaluated: dict[str, Evaluation]) -> Iterator[Block]:
    bits = {name: one.bits_per_byte for name, one in evaluated.items() if one.bits_per_byte is not None}
    if not bits:
        return
    guess = random_guess(chain)
    scale = f" A random guess would need {number(guess)}." if guess is not None else ""
    text = (
        "Bits per byte: how many bits the model needs to predict a byte of held-out text like that of the base"
        f" stage.{scale}"
    )
    last = max(bits, key=lambda name: bits[name])
    if "base" in bits and bits[last] > RISEN * bits["base"]:
        text += (
            f" It rises from {number(bits['base'])} (Base) to {number(bits[last])} ({MODELS[last]}). The later stages"
            " learn only the assistant's words in chats, so the model forgets how to continue plain text. This is"
            " expected, and it is the price of these stages: chat with this model, and use the base model where you"
            " need plain text. How well it answers in chats is measured above, not by this number."
        )
    yield Text(text)
