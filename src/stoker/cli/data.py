"""stoker data show PATH... [--tokenizer PATH] [--format NAME] [--context-length N] [--rows N] [--json]"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.frozen import as_json
from stoker.contract.options import OptionParser, suggest
from stoker.contract.terminal import print_highlighted, print_json, print_status, print_text
from stoker.contract.units import plural

if TYPE_CHECKING:
    from stoker.training.data.show import Shown

_ACTIONS = ("show",)
_ABOUT = (
    "What training would make of a file: its format, its tokens, samples with the learned tokens marked, and which rows"
    " would be left out and why. Writes nothing."
)
_EXAMPLES = """examples:
  stoker data show chats.jsonl --tokenizer ./model
  stoker data show ultrafeedback.jsonl.gz --context-length 2048
  stoker data show rows.csv --format alpaca --json"""


def parser() -> OptionParser:
    made = OptionParser(prog="stoker data")
    made.add_argument("action", choices=_ACTIONS)
    made.take_over(show_parser())
    return made


def show_parser() -> OptionParser:
    from stoker.training.data.formats.table import AUTO, NAMES

    made = OptionParser("stoker data show", _ABOUT, _EXAMPLES, allow_abbrev=False)
    made.option("path", "PATH", "files, folders or globs, compressed or not, or a hub id", nargs="+")
    tokenizer = "a folder with tokenizer.json, or a hub id (default: bytes, a token each)"
    made.option("--tokenizer", "PATH", tokenizer, default="bytes")
    formats = f"format of the rows: {', '.join(NAMES[1:])} (default: recognized)"
    made.add_argument("--format", default=AUTO, choices=NAMES, metavar="FORMAT", help=formats)
    made.option("--text-key", "NAME", "the field that holds a plain text", default="text")
    made.option("--context-length", "N", "tokens per sample (default: 1024)", int, default=1024)
    made.option("--rows", "N", "read only the first N rows of each file", int, default=0)
    made.option("--cache", "DIR", "where to keep rows of a hub id", default="cache")
    made.switch("--json", "everything as JSON")
    return made


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(show_parser().format_help(), end="")
        return 0 if argv else EX_USAGE
    if argv[0] not in _ACTIONS:
        raise Refusal(f"no `stoker data {argv[0]}`{suggest(argv[0], _ACTIONS)}; there is {_ACTIONS[0]}", EX_USAGE)
    given = show_parser().parse_args(argv[1:])
    if given.context_length < 2 or given.rows < 0:
        raise Refusal("--context-length is at least 2, and --rows at least 0", EX_USAGE)
    from stoker.training.data.show import Ask, show
    from stoker.training.data.sources import files_of
    from stoker.training.tokenizer.tokenizer import load

    ask = Ask(load(given.tokenizer), given.context_length, given.format, given.text_key, given.rows)
    files = []
    for path in files_of(given.path, given.cache, print_status):
        shown = show(path, ask, print_status)
        files.append(shown)
        if not given.json:
            _print(shown, given.tokenizer, given.context_length)
    if given.json:
        print_json({"schema": 1, "tokenizer": given.tokenizer, "context_length": given.context_length,
                         "files": [as_json(shown) for shown in files]})  # fmt: skip
    return 0


def _print(shown: Shown, tokenizer: str, context: int) -> None:
    from stoker.training.data.reasons import words

    print_text(f"{shown.file}: format {shown.format} ({shown.about}), {plural(shown.rows, 'row')}")
    left = shown.rows - shown.used
    share = f", {shown.learned:,} of them learned" if shown.view != "texts" else ""
    print_text(
        f"  {plural(shown.used, shown.view.removesuffix('s'))} used, {plural(shown.tokens, 'token')}{share} (tokenizer {tokenizer})"
    )
    if shown.long:
        print_text(f"  {shown.long:,} are longer than the context length {context} and are cut")
    print(f"  {left:,} row{'' if left == 1 else 's'} left out" + (":" if left else ""))
    for reason in shown.dropped:
        print_text(f"    {words(reason)}")
    if shown.refused:
        print_text(f"  training refuses this file: {shown.refused}")
    for sample in shown.samples:
        print(f"\n--- row {sample.row}{f', {sample.what}' if sample.what else ''}")
        print_highlighted([*sample.pieces, *([(" …", False)] if sample.cut else [])])
    if shown.samples:
        print()
