"""stoker submit [options] -- [run options] script.py [args]"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection

from stoker.contract import layout
from stoker.contract.errors import EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.options import OptionParser, add_flags, build_options
from stoker.contract.terminal import print_text
from stoker.control.record.run_writer import make_private
from stoker.control.scheduler import slurm_submit as submit
from stoker.control.scheduler.slurm_submit import SubmitOptions

_EXAMPLES = """examples:
  stoker submit --nodes 2 --gpus-per-node 4 --time 12h -- train.py --lr 3e-4
  stoker submit --gpus-per-node 8 --time 4h --requeue --name exp1 -- train.py         resumes after each 4 hours until it is done
  stoker submit --gpus-per-node 1 --array-seeds 0-4 -- train.py                       five runs; SEED is in their environment
  stoker submit --nodes 2 --gpus-per-node 4 -- train pretrain --data texts/           a recipe, as stoker train has it
  stoker submit --follow 1234                                                         follow a job again

After -- come the arguments of `stoker run`: its options, the script, the script's arguments. The job script goes to the runs folder, under slurm/.
Ctrl-C leaves the job alone. exit codes: the run's own; 64 usage, 66 no script, 69 sbatch missing or failing, 73 runs folder can't be written."""


def parser() -> OptionParser:
    made = OptionParser(
        "stoker submit",
        "Writes a Slurm job script for a run, submits it, and follows it until it ends.",
        _EXAMPLES,
        usage="stoker submit [options] -- [run options] script.py [args]",
        allow_abbrev=False,
    )
    add_flags(made, SubmitOptions)
    return made


def main(argv: list[str]) -> int:
    at = argv.index("--") if "--" in argv else len(argv)
    made = parser()
    found, extra = made.parse_known_args(argv[:at])
    words = argv[at + 1 :]
    if extra:
        if not extra[0].startswith("-"):
            raise Refusal(f"put -- before the run: stoker submit [options] -- {' '.join(extra)}", EX_USAGE)
        made.unknown(extra)
    options = build_options(SubmitOptions, vars(found))
    root = os.path.abspath(layout.runs_root(options.runs_dir, os.environ, write=True))
    if root == layout.private_runs_root(os.environ):
        make_private(root)
    if options.follow is not None:
        if words:
            line = f"--follow {options.follow} takes no script: it follows a job that was submitted before"
            raise Refusal(line, EX_USAGE)
        return _follow(root, options.follow)
    if not words:
        raise Refusal("no script given: stoker submit [options] -- [run options] script.py [args]", EX_USAGE)
    submit.check_options(options)
    training = words[0] == "train"
    base, shrinks = _check_training(words) if training else _check_run(words)
    name = options.name or base
    command = _stoker("train" if training else "run")
    script = submit.make_script(options, command, words[1:] if training else words, name, root, os.getcwd(), shrinks)
    if options.dry_run:
        print(script.text, end="")
        return 0
    if shutil.which("sbatch") is None:
        line = (
            "stoker submit needs Slurm's sbatch, and there is none on the PATH: submit from a login node of the cluster"
        )
        raise Refusal(line, EX_UNAVAILABLE, cause="slurm.unreachable")
    path = submit.write_script(script, root, name)
    number = submit.submit(path, script, os.environ)
    submit.write_job_note(
        root, number, script, path, submit.parse_seeds(options.array_seeds) if options.array_seeds else []
    )
    print(f"job {number} is submitted; its script: {os.path.relpath(path)}", flush=True)
    if options.no_follow:
        print(f"  stoker submit --follow {number}   follow it\n  stoker why slurm:{number}         how it ended")
        print(f"  scancel {number}", flush=True)
        return 0
    return _follow(root, number)


def _check_run(words: list[str]) -> tuple[str, bool]:
    """Refuses now what would be refused hours later. (The job's name, does it go on without a lost node.)"""
    from stoker.cli.run import is_job, parse, split
    from stoker.control.plan.request import program
    from stoker.control.plan.run_plan import default_name

    told = split(words)[0]
    _refuse_ours(told)
    if is_job(told):
        from stoker.cli.roles import request_of

        job, plan = request_of(words)
        return default_name(job), any(spec.min_hosts for spec in plan.specs)
    request = parse(words)
    program(request)
    return default_name(request), bool(request.options.min_hosts)


def _check_training(words: list[str]) -> tuple[str, bool]:
    """A recipe has no arguments of its own: every flag is an option."""
    told = {word.split("=")[0].removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    _refuse_ours(told)
    return (words[1] if len(words) > 1 and not words[1].startswith("-") else "train"), "min_hosts" in told


def _refuse_ours(told: Collection[str]) -> None:
    for key in ("name", "runs_dir"):
        if key in told:
            raise Refusal(f"--{key.replace('_', '-')} belongs before the --", EX_USAGE)
    if "detach" in told:
        raise Refusal("--detach: leave it out, a Slurm job needs no terminal", EX_USAGE)


def _stoker(command: str) -> list[str]:
    """The Stoker that is running, wherever the job's shell would look."""
    own = os.path.join(os.path.dirname(sys.executable), "stoker")
    return [own, command] if os.access(own, os.X_OK) else [sys.executable, "-P", "-m", "stoker", command]


def _follow(root: str, number: str) -> int:
    from stoker.control.scheduler.slurm_job import JobFollower

    def say(line: str) -> None:
        print_text(line, sys.stderr)

    def put(data: bytes) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    try:
        return JobFollower(root, number, say, put).follow()
    except KeyboardInterrupt:
        again = f"`stoker submit --follow {number}` follows it again, `scancel {number}` ends it"
        say(f"\nleft job {number}; it keeps running. {again}")
        return 0
