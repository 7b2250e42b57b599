"""`stoker export MODEL OUT [--stage NAME] [--merge] [--gguf]`: writes a model as a folder that transformers loads."""

from __future__ import annotations

import os

from stoker.contract import layout
from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.options import OptionParser
from stoker.contract.terminal import print_status

_DESCRIPTION = "Writes a model as a folder that `transformers` loads: weights, tokenizer, chat template, end tokens."
_EPILOG = """examples:
  stoker export runs/latest my-model                  a run's model, with its tokenizer and a chat template
  stoker export runs/speedrun-cpu my-model --stage sft
  stoker export runs/latest/checkpoints/step-00000500 my-model --dtype bf16
  stoker export runs/latest my-model --merge          the complete model, with an adapter merged into its weights
  stoker export runs/latest my-model.gguf --gguf

The folder loads in transformers: AutoModelForCausalLM.from_pretrained("my-model"), and apply_chat_template writes what the model was trained on.
A model that was loaded from elsewhere keeps its context length, end tokens, generation settings, precision and tokenizer files."""


def build_parser() -> OptionParser:
    parser = OptionParser("stoker export", _DESCRIPTION, _EPILOG, usage="stoker export MODEL OUT [options]")
    model = "a folder with weights, a run (path, id, name or latest), a speedrun's folder, or a checkpoint"
    parser.option("model", "MODEL", model)
    out = "the folder to write, or the file with --gguf; must not exist, unless with --force"
    parser.option("out", "OUT", out)
    parser.option("--stage", "NAME", "which stage of a speedrun")
    dtype = "dtype of the weights (default: bf16 with --merge or if they were loaded in 16 bits, else fp32)"
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help=dtype)
    parser.switch("--merge", "merge an adapter into the weights it was trained on, and write the complete model")
    parser.switch("--gguf", "OUT is one GGUF file, not a folder; needs the package gguf")
    parser.switch("--force", "replace an earlier export at OUT; other files are never replaced")
    parser.option("--tokenizer", "DIR", "the tokenizer's folder, if the model's folder has none")
    parser.switch("--trust-remote-code", "run Python code of the folder that a checkpoint's model was loaded from")
    parser.runs_dir()
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    from stoker.training.generate.finding import find

    model = find(args.model, args.stage, layout.runs_root(args.runs_dir, os.environ), print_status, checkpoints=True)
    if not model.checkpoint:
        from stoker.training.model import hf_config, hf_files

        hf_files.check(model.folder, hf_config.shape_of(model.folder))
    if args.gguf:
        if model.checkpoint:
            line = f"{model.folder} is a checkpoint; export it to a folder first, then export that folder with --gguf"
            raise Refusal(line, EX_USAGE)
        from stoker.training.generate.gguf_file import write

        write(model.folder, args.out, args.dtype, args.tokenizer, print_status, args.force)
        return 0
    # Import this only after all checks: it imports torch, which takes seconds.
    from stoker.training.generate.exporting import export

    export(model, args.out, args.dtype, args.tokenizer, print_status, args.trust_remote_code, args.merge, args.force)
    return 0
