"""Files of questions, as published: ours, GSM8K's, ARC's and MMLU's. What can't be asked is named. No torch."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from stoker.contract.errors import EX_DATAERR, EX_NOINPUT, EX_USAGE, Refusal, parsing
from stoker.contract.frozen import frozen, replace
from stoker.training.data import jsonl
from stoker.training.data.formats.format import Row, Unusable
from stoker.training.data.formats.questions import FORMS, Form, Question, messages_of, mmlu_cells
from stoker.training.data.parquet import open_parquet, read_rows
from stoker.training.data.rows import counted_in, kind_of
from stoker.training.data.rows import rows as file_rows
from stoker.training.data.unpack import open_unpacked, packing_of, unpacked_name
from stoker.training.evaluate.grading import Grader

TOLERATED = 0.01  # a share of unusable rows that is skipped; from there on the file is wrong
_PLAIN_NAMES = ("test", "train", "dev", "val", "validation")
_COLUMNS = ("prompt", "question", "answer", "answerKey", "choices", "alternatives", "kind", "subject")  # of all forms
_ENDINGS = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".csv")
_LOOK = 10_000  # rows of a file: the first of them that can be asked decides the form of all


@frozen
class Task:
    name: str
    questions: tuple[Question, ...]
    skipped: str  # which rows, and why; empty: none
    grader: Grader  # of all questions of the file, so that evaluate.most changes no grade


@frozen
class Prompts:
    """Questions that need no answer: what density and diversity ask."""

    questions: tuple[Question, ...]
    places: tuple[int, ...]  # which rows of the file they are
    rows: int  # that the file has
    skipped: str


def read_tasks(paths: Sequence[str], most: int) -> tuple[Task, ...]:
    """A path, or NAME=PATH."""
    told = [_told(word) for word in paths]
    with parsing("evaluate.tasks"):
        tasks = [replace(task, name=name or task.name) for (name, path) in told for task in (_task(path, most),)]
    names = [task.name for task in tasks]
    twice = {name for name in names if names.count(name) > 1}
    tasks = [
        replace(task, name=_with_folder(path)) if task.name in twice and not name else task
        for task, (name, path) in zip(tasks, told, strict=True)
    ]
    names = [task.name for task in tasks]
    same = next((name for name in names if names.count(name) > 1), None)
    if same:
        raise Refusal(f"evaluate.tasks names {same} twice", EX_USAGE)
    return tuple(tasks)


def _told(word: str) -> tuple[str, str]:
    """(name, path) of a task; a path may have a = in it."""
    name, sign, path = word.partition("=")
    return (name, path) if sign and not os.path.exists(word) and os.sep not in name else ("", word)


def spread(count: int, most: int) -> list[int]:
    """Places of at most `most` of `count` rows, evenly over all: files are often sorted by kind."""
    return list(range(count)) if not most or count <= most else [place * count // most for place in range(most)]


def prompts_of(path: str, key: str) -> Prompts:
    rows = _json_rows(path, key)

    def read(row: Any) -> Question:
        asked = row.get("prompt", row.get("question")) if isinstance(row, dict) else None
        if asked is None:
            raise Unusable(_strange(row, "prompt"))
        return Question(messages_of(asked), str(row.get("answer", "")), str(row.get("kind", "")))

    found, places, skipped = _usable(rows, read, f"{key} {path}")
    return Prompts(tuple(found), tuple(places), len(rows), skipped)


def _task(path: str, most: int) -> Task:
    files = _files(path)
    questions: list[Question] = []
    skipped: list[str] = []
    with parsing(f"evaluate.tasks {path}"):
        for file in files:
            kind = (
                _name(file)
                if len(files) == 1
                else os.path.splitext(os.path.basename(unpacked_name(file)))[0].removesuffix("_test")
            )
            found, wrong = _file(file, kind)
            questions += found
            skipped += [wrong] if wrong else []
    chosen = tuple(questions[place] for place in spread(len(questions), most))
    return Task(_name(path), chosen, "; ".join(skipped), Grader(questions))


def _files(path: str) -> list[str]:
    """MMLU is a folder of 57 files: their names are the kinds."""
    if not os.path.isdir(path):
        return [path]
    found = sorted(
        os.path.join(path, name)
        for name in os.listdir(path)
        if unpacked_name(name).lower().endswith(_ENDINGS) and not name.startswith(".")
    )
    if not found:
        raise Refusal(f"evaluate.tasks {path}: a folder without {', '.join(_ENDINGS)} files", EX_NOINPUT)
    return found


def _file(path: str, kind: str) -> tuple[list[Question], str]:
    where = f"evaluate.tasks {path}"
    if unpacked_name(path).lower().endswith(".csv"):
        cells_of = _some(_csv_rows(path), where)
        questions, _, skipped = _usable(cells_of, lambda cells: mmlu_cells(cells, kind), where)
        return questions, skipped
    rows = _rows(path, where)
    form = _form(rows, kind, where)

    def read(row: Any) -> Question:
        question = form(row, kind) if isinstance(row, dict) else None
        if question is None:
            raise Unusable(_strange(row, "what the other rows have"))
        return question

    questions, _, skipped = _usable(rows, read, where)
    return questions, skipped


def _rows(path: str, where: str) -> Sequence[tuple[str, Any]]:
    if path.lower().endswith(".parquet"):
        return _some(_parquet_rows(path), where)
    if kind_of(path) in ("jsonl", "text") and not packing_of(path):
        return _json_rows(path, "evaluate.tasks")  # a line that is no JSON is one row that can't be asked
    return _some([(f"{counted_in(path)} {number}", row) for number, row in file_rows(path)], where)


def _form(rows: Sequence[tuple[str, Any]], kind: str, where: str) -> Form:
    for _, row in rows[:_LOOK]:
        for form in FORMS.values() if isinstance(row, dict) else ():
            try:
                if form(row, kind) is not None:
                    return form
            except Unusable:
                continue  # of this form, but not this row
    first = next((row for _, row in rows if isinstance(row, dict)), {})
    raise Refusal(
        f"{where}: no row can be asked; looked for {'; '.join(FORMS)}; the first row has"
        f" {', '.join(map(str, first)) or 'no keys'}",
        EX_DATAERR,
    )


def _usable(
    rows: Sequence[tuple[str, Any]], read: Callable[[Any], Question], where: str
) -> tuple[list[Question], list[int], str]:
    """What can be read, the places of these rows, and a line on the others; 1 % of them or more is refused."""
    found, places, wrong = [], [], []
    for place, (number, row) in enumerate(rows):
        try:
            if isinstance(row, _NotJson):
                raise Unusable(row.why)
            with parsing(f"{where}, {number}", Unusable):
                found.append(read(row))
            places.append(place)
        except Unusable as problem:
            wrong.append(f"{number}: {problem}")
    if not wrong:
        return found, places, ""
    line = (
        f"{where}: {len(wrong)} of {len(rows)} rows can't be used"
        f" ({'; '.join(wrong[:3])}{'; …' if len(wrong) > 3 else ''})"
    )
    if len(wrong) >= TOLERATED * len(rows):
        raise Refusal(f"{line}: that is 1 % or more: fix the file", EX_DATAERR)
    return found, places, f"{line} and are skipped"


@frozen
class _NotJson:
    why: str


def _json_rows(path: str, key: str) -> list[tuple[str, Any]]:
    if not path:
        raise Refusal(f"{key} is empty: name a jsonl file", EX_USAGE)
    try:
        rows = [(f"line {number}", _json(line)) for number, line in jsonl.lines(path)]
    except (OSError, ValueError) as problem:
        raise Refusal(f"{key} {path} can't be read: {problem}", EX_NOINPUT) from problem
    return _some(rows, f"{key} {path}")


def _some(rows: list[tuple[str, Any]], where: str) -> list[tuple[str, Any]]:
    if not rows:
        raise Refusal(f"{where} has no rows", EX_NOINPUT)
    return rows


def _json(line: str) -> Any:
    try:
        return jsonl.row(line)
    except ValueError as problem:
        return _NotJson(f"not JSON ({problem})")


def _parquet_rows(path: str) -> list[tuple[str, Any]]:
    if not os.path.isfile(path):
        raise Refusal(f"evaluate.tasks {path} does not exist", EX_NOINPUT)
    table = open_parquet(path)
    names = table.schema_arrow.names
    columns = [name for name in _COLUMNS if name in names]
    if not columns:
        found = f"{', '.join(names[:20])}{', …' if len(names) > 20 else ''}"
        raise Refusal(
            f"evaluate.tasks {path}: no row can be asked; looked for {'; '.join(FORMS)}; its columns are {found}",
            EX_DATAERR,
        )
    rows: list[Row] = []
    for group in range(table.metadata.num_row_groups):
        for some in read_rows(table, group, columns, path):
            rows += some
    return [(f"row {number}", row) for number, row in enumerate(rows, 1)]


def _csv_rows(path: str) -> list[tuple[str, Any]]:
    try:
        with open_unpacked(path) as stream:
            reader = csv.reader(_text_lines(stream))
            rows = [(f"row {number}", cells) for number, cells in enumerate(reader, 1) if cells]
    except (OSError, ValueError, csv.Error) as problem:
        raise Refusal(f"evaluate.tasks {path} can't be read: {problem}", EX_NOINPUT) from problem
    has_header = rows and rows[0][1][-1].strip().lower() == "answer"  # as some copies have
    return rows[1:] if has_header else rows


def _text_lines(stream: BinaryIO) -> Iterator[str]:
    for number, line in enumerate(stream, 1):
        yield line.decode("utf-8-sig" if number == 1 else "utf-8")


def _strange(row: Any, wanted: str) -> str:
    return (
        f"a row without {wanted}: it has {', '.join(map(str, row)) or 'no keys'}"
        if isinstance(row, dict)
        else f"a {type(row).__name__}, not an object"
    )


def _name(path: str) -> str:
    """gsm8k/test.jsonl is gsm8k: `test` says nothing. A folder has its own name."""
    stem = os.path.splitext(os.path.basename(os.path.normpath(unpacked_name(path))))[0]
    return _with_folder(path) if stem in _PLAIN_NAMES else stem


def _with_folder(path: str) -> str:
    whole = os.path.abspath(unpacked_name(path))
    stem = os.path.splitext(os.path.basename(whole))[0]
    folder = os.path.basename(os.path.dirname(whole))
    return f"{folder}-{stem}" if folder else stem
