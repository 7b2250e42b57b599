"""`stoker submit [options] -- [run options] script.py [args]`: writes, submits and follows a Slurm job."""

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
from stoker.control.scheduler import slurm_submit
from stoker.control.scheduler.slurm_submit import SubmitOptions

_EXAMPLES = """examples:
  stoker submit --nodes 2 --gpus-per-node 4 --time 12h -- train.py --lr 3e-4
  stoker submit --gpus-per-node 8 --time 4h --requeue --name exp1 -- train.py         resumes every 4 hours until it is complete
  stoker submit --gpus-per-node 1 --array-seeds 0-4 -- train.py                       five runs, each with SEED in its environment
  stoker submit --nodes 2 --gpus-per-node 4 -- train pretrain --data texts/           a recipe, as with `stoker train`
  stoker submit --follow 1234                                                         follow a job again

After -- come the arguments of `stoker run`: its options, the script, the script's arguments. The job script goes to the runs folder, under slurm/.
Ctrl-C leaves the job running. exit codes: the run's own; 64 usage, 66 no script, 69 sbatch missing or failing, 73 runs folder can't be written."""


def build_parser() -> OptionParser:
    parser = OptionParser(
        "stoker submit",
        "Writes a Slurm job script for a run, submits it, and follows it until it ends.",
        _EXAMPLES,
        usage="stoker submit [options] -- [run options] script.py [args]",
        allow_abbrev=False,
    )
    add_flags(parser, SubmitOptions)
    return parser


def main(argv: list[str]) -> int:
    separator = argv.index("--") if "--" in argv else len(argv)
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv[:separator])
    run_argv = argv[separator + 1 :]
    if unknown:
        if not unknown[0].startswith("-"):
            raise Refusal(f"put -- before the script: stoker submit [options] -- {' '.join(unknown)}", EX_USAGE)
        parser.refuse_unknown(unknown)
    options = build_options(SubmitOptions, vars(args))
    root = os.path.abspath(layout.runs_root(options.runs_dir, os.environ, write=True))
    if root == layout.private_runs_root(os.environ):
        make_private(root)
    if options.follow is not None:
        if run_argv:
            line = f"--follow {options.follow} takes no script: it follows a job that was submitted earlier"
            raise Refusal(line, EX_USAGE)
        return _follow(root, options.follow)
    if not run_argv:
        raise Refusal("the script is missing; type stoker submit [options] -- [run options] script.py [args]", EX_USAGE)
    slurm_submit.check_options(options)
    command = "run"
    if run_argv[0] == "train":
        command, run_argv = "train", run_argv[1:]
    default_name, shrinks = _check_training(run_argv) if command == "train" else _check_run(run_argv)
    name = options.name or default_name
    # The job must run this Stoker, not another one on the PATH of its shell.
    program = os.path.join(os.path.dirname(sys.executable), "stoker")
    prefix = [program] if os.access(program, os.X_OK) else [sys.executable, "-P", "-m", "stoker"]
    script = slurm_submit.make_script(options, [*prefix, command], run_argv, name, root, os.getcwd(), shrinks)
    if options.dry_run:
        print(script.text, end="")
        return 0
    if shutil.which("sbatch") is None:
        line = "stoker submit needs Slurm's sbatch, which is not on the PATH; submit from a login node of the cluster"
        raise Refusal(line, EX_UNAVAILABLE, cause="slurm.unreachable")
    path = slurm_submit.write_script(script, root, name)
    number = slurm_submit.submit(path, script, os.environ)
    seeds = slurm_submit.parse_seeds(options.array_seeds) if options.array_seeds else []
    slurm_submit.write_job_note(root, number, script, path, seeds)
    print(f"job {number} is submitted; its script: {os.path.relpath(path)}", flush=True)
    if options.no_follow:
        print(
            f"  stoker submit --follow {number}   follows it\n  stoker why slurm:{number}         explains how it ended"
        )
        print(f"  scancel {number}", flush=True)
        return 0
    return _follow(root, number)


def _check_run(argv: list[str]) -> tuple[str, bool]:
    """Return the name of the run, and whether it can continue after losing a node.

    Raises Refusal now for errors that would otherwise show when the job starts, hours later.
    """
    from stoker.cli.run import is_job, parse, split
    from stoker.control.plan.request import rank_command
    from stoker.control.plan.run_plan import default_name

    options = split(argv)[0]
    _refuse_submit_options(options)
    if is_job(options):
        from stoker.cli import roles

        job, plan = roles.parse(argv)
        return default_name(job), any(spec.min_hosts for spec in plan.specs)
    request = parse(argv)
    rank_command(request)
    return default_name(request), bool(request.options.min_hosts)


def _check_training(argv: list[str]) -> tuple[str, bool]:
    """Return the same as _check_run for `stoker train`, where every flag is an option, since recipes take no arguments."""
    options = {word.split("=")[0].removeprefix("--").replace("-", "_") for word in argv if word.startswith("--")}
    _refuse_submit_options(options)
    return (argv[0] if argv and not argv[0].startswith("-") else "train"), "min_hosts" in options


def _refuse_submit_options(options: Collection[str]) -> None:
    for key in ("name", "runs_dir"):
        if key in options:
            raise Refusal(f"--{key.replace('_', '-')} must be before the --", EX_USAGE)
    if "detach" in options:
        raise Refusal("a Slurm job needs no terminal; leave --detach out", EX_USAGE)


def _follow(root: str, number: str) -> int:
    from stoker.control.scheduler.slurm_job import JobFollower

    def say(line: str) -> None:
        print_text(line, sys.stderr)

    def write_output(output: bytes) -> None:
        sys.stdout.buffer.write(output)
        sys.stdout.buffer.flush()

    try:
        return JobFollower(root, number, say, write_output).follow()
    except KeyboardInterrupt:
        hint = f"`stoker submit --follow {number}` follows it again, `scancel {number}` cancels it"
        say(f"\nleft job {number}; it keeps running. {hint}")
        return 0
