"""`stoker run [options] script.py [args]`: starts a script on every rank. Also the launcher process of `stoker.launch`."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from stoker.contract import env_vars, schedulers
from stoker.contract.errors import EX_NOINPUT, EX_USAGE, Refusal
from stoker.contract.options import OptionParser, add_flags, build_options
from stoker.contract.text import is_digits
from stoker.control.plan.options import RunOptions, from_torchrun_environment
from stoker.control.plan.request import Request, resolve_launch_mode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.cluster.hosts import Hosts
    from stoker.control.launch.session import OnEnd

# Options of runs on several hosts. A run without any of them doesn't import the modules for hosts, to start faster.
_HOST_OPTIONS = {"hosts", "min_hosts", "sync", "stage", "nnodes", "node_rank"}

_EXAMPLES = """examples:
  stoker run train.py --lr 3e-4                     one rank per usable GPU; one CPU rank if there is no GPU
  stoker run --nproc-per-node 4 -m mypkg.train      the same flags as torchrun
  stoker run --gpus 0,3 train.py                    these two, numbered as by nvidia-smi
  stoker run --gpus any:2 --min-free-memory 20GB --wait 10m train.py
  stoker run --detach --name exp1 --notify 'mail -s done me' train.py
  stoker run --no-python ./a.out                    any program
  stoker run --hosts cluster.yaml --min-hosts 2 train.py   several hosts; continues if one is lost
  stoker run --role server:1:'serve.py --port ${port}' --role trainer:3:train.py    two programs as one run (`stoker docs roles`)
  stoker run --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 train.py   started by hand on each machine, as with torchrun

exit codes: the failing rank's own; 128+n for a signal; 70 where that would be 0 or Stoker ended the rank; 0 only if every rank ended with exit code 0.
refusals: 64 usage, 65 syntax error in script or config, 66 not found, 69 GPUs, driver or port not available, 71 system error,
          73 runs folder can't be written, 75 --wait ran out, 77 no permission, 78 bad config value."""


def build_parser() -> OptionParser:
    description = (
        "Starts a script, one process per rank, on this machine or with --hosts on several. Takes torchrun's flags."
    )
    parser = OptionParser("stoker run", description, _EXAMPLES, usage="stoker run [options] script.py [args]")
    add_flags(parser, RunOptions)
    add_script_arguments(parser)
    return parser


def add_script_arguments(parser: OptionParser) -> None:
    parser.add_argument("script", nargs="?", help="the script, module (-m) or program (--no-python)")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")


def main(argv: list[str]) -> int:
    if env_vars.PASSED_OPTIONS in os.environ:
        from stoker.control.launch.children import restore_secret_options

        argv = restore_secret_options(argv)
    role_env = take_role_environment()
    options, script, args = split(argv)
    if role_env:
        options["env"] = [*role_env, *options.get("env", [])]
    if is_job(options):
        from stoker.cli.roles import start_job

        return start_job(argv)
    return start(_make_request(options, script, args))


def parse(argv: list[str]) -> Request:
    return _make_request(*split(argv))


def split(argv: list[str], parser: OptionParser | None = None) -> tuple[dict[str, Any], str | None, list[str]]:
    """Return the options, the script and its arguments.

    The script is located first: argparse alone would refuse the script's `--debug` as a prefix of two of our flags.
    """
    parser, words = parser or build_parser(), list(argv)
    index = _find_script(parser, words)
    parsed, unknown = parser.parse_known_args(words[:index])
    if unknown:
        parser.refuse_unknown(unknown)
    options = vars(parsed)
    script, script_args = options.pop("script"), options.pop("args")
    if script is not None or script_args:  # argparse mistakes a flag with a space in it for the script
        parser.refuse_unknown([script, *script_args])
    args = words[index + 1 :]
    # Like torchrun, drop one --, either before the script (_find_script has deleted that one) or right after it.
    if args[:1] == ["--"] and len(words) == len(argv):
        del args[0]
    return options, words[index] if index < len(words) else None, args


def _find_script(parser: OptionParser, words: list[str]) -> int:
    """Return the index of the first word that is neither a flag nor its value. Deletes a -- before it from `words`."""
    index = 0
    while index < len(words):
        word = words[index]
        if word == "--":
            del words[index]
            return index
        if not word.startswith("-") or word == "-":
            return index
        index += 2 if _takes_next_word(parser, word) else 1
    return len(words)


def _takes_next_word(parser: OptionParser, word: str) -> bool:
    """Return whether this flag takes the next word as its value."""
    flags = parser._option_string_actions
    if word.startswith("--"):
        name, equals, _ = word.partition("=")
        actions = [action for flag, action in flags.items() if flag.startswith(name)]  # of an abbreviation
        actions = [flags[name]] if name in flags else actions
        return not equals and any(action.nargs != 0 for action in actions)
    for position, letter in enumerate(word[1:], 2):
        action = flags.get(f"-{letter}")
        if action is None or action.nargs != 0:
            return action is not None and position == len(word)  # -r 3; in -r3 the value is in the word
    return False


def _make_request(options: dict[str, Any], script: str | None, args: list[str]) -> Request:
    layers = [from_torchrun_environment(os.environ), options]
    if options.get("config"):
        layers.insert(0, _read_config(options["config"]))
    if not script:
        raise Refusal("the script is missing; type stoker run [options] script.py [args]", EX_USAGE)
    given = frozenset(key for layer in layers for key in layer)
    return Request(resolve_launch_mode(build_options(RunOptions, *layers)), script, tuple(args), given)


def _read_config(path: str) -> dict[str, Any]:
    from stoker.contract.options import options_from_mapping
    from stoker.training.config.files import load, shipped

    if not os.path.exists(path):
        hint = f"; {path} is a config of `stoker train`" if path in shipped() else ""
        raise Refusal(f"config file {path} does not exist{hint}", EX_NOINPUT)
    return options_from_mapping(RunOptions, load(path), f"config file {path}")


def take_role_environment() -> list[str]:
    """Return the variables (NAME=VALUE) that a multi-role job sets for the ranks of this role, or [] outside a job.

    Removes the job's variables from the environment. In a role, also makes this process stop when the job's process exits.
    """
    parent = os.environ.pop(env_vars.JOB_PID, "")
    if not is_digits(parent):
        os.environ.pop(env_vars.JOB, None)  # started by a rank of a role, so it is a separate run
        return []
    import signal

    from stoker.control.agent.prctl import die_with_parent

    die_with_parent(int(parent), signal.SIGTERM)
    variables = os.environ.pop(env_vars.ROLE_ENV, "")
    if not variables:
        return []
    import json

    return list(json.loads(variables))


def is_job(options: dict[str, Any]) -> bool:
    """Return whether these options describe a multi-role job."""
    return "roles" in options or "allocation" in options or ":" in options.get("role", "")


def start(request: Request, on_end: OnEnd | None = None) -> int:
    """Run a request of `stoker run` or another command; return the exit code.

    `on_end` is called at the end of a run that was started.
    """
    if request.options.ladder or any(os.environ.get(name) for name in ("RUN_IMPORT_TEST", "RUN_SINGLE_GPU_TEST")):
        from stoker.cli.ladder import before_run
        from stoker.control.launch.ladder import parse_ladder_variables

        rungs = ({"all"} if request.options.ladder else set()) | parse_ladder_variables(os.environ)
        code = before_run(request, rungs) if rungs and not request.options.dry_run else 0
        if code:
            return code
    # Start the agent before importing the launcher, so that the two take 50 ms in parallel instead of 100 ms.
    from stoker.control.cluster import transport
    from stoker.control.launch import background

    hosts: Hosts | None = None
    if schedulers.find_scheduler(os.environ) is not None or request.given & _HOST_OPTIONS:
        from stoker.control.plan.targets import resolve_hosts

        request, hosts = resolve_hosts(request, os.environ)
    report = background.start_detached() if request.options.detach and not request.options.dry_run else None
    link = transport.start_local_agent(0 if background.has_usable_stdin() else -1) if hosts is None else None
    from stoker.control.launch.run import launch

    return launch(request, link, report, hosts, on_end)


def launch_entry() -> None:
    """Run the launcher of `stoker.launch` in a separate process: python -c ... CALLER REPORT [options] -- script

    CALLER is the pid of the waiting process; the run stops when it exits. The run directory, or the refusal, is written
    to the file REPORT.
    """
    import json
    import signal

    from stoker.control.agent.prctl import die_with_parent
    from stoker.control.cluster import transport
    from stoker.control.launch import background
    from stoker.control.launch.children import restore_secret_options
    from stoker.control.launch.run import launch

    class CallerReport(background.StartReport):
        def started(self, run_dir: str) -> None:
            self._write({"run_dir": run_dir})

        def refused(self, refusal: Refusal) -> None:
            self._write({"refused": refusal.line, "cause": refusal.cause, "code": refusal.code})

        def _write(self, report: dict[str, object]) -> None:
            with open(report_path, "w", encoding="utf-8") as file:
                json.dump(report, file)

    sys.argv[0] = "stoker.launch"
    caller, report_path, *argv = sys.argv[1:]
    die_with_parent(int(caller), signal.SIGTERM)  # SIGTERM: the ranks may save
    report = CallerReport(-1)
    try:
        request = parse(restore_secret_options(argv))
    except Refusal as refusal:
        print(f"stoker: {refusal.line}", file=sys.stderr)
        report.refused(refusal)
        sys.exit(refusal.code)
    sys.exit(launch(request, transport.start_local_agent(-1), report))
