"""`stoker data show PATH...` shows what training reads from files; `stoker prepare` turns data into shards of tokens."""

from __future__ import annotations

import os
import time

from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.frozen import as_json
from stoker.contract.options import OptionParser, build_options, options_from_mapping, suggest
from stoker.contract.terminal import print_highlighted, print_json, print_status, print_text
from stoker.contract.units import plural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.training.config.layers import Layers
    from stoker.training.data.shards import Prepared
    from stoker.training.data.show import Shown

_ACTIONS = ("show",)
_SHOW_DESCRIPTION = (
    "Shows what training would read from files: the format, the number of tokens, samples with the trained tokens marked, and"
    " the rows that would be dropped and why. Writes nothing."
)
_SHOW_EXAMPLES = """examples:
  stoker data show chats.jsonl --tokenizer ./model
  stoker data show ultrafeedback.jsonl.gz --context-length 2048
  stoker data show rows.csv --format alpaca --json"""


def build_parser() -> OptionParser:
    """Build the parser of `stoker data`, for completion and docs/cli.md."""
    parser = OptionParser(prog="stoker data")
    parser.add_argument("action", choices=_ACTIONS)
    parser.take_over(build_show_parser())
    return parser


def build_show_parser() -> OptionParser:
    from stoker.training.data.formats.table import AUTO, NAMES

    parser = OptionParser("stoker data show", _SHOW_DESCRIPTION, _SHOW_EXAMPLES, allow_abbrev=False)
    parser.option("path", "PATH", "files, folders or globs, compressed or not, or a hub id", nargs="+")
    tokenizer = "a folder with tokenizer.json, or a hub id (default: bytes, one token per byte)"
    parser.option("--tokenizer", "PATH", tokenizer, default="bytes")
    formats = f"format of the rows: {', '.join(NAMES[1:])} (default: detected)"
    parser.add_argument("--format", default=AUTO, choices=NAMES, metavar="FORMAT", help=formats)
    parser.option("--text-key", "NAME", "the field that holds plain text", default="text")
    parser.option("--context-length", "N", "tokens per sample (default: 1024)", int, default=1024)
    parser.option("--rows", "N", "read only the first N rows of each file", int, default=0)
    parser.option("--cache", "DIR", "the folder for the rows of a hub id", default="cache")
    parser.switch("--json", "print everything as JSON")
    return parser


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(build_show_parser().format_help(), end="")
        return 0 if argv else EX_USAGE
    if argv[0] not in _ACTIONS:
        near = suggest(argv[0], _ACTIONS)
        raise Refusal(f"unknown command `stoker data {argv[0]}`{near}; use `stoker data {_ACTIONS[0]}`", EX_USAGE)
    args = build_show_parser().parse_args(argv[1:])
    if args.context_length < 2 or args.rows < 0:
        raise Refusal("--context-length must be at least 2, and --rows at least 0", EX_USAGE)
    from stoker.training.data.show import Ask, show
    from stoker.training.data.sources import files_of
    from stoker.training.tokenizer.tokenizer import load

    ask = Ask(load(args.tokenizer), args.context_length, args.format, args.text_key, args.rows)
    files = []
    for path in files_of(args.path, args.cache, print_status):
        shown = show(path, ask, print_status)
        files.append(shown)
        if not args.json:
            _print_file(shown, args.tokenizer, args.context_length)
    if args.json:
        print_json(
            {
                "schema": 1,
                "tokenizer": args.tokenizer,
                "context_length": args.context_length,
                "files": [as_json(shown) for shown in files],
            }
        )
    return 0


def _print_file(shown: Shown, tokenizer: str, context: int) -> None:
    from stoker.training.data.reasons import words

    print_text(f"{shown.file}: format {shown.format} ({shown.about}), {plural(shown.rows, 'row')}")
    dropped = shown.rows - shown.used
    trained = f", {shown.learned:,} of them trained" if shown.view != "texts" else ""
    used = plural(shown.used, shown.view.removesuffix("s"))
    print_text(f"  {used} used, {plural(shown.tokens, 'token')}{trained} (tokenizer {tokenizer})")
    if shown.long:
        print_text(f"  {shown.long:,} longer than the context length {context}: truncated")
    print(f"  {plural(dropped, 'row')} dropped" + (":" if dropped else ""))
    for reason in shown.dropped:
        print_text(f"    {words(reason)}")
    if shown.refused:
        print_text(f"  training refuses this file: {shown.refused}")
    for sample in shown.samples:
        print(f"\n--- row {sample.row}{f', {sample.what}' if sample.what else ''}")
        print_highlighted([*sample.pieces, *([(" …", False)] if sample.cut else [])])
    if shown.samples:
        print()


_PREPARE_DESCRIPTION = """Turns text files, files of rows, folders, globs or a hub id into shards of tokens. `stoker train` does this, too, if it has not been done before.
From a folder, and the folders in it, files ending in {forms} are read, compressed or not
({packed}). `stoker data show PATH` shows what training would read from a file.
The shards are kept in cache/datasets/ and used again for data with the same content and tokenizer, whatever its name.
Without --preset the preset is the one that `stoker train` would use here: production with GPUs, small without."""
_PREPARE_EXAMPLES = """examples:
  stoker prepare --data book.txt --tokenizer.path bytes --data.validation 0.1
  stoker prepare --data 'web/*.jsonl' --data.text_key content
  stoker prepare --data chats.jsonl --data.kind chat --data.context_length 2048
  stoker prepare --data 'web/*.jsonl' --preset production        # prepares on this machine, for one with GPUs
"""


# Only `prepare` imports the configuration's modules, so that `stoker data show` starts faster.


def build_prepare_parser() -> OptionParser:
    from stoker.training.config.flags import add_key_flags
    from stoker.training.data.sources import FORMS
    from stoker.training.data.unpack import PACKED

    description = _PREPARE_DESCRIPTION.format(forms=" ".join(FORMS), packed=" ".join(PACKED))
    usage = "stoker prepare [options]"
    parser = OptionParser("stoker prepare", description, _PREPARE_EXAMPLES, usage=usage, allow_abbrev=False)
    parser.switch("--verify", "compare every shard with its checksum, even if nothing changed; rebuild damaged data")
    parser.switch("--json", "print what was prepared as JSON")
    add_key_flags(parser)
    return parser


def prepare_main(argv: list[str]) -> int:
    from stoker.training.config.check import check
    from stoker.training.config.layers import gather
    from stoker.training.config.resolve import settle

    parser = build_prepare_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.refuse_unknown(unknown)
    layers = gather(getattr(args, "keys", ()), os.environ)
    resolved = settle(layers, _is_for_gpus(layers))
    check(resolved.config, resolved.given)
    print_status(resolved.lines[0])
    from stoker.training.data.prepare import prepare  # this imports numpy

    start = time.monotonic()
    prepared = prepare(resolved.config.data, resolved.config.tokenizer, print_status, args.verify)
    seconds = time.monotonic() - start
    if args.json:
        print_json({"schema": 1, **as_json(prepared), "call_seconds": round(seconds, 3)})
    else:
        _print_prepared(prepared, seconds)
    return 0


def _print_prepared(prepared: Prepared, seconds: float) -> None:
    documents = prepared.train_documents + prepared.validation_documents
    tokens = prepared.train_tokens + prepared.validation_tokens
    size = prepared.train_bytes + prepared.validation_bytes
    if prepared.fresh:
        speed = f"prepared in {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s"
    else:
        speed = f"found in {seconds:.2f} s, prepared earlier in {prepared.seconds:.1f} s"
    unit = "conversation" if prepared.kind == "chat" else "document"
    print(f"{plural(tokens, 'token')} of {plural(documents, unit)}, {speed}")
    validation = "no validation data"
    if prepared.validation_tokens:
        validation = f"validation {prepared.validation_tokens:,} ({plural(prepared.validation_bytes, 'byte')})"
    density = f"; {size / max(tokens, 1):.2f} bytes/token" if prepared.kind == "stream" else ""
    print(f"  train {prepared.train_tokens:,} ({plural(prepared.train_bytes, 'byte')}), {validation}{density}")
    if prepared.kind == "chat":
        rows = f"{plural(prepared.train_samples or 0, 'row')} of {prepared.context} tokens"
        losses = f"{prepared.cut:,} truncated, {prepared.dropped:,} dropped (nothing to train on)"
        print(f"  {rows}, {100 * (prepared.fill or 0):.1f} % full; {losses}")
    print(f"  vocabulary {prepared.vocab_size:,}, {plural(prepared.shards, 'shard')}: {prepared.folder}")


def _is_for_gpus(layers: Layers) -> bool:
    """Return whether `stoker train` would use GPUs: this machine has usable ones, or the config sets the device to cuda."""
    from stoker.cli.machines import has_usable_gpus, observe_machine
    from stoker.control.plan.options import RunOptions, from_torchrun_environment, requested_ranks

    device = layers.told("parallel.device")
    if device is not None and device[0] == "cuda":
        return True
    section = options_from_mapping(RunOptions, layers.run, f"config file {layers.path}: run")
    options = build_options(RunOptions, section, from_torchrun_environment(os.environ))
    return has_usable_gpus(observe_machine(), requested_ranks(options.nproc_per_node, os.environ))
