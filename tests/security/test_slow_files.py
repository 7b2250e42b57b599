"""Files that are small and well-formed, and would keep their reader busy for minutes."""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Stoker, at_length
from stoker.contract.names import Refusal
from stoker.training.evaluate import tasks
from stoker.training.evaluate.marking import LONGEST_ANSWER

CPU_S = 30  # each takes below 3 s; without a limit on the work, minutes


def within_seconds(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S)),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return done.stdout


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("5", "'x' + '. ' * 1_000_000"),
        ("5", "'1' * 200_000 + '~'"),
        ("'1, ' * 50_000 + 'x'", "'5'"),
        ("'more than 1 ' * 50_000", "'5'"),
    ],
    ids=["nested stops", "digits", "numbers", "comparisons"],
)
def test_marking_takes_time_in_proportion_to_the_text(completion: str, answer: str) -> None:
    script = f"""
from stoker.training.evaluate.marking import in_form, right, right_in_form
for mark in (in_form, right, right_in_form):
    print(mark(str({completion}), str({answer})))
"""
    assert len(within_seconds(script).split()) == 3


def test_an_endless_answer_is_not_compared(tmp_path: Path) -> None:
    rows = [{"prompt": "How many?", "answer": "5"}] * 200 + [{"prompt": "x", "answer": "5" * (LONGEST_ANSWER + 1)}]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (task,) = tasks.read_tasks([str(tmp_path / "q.jsonl")], 0)
    assert len(task.questions) == 200 and "line 201: an answer of 65,537 characters; 65,536 is the most" in task.skipped


WIDE = """
import sys
from stoker.training.evaluate.tasks import read_tasks
print(read_tasks([sys.argv[1]], 0)[0].questions[0].answer)
"""


def test_a_wide_parquet_file_is_read_by_the_columns_that_count(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="parquet files need pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="parquet files need pyarrow")
    columns = {f"c{number}": ["x"] for number in range(20_000)}
    wide, strange = tmp_path / "wide.parquet", tmp_path / "strange.parquet"
    parquet.write_table(pyarrow.table({**columns, "prompt": ["hi"], "answer": ["5"]}), wide, use_dictionary=False)
    assert within_seconds(WIDE, str(wide)) == "5\n"
    parquet.write_table(pyarrow.table({"first": ["x"], "second": ["y"]}), strange)
    with pytest.raises(Refusal, match=r"no row can be asked; looked for .*; its columns are first, second$"):
        tasks.read_tasks([str(strange)], 0)


@at_length
def test_all_columns_of_a_wide_parquet_file_can_be_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="parquet files need pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="parquet files need pyarrow")
    columns = {f"c{number}": ["x"] for number in range(20_000)}
    nested = {"a.b": [{"c": [1, 2]}]}
    parquet.write_table(pyarrow.table({**columns, **nested}), tmp_path / "wide.parquet", use_dictionary=False)
    script = """
import sys
from stoker.training.data.parquet import open_parquet, read_rows
table = open_parquet(sys.argv[1])
((row,),) = read_rows(sys.argv[1], table, 0, table.schema_arrow.names)
print(len(row), row["a.b"])
"""
    assert within_seconds(script, str(tmp_path / "wide.parquet")) == "20001 {'c': [1, 2]}\n"


def test_long_words_are_cut_to_train_a_tokenizer(stoker: Stoker) -> None:
    """Each merge would go through all words that have the pair: 6 MB without a blank took minutes."""
    pytest.importorskip("tokenizers", reason="training a tokenizer needs tokenizers")
    from stoker.training.tokenizer.definition import OURS
    from stoker.training.tokenizer.tokenizer import load

    words = "".join(random.Random(1).choices("abcdefgh", k=2000))
    (stoker.cwd / "d.txt").write_text(f"{'xy' * 2000} {words}\n" * 3)
    argv = ["prepare", "--data", "d.txt", "--tokenizer.vocab_size", "5000", "--data.context_length", "16"]
    done = stoker(*argv, timeout=300)
    assert done.code == 0, done.err
    shown = done.out + done.err
    assert shown.count("the data has runs of more than 256 letters, signs or blanks") == 1, shown
    (folder,) = {path.parent for path in (stoker.cwd / "cache" / "tokenizers").rglob("tokenizer.json")}
    told = load(str(folder)).told
    assert max(map(len, told.vocabulary)) <= 257, "a word, and a blank before it"
    assert told.pattern == OURS, "only training cuts"
