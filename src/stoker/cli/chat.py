"""`stoker chat [MODEL] [--prompt TEXT]`: talks to a model in the terminal."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from types import FrameType

from stoker.contract import layout
from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.options import OptionParser
from stoker.contract.terminal import print_completion, print_status

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.training.generate.conversation import Conversation

_MODEL = (
    "a folder with weights, a run (path, id, name or latest), a speedrun's folder, or a hub id (default: the newest run or speedrun"
    " that has a model)"
)
_STAGE = "the stage whose model to use: base, midtrain, sft, grpo-density … (default: the last one of the chain)"
_TOP_P = "sample only from the most likely tokens that together have this probability"
_CONTEXT = "tokens of a conversation (default: what the model was trained for, up to 4096)"
_BITS = "bits per weight; 4: NF4, a quarter of the memory (default: 16, or 4 if 16 don't fit on the GPU)"
_EPILOG = """examples:
  stoker chat                                      the newest run or speedrun that has a model; of a speedrun, its last stage
  stoker chat runs/speedrun-cpu --stage sft
  stoker chat my-model --prompt "What is 2 + 3?" --temperature 0
  stoker chat runs/latest --raw --prompt "Once upon a time"      a base model continues the text

Ctrl-C stops an answer; at the prompt Ctrl-C or Ctrl-D exits."""
_HELP = "/new starts a new conversation, /quit or Ctrl-D exits, Ctrl-C stops an answer; `stoker chat --help` lists the options"


def build_parser() -> OptionParser:
    usage = "stoker chat [MODEL] [options]"
    parser = OptionParser("stoker chat", "Talks to a model in the terminal.", _EPILOG, usage=usage)
    parser.option("model", "MODEL", _MODEL, nargs="?")
    parser.option("--stage", "NAME", _STAGE)
    parser.option("--prompt", "TEXT", "print one answer on stdout, and nothing else")
    parser.option("--system", "TEXT", "system message before the conversation", default="")
    parser.switch("--raw", "the model continues what you type, without roles or history, as base models do")
    parser.option("--temperature", "T", "0: greedy, always the most likely token (default: 0.7)", float, default=0.7)
    parser.option("--top-p", "P", _TOP_P, float, default=1.0)
    parser.option("--max-tokens", "N", "maximum tokens of an answer (default: 256)", int, default=256)
    parser.option("--context", "N", _CONTEXT, int, default=0)
    parser.option("--seed", "N", "the same seed gives the same answers (default: a different one each time)", int)
    device = "where to run the model (default: a GPU if there is one)"
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=device)
    parser.add_argument("--bits", choices=("auto", "16", "4"), default="auto", help=_BITS)
    parser.switch("--trust-remote-code", "run Python code that comes with the model's folder")
    parser.runs_dir()
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    if args.max_tokens < 1:
        raise Refusal(f"--max-tokens must be at least 1, got {args.max_tokens}", EX_USAGE)
    if args.raw and args.system:
        raise Refusal("--raw can't be combined with --system; put the text of --system into the prompt", EX_USAGE)
    from stoker.training.generate.finding import find
    from stoker.training.model import hf_config, hf_files
    from stoker.training.model.config import ModelConfig

    model = find(args.model, args.stage, layout.runs_root(args.runs_dir, os.environ), print_status)
    shape = hf_config.shape_for(ModelConfig(trust_remote_code=args.trust_remote_code), model.folder)
    if shape.engine != "transformers":
        hf_files.check(model.folder, shape)
    conversation = _open_conversation(args, model.folder)
    if args.prompt is not None:
        _print_answer(conversation, args.prompt)
        return 0
    return _converse(conversation)


def _open_conversation(args: argparse.Namespace, folder: str) -> Conversation:
    # Import these only once the model is known: they import torch, which takes seconds.
    from stoker.training.generate.bits import coded
    from stoker.training.generate.config import checked
    from stoker.training.generate.conversation import Conversation, Manner, context_of, device_of, opened
    from stoker.training.model.ready import parameters
    from stoker.training.serve.batch import BatchEngine

    checked(args.temperature, 0, args.top_p)
    trust = args.trust_remote_code
    device, context = device_of(args.device), context_of(folder, args.context, trust)
    model, tokenizer = opened(folder, context, device, print_status, trust, args.bits)
    manner = Manner(args.temperature, args.top_p, args.max_tokens, args.raw)
    seed = args.seed if args.seed is not None else time.time_ns()
    in_4_bits = coded(model)
    engine = BatchEngine(model, rows=1, length=context, vocab=tokenizer.vocab_size, codes=in_4_bits)
    conversation = Conversation(engine, tokenizer, manner, args.system, seed, print_status)
    size = f"{parameters(model) / 1e6:,.1f} M parameters{' in 4 bits' if in_4_bits else ''}"
    print_status(f"{folder}: {size}, {context} tokens of context, on {device.type}")
    return conversation


def _converse(conversation: Conversation) -> int:
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  gives input() line editing and history

        print_status("Ctrl-C stops an answer, Ctrl-D exits, /help lists the commands")
    while True:
        try:
            text = input("> " if interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            if interactive:
                print()
            return 0
        if not text:
            continue
        if text in ("/quit", "/exit"):
            return 0
        if re.fullmatch(r"/[a-z?]+", text):
            _run_slash_command(conversation, text)
            continue
        try:
            _print_answer(conversation, text, is_stoppable=True)
        except Refusal as refusal:
            print_status(refusal.line)


def _run_slash_command(conversation: Conversation, command: str) -> None:
    if command == "/new":
        conversation.forget()
        print_status("new conversation; the system prompt stays")
        return
    if command not in ("/help", "/?"):
        print_status(f"unknown command {command}")
    print_status(_HELP)


def _print_answer(conversation: Conversation, text: str, is_stoppable: bool = False) -> None:
    """Print the answer to a text while it is generated.

    If `is_stoppable`, the first Ctrl-C ends the answer after its next token, and the second one exits the program.
    """
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if stopped:
            raise KeyboardInterrupt
        stopped = True

    previous_handler = signal.signal(signal.SIGINT, stop) if is_stoppable else None
    pieces, is_empty = conversation.answer(text), True
    try:
        for piece in pieces:
            print_completion(piece)
            is_empty = is_empty and not piece.strip()
            if stopped:
                break
    finally:
        pieces.close()  # the conversation keeps what was generated so far as the answer
        if previous_handler is not None:
            signal.signal(signal.SIGINT, previous_handler)
    print(flush=True)
    if is_empty and not stopped:
        print_status("(empty answer)")  # on stderr: stdout may be a file of answers
