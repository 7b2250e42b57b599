"""All formats, in the order in which a row is compared with them. One entry makes a format known everywhere."""

from __future__ import annotations

from stoker.training.data.formats import conversations, preferences, questions
from stoker.training.data.formats.format import Format, Row

AUTO, TEXT = "auto", "text"
FORMATS: dict[str, Format] = {
    made.name: made for made in (*conversations.FORMATS, *preferences.FORMATS, *questions.FORMATS)
}
NAMES = (AUTO, TEXT, *FORMATS)


def recognise(row: Row, pairs: bool = False) -> Format | None:
    """The format of a row that is to be a conversation, or with `pairs` a preference pair."""
    for made in FORMATS.values():
        if (made.preference if pairs else made.conversation) is not None and made.recognises(row):
            return made
    return None


def recognise_any(row: Row) -> Format | None:
    """What a row is before anybody says what it is for: a pair where it can be one, else a conversation or a question."""
    return recognise(row, pairs=True) or recognise(row)


def known(pairs: bool = False) -> str:
    return ", ".join(
        made.name for made in FORMATS.values() if (made.preference if pairs else made.conversation) is not None
    )
