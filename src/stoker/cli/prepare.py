"""stoker prepare [--config F] [--preset P] [--data PATH ...] [--data.context_length N ...] [--verify] [--json]"""

from __future__ import annotations

import os
import time

from stoker.cli.sight import gpus_to_use, look
from stoker.contract.frozen import as_json
from stoker.contract.options import OptionParser, build_options, options_from_mapping
from stoker.contract.terminal import print_json, print_status
from stoker.contract.units import plural
from stoker.control.plan.options import RunOptions, from_torchrun_environment, ranks_asked
from stoker.training.config.check import check
from stoker.training.config.flags import add_key_flags
from stoker.training.config.layers import Layers, gather
from stoker.training.config.resolve import settle
from stoker.training.data.sources import FORMS
from stoker.training.data.unpack import PACKED

_HELP = f"""Turns files of text or rows, folders and globs of these, or a hub id into shards of tokens, once; `stoker train` does it by itself.
From a folder, and the folders in it, files ending in {" ".join(FORMS)} are read, compressed or not
({" ".join(PACKED)}). `stoker data show PATH` shows what training would make of a file.
Data with the same content and tokenizer is found in cache/datasets/ and used again, whatever its name.
Without --preset the preset is the one that `stoker train` would take here: production with GPUs, small without."""
_EXAMPLES = """examples:
  stoker prepare --data book.txt --tokenizer.path bytes --data.validation 0.1
  stoker prepare --data 'web/*.jsonl' --data.text_key content
  stoker prepare --data chats.jsonl --data.kind chat --data.context_length 2048
  stoker prepare --data 'web/*.jsonl' --preset production        # here without GPUs, for a machine that has some
"""


def parser() -> OptionParser:
    made = OptionParser("stoker prepare", _HELP, _EXAMPLES, usage="stoker prepare [options]", allow_abbrev=False)
    made.switch(
        "--verify", "compare every shard with its checksum, even if nothing changed; a damaged one is made again"
    )
    made.switch("--json", "what was made, as JSON")
    add_key_flags(made)
    return made


def main(argv: list[str]) -> int:
    reader = parser()
    told, extra = reader.parse_known_args(argv)
    if extra:
        reader.unknown(extra)
    from stoker.training.data.prepare import prepare

    as_data, verify = told.json, told.verify
    layers = gather(getattr(told, "keys", ()), os.environ)
    resolved = settle(layers, _for_gpus(layers))
    check(resolved.config, resolved.given)
    print_status(resolved.lines[0])
    began = time.monotonic()
    made = prepare(resolved.config.data, resolved.config.tokenizer, print_status, verify)
    seconds = time.monotonic() - began
    if as_data:
        print_json({"schema": 1, **as_json(made), "call_seconds": round(seconds, 3)})
        return 0
    documents = made.train_documents + made.validation_documents
    tokens, size = made.train_tokens + made.validation_tokens, made.train_bytes + made.validation_bytes
    how = f"found in {seconds:.2f} s, made before in {made.seconds:.1f} s"
    if made.fresh:
        how = f"made in {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s"
    print(
        f"{plural(tokens, 'token')} of {plural(documents, 'conversation' if made.kind == 'chat' else 'document')}, {how}"
    )
    held = f"{made.validation_tokens:,} held out ({plural(made.validation_bytes, 'byte')})"
    held = held if made.validation_tokens else "nothing held out"
    density = f"; {size / max(tokens, 1):.2f} bytes/token" if made.kind == "stream" else ""
    print(f"  train {made.train_tokens:,} ({plural(made.train_bytes, 'byte')}), {held}{density}")
    if made.kind == "chat":
        left = f"{made.cut:,} cut, {made.dropped:,} with nothing to learn"
        print(
            f"  {plural(made.train_samples or 0, 'row')} of {made.context}, {100 * (made.fill or 0):.1f} % full; {left}"
        )
    print(f"  vocabulary {made.vocab_size:,}, {made.shards} shard(s): {made.folder}")
    return 0


def _for_gpus(layers: Layers) -> bool:
    """As `stoker train` would find it here; a config that says cuda may be prepared where there are no GPUs."""
    device = layers.told("parallel.device")
    if device is not None and device[0] == "cuda":
        return True
    section = options_from_mapping(RunOptions, layers.run, f"config file {layers.path}: run")
    options = build_options(RunOptions, section, from_torchrun_environment(os.environ))
    return gpus_to_use(look(), ranks_asked(options.nproc_per_node, os.environ))
