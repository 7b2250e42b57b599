"""What the twentieth review found: secrets on the lines below a name within a message, and phrases that are quoted with their names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.contract import redact
from stoker.contract.names import Refusal
from stoker.training.data import show, unpack
from stoker.training.data.rows import rows
from stoker.training.tokenizer.tokenizer import bytes_tokenizer

MIXED, LETTERS, DIGITS, PHRASE = (
    "Qw7xR2pLm9" + "Kd4TzVb8Ns",
    "zqwv" + "kjxhpf",
    "8315" + "640927",
    "correct horse " + "battery",
)
MESSAGES = ("{}", "ValueError: bad settings: {}", "  pydantic.Error: {}", "\x1b[31m{}\x1b[0m")
WRITTEN = (
    "passwords:\n  db: {}\nz: 1\n", "db_password:\n- {}\n- x\nz: 1\n", "db_password:\n    {}\nz: 1\n", "db_password =\n    {}\n",
    "passwords: {{db: {}, user: me}}",
)  # fmt: skip


def ways(text: str) -> tuple[str, ...]:
    return (text, repr(text), json.dumps(text), f"RuntimeError({text!r})", repr(text.encode()))


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("value", [MIXED, LETTERS, DIGITS])
def test_a_message_may_stand_before_the_name(message: str, written: str, value: str) -> None:
    """`ValueError: bad settings: passwords:` above the entries left all of them as they were."""
    for text in ways(message.format(written.format(value))):
        shown = redact.whole(text)
        assert value not in shown and redact.HIDDEN in shown, (text, shown)


@pytest.mark.parametrize(
    "written",
    [
        *WRITTEN[:-1], "env:\n- name: DB_PASSWORD\n  value: {}\n", "['deploy', '--password={}', '-x']", 'docker run -e "DB_PASSWORD={}" img',
        "Command '['deploy', '--password={}']' timed out",
    ],
)  # fmt: skip
def test_a_phrase_is_hidden_to_its_end(written: str) -> None:
    """Its first word was."""
    for text in ways(written.format(PHRASE)):
        assert "battery" not in redact.whole(text), redact.whole(text)


def test_a_tuple_in_a_repr() -> None:
    shown = redact.whole(repr(repr({"HF_TOKEN": (f'ab"{MIXED}',)})))
    assert MIXED not in shown, shown


@pytest.mark.parametrize(
    "text",
    [
        "the next token:\n    continue\n", "wrong password:\n    File \"x.py\", line 3\n", "for each token:\n  emit\n", "token = \\\n    draw(logits)\n",
        "ValueError: no password:\n  user: me\n", "def f(token:\n    int):\n", "missing secret:\n  - \n", "'token=abc is no number'",
        "Error: token:\n  at foo (x.js:1:2)\n", "ValueError: HF_TOKEN:\nTraceback (most recent call last):\n",
    ],
)  # fmt: skip
def test_what_is_no_value_stays(text: str) -> None:
    assert redact.whole(text) == text


def test_a_name_that_stands_deep() -> None:
    for deep in (39, 40, 41, 79, 81, 199, 201, 500):
        shown = redact.whole(f"{' ' * deep}password:\n{' ' * (deep + 2)}{MIXED}\n{' ' * deep}passwords =\n- x\n")
        assert MIXED not in shown or deep > 78, shown


def test_lists_that_share_their_items_unfold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short text counted as its one character: half a megabyte took 45 s."""
    arrow = pytest.importorskip("pyarrow")
    view = getattr(arrow, "ListViewArray", None)
    if view is None:
        pytest.skip("this pyarrow has no list views")
    begins, sizes = arrow.array([0] * 200, arrow.int32()), arrow.array([1000] * 200, arrow.int32())
    table = arrow.table({"text": view.from_arrays(begins, sizes, arrow.array(["y"] * 1000))})
    path = tmp_path / "shared.arrow"
    with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    monkeypatch.setattr(unpack, "ALWAYS", 1 << 20)
    monkeypatch.setattr(unpack, "MOST_TIMES", 1)
    with pytest.raises(Refusal, match="unpacks to more than"):
        list(rows(str(path)))


def test_rows_of_no_known_format_are_not_read_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "HOPELESS_AFTER_ALL", 10)
    path = tmp_path / "empty.jsonl"
    path.write_text("{}\n" * 20 + "nonsense\n")
    with pytest.raises(Refusal, match="no known format"):
        show.show(str(path), show.Ask(bytes_tokenizer(), 64), lambda line: None)
