"""`stoker COMMAND ...`. Imports only the command that is asked for: import time is launch time."""

from __future__ import annotations

import os
import sys

# Commands by what people want to do; the order of --help.
GROUPS = {
    "run": {
        "run": "start a script, one rank per GPU: torchrun's place and flags",
        "attach": "follow a run that is under way",
        "stop": "end a run; it may save first",
        "detach": "let a run continue when its terminal closes",
    },
    "look": {
        "why": "how a run ended, and why",
        "runs": "list the runs, with step, loss and speed",
        "logs": "what a rank printed",
        "top": "hosts, GPUs, ranks and the loss, live in the terminal",
        "web": "the same in the browser; or a run as one HTML file",
        "plot": "draw the loss, or another metric, of some runs",
        "compare": "two runs: settings, results, and is it more than noise",
        "rollouts": "what a GRPO run answered: best, worst, what changed",
        "nan": "what made the first NaN or Inf",
        "metrics": "serve runs, ranks, hosts and GPUs to Prometheus",
    },
    "train": {
        "train": "train a model: pretrain, sft, dpo, reward, grpo, evaluate",
        "fit": "GPU memory a model takes, settings that fit; no GPU needed",
        "speedrun": "the whole chain, tokenizer to GRPO to report",
        "data": "show what training would make of a file",
        "prepare": "make data ready for training, once",
        "chat": "talk to a model in the terminal",
        "serve": "answer requests for a model over HTTP, as OpenAI's API does",
        "export": "write a model as a folder that transformers opens",
    },
    "machine": {
        "doctor": "what is wrong with this machine, and what to type",
        "clean": "free what dead runs left behind; acts only with --yes",
        "ladder": "imports, then 1, half and all ranks: where does it fail?",
        "burnin": "same-seed replicas on every GPU: which one is wrong or slow",
        "docs": "show the documentation of this version",
        "completion": "print a completion script for bash, zsh or tcsh",
    },
    "cluster": {
        "cluster": "check hosts, or write a hosts file by asking them",
        "submit": "write a Slurm job for a run, submit and follow it",
    },
}  # fmt: skip
COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}
# Other programs' words for a command of ours.
ALIASES = {"ls": "runs", "ps": "runs", "list": "runs", "status": "runs", "kill": "stop", "cancel": "stop"}
# Words that mean more than one thing here, or a command with its first word: they are answered, not obeyed.
MEANT = {
    "torchrun": "stoker run", "launch": "stoker run", "start": "stoker run", "srun": "stoker run", "sbatch": "stoker submit",
    "resume": "stoker run --name NAME, or stoker train STAGE --name NAME",
    "finetune": "stoker train sft", "eval": "stoker train evaluate", "generate": "stoker chat", "convert": "stoker export",
    "log": "stoker logs", "tail": "stoker logs", "explain": "stoker why", "debug": "stoker why", "check": "stoker doctor",
    "monitor": "stoker top", "nvitop": "stoker top", "gpustat": "stoker top", "dashboard": "stoker web", "ui": "stoker web",
    "estimate": "stoker fit", "memory": "stoker fit",
}  # fmt: skip

# Packages of the extra `train`: the launcher works without them.
EXTRA = ("torch", "numpy", "tokenizers", "tiktoken", "safetensors", "pyarrow", "huggingface_hub", "jinja2", "uvicorn")

_HELP = """Stoker trains language models on whatever GPUs there are. One command starts
only what can work, keeps it running, and explains failures.

usage: stoker COMMAND [options]

{commands}
  stoker run train.py --lr 3e-4              one rank per GPU
  stoker run --gpus any:2 --wait 10m train.py
  stoker train pretrain --data texts/        on GPUs or on the CPU
  stoker why                                 how the last run ended

`stoker COMMAND --help` says more, `stoker docs` has the guides.
Exit codes: the failing rank's own, 128+n for a signal, 70 where that would be
0, 64-78 for a refusal.
"""


def main(argv: list[str] | None = None) -> int:
    if not sys.platform.startswith("linux"):
        print(f"stoker: {_elsewhere(sys.platform)}", file=sys.stderr)
        return 69
    from stoker.contract.terminal import own_lines

    code = 0
    with own_lines():
        try:
            code = _main(argv)
            if sys.stdout is not None:
                sys.stdout.flush()  # here, and not when Python ends: what goes wrong then is a traceback
        except BrokenPipeError:
            # `stoker logs | head`: the reader has enough. Python would complain once more when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        except OSError as problem:  # a full disk
            from stoker.contract.errors import EX_OSERR

            print(f"stoker: standard output: {problem.strerror}", file=sys.stderr)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return EX_OSERR
    return code


def _elsewhere(platform: str) -> str:
    if platform == "win32":
        return "Stoker runs on Linux; on Windows use WSL2 (`wsl --install`), and install Stoker in there"
    if platform == "darwin":
        return "Stoker runs on Linux; on a Mac use a Linux container or machine (Apple's GPUs, MPS, are not used)"
    return f"Stoker runs on Linux, and this is {platform}"


def _main(argv: list[str] | None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help", "help"):
        listed = (
            f"{group}:\n" + "".join(f"  {name:<11}{text}\n" for name, text in GROUPS[group].items()) for group in GROUPS
        )
        print(_HELP.format(commands="\n".join(listed)), end="")
        return 0 if words else 64
    if words[0] in ("-V", "--version", "version"):
        from stoker.cli import version

        print(version.line())
        return 0
    from stoker.contract.errors import EX_DATAERR, EX_OSERR, EX_UNAVAILABLE, EX_USAGE, Refusal
    from stoker.contract.text import escape

    command, rest = ALIASES.get(words[0], words[0]), words[1:]
    try:
        if command not in COMMANDS:
            raise Refusal(f"no command {command!r}{_meant(command)}; `stoker --help` lists them", EX_USAGE)
        from importlib import import_module

        return int(import_module(f"stoker.cli.{command}").main(rest))
    except BrokenPipeError:
        raise  # not an error: see main
    except Refusal as refusal:
        line, code = refusal.line, refusal.code
    except ModuleNotFoundError as problem:
        if problem.name not in EXTRA:
            raise
        install = "type `pip install '.[train]'` in Stoker's clone, or `pip install 'FILE.whl[train]'` with its wheel"
        line = f"stoker {command} needs the package {problem.name}, which is not installed here; {install}"
        code = EX_UNAVAILABLE
    except OSError as problem:
        line, code = escape(str(problem)), EX_OSERR
    except RecursionError as problem:
        line, code = f"something is nested too deeply, {_place(problem)}", EX_DATAERR
    except MemoryError as problem:
        line, code = f"out of memory, {_place(problem)}", EX_OSERR
    from stoker.contract.terminal import ERROR, print_status

    print_status(line, ERROR)
    return code


def _meant(word: str) -> str:
    """By meaning, then by spelling."""
    from stoker.contract.options import suggest
    from stoker.training.stages.registry import STAGES

    meant = f"stoker train {word}" if word in STAGES else MEANT.get(word)
    return f" (did you mean `{meant}`?)" if meant else suggest(word, COMMANDS)


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
    from stoker.contract.terminal import clear_bar, own_lines

    own_lines().__enter__()  # to the end: a traceback quotes foreign text, too
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        clear_bar()
        if "torch" in sys.modules:  # chat, export: the last look for garbage among all of torch takes a second
            import gc

            gc.freeze()


if __name__ == "__main__":
    entry()
