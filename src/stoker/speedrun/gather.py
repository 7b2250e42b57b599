"""Reads a speedrun directory into frozen shapes. A file or a field that is missing, cut or of another type is None: a
partial chain has a report too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from stoker.contract import layout
from stoker.contract.errors import EX_NOINPUT, Refusal, parsing
from stoker.contract.frozen import frozen
from stoker.contract.safe_io import read_lines
from stoker.contract.text import parse_json
from stoker.contract.units import finite_number
from stoker.control.record import run_record
from stoker.control.record.run_index import CHAIN
from stoker.speedrun.stages import REPORT
from stoker.speedrun.state import RESULT
from stoker.training.stages.evaluate import PROMPTS, QUESTIONS
from stoker.training.stages.registry import STAGES, links
from stoker.training.stages.significance import Marks, marks
from stoker.training.stages.stage import From, Link, Metrics

MODELS = {link.name: link.title for link, _ in links() if link.title}  # what makes a model, in the chain's order
_LOADED = [
    (link, kind, begun.stage) for link, kind in links() if isinstance(begun := link.keys.get("model.load"), From)
]
BEFORE = {link.name: model for link, _, model in _LOADED if link.name in MODELS}  # the model that a stage began with
_EVALUATIONS = {model: link.name for link, kind, model in reversed(_LOADED) if kind.measures}

COMPLETIONS = "completions.jsonl"
SAMPLES_OF_A_KIND = 2  # where result.json has none and the completions are looked at instead
# Events worth a line in a report.
_REPORTED = [
    "restart", "gpu-left-out", "straggler", "straggler-over", "suspicion", "busy", "numbers", "stop", "verdict", "watch-failed",
]  # fmt: skip


@frozen
class Sample:
    prompt: str
    answer: str
    completion: str
    correct: bool | None
    kind: str
    in_form: bool | None = None
    cut: bool = False


@frozen
class Evaluation:
    everything: Marks
    files: dict[str, Marks]  # of questions, where there are several
    kinds: dict[str, Marks]
    bits_per_byte: float | None
    samples: tuple[Sample, ...]
    new_tokens: int | None = None  # the limit that answers are cut at

    @property
    def questions(self) -> Marks:
        """Evenly of all kinds, as far as the data tells them from GRPO's prompts."""
        return self.files.get(QUESTIONS, self.everything)

    @property
    def prompts(self) -> Marks | None:
        """Held out, of the same kinds as GRPO's own."""
        return self.files.get(PROMPTS)


@frozen
class StageRecord:
    name: str
    stage: str
    status: str
    run: str  # relative to the speedrun directory; empty where it never started
    done: bool  # result.json is there, and no stop rule ended it early
    seconds: float | None
    attempts: int | None
    energy_wh: float | None
    cost: float | None
    metrics: dict[str, Any]  # of result.json
    steps: tuple[dict[str, Any], ...]  # the lines of metrics.jsonl
    evaluation: Evaluation | None
    troubles: tuple[str, ...]
    versions: dict[str, Any]

    def curve(self, key: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Steps and values of one metric, where it was logged."""
        found = [
            (step, value)
            for row in self.steps
            if (step := finite_number(row, "step")) is not None and (value := finite_number(row, key)) is not None
        ]
        return tuple(step for step, _ in found), tuple(value for _, value in found)


@frozen
class Chain:
    folder: str
    preset: str
    seed: str
    hardware: dict[str, Any]
    stages: dict[str, StageRecord]

    def result(self, name: str) -> StageRecord | None:
        """The record of a stage that is done."""
        found = self.stages.get(name)
        return found if found is not None and found.done else None

    def evaluation(self, name: str) -> Evaluation | None:
        """Of the model that stage `name` made."""
        found = self.result(_EVALUATIONS.get(name, ""))
        return found.evaluation if found else None

    @property
    def evaluations(self) -> dict[str, Evaluation]:
        """Of the models that there are, in the chain's order."""
        return {name: found for name in MODELS if (found := self.evaluation(name)) is not None}

    def given(self, link: Link) -> dict[str, Metrics]:
        """Key -> metrics of the done link that its value comes from."""
        made = {key: self.result(value.stage) for key, value in link.keys.items() if isinstance(value, From)}
        return {key: found.metrics for key, found in made.items() if found is not None}


def gather(folder: str) -> Chain:
    chain = run_record.read_json(os.path.join(folder, CHAIN))
    if not isinstance(chain, dict):
        raise Refusal(
            f"{folder} has no readable {CHAIN}: name a speedrun directory; `stoker speedrun` makes one", EX_NOINPUT
        )
    rows = chain.get("stages")
    price = finite_number(chain, "price_per_hour")
    known = [
        row
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, dict) and row.get("name") not in (None, REPORT)
    ]
    with parsing(f"speedrun {folder}"):
        records = [_stage(folder, row, price) for row in known]
    hardware = chain.get("hardware")
    hardware = hardware if isinstance(hardware, dict) else {}
    return Chain(
        folder,
        _text(chain.get("preset")),
        _text(chain.get("seed")),
        hardware,
        {record.name: record for record in records},
    )


def _stage(folder: str, row: dict[str, Any], price: float | None) -> StageRecord:
    """`price`: of an hour; a report that is made again may be told it later than the stage ran."""
    run = row.get("run") if isinstance(row.get("run"), str) else ""
    where = os.path.join(folder, run) if run else ""
    result = _object(os.path.join(where, RESULT)) if where else {}
    metrics = result.get("metrics")
    metrics = metrics if isinstance(metrics, dict) else {}
    about = _object(os.path.join(where, layout.RUN)) if where else {}
    attempts, seconds = finite_number(row, "attempts"), finite_number(row, "seconds")
    cost = finite_number(row, "cost") if price is None or seconds is None else round(seconds / 3600 * price, 4)
    kind = _text(row.get("stage") or row.get("name"))
    versions = about.get("versions")
    return StageRecord(
        name=str(row["name"]),
        stage=kind,
        status=_text(row.get("status")) or "unknown",
        run=str(run or ""),
        done=bool(result) and not metrics.get("stopped"),
        seconds=seconds,
        attempts=None if attempts is None else int(attempts),
        energy_wh=finite_number(row, "energy_wh"),
        cost=cost,
        metrics=metrics,
        steps=tuple(_lines(os.path.join(where, layout.METRICS))) if where else (),
        troubles=tuple(_troubles(where, row, metrics)),
        evaluation=_evaluation(where, result, metrics) if kind in STAGES and STAGES[kind].measures and result else None,
        versions=versions if isinstance(versions, dict) else {},
    )


def _object(path: str) -> dict[str, Any]:
    found = run_record.read_json(path)
    return found if isinstance(found, dict) else {}


def _lines(path: str) -> Iterator[dict[str, Any]]:
    """Whole JSON objects only: a crash may have cut the last line."""
    try:
        for line in read_lines(path):
            try:
                row = parse_json(line)
            except ValueError:
                row = None
            if isinstance(row, dict):
                yield row
    except (OSError, ValueError):
        return


def _text(value: Any) -> str:
    """A prompt may be a text or messages."""
    if value is None:
        return ""
    if isinstance(value, list):
        return "\n".join(_text(turn.get("content")) if isinstance(turn, dict) else _text(turn) for turn in value)
    return str(value).encode("utf-8", "replace").decode()  # JSON can hold half a surrogate pair, a file can't


def _evaluation(where: str, result: dict[str, Any], metrics: dict[str, Any]) -> Evaluation:
    files, kinds = metrics.get("tasks"), metrics.get("kinds")
    kept, limit = result.get("samples"), finite_number(metrics, "new_tokens")
    rows: Sequence[Any] = kept if isinstance(kept, list) and kept else list(_first_of_each_kind(where))
    samples = tuple(_sample(row) for row in rows if isinstance(row, dict))
    return Evaluation(
        marks(metrics.get("all")),
        {_text(name): marks(found) for name, found in files.items()}
        if isinstance(files, dict) and len(files) > 1
        else {},
        {_text(kind): marks(found) for kind, found in kinds.items()} if isinstance(kinds, dict) else {},
        finite_number(metrics, "bits_per_byte"),
        samples,
        None if limit is None else int(limit),
    )


def _sample(row: dict[str, Any]) -> Sample:
    right, in_form = (value if isinstance(value := row.get(key), bool) else None for key in ("correct", "in_form"))
    return Sample(
        _text(row.get("prompt")),
        _text(row.get("answer")),
        _text(row.get("completion")),
        right,
        _text(row.get("kind")),
        in_form,
        row.get("cut") is True,
    )


def _first_of_each_kind(where: str) -> Iterator[dict[str, Any]]:
    seen: dict[str, int] = {}
    for row in _lines(os.path.join(where, COMPLETIONS)):
        kind = _text(row.get("kind"))
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= SAMPLES_OF_A_KIND:
            yield row


def _troubles(where: str, row: dict[str, Any], metrics: dict[str, Any]) -> Iterator[str]:
    """What went wrong on the way, in order, each once: events, what the chain noted, how it ended, what stopped it."""
    events = list(run_record.read_events(where)) if where else []
    said = [_event(event) for event in events if event.get("event") in _REPORTED]
    again = sum(event.get("event") == "run" for event in events) - 1
    if again > 0:
        said.append(f"the command was run again {'once' if again == 1 else f'{again} times'}, and the stage resumed")
    noted = row.get("restarts")
    said += [_note(one) for one in (noted if isinstance(noted, list) else ())]
    verdict = _object(os.path.join(where, layout.VERDICT)) if where else {}
    trouble = _text(row.get("trouble"))
    if trouble and trouble not in _text(verdict.get("summary")):  # a refusal says more than its exit code
        said.append(f"failed: {trouble}")
    said.append(_event({**verdict, "event": "verdict"}))
    fix = verdict.get("fix")
    if said[-1] and isinstance(fix, list) and fix:
        said.append(f"what to do: {_text(fix[0])}")
    stopped = _text(metrics.get("stopped"))
    if stopped and not any(stopped in line for line in said):  # the verdict of a run that ended so has its line, too
        said.append(f"stopped by its stop rule: {stopped}")
    yield from dict.fromkeys(line for line in said if line)


def _event(event: dict[str, Any]) -> str:
    kind, rank = _text(event.get("event")), event.get("rank")
    of = f" (rank {rank})" if rank is not None else ""
    if kind == "restart":
        return (
            f"restarted as attempt {_text(event.get('attempt'))} after {_text(event.get('cause')) or 'a failure'}{of}"
        )
    if kind == "verdict":
        fine = event.get("status") in (None, "completed")
        return "" if fine else f"{_text(event['status'])}: {_text(event.get('summary') or event.get('cause'))}"
    if kind == "stop":
        return f"stopped by {_text(event.get('signal')) or 'a signal'}"
    what = _text(event.get("summary") or event.get("why") or event.get("cause"))
    return f"{kind}{of}: {what}" if what else f"{kind}{of}"


def _note(noted: Any) -> str:
    """The chain keeps restarts as their events; one that the events tell, too, is told once."""
    return _event({"event": "restart", **noted}) if isinstance(noted, dict) else _text(noted)
