"""What the user asked for: `stoker run`'s options, torchrun's among them, and the program to start."""

from __future__ import annotations

import os
import sys

from stoker.contract.shape import option, shape
from stoker.contract.names import EX_DATAERR, EX_NOINPUT, EX_USAGE, Refusal
from stoker.contract.quantities import duration, size

_RANKS, _GPUS, _OUT, _LIFE, _RUN, _TORCHRUN = "ranks", "GPUs", "output", "life of the run", "record", "torchrun's, accepted"


@shape
class RunOptions:
    nproc_per_node: str | None = option("ranks to start: a number, gpu, cpu or auto (default: one per usable GPU)", default=None, metavar="N", group=_RANKS)
    module: bool = option("the script is a module, started as with python -m", default=False, flags=("-m",), group=_RANKS)
    no_python: bool = option("the program is not Python: execute it as it is", default=False, group=_RANKS)
    env: tuple[str, ...] = option("set a variable for the ranks (NAME=VALUE), or pass one on (NAME)", default=(), metavar="NAME[=VALUE]", many=True, group=_RANKS)
    init_slots: str | None = option("ranks that may import and load at the same time: a number or auto", default=None, metavar="K", group=_RANKS)
    init_timeout: float = option("a rank gives its start-up slot back after this long at the latest", default=120.0, parse=duration, metavar="TIME", group=_RANKS)
    ram_limit: int = option("stop the job when a rank's resident memory passes this, e.g. 20GB", default=0, parse=size, metavar="SIZE", group=_RANKS)
    numa_binding: str | None = option("bind each rank to the CPUs near its GPU", default=None, choices=("node", "socket", "exclusive", "core-complex"), metavar="MODE", group=_RANKS
    )

    gpus: str | None = option("which GPUs: 0,3 (as nvidia-smi counts), UUIDs, or any:2 for the two with most room", default=None, metavar="WHICH", group=_GPUS)
    gpu: str | None = option("one GPU by its number or UUID", default=None, metavar="ID", group=_GPUS)
    min_free_memory: int = option("a GPU with less free memory than this is not used, e.g. 20GB", default=0, parse=size, metavar="SIZE", group=_GPUS)
    wait: float = option("wait this long for enough free GPUs, e.g. 10m", default=0.0, parse=duration, metavar="TIME", group=_GPUS)
    isolate: bool = option("each rank sees its own GPU only, as device 0", default=False, group=_GPUS)
    share_gpus: bool = option("let several ranks or runs use one GPU", default=False, group=_GPUS)

    show: str = option("what the console gets: all, none, errors (stderr only), or ranks like 0,2", default="all", metavar="WHAT", group=_OUT)
    quiet: bool = option("no MEM and LOCK lines on the console", default=False, flags=("-q",), group=_OUT)
    log_dir: str | None = option("also write torchrun's stdout.log and stderr.log per rank under this folder", default=None, group=_OUT)
    redirects: str | None = option("streams that go to files and not to the console: 1, 2, 3 or 0:1,1:2", default=None, flags=("-r",), metavar="STD", group=_OUT)
    tee: str | None = option("streams that go to files and to the console (Stoker's default for all)", default=None, flags=("-t",), metavar="STD", group=_OUT)
    local_ranks_filter: str | None = option("ranks whose output the console gets, e.g. 0,1", default=None, metavar="RANKS", group=_OUT)

    max_restarts: int = option("start again after a failure that another attempt can survive, at most this often", default=0, metavar="N", group=_LIFE)
    grace: float | None = option("time a rank has to end after a stop signal (default: 30s, 5s after a failure)", default=None, parse=duration, metavar="TIME", group=_LIFE
    )
    detach: bool = option("run in the background, also after logout", default=False, group=_LIFE)
    notify: str | None = option("shell command that gets the verdict on its stdin when the run ends or restarts", default=None, metavar="CMD", group=_LIFE)
    signals_to_handle: str = option("signals passed on to the ranks", default="SIGTERM,SIGINT,SIGHUP,SIGQUIT", metavar="NAMES", group=_LIFE)

    name: str | None = option("name of the run; given again it goes on with that run if it is unfinished", default=None, group=_RUN)
    runs_dir: str | None = option("folder of the run directories (default: $STOKER_RUNS, else ./runs)", default=None, metavar="DIR", group=_RUN)
    config: str | None = option("YAML or JSON file with any of these options", default=None, metavar="FILE", group=_RUN)
    dry_run: bool = option("print the plan and start nothing", default=False, group=_RUN)
    json: bool = option("print the plan as JSON (with --dry-run)", default=False, group=_RUN)
    no_preflight: bool = option("skip the checks before the start", default=False, group=_RUN)

    hosts: str | None = option("hosts reached by ssh, comma-separated, in rank order", default=None, group="hosts")
    ssh_option: tuple[str, ...] = option("an option for the ssh client, e.g. -p2222", default=(), metavar="OPT", many=True, group="hosts")
    python: str | None = option("the Python of the ranks (default: the one that runs Stoker; python3 on other hosts)", default=None, metavar="PATH", group="hosts")

    master_port: int | None = option("port of rank 0's store (default: a free one)", default=None, metavar="PORT", group=_TORCHRUN)
    master_addr: str | None = option("address of rank 0's store", default=None, metavar="ADDR", group=_TORCHRUN)
    standalone: bool = option("one machine and a free port: always so here", default=False, group=_TORCHRUN)
    nnodes: str = option("number of machines", default="1", metavar="N", group=_TORCHRUN)
    node_rank: int = option("number of this machine", default=0, group=_TORCHRUN)
    rdzv_backend: str | None = option("ranks meet in torch's own store: any backend means that here", default=None, group=_TORCHRUN)
    rdzv_endpoint: str | None = option("HOST:PORT of the store", default=None, group=_TORCHRUN)
    rdzv_id: str | None = option("becomes TORCHELASTIC_RUN_ID", default=None, group=_TORCHRUN)
    rdzv_conf: str | None = option("not needed", default=None, group=_TORCHRUN)
    role: str = option("becomes ROLE_NAME", default="default", group=_TORCHRUN)
    shutdown_timeout: float | None = option("the same as --grace", default=None, metavar="SECONDS", group=_TORCHRUN)
    virtual_local_rank: bool = option("the same as --isolate", default=False, group=_TORCHRUN)
    monitor_interval: float | None = option("not needed: a rank's end is seen at once", default=None, group=_TORCHRUN)
    start_method: str | None = option("not needed: ranks are always fresh processes", default=None, group=_TORCHRUN)
    run_path: bool = option("not needed: the script always runs as __main__", default=False, group=_TORCHRUN)
    local_addr: str | None = option("not needed on one machine", default=None, group=_TORCHRUN)
    event_log_handler: str | None = option("not needed: events are in the run directory", default=None, group=_TORCHRUN)
    logs_specs: str | None = option("not needed: logs are in the run directory", default=None, group=_TORCHRUN)
    duplicate_stdout_filters: str | None = option("not needed: grep the rank's log", default=None, group=_TORCHRUN)
    duplicate_stderr_filters: str | None = option("not needed: grep the rank's log", default=None, group=_TORCHRUN)


# Flags that are taken and change nothing, with the reason that is printed.
_NO_EFFECT = {
    "monitor_interval": "a rank's end is seen at once", "start_method": "ranks are always fresh processes",
    "run_path": "the script always runs as __main__", "local_addr": "one machine needs no address",
    "event_log_handler": "events are in the run directory", "logs_specs": "logs are in the run directory",
    "duplicate_stdout_filters": "grep the rank's log instead", "duplicate_stderr_filters": "grep the rank's log instead",
    "rdzv_conf": "ranks meet in torch's own store", "rdzv_backend": "ranks meet in torch's own store",
    "node_rank": "ranks are numbered by Stoker",
}  # fmt: skip


@shape
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
