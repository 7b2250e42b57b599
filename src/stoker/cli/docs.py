"""stoker docs [TOPIC]"""

from __future__ import annotations

import os

from stoker.contract.errors import EX_NOINPUT, EX_UNAVAILABLE, Refusal
from stoker.contract.options import OptionParser, suggest

# In a checkout a link to docs/; in an installed package the pages themselves.
FOLDER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "docs")


def parser() -> OptionParser:
    made = OptionParser("stoker docs", "Shows the documentation of this version, or lists its topics.")
    made.option("topic", "TOPIC", "the page to show (default: list them)", nargs="?")
    return made


def topics() -> dict[str, str]:
    """Topic -> its page."""
    if not os.path.isdir(FOLDER):
        raise Refusal(f"no documentation at {FOLDER}; install Stoker again", EX_UNAVAILABLE)
    pages = sorted(name for name in os.listdir(FOLDER) if name.endswith((".md", ".yaml")))
    return {os.path.splitext(name)[0]: os.path.join(FOLDER, name) for name in pages}


def main(argv: list[str]) -> int:
    topic, pages = parser().parse_args(argv).topic, topics()
    if topic is None:
        width = max(map(len, pages))
        for name, page in pages.items():
            with open(page, encoding="utf-8") as text:
                print(f"{name:<{width}}  {text.readline().lstrip('# ').rstrip()}")
        print("\n`stoker docs TOPIC` shows one.")
        return 0
    if topic not in pages:  # README.md and the pages themselves link to docs/launching.md
        topic = os.path.splitext(os.path.basename(topic))[0]
    if topic not in pages:
        raise Refusal(f"no topic {topic!r}{suggest(topic, pages)}; `stoker docs` lists them", EX_NOINPUT)
    with open(pages[topic], encoding="utf-8") as text:
        print(text.read(), end="")
    return 0
