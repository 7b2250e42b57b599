"""stoker run [options] script.py [args]"""

from __future__ import annotations

import argparse
import os
from typing import Any

from stoker.contract import env_vars, schedulers
from stoker.contract.errors import EX_NOINPUT, EX_USAGE, Refusal
from stoker.contract.options import OptionParser, add_flags, build_options
from stoker.contract.text import is_digits
from stoker.control.plan.options import RunOptions, from_torchrun_environment
from stoker.control.plan.request import Request, how_to_run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.cluster.hosts import Hosts
    from stoker.control.launch.session import OnEnd

# Options of runs on several machines: the others load nothing for them.
_SEVERAL = {"hosts", "min_hosts", "sync", "stage", "nnodes", "node_rank"}

_EXAMPLES = """examples:
  stoker run train.py --lr 3e-4                     one rank per usable GPU; without GPUs one CPU rank
  stoker run --nproc-per-node 4 -m mypkg.train      as torchrun would
  stoker run --gpus 0,3 train.py                    these two, as nvidia-smi counts
  stoker run --gpus any:2 --min-free-memory 20GB --wait 10m train.py
  stoker run --detach --name exp1 --notify 'mail -s done me' train.py
  stoker run --no-python ./a.out                    any program
  stoker run --hosts cluster.yaml --min-hosts 2 train.py   several machines; continues without a lost one
  stoker run --role server:1:'serve.py --port ${port}' --role trainer:3:train.py    two programs as one run (`stoker docs roles`)
  stoker run --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 train.py   by hand on each, as torchrun would

exit codes: the guilty rank's own; 128+n for a signal; 70 where that would be 0 or was our doing; 0 only if every rank ended with exit code 0.
refusals: 64 usage, 65 syntax error in script or config, 66 not found, 69 GPUs, driver or port not available, 71 system error,
          73 runs folder can't be written, 75 --wait ran out, 77 no permission, 78 bad config value."""


def parser() -> OptionParser:
    about = "Starts a script, one process per rank, on this machine or with --hosts on several. Takes torchrun's flags."
    made = OptionParser("stoker run", about, _EXAMPLES, usage="stoker run [options] script.py [args]")
    add_flags(made, RunOptions)
    add_script(made)
    return made


def add_script(made: OptionParser) -> None:
    made.add_argument("script", nargs="?", help="the script, module (-m) or program (--no-python)")
    made.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")


def split(words: list[str], made: OptionParser | None = None) -> tuple[dict[str, Any], str | None, list[str]]:
    """(options, script, its arguments). argparse alone would refuse the script's own `--debug`: two of ours begin so."""
    made, argv = made or parser(), list(words)
    at = _script_at(made, argv)
    found, extra = made.parse_known_args(argv[:at])
    if extra:
        made.unknown(extra)
    given = vars(found)
    stray, more = given.pop("script"), given.pop("args")
    if stray is not None or more:  # a word with a space in it is no flag to argparse
        made.unknown([stray, *more])
    args = argv[at + 1 :]
    if args[:1] == ["--"] and len(argv) == len(words):  # torchrun drops one: before the script, or right behind it
        del args[0]
    return given, argv[at] if at < len(argv) else None, args


def _script_at(made: OptionParser, argv: list[str]) -> int:
    """Where the script stands: the first word that is neither a flag nor a flag's value."""
    at = 0
    while at < len(argv):
        word = argv[at]
        if word == "--":
            del argv[at]
            return at
        if not word.startswith("-") or word == "-":
            return at
        at += 2 if _takes_next(made, word) else 1
    return len(argv)


def _takes_next(made: OptionParser, word: str) -> bool:
    flags = made._option_string_actions
    if word.startswith("--"):
        name, equals, _ = word.partition("=")
        meant = [flags[name]] if name in flags else [action for flag, action in flags.items() if flag.startswith(name)]
        return not equals and any(action.nargs != 0 for action in meant)
    for position, letter in enumerate(word[1:], 2):
        action = flags.get(f"-{letter}")
        if action is None or action.nargs != 0:
            return action is not None and position == len(word)  # -r 3; in -r3 the value is in the word
    return False


def parse(argv: list[str]) -> Request:
    return _request(*split(argv))


def _request(told: dict[str, Any], script: str | None, args: list[str]) -> Request:
    layers = [from_torchrun_environment(os.environ), told]
    if told.get("config"):
        layers.insert(0, _read_config(told["config"]))
    if not script:
        raise Refusal("no script given: stoker run [options] script.py [args]", EX_USAGE)
    given = frozenset(key for layer in layers for key in layer)
    return Request(how_to_run(build_options(RunOptions, *layers)), script, tuple(args), given)


def given_by_job() -> list[str]:
    """Where a job started this run as one of its roles: ends with it, and has these variables (NAME=VALUE) for its ranks."""
    parent = os.environ.pop(env_vars.JOB_PID, "")
    if not is_digits(parent):
        os.environ.pop(env_vars.JOB, None)  # started by a rank of a role: a run of its own
        return []
    import signal

    from stoker.control.agent.prctl import die_with_parent

    die_with_parent(int(parent), signal.SIGTERM)
    given = os.environ.pop(env_vars.ROLE_ENV, "")
    if not given:
        return []
    import json

    return list(json.loads(given))


def is_job(told: dict[str, Any]) -> bool:
    """Of several roles."""
    return "roles" in told or "allocation" in told or ":" in told.get("role", "")


def main(argv: list[str]) -> int:
    if env_vars.PASSED_OPTIONS in os.environ:
        from stoker.control.launch.children import restore_secret_options

        argv = restore_secret_options(argv)
    given = given_by_job()
    told, script, args = split(argv)
    if given:
        told["env"] = [*given, *told.get("env", [])]
    if is_job(told):
        from stoker.cli.roles import start_job

        return start_job(argv)
    return start(_request(told, script, args))


def start(request: Request, on_end: OnEnd | None = None) -> int:
    """The run itself, for every command that makes a request. `on_end`: called at the end of a run that was started."""
    if request.options.ladder or any(os.environ.get(name) for name in ("RUN_IMPORT_TEST", "RUN_SINGLE_GPU_TEST")):
        from stoker.cli.ladder import before_run
        from stoker.control.launch.ladder import wanted_by_environment

        wanted = ({"all"} if request.options.ladder else set()) | wanted_by_environment(os.environ)
        code = before_run(request, wanted) if wanted and not request.options.dry_run else 0
        if code:
            return code
    # The agent starts while the launcher is still being imported: 50 ms each, side by side.
    from stoker.control.cluster import transport
    from stoker.control.launch import background

    hosts: Hosts | None = None
    if schedulers.find_scheduler(os.environ) is not None or request.given & _SEVERAL:
        from stoker.control.plan.targets import resolve_hosts

        request, hosts = resolve_hosts(request, os.environ)
    report = background.start_detached() if request.options.detach and not request.options.dry_run else None
    link = transport.start_local_agent(0 if background.usable_stdin() else -1) if hosts is None else None
    from stoker.control.launch.run import launch

    return launch(request, link, report, hosts, on_end)


def _read_config(path: str) -> dict[str, Any]:
    from stoker.contract.options import options_from_mapping
    from stoker.training.config.files import load, shipped

    if not os.path.exists(path):
        named = f"; {path} is a config of `stoker train`" if path in shipped() else ""
        raise Refusal(f"config file {path} does not exist{named}", EX_NOINPUT)
    return options_from_mapping(RunOptions, load(path), f"config file {path}")
