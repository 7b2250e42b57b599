"""What the twentieth review found: secrets on the lines below a name within a message, and phrases that are quoted with their names."""

from __future__ import annotations

import json

import pytest

from stoker.contract import redact

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
