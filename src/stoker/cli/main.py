"""`stoker COMMAND ...`. Imports only the command that is asked for: import time is launch time."""

from __future__ import annotations

import os
import sys

COMMANDS = {
    "run": "start a script on this machine's GPUs (or CPUs): torchrun's place, torchrun's flags",
    "train": "train a language model: checks, data, then a run of the stage's recipe",
    "fit": "how much GPU memory training a model takes, and the settings that fit; no GPU needed",
    "speedrun": "the whole chain, tokenizer to GRPO to report, in one command; goes on where it was",
    "prepare": "make data ready for training: tokenizer and token shards, once",
    "data": "show: what training would make of a file, and which rows it would leave out",
    "chat": "talk to a model in the terminal",
    "serve": "answer requests for a model over HTTP, as OpenAI's API does",
    "export": "write a model as a folder that transformers opens, with its chat template",
    "runs": "list the runs, with step, loss and speed",
    "plot": "draw the loss, or another metric, of one or several runs",
    "rollouts": "what a GRPO run answered: best, worst, and what changed",
    "compare": "two runs: settings that differ, results, and whether the difference is more than noise",
    "top": "hosts, GPUs, ranks and the run's loss, live in the terminal",
    "web": "the same as a page in the browser: runs, curves, ranks, GPUs, logs; or a run as one HTML file",
    "why": "how a run ended, and why",
    "logs": "what a rank printed",
    "nan": "what made the first NaN or Inf: look at a nan_step_N folder",
    "attach": "follow a run that is under way",
    "stop": "end a run",
    "detach": "let a run continue when its terminal closes",
    "clean": "free what dead runs left behind; shows first, acts with --yes",
    "ladder": "imports one by one, then 1, half and all ranks: where does a script begin to fail?",
    "burnin": "same-seed replicas on every GPU: which one computes something else, which is slow",
    "doctor": "what is wrong with this machine, and what to type",
    "cluster": "check: are these hosts fit to train together; init: write a hosts file by asking them",
    "submit": "write a Slurm job script for a run, submit it, follow it",
    "metrics": "serve runs, ranks, hosts and GPUs as Prometheus metrics",
    "docs": "show the documentation of this version",
    "completion": "print a completion script for bash, zsh or tcsh",
}

_HELP = """Stoker trains LLMs on whatever GPUs there are: one command starts only what can work, keeps it alive, and says why when it can't.

usage: stoker COMMAND [options]

{commands}

  stoker run train.py --lr 3e-4              one rank per GPU
  stoker run --nproc-per-node 2 train.py     two ranks
  stoker run --gpus any:2 --wait 10m train.py
  stoker train pretrain --data texts/        a language model, on GPUs or on the CPU
  stoker why                                 the last run's verdict

`stoker COMMAND --help` says more. Exit codes: the guilty rank's own, 128+n for a signal, 70 where that would be 0, 64-78 for a refusal.
"""


def main(argv: list[str] | None = None) -> int:
    from stoker.contract.terminal import own_lines

    with own_lines():
        return _main(argv)


def _main(argv: list[str] | None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help", "help"):
        print(_HELP.format(commands="\n".join(f"  {name:<11}{text}" for name, text in COMMANDS.items())), end="")
        return 0 if words else 64
    if words[0] in ("-V", "--version"):
        from stoker.cli import version

        print(version.line())
        return 0
    from stoker.contract.names import EX_DATAERR, EX_OSERR, EX_USAGE, Refusal
    from stoker.contract.untrusted import printable

    command, rest = words[0], words[1:]
    try:
        if command not in COMMANDS:
            from stoker.contract.settings import suggest

            raise Refusal(f"no command {command!r}{suggest(command, COMMANDS)}; `stoker --help` lists them", EX_USAGE)
        from importlib import import_module

        return int(import_module(f"stoker.cli.{command}").main(rest))
    except BrokenPipeError:
        # `stoker logs | head`: the reader has enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Refusal as refusal:
        line, code = refusal.line, refusal.code
    except OSError as problem:
        line, code = printable(str(problem)), EX_OSERR
    except RecursionError as problem:
        line, code = f"something is nested too deeply, {_place(problem)}", EX_DATAERR
    except MemoryError as problem:
        line, code = f"out of memory, {_place(problem)}", EX_OSERR
    from stoker.contract import redact
    from stoker.contract.terminal import ERROR, say

    say(redact.whole(line), ERROR)
    return code


def _place(problem: BaseException) -> str:
    """The function of ours that was at work: a report of a bug needs it."""
    trace, place = problem.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if f"{os.sep}stoker{os.sep}" in code.co_filename:
            place = f"in {code.co_name} ({code.co_filename}:{trace.tb_lineno})"
        trace = trace.tb_next
    return place


def entry() -> None:
    for handle in (0, 1, 2):  # `<&-`: a pipe of ours must not land on a standard descriptor
        try:
            os.fstat(handle)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):  # a terminal that has no ✓ gets a ?, and no traceback
        if stream is not None and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    from stoker.contract.terminal import own_lines, wipe

    own_lines().__enter__()  # to the end: a traceback quotes foreign text, too
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        wipe()
        if "torch" in sys.modules:  # chat, export: the last look for garbage among all of torch takes a second
            import gc

            gc.freeze()


if __name__ == "__main__":
    entry()
