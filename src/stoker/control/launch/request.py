"""What the user asked for: `stoker run`'s options, torchrun's among them, and the program to start."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from stoker.contract.names import EX_DATAERR, EX_NOINPUT, EX_USAGE, Refusal
from stoker.contract.quantities import duration, size
from stoker.contract.settings import option

_RANKS, _GPUS, _OUT, _LIFE, _RUN, _TORCHRUN = "ranks", "GPUs", "output", "life of the run", "record", "torchrun's, accepted"


@dataclass(frozen=True)
class RunOptions:
    nproc_per_node: str | None = option(None, "ranks to start: a number, gpu, cpu or auto (default: one per usable GPU)", metavar="N", group=_RANKS)
    module: bool = option(False, "the script is a module, started as with python -m", flags=("-m",), group=_RANKS)
    no_python: bool = option(False, "the program is not Python: execute it as it is", group=_RANKS)
    env: tuple[str, ...] = option((), "set a variable for the ranks (NAME=VALUE), or pass one on (NAME)", metavar="NAME[=VALUE]", many=True, group=_RANKS)
    init_slots: str | None = option(None, "ranks that may import and load at the same time: a number or auto", metavar="K", group=_RANKS)
    init_timeout: float = option(120.0, "a rank gives its start-up slot back after this long at the latest", parse=duration, metavar="TIME", group=_RANKS)
    ram_limit: int = option(0, "stop the job when a rank's resident memory passes this, e.g. 20GB", parse=size, metavar="SIZE", group=_RANKS)
    numa_binding: str | None = option(
        None, "bind each rank to the CPUs near its GPU", choices=("node", "socket", "exclusive", "core-complex"), metavar="MODE", group=_RANKS
    )

    gpus: str | None = option(None, "which GPUs: 0,3 (as nvidia-smi counts), UUIDs, or any:2 for the two with most room", metavar="WHICH", group=_GPUS)
    gpu: str | None = option(None, "one GPU by its number or UUID", metavar="ID", group=_GPUS)
    min_free_memory: int = option(0, "a GPU with less free memory than this is not used, e.g. 20GB", parse=size, metavar="SIZE", group=_GPUS)
    wait: float = option(0.0, "wait this long for enough free GPUs, e.g. 10m", parse=duration, metavar="TIME", group=_GPUS)
    isolate: bool = option(False, "each rank sees its own GPU only, as device 0", group=_GPUS)
    share_gpus: bool = option(False, "let several ranks or runs use one GPU", group=_GPUS)

    show: str = option("all", "what the console gets: all, none, errors (stderr only), or ranks like 0,2", metavar="WHAT", group=_OUT)
    quiet: bool = option(False, "no MEM and LOCK lines on the console", flags=("-q",), group=_OUT)
    log_dir: str | None = option(None, "also write torchrun's stdout.log and stderr.log per rank under this folder", group=_OUT)
    redirects: str | None = option(None, "streams that go to files and not to the console: 1, 2, 3 or 0:1,1:2", flags=("-r",), metavar="STD", group=_OUT)
    tee: str | None = option(None, "streams that go to files and to the console (Stoker's default for all)", flags=("-t",), metavar="STD", group=_OUT)
    local_ranks_filter: str | None = option(None, "ranks whose output the console gets, e.g. 0,1", metavar="RANKS", group=_OUT)

    max_restarts: int = option(0, "start again after a failure that another attempt can survive, at most this often", metavar="N", group=_LIFE)
    grace: float | None = option(
        None, "time a rank has to end after a stop signal (default: 30s, 5s after a failure)", parse=duration, metavar="TIME", group=_LIFE
    )
    detach: bool = option(False, "run in the background, also after logout", group=_LIFE)
    notify: str | None = option(None, "shell command that gets the verdict on its stdin when the run ends or restarts", metavar="CMD", group=_LIFE)
    signals_to_handle: str = option("SIGTERM,SIGINT,SIGHUP,SIGQUIT", "signals passed on to the ranks", metavar="NAMES", group=_LIFE)

    name: str | None = option(None, "name of the run; given again it goes on with that run if it is unfinished", group=_RUN)
    runs_dir: str | None = option(None, "folder of the run directories (default: $STOKER_RUNS, else ./runs)", metavar="DIR", group=_RUN)
    config: str | None = option(None, "YAML or JSON file with any of these options", metavar="FILE", group=_RUN)
    dry_run: bool = option(False, "print the plan and start nothing", group=_RUN)
    json: bool = option(False, "print the plan as JSON (with --dry-run)", group=_RUN)
    no_preflight: bool = option(False, "skip the checks before the start", group=_RUN)

    hosts: str | None = option(None, "hosts reached by ssh, comma-separated, in rank order", group="hosts")
    ssh_option: tuple[str, ...] = option((), "an option for the ssh client, e.g. -p2222", metavar="OPT", many=True, group="hosts")
    python: str | None = option(None, "the Python of the ranks (default: the one that runs Stoker; python3 on other hosts)", metavar="PATH", group="hosts")

    master_port: int | None = option(None, "port of rank 0's store (default: a free one)", metavar="PORT", group=_TORCHRUN)
    master_addr: str | None = option(None, "address of rank 0's store", metavar="ADDR", group=_TORCHRUN)
    standalone: bool = option(False, "one machine and a free port: always so here", group=_TORCHRUN)
    nnodes: str = option("1", "number of machines", metavar="N", group=_TORCHRUN)
    node_rank: int = option(0, "number of this machine", group=_TORCHRUN)
    rdzv_backend: str | None = option(None, "ranks meet in torch's own store: any backend means that here", group=_TORCHRUN)
    rdzv_endpoint: str | None = option(None, "HOST:PORT of the store", group=_TORCHRUN)
    rdzv_id: str | None = option(None, "becomes TORCHELASTIC_RUN_ID", group=_TORCHRUN)
    rdzv_conf: str | None = option(None, "not needed", group=_TORCHRUN)
    role: str = option("default", "becomes ROLE_NAME", group=_TORCHRUN)
    shutdown_timeout: float | None = option(None, "the same as --grace", metavar="SECONDS", group=_TORCHRUN)
    virtual_local_rank: bool = option(False, "the same as --isolate", group=_TORCHRUN)
    monitor_interval: float | None = option(None, "not needed: a rank's end is seen at once", group=_TORCHRUN)
    start_method: str | None = option(None, "not needed: ranks are always fresh processes", group=_TORCHRUN)
    run_path: bool = option(False, "not needed: the script always runs as __main__", group=_TORCHRUN)
    local_addr: str | None = option(None, "not needed on one machine", group=_TORCHRUN)
    event_log_handler: str | None = option(None, "not needed: events are in the run directory", group=_TORCHRUN)
    logs_specs: str | None = option(None, "not needed: logs are in the run directory", group=_TORCHRUN)
    duplicate_stdout_filters: str | None = option(None, "not needed: grep the rank's log", group=_TORCHRUN)
    duplicate_stderr_filters: str | None = option(None, "not needed: grep the rank's log", group=_TORCHRUN)


# Flags that are taken and change nothing, with the reason that is printed.
_NO_EFFECT = {
    "monitor_interval": "a rank's end is seen at once", "start_method": "ranks are always fresh processes",
    "run_path": "the script always runs as __main__", "local_addr": "one machine needs no address",
    "event_log_handler": "events are in the run directory", "logs_specs": "logs are in the run directory",
    "duplicate_stdout_filters": "grep the rank's log instead", "duplicate_stderr_filters": "grep the rank's log instead",
    "rdzv_conf": "ranks meet in torch's own store", "rdzv_backend": "ranks meet in torch's own store",
    "node_rank": "ranks are numbered by Stoker",
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    options: RunOptions
    script: str
    args: tuple[str, ...]
    given: frozenset[str]  # options given as flags, in the config file or in PET_*: not defaults


def notices(request: Request) -> list[str]:
    found = [f"--{name.replace('_', '-')} has no effect here: {why}" for name, why in _NO_EFFECT.items() if name in request.given]
    if ":" in request.options.nnodes:
        found.append(f"--nnodes {request.options.nnodes}: one machine here, so it runs with one")
    return found


def python_flags() -> list[str]:
    """The interpreter options Stoker itself was started with (python -X dev -m stoker run ...), for the ranks too."""
    flags = [flag for on, flag in ((sys.flags.dont_write_bytecode and "PYTHONDONTWRITEBYTECODE" not in os.environ, "-B"),) if on]
    flags += ["-" + "O" * sys.flags.optimize] if sys.flags.optimize and "PYTHONOPTIMIZE" not in os.environ else []
    # sys.orig_argv has what was typed; sys._xoptions also what implementations add by themselves.
    words = iter(sys.orig_argv[1:])
    for word in words:
        if word in ("-X", "-W"):
            flags += [word, next(words, "")]
        elif word.startswith(("-X", "-W")):
            flags.append(word)
        elif not word.startswith("-") or word in ("-m", "-c"):
            break
    return flags


def program(request: Request) -> list[str]:
    """The command of a rank. Refuses what can't start, before anything does."""
    options, script = request.options, request.script
    python = options.python or sys.executable
    remote = options.hosts is not None
    if options.no_python:
        import shutil

        if not remote and shutil.which(script) is None:
            raise Refusal(f"--no-python: no program {script!r} on the PATH", EX_NOINPUT, cause="launch.script-missing")
        return [script, *request.args]
    if options.module:
        if not remote and not options.no_preflight:
            _check_module(script)
        return [python, *python_flags(), "-m", script, *request.args]
    if not remote and not options.no_preflight:
        _check_script(script, own_python=options.python is None)
    return [python, *python_flags(), script, *request.args]


def _check_script(path: str, own_python: bool) -> None:
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, "__main__.py")):
        raise Refusal(f"{path} is a folder, not a script", EX_NOINPUT, cause="launch.script-missing")
    if not os.path.exists(path):
        raise Refusal(f"no script {path}{_near(path)}", EX_NOINPUT, cause="launch.script-missing")
    if os.path.isdir(path) or not path.endswith(".py") or not own_python:
        return
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as problem:
        raise Refusal(f"{path} can't be read: {problem.strerror}", EX_NOINPUT, cause="launch.script-missing") from problem
    try:
        compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as problem:
        import traceback

        shown = "".join(traceback.format_exception_only(problem)).rstrip()
        raise Refusal(f"{path} does not parse; nothing was started\n{shown}", EX_DATAERR, cause="launch.syntax-error") from problem


def _near(path: str) -> str:
    import difflib

    folder = os.path.dirname(path) or "."
    try:
        found = difflib.get_close_matches(os.path.basename(path), [name for name in os.listdir(folder) if name.endswith(".py")], 1)
    except OSError:
        return f"; the folder {folder} is not there either"
    return f"; did you mean {os.path.join(os.path.dirname(path), found[0])}?" if found else ""


def _check_module(name: str) -> None:
    """Finds the module as `python -m` will, the working directory first, without importing anything of it."""
    path: list[str] | None = None
    here = os.getcwd()
    parts = name.split(".")
    sys.path.insert(0, here)
    try:
        for count, part in enumerate(parts, 1):
            if not part:
                raise Refusal(f"-m {name}: not a module name", EX_USAGE, cause="launch.script-missing")
            full = ".".join(parts[:count])
            found = (finder.find_spec(full, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
            spec = next((one for one in found if one is not None), None)
            if spec is None:
                raise Refusal(f"no module {name} (looked in {here} and in {sys.prefix})", EX_NOINPUT, cause="launch.script-missing")
            path = list(spec.submodule_search_locations or [])
    finally:
        sys.path.remove(here)
