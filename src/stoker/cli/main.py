"""`stoker COMMAND ...`: finds the module of a command and imports only that one, since import time is launch time."""

from __future__ import annotations

import os
import sys

from stoker import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker.contract.options import OptionParser

# The commands in the groups and the order of --help.
GROUPS = {
    "run": {
        "run": "start a script with one process per GPU; takes torchrun's flags",
        "attach": "follow the output of a run",
        "stop": "stop a run; its ranks may save first",
        "detach": "keep a run going when its terminal closes",
    },
    "look": {
        "why": "explain how a run ended, and why",
        "runs": "list the runs with step, loss and speed",
        "logs": "print the output of a rank",
        "top": "show hosts, GPUs, ranks and the loss live in the terminal",
        "web": "show the same in a browser, or save a run as an HTML file",
        "plot": "plot the loss or another metric of one or more runs",
        "compare": "compare the settings and results of two runs",
        "rollouts": "show the best and worst completions of a GRPO run",
        "nan": "find the operation that produced the first NaN or Inf",
        "metrics": "serve runs, ranks, hosts and GPUs to Prometheus",
    },
    "train": {
        "train": "train a model: pretrain, sft, dpo, reward, grpo, evaluate",
        "fit": "plan GPU memory and find settings that fit; needs no GPU",
        "speedrun": "run the whole chain, from tokenizer to GRPO to report",
        "data": "show what training would read from a file",
        "prepare": "tokenize the data of a training run in advance",
        "chat": "chat with a model in the terminal",
        "serve": "serve a model over HTTP with an OpenAI-compatible API",
        "export": "export a model as a folder that transformers loads",
    },
    "machine": {
        "doctor": "find what is wrong with this machine and how to fix it",
        "clean": "free what dead runs left behind; acts only with --yes",
        "ladder": "try imports, then 1, half and all ranks, to find what fails",
        "burnin": "train same-seed replicas to find a wrong or slow GPU",
        "docs": "show the documentation of this version",
        "completion": "print a completion script for bash, zsh or tcsh",
    },
    "cluster": {
        "cluster": "check hosts, or write a hosts file for them",
        "submit": "write a Slurm job for a run, submit and follow it",
    },
}
COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}
# Most commands have a module of their name, with the functions main and build_parser. These share the module of another
# command, which has the functions NAME_main and build_NAME_parser.
MODULES = {
    "attach": "follow",
    "logs": "follow",
    "detach": "stop",
    "compare": "plot",
    "prepare": "data",
    "completion": "docs",
}
# Other programs use these names for a command.
ALIASES = {"ls": "runs", "ps": "runs", "list": "runs", "status": "runs", "kill": "stop", "cancel": "stop"}
# These words get a suggestion, but don't run: they could mean more than one thing, or would need a second word.
SUGGESTED = {
    "torchrun": "stoker run", "launch": "stoker run", "start": "stoker run", "srun": "stoker run", "sbatch": "stoker submit",
    "resume": "stoker run --name NAME, or stoker train STAGE --name NAME",
    "finetune": "stoker train sft", "eval": "stoker train evaluate", "generate": "stoker chat", "convert": "stoker export",
    "log": "stoker logs", "tail": "stoker logs", "explain": "stoker why", "debug": "stoker why", "check": "stoker doctor",
    "monitor": "stoker top", "nvitop": "stoker top", "gpustat": "stoker top", "dashboard": "stoker web", "ui": "stoker web",
    "estimate": "stoker fit", "memory": "stoker fit",
}  # fmt: skip

# The launcher works without these packages of the extra `train`.
EXTRA = ("torch", "numpy", "tokenizers", "tiktoken", "safetensors", "pyarrow", "huggingface_hub", "jinja2", "uvicorn")

_HELP = """Stoker trains language models on whatever GPUs there are. One command starts
only what can work, keeps it running, and explains failures.

usage: stoker COMMAND [options]

{commands}
  stoker run train.py --lr 3e-4              one rank per GPU
  stoker run --gpus any:2 --wait 10m train.py
  stoker train pretrain --data texts/        on GPUs or on the CPU
  stoker why                                 how the last run ended

`stoker COMMAND --help` lists its options, `stoker docs` the guides.
Exit codes: the failing rank's own, 128+n for a signal, 70 where that would be
0, 64-78 for a refusal.
"""
_WINDOWS = "Stoker runs on Linux; on Windows use WSL2 (`wsl --install`) and install Stoker there"
_MAC = "Stoker runs on Linux; on a Mac use a Linux container or machine (Apple's GPUs, MPS, are not used)"

PACKAGE = os.path.dirname(os.path.dirname(__file__))
CHECKOUT = os.path.dirname(os.path.dirname(PACKAGE))
COMMIT_FILE = os.path.join(PACKAGE, "commit.txt")  # written into a wheel and a source archive by hatch_build.py


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if not sys.platform.startswith("linux"):
        line = {"win32": _WINDOWS, "darwin": _MAC}.get(
            sys.platform, f"Stoker runs on Linux, and this is {sys.platform}"
        )
        print(f"stoker: {line}", file=sys.stderr)
        return 69
    from stoker.contract.terminal import masked_output

    code = 0
    with masked_output():
        try:
            code = _run_command(sys.argv[1:] if argv is None else argv)
            if sys.stdout is not None:
                sys.stdout.flush()  # not at exit, where an error would print a traceback
        except BrokenPipeError:
            # The reader of `stoker logs | head` has closed the pipe. Without this, Python's flush at exit complains again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        except OSError as problem:  # a full disk
            from stoker.contract.errors import EX_OSERR

            print(f"stoker: standard output can't be written: {problem.strerror}", file=sys.stderr)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return EX_OSERR
    return code


def load_command(name: str) -> tuple[Callable[[list[str]], int], Callable[[], OptionParser]]:
    """Import the module of a command. Return its main function and the function that builds its parser."""
    from importlib import import_module

    module = import_module(f"stoker.cli.{MODULES.get(name, name)}")
    if name in MODULES:
        return getattr(module, f"{name}_main"), getattr(module, f"build_{name}_parser")
    return module.main, module.build_parser


def _run_command(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        groups = (
            f"{group}:\n" + "".join(f"  {name:<11}{text}\n" for name, text in commands.items())
            for group, commands in GROUPS.items()
        )
        print(_HELP.format(commands="\n".join(groups)), end="")
        return 0 if argv else 64
    if argv[0] in ("-V", "--version", "version"):
        commit = source_commit()
        print(f"stoker {__version__} (commit {commit})" if commit else f"stoker {__version__}")
        return 0
    from stoker.contract.errors import EX_DATAERR, EX_OSERR, EX_UNAVAILABLE, EX_USAGE, Refusal
    from stoker.contract.text import escape

    command = ALIASES.get(argv[0], argv[0])
    try:
        if command not in COMMANDS:
            raise Refusal(
                f"unknown command {command!r}{_suggest_command(command)}; `stoker --help` lists the commands", EX_USAGE
            )
        run, _ = load_command(command)
        return int(run(argv[1:]))
    except BrokenPipeError:
        raise  # not an error: main handles it
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
        line, code = f"a value is nested too deeply, {_locate_error(problem)}", EX_DATAERR
    except MemoryError as problem:
        line, code = f"out of memory, {_locate_error(problem)}", EX_OSERR
    from stoker.contract.terminal import ERROR, print_status

    print_status(line, ERROR)
    return code


def source_commit() -> str:
    """Return the commit of this Stoker, or "" if it is not known.

    A checkout has its current commit, followed by + if files differ from it. An installed package has it in a file.
    """
    import subprocess

    if os.path.exists(COMMIT_FILE):
        with open(COMMIT_FILE, encoding="ascii") as file:
            return file.read().strip()
    if not os.path.exists(os.path.join(CHECKOUT, ".git")):
        return ""
    command = ["git", "-C", CHECKOUT, "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+"]
    try:
        git = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # git is not installed
        return ""
    return git.stdout.strip() if git.returncode == 0 else ""


def _suggest_command(word: str) -> str:
    """Return a suggestion for an unknown command: by its meaning, else by its spelling."""
    from stoker.contract.options import suggest
    from stoker.training.stages.registry import STAGES

    command = f"stoker train {word}" if word in STAGES else SUGGESTED.get(word)
    return f" (did you mean `{command}`?)" if command else suggest(word, COMMANDS)


def _locate_error(problem: BaseException) -> str:
    """Return the innermost function of Stoker in the traceback, for a bug report."""
    trace, location = problem.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if f"{os.sep}stoker{os.sep}" in code.co_filename:
            location = f"in {code.co_name} ({code.co_filename}:{trace.tb_lineno})"
        trace = trace.tb_next
    return location


def entry() -> None:
    """Run the command of sys.argv and exit with its code: the `stoker` program."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:  # closed, as by `<&-`: open it, so that none of our pipes becomes a standard stream
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # prints ? for ✓ instead of a traceback
    from stoker.contract.terminal import clear_bar, masked_output

    masked_output().__enter__()  # never exited: a traceback may quote text with control codes, too
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        clear_bar()
        if "torch" in sys.modules:  # chat, export: the last garbage collection over all of torch takes a second
            import gc

            gc.freeze()


if __name__ == "__main__":
    entry()
