"""The options of `stoker run`: torchrun's with their meaning there, and Stoker's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.contract.frozen import frozen, option, section
from stoker.contract.options import options_from_environment
from stoker.contract.units import parse_bytes, parse_duration


def _time(help: str, default: float | None) -> Any:
    return option(help, "TIME", default=default, parse=parse_duration)


@frozen
class RunOptions:
    _ranks = section("ranks")
    nproc_per_node: str | None = option(
        "ranks to start: a number, gpu, cpu or auto (default: one per usable GPU)", "N", default=None
    )
    module: bool = option("the script is a module, started as with python -m", default=False, flags=("-m",))
    no_python: bool = option("execute the program directly: it is not a Python script", default=False)
    gpus_per_rank: int = option(
        "GPUs that each rank sees, as devices 0 to K-1, e.g. for a server that splits its model (default: 1)",
        "K",
        default=1,
    )
    port_base: int | None = option(
        "give each rank a port: STOKER_PORT, and ${port} in its arguments, are N plus its local rank", "N", default=None
    )
    env: tuple[str, ...] = option(
        "set a variable for the ranks (NAME=VALUE), or pass one on (NAME)", "NAME[=VALUE]", default=(), many=True
    )
    init_slots: str | None = option(
        "ranks that may import and load at the same time: a number or auto", "K", default=None
    )
    init_timeout: float = _time(
        "time after which a rank loses its start-up slot, if it has not returned it (default: 2m)", 120.0
    )
    ram_limit: int = option(
        "stop the job when the memory of a rank and its worker processes exceeds this, e.g. 20GB",
        "SIZE",
        default=0,
        parse=parse_bytes,
    )
    numa_binding: str | None = option(
        "node: bind each rank to the CPUs near its GPU (torchrun's socket, exclusive and core-complex mean the same"
        " here)",
        "MODE",
        default=None,
        choices=("node", "socket", "exclusive", "core-complex"),
    )

    _gpus = section("GPUs")
    gpus: str | None = option(
        "GPUs to use: 0,3 (as nvidia-smi counts), UUIDs, or any:2 for the two with the most free memory",
        "WHICH",
        default=None,
    )
    gpu: str | None = option("use one GPU, given by its number or UUID", "ID", default=None)
    min_free_memory: int = option(
        "skip GPUs with less free memory than this, e.g. 20GB", "SIZE", default=0, parse=parse_bytes
    )
    wait: float = _time("wait this long for enough free GPUs, e.g. 10m", 0.0)
    isolate: bool = option("let each rank see only its GPU, as device 0", default=False)
    exclude_bad: bool = option(
        "test each GPU first (a CUDA context and a matrix product in a child process) and leave the bad ones out",
        default=False,
    )
    legal_ranks: str | None = option("numbers of ranks that the job can run with, e.g. 1,2,4,8", "N,N", default=None)
    share_gpus: bool = option("let several ranks or runs use one GPU", default=False)

    _out = section("output")
    show: str = option(
        "output that the console shows: all, none, errors (stderr only), or ranks like 0,2", "WHAT", default="all"
    )
    quiet: bool = option("hide MEM and LOCK lines on the console", default=False, flags=("-q",))
    prefix: str = option(
        "GPU0: before every line on the console: always, never, or auto (the default: always, except on the stdout of a"
        " single rank when stdout goes to a separate pipe or file; `stoker train`: always)",
        "WHEN",
        default="auto",
        choices=("auto", "always", "never"),
    )
    log_line_prefix_template: str | None = option(
        "another prefix, e.g. '[${role_name}${local_rank}]:' or '[rank${rank}]: ' (default:"
        " $TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE)",
        "TEXT",
        default=None,
    )
    log_dir: str | None = option(
        "torchrun's log folder: ID_XXXXXXXX/attempt_0/LOCAL_RANK/ with error.json, and with the stdout.log and"
        " stderr.log that -r and -t ask for",
        default=None,
    )
    redirects: str | None = option(
        "streams that go to files and not to the console: 1, 2, 3 or 0:1,1:2", "STD", default=None, flags=("-r",)
    )
    tee: str | None = option(
        "streams that go to files and to the console: 1, 2, 3 or 0:1,1:2 (the run directory always gets both)",
        "STD",
        default=None,
        flags=("-t",),
    )
    local_ranks_filter: str | None = option("ranks whose output the console shows, e.g. 0,1", "RANKS", default=None)

    _life = section("life of the run")
    max_restarts: int = option(
        "start again after a failure that another attempt can survive, at most this often (default: 0)", "N", default=0
    )
    grace: float | None = _time("time a rank has to exit after a stop signal (default: 30s, 5s after a failure)", None)
    hang_timeout: float = _time(
        "stop a job that has made no progress for this long (default: 5m; 0: never); a stall is reported"
        " within seconds in any case",
        300.0,
    )
    busy_timeout: float = _time(
        "stop a job whose ranks are busy but have not finished a step for this long (default: 30m, at least"
        " --hang-timeout; 0: never): a rank is busy while it prints, reads or writes files, or its stack or variables"
        " change",
        1800.0,
    )
    on_nan: str = option(
        "what to do if the loss stays NaN, infinite or exploded: stop the job (the default), or warn",
        "WHAT",
        default="stop",
        choices=("stop", "warn"),
    )
    debug_retry: bool = option(
        "after an asynchronous CUDA error make one more attempt with blocking launches, which finds the true line",
        default=False,
    )
    stop_after_steps: int = option(
        "end the run, as complete, once every rank has finished this many steps", "N", default=0
    )
    detach: bool = option("run in the background, also after logout", default=False)
    on_hangup: str = option(
        "what to do when the terminal closes: stop (the ranks save and end, as with Ctrl-C; the default), or detach (the run"
        " continues in the background)",
        "WHAT",
        default="stop",
        choices=("stop", "detach"),
    )
    notify: str | None = option(
        "where to send a message when the run ends or restarts: ntfy://TOPIC, a URL of ntfy, slack:URL, discord:URL,"
        " mailto:ADDRESS, or a shell command that gets the verdict on its stdin",
        "TARGET",
        default=None,
    )
    metrics_port: int | None = option(
        "serve the run as Prometheus metrics at http://127.0.0.1:N/metrics while it runs (0: a free port)",
        "N",
        default=None,
    )
    signals_to_handle: str = option(
        "signals that stop the run: passed on to the ranks, which have --grace to save and end (default:"
        " SIGTERM,SIGINT,SIGHUP,SIGQUIT, which always do)",
        "NAMES",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    )

    _run = section("record")
    name: str | None = option(
        "name of the run; an unfinished run of this name or id is continued",
        default=None,
    )
    again: bool = option(
        "if the run of this name is complete, run it again in a new run directory; the old one stays",
        default=False,
    )
    runs_dir: str | None = option(
        "folder of the run directories (default: $STOKER_RUNS, else ./runs)", "DIR", default=None
    )
    config: str | None = option("YAML or JSON file with any of these options", "FILE", default=None)
    ladder: bool = option(
        "first test the imports one by one, then 1, half and all ranks for a few steps (stoker ladder)", default=False
    )
    dry_run: bool = option("print the plan and start nothing", default=False)
    json: bool = option("print the plan as JSON (with --dry-run)", default=False)
    no_preflight: bool = option("skip the checks before the start", default=False)

    _roles = section("roles")
    roles: str | None = option(
        "several programs as one run, described in this file (`stoker docs roles`); for simple ones --role"
        " NAME:COUNT:'COMMAND', once for each",
        "FILE",
        default=None,
    )
    allocation: str | None = option(
        "how many GPUs each role gets, as in sglang.d1t1p1+d3t1p1; then --role NAME:'COMMAND', in the same order",
        "TEXT",
        default=None,
    )

    _hosts = section("hosts")
    hosts: str | None = option(
        "hosts in rank order: a hosts file (cluster.yaml), or a,b,c reached by ssh", "FILE|A,B", default=None
    )
    min_hosts: int = option(
        "continue without lost hosts, from the last checkpoint, while at least this many are left (default: all)",
        "K",
        default=0,
    )
    rejoin: str = option(
        'when a returned host joins: at a checkpoint (the default: when rank 0 calls stoker.mark("CHECKPOINT"), as'
        " recipes do) or with the next attempt; or never",
        "WHEN",
        default="checkpoint",
        choices=("checkpoint", "never"),
    )
    sync: bool = option("copy the working directory to the hosts first, without what .gitignore names", default=False)
    stage: tuple[str, ...] = option(
        "copy this file or folder to every host's disk first, to the same path or to DEST (for a file, DEST includes its name);"
        " verified by hash, and not copied again",
        "PATH[=DEST]",
        default=(),
        many=True,
    )
    ssh_option: tuple[str, ...] = option(
        "an option for the ssh client: --ssh-option=-p2222", "OPT", default=(), many=True
    )
    python: str | None = option(
        "the Python of the ranks (default: the hosts file's, else the one that runs Stoker)", "PATH", default=None
    )

    _torchrun = section("torchrun's, accepted")
    master_port: int | None = option("port of rank 0's store (default: a free one)", "PORT", default=None)
    master_addr: str | None = option(
        "address of rank 0's machine, with --nnodes started by hand on each", "ADDR", default=None
    )
    standalone: bool = option("use one machine and a free port, which is the default here", default=False)
    nnodes: str = option(
        "number of machines, where `stoker run` is started by hand on each of them; MIN:MAX with --rdzv-endpoint",
        "N",
        default="1",
    )
    node_rank: int = option("number of this machine, from 0", default=0)
    rdzv_backend: str | None = option(
        "static: --node-rank numbers the machines; c10d: the rendezvous at --rdzv-endpoint numbers them",
        default=None,
    )
    rdzv_endpoint: str | None = option(
        "HOST:PORT of the rendezvous on one of the machines; the same STOKER_RDZV_SECRET on all keeps other users out",
        default=None,
    )
    rdzv_id: str | None = option("becomes TORCHELASTIC_RUN_ID", default=None)
    rdzv_conf: str | None = option(
        "last_call_timeout=SECONDS: how long --nnodes MIN:MAX waits for more than MIN (default: 30); no other key is"
        " needed",
        default=None,
    )
    role: str = option("NAME sets ROLE_NAME; NAME:COUNT:'COMMAND' adds a role (see roles)", default="default")
    shutdown_timeout: float | None = option("the same as --grace", "SECONDS", default=None)
    virtual_local_rank: bool = option("the same as --isolate", default=False)
    monitor_interval: float | None = option("not needed: an exited rank is noticed immediately", default=None)
    start_method: str | None = option(
        "not needed: ranks are always fresh processes", default=None, choices=("spawn", "fork", "forkserver")
    )
    run_path: bool = option("not needed: the script always runs as __main__", default=False)
    local_addr: str | None = option("not needed: Stoker finds the address that the other hosts can reach", default=None)
    event_log_handler: str | None = option(
        "not needed: events are in the run directory", default=None, choices=("null", "console", "dynamic_rendezvous")
    )
    logs_specs: str | None = option("not needed: logs are in the run directory", default=None, choices=("default",))
    duplicate_stdout_filters: str | None = option("not needed: grep the rank's log instead", default=None)
    duplicate_stderr_filters: str | None = option("not needed: grep the rank's log instead", default=None)


# torchrun reads these variables as defaults of its flags. Stoker's own flags have no such variables: PET_NAME, for
# example, may belong to another program.
_PET_OPTIONS = """
    nnodes nproc_per_node rdzv_backend rdzv_endpoint rdzv_id rdzv_conf standalone max_restarts monitor_interval
    start_method event_log_handler role module no_python run_path log_dir redirects tee local_ranks_filter
    duplicate_stdout_filters duplicate_stderr_filters node_rank master_addr master_port local_addr signals_to_handle
    shutdown_timeout virtual_local_rank
"""
_PET_VARIABLES = {name: f"PET_{name.upper()}" for name in _PET_OPTIONS.split()}
_OTHER_VARIABLES = {
    "log_line_prefix_template": "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
    "shutdown_timeout": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
}
TORCHRUN_VARIABLES = frozenset((*_PET_VARIABLES.values(), *_OTHER_VARIABLES.values()))

# Environment variables that give the number of ranks where --nproc-per-node does not.
RANK_VARIABLES = ("NPROC_PER_NODE", "NUM_GPUS")


def requested_ranks(flag: str | None, environment: Mapping[str, str]) -> str:
    """Return the number of ranks that --nproc-per-node or else a variable sets, or "" if neither does."""
    return flag or next((environment[name] for name in RANK_VARIABLES if environment.get(name)), "")


def hides_all(visible: str | None) -> bool:
    """Return whether a value of CUDA_VISIBLE_DEVICES hides every GPU."""
    return visible is not None and visible.strip() in ("", "-1", "NoDevFiles")


def from_torchrun_environment(environment: Mapping[str, str], without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the options, except those in `without`, that torchrun's variables set; as in torchrun, PET_* win."""
    options = {
        **options_from_environment(RunOptions, _OTHER_VARIABLES, environment),
        **options_from_environment(RunOptions, _PET_VARIABLES, environment),
    }
    return {name: value for name, value in options.items() if name not in without}
