"""stoker export [MODEL] OUT [--stage NAME] [--dtype bf16|fp32] [--tokenizer DIR]"""

from __future__ import annotations

import argparse
import os
import sys

from stoker.contract import layout
from stoker.contract.settings import Parser

_EPILOG = """examples:
  stoker export runs/latest my-model                  a run's model, with its tokenizer and a chat template
  stoker export runs/speedrun-cpu my-model --stage sft
  stoker export runs/latest/checkpoints/step-00000500 my-model --dtype bf16

The folder opens in transformers: AutoModelForCausalLM.from_pretrained("my-model"), and apply_chat_template writes what the model was trained on.
Of a model that was loaded from elsewhere, context length, end tokens, generation settings, precision and tokenizer files stay as they were."""


def parser() -> Parser:
    made = Parser(
        prog="stoker export",
        usage="stoker export MODEL OUT [options]",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "Writes a model as a folder that `transformers` opens: weights, tokenizer, chat template, the tokens that"
            " end an answer, and a model card with data, settings and loss."
        ),
    )
    made.add_argument(
        "model",
        metavar="MODEL",
        help="a folder with weights, a run (path, id or name), a speedrun's folder, or a checkpoint",
    )
    made.add_argument("out", metavar="OUT", help="the folder to write; an earlier export there is replaced")
    made.add_argument("--stage", metavar="NAME", help="which stage of a speedrun")
    made.add_argument(
        "--dtype",
        choices=("bf16", "fp32"),
        help="of the weights (default: bf16 where they were loaded as 16 bits, else fp32)",
    )
    made.add_argument("--tokenizer", metavar="DIR", help="its folder, where the model has none beside it")
    made.add_argument(
        "--runs-dir", metavar="DIR", help="folder of the run directories (default: $STOKER_RUNS, else ./runs)"
    )
    return made


def main(argv: list[str]) -> int:
    told = parser().parse_args(argv)
    from stoker.training.generate.finding import find

    found = find(told.model, told.stage, layout.runs_root(told.runs_dir, os.environ), _say, checkpoints=True)
    if not found.checkpoint:
        from stoker.training.model import hf_config, hf_files

        hf_files.check(found.folder, hf_config.shape_of(found.folder))
    from stoker.training.generate.exporting import export  # torch: seconds, and only once it is known what to do

    export(found, told.out, told.dtype, told.tokenizer, _say)
    return 0


def _say(line: str) -> None:
    print(f"stoker: {line}", file=sys.stderr, flush=True)
