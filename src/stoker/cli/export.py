"""stoker export [MODEL] OUT [--stage NAME] [--dtype bf16|fp32] [--merge] [--gguf] [--force] [--tokenizer DIR] [--trust-remote-code]"""

from __future__ import annotations

import os

from stoker.contract import layout
from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.options import OptionParser
from stoker.contract.terminal import print_status

_ABOUT = "Writes a model as a folder that `transformers` opens: weights, tokenizer, chat template, the tokens that end an answer."
_EPILOG = """examples:
  stoker export runs/latest my-model                  a run's model, with its tokenizer and a chat template
  stoker export runs/speedrun-cpu my-model --stage sft
  stoker export runs/latest/checkpoints/step-00000500 my-model --dtype bf16
  stoker export runs/latest my-model --merge          the whole model, with an adapter merged into its weights
  stoker export runs/latest my-model.gguf --gguf

The folder opens in transformers: AutoModelForCausalLM.from_pretrained("my-model"), and apply_chat_template writes what the model was trained on.
A model that was loaded from elsewhere keeps its context length, end tokens, generation settings, precision and tokenizer files."""


def parser() -> OptionParser:
    made = OptionParser("stoker export", _ABOUT, _EPILOG, usage="stoker export MODEL OUT [options]")
    made.option(
        "model",
        "MODEL",
        "a folder with weights, a run (path, id, name or latest), a speedrun's folder, or a checkpoint",
    )
    made.option("out", "OUT", "the folder to write, or with --gguf the file; what exists is refused, see --force")
    made.option("--stage", "NAME", "which stage of a speedrun")
    made.add_argument(
        "--dtype",
        choices=("bf16", "fp32"),
        help="dtype of the weights (default: bf16 with --merge or if they were loaded in 16 bits, else fp32)",
    )
    made.switch("--merge", "merge an adapter into the weights it was trained on, and write the whole model")
    made.switch("--gguf", "OUT is one GGUF file, not a folder; needs the package gguf")
    made.switch("--force", "replace an earlier export at OUT; other files are never replaced")
    made.option("--tokenizer", "DIR", "the tokenizer's folder, if the model's folder has none")
    made.switch("--trust-remote-code", "run Python code of the folder that a checkpoint's model was loaded from")
    made.runs_dir()
    return made


def main(argv: list[str]) -> int:
    told = parser().parse_args(argv)
    from stoker.training.generate.finding import find

    found = find(told.model, told.stage, layout.runs_root(told.runs_dir, os.environ), print_status, checkpoints=True)
    if not found.checkpoint:
        from stoker.training.model import hf_config, hf_files

        hf_files.check(found.folder, hf_config.shape_of(found.folder))
    if told.gguf:
        if found.checkpoint:
            line = f"{found.folder} is a checkpoint: export it to a folder first, then export that folder with --gguf"
            raise Refusal(line, EX_USAGE)
        from stoker.training.generate.gguf_file import write

        write(found.folder, told.out, told.dtype, told.tokenizer, print_status, told.force)
        return 0
    from stoker.training.generate.exporting import export  # torch: seconds, and only once it is known what to do

    export(found, told.out, told.dtype, told.tokenizer, print_status, told.trust_remote_code, told.merge, told.force)
    return 0
