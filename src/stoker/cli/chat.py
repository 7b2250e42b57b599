"""stoker chat [MODEL] [--stage NAME] [--prompt TEXT] [--temperature T] [--max-tokens N] [--system TEXT] [--raw]"""

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
_STAGE = "which stage's model: base, midtrain, sft, grpo-density … (default: the last one of the chain)"
_TOP_P = "sample only from the most likely tokens that together have this probability"
_CONTEXT = "tokens of a conversation (default: what the model was trained for, up to 4096)"
_BITS = "bits per weight; 4: NF4, a quarter of the memory (default: 16, or 4 if 16 don't fit on the GPU)"
_EPILOG = """examples:
  stoker chat                                      the newest run or speedrun that has a model; of a speedrun, its last stage
  stoker chat runs/speedrun-cpu --stage sft
  stoker chat my-model --prompt "What is 2 + 3?" --temperature 0
  stoker chat runs/latest --raw --prompt "Once upon a time"      a base model continues the text

Ctrl-C stops an answer; at the prompt Ctrl-C or Ctrl-D leaves."""


def parser() -> OptionParser:
    made = OptionParser(
        "stoker chat", "Talks to a model in the terminal.", _EPILOG, usage="stoker chat [MODEL] [options]"
    )
    made.option("model", "MODEL", _MODEL, nargs="?")
    made.option("--stage", "NAME", _STAGE)
    made.option("--prompt", "TEXT", "print one answer on stdout, and nothing else")
    made.option("--system", "TEXT", "system message before the conversation", default="")
    made.switch("--raw", "no roles, no memory: the model continues what you type, as base models do")
    made.option("--temperature", "T", "0: greedy, always the most likely token (default: 0.7)", float, default=0.7)
    made.option("--top-p", "P", _TOP_P, float, default=1.0)
    made.option("--max-tokens", "N", "an answer has at most this many tokens (default: 256)", int, default=256)
    made.option("--context", "N", _CONTEXT, int, default=0)
    made.option("--seed", "N", "the same seed gives the same answers (default: another one each time)", int)
    devices = ("auto", "cpu", "cuda")
    made.add_argument("--device", choices=devices, default="auto", help="(default: a GPU where there is one)")
    made.add_argument("--bits", choices=("auto", "16", "4"), default="auto", help=_BITS)
    made.switch("--trust-remote-code", "run Python code that comes with the model's folder")
    made.runs_dir()
    return made


def main(argv: list[str]) -> int:
    told = parser().parse_args(argv)
    if told.max_tokens < 1:
        raise Refusal(f"--max-tokens {told.max_tokens} is too small: at least 1", EX_USAGE)
    if told.raw and told.system:
        raise Refusal("--raw has no roles: leave --system out, or put its text into the prompt", EX_USAGE)
    from stoker.training.generate.finding import find
    from stoker.training.model import hf_config, hf_files
    from stoker.training.model.config import ModelConfig

    found = find(told.model, told.stage, layout.runs_root(told.runs_dir, os.environ), print_status)
    shape = hf_config.shape_for(ModelConfig(trust_remote_code=told.trust_remote_code), found.folder)
    if shape.engine != "transformers":
        hf_files.check(found.folder, shape)
    talk = _opened(told, found.folder)
    if told.prompt is not None:
        _answer(talk, told.prompt)
        return 0
    return _converse(talk)


def _opened(told: argparse.Namespace, folder: str) -> Conversation:
    # torch: seconds, so only once there is a model
    from stoker.training.generate.bits import coded
    from stoker.training.generate.config import checked
    from stoker.training.generate.conversation import Conversation, Manner, context_of, device_of, opened
    from stoker.training.model.ready import parameters
    from stoker.training.serve.batch import BatchEngine

    checked(told.temperature, 0, told.top_p)
    trust = told.trust_remote_code
    device, context = device_of(told.device), context_of(folder, told.context, trust)
    model, words = opened(folder, context, device, print_status, trust, told.bits)
    manner = Manner(told.temperature, told.top_p, told.max_tokens, told.raw)
    seed = told.seed if told.seed is not None else time.time_ns()
    in_codes = coded(model)
    engine = BatchEngine(model, rows=1, length=context, vocab=words.vocab_size, codes=in_codes)
    talk = Conversation(engine, words, manner, told.system, seed, print_status)
    in_4_bits = " in 4 bits" if in_codes else ""
    size = parameters(model)
    print_status(f"{folder}: {size / 1e6:,.1f} M parameters{in_4_bits}, {context} tokens of context, on {device.type}")
    return talk


def _converse(talk: Conversation) -> int:
    watched = sys.stdin.isatty()
    if watched:
        import readline  # noqa: F401  input() edits lines and remembers them

        print_status("Ctrl-C stops an answer, Ctrl-D leaves; /help")
    while True:
        try:
            text = input("> " if watched else "").strip()
        except (EOFError, KeyboardInterrupt):
            if watched:
                print()
            return 0
        if not text:
            continue
        if text in ("/quit", "/exit"):
            return 0
        if re.fullmatch(r"/[a-z?]+", text):
            _obey(talk, text)
            continue
        try:
            _answer(talk, text, stoppable=True)
        except Refusal as refusal:
            print_status(refusal.line)


def _obey(talk: Conversation, word: str) -> None:
    if word == "/new":
        talk.forget()
        print_status("new conversation; the system prompt stays")
        return
    if word not in ("/help", "/?"):
        print_status(f"no command {word}")
    print_status(
        "/new starts a new conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer; `stoker chat --help` has the options"
    )


def _answer(talk: Conversation, text: str, stoppable: bool = False) -> None:
    """Printed as it comes. The first Ctrl-C ends the answer after its next token, a second one the program."""
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if stopped:
            raise KeyboardInterrupt
        stopped = True

    before = signal.signal(signal.SIGINT, stop) if stoppable else None
    pieces, empty = talk.answer(text), True
    try:
        for piece in pieces:
            print_completion(piece)
            empty = empty and not piece.strip()
            if stopped:
                break
    finally:
        pieces.close()  # what was said so far becomes the answer
        if before is not None:
            signal.signal(signal.SIGINT, before)
    print(flush=True)
    if empty and not stopped:
        print_status("(empty answer)")  # not into a file that takes the answers
