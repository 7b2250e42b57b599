"""`stoker run`'s options: torchrun's with torchrun's meaning, and our own."""

from __future__ import annotations

from stoker.contract.quantities import duration, size
from stoker.contract.settings import from_environment
from stoker.contract.shape import option, shape

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_RANKS, _GPUS, _OUT, _LIFE, _RUN, _HOSTS, _TORCHRUN = (
    "ranks",
    "GPUs",
    "output",
    "life of the run",
    "record",
    "hosts",
    "torchrun's, accepted",
)


@shape
class RunOptions:
    nproc_per_node: str | None = option(
        "ranks to start: a number, gpu, cpu or auto (default: one per usable GPU)",
        default=None,
        metavar="N",
        group=_RANKS,
    )
    module: bool = option(
        "the script is a module, started as with python -m", default=False, flags=("-m",), group=_RANKS
    )
    no_python: bool = option("the program is not Python: execute it as it is", default=False, group=_RANKS)
    env: tuple[str, ...] = option(
        "set a variable for the ranks (NAME=VALUE), or pass one on (NAME)",
        default=(),
        metavar="NAME[=VALUE]",
        many=True,
        group=_RANKS,
    )
    init_slots: str | None = option(
        "ranks that may import and load at the same time: a number or auto", default=None, metavar="K", group=_RANKS
    )
    init_timeout: float = option(
        "a rank gives its start-up slot back after this long at the latest (default: 2m)",
        default=120.0,
        parse=duration,
        metavar="TIME",
        group=_RANKS,
    )
    ram_limit: int = option(
        "stop the job when a rank's resident memory passes this, e.g. 20GB",
        default=0,
        parse=size,
        metavar="SIZE",
        group=_RANKS,
    )
    numa_binding: str | None = option(
        "node: bind each rank to the CPUs near its GPU (torchrun's socket, exclusive and core-complex mean the same"
        " here)",
        default=None,
        choices=("node", "socket", "exclusive", "core-complex"),
        metavar="MODE",
        group=_RANKS,
    )

    gpus: str | None = option(
        "which GPUs: 0,3 (as nvidia-smi counts), UUIDs, or any:2 for the two with most room",
        default=None,
        metavar="WHICH",
        group=_GPUS,
    )
    gpu: str | None = option("one GPU by its number or UUID", default=None, metavar="ID", group=_GPUS)
    min_free_memory: int = option(
        "a GPU with less free memory than this is not used, e.g. 20GB",
        default=0,
        parse=size,
        metavar="SIZE",
        group=_GPUS,
    )
    wait: float = option(
        "wait this long for enough free GPUs, e.g. 10m", default=0.0, parse=duration, metavar="TIME", group=_GPUS
    )
    isolate: bool = option("each rank sees its own GPU only, as device 0", default=False, group=_GPUS)
    exclude_bad: bool = option(
        "prove each GPU first (a context and a product in a child) and leave the bad ones out",
        default=False,
        group=_GPUS,
    )
    legal_ranks: str | None = option(
        "the numbers of ranks the job can run with, e.g. 1,2,4,8", default=None, metavar="N,N", group=_GPUS
    )
    share_gpus: bool = option("let several ranks or runs use one GPU", default=False, group=_GPUS)

    show: str = option(
        "what the console gets: all, none, errors (stderr only), or ranks like 0,2",
        default="all",
        metavar="WHAT",
        group=_OUT,
    )
    quiet: bool = option("no MEM and LOCK lines on the console", default=False, flags=("-q",), group=_OUT)
    prefix: str = option(
        "GPU0: before every line on the console: always, never, or auto (the default: always, except on the stdout of a"
        " single rank when stdout goes to a pipe or file of its own)",
        default="auto",
        choices=("auto", "always", "never"),
        metavar="WHEN",
        group=_OUT,
    )
    log_line_prefix_template: str | None = option(
        "another prefix, e.g. '[${role_name}${local_rank}]:' or '[rank${rank}]: ' (default:"
        " $TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE)",
        default=None,
        metavar="TEXT",
        group=_OUT,
    )
    log_dir: str | None = option(
        "torchrun's log folder: ID_XXXXXXXX/attempt_0/LOCAL_RANK/ with error.json, and with the stdout.log and"
        " stderr.log that -r and -t ask for",
        default=None,
        group=_OUT,
    )
    redirects: str | None = option(
        "streams that go to files and not to the console: 1, 2, 3 or 0:1,1:2",
        default=None,
        flags=("-r",),
        metavar="STD",
        group=_OUT,
    )
    tee: str | None = option(
        "streams that go to files and to the console: 1, 2, 3 or 0:1,1:2 (the run directory always gets both)",
        default=None,
        flags=("-t",),
        metavar="STD",
        group=_OUT,
    )
    local_ranks_filter: str | None = option(
        "ranks whose output the console gets, e.g. 0,1", default=None, metavar="RANKS", group=_OUT
    )

    max_restarts: int = option(
        "start again after a failure that another attempt can survive, at most this often (default: 0)",
        default=0,
        metavar="N",
        group=_LIFE,
    )
    grace: float | None = option(
        "time a rank has to end after a stop signal (default: 30s, 5s after a failure)",
        default=None,
        parse=duration,
        metavar="TIME",
        group=_LIFE,
    )
    hang_timeout: float = option(
        "stop a job that has made no progress for this long (default: 5m; 0: never); a stall is explained within"
        " seconds all the same",
        default=300.0,
        parse=duration,
        metavar="TIME",
        group=_LIFE,
    )
    on_nan: str = option(
        "a loss that stays NaN, infinite or exploded: stop the job (the default), or warn",
        default="stop",
        choices=("stop", "warn"),
        metavar="WHAT",
        group=_LIFE,
    )
    debug_retry: bool = option(
        "after an asynchronous CUDA error one more attempt with blocking launches, for the true line",
        default=False,
        group=_LIFE,
    )
    stop_after_steps: int = option(
        "end the run, as complete, once every rank has made this many steps", default=0, metavar="N", group=_LIFE
    )
    detach: bool = option("run in the background, also after logout", default=False, group=_LIFE)
    on_hangup: str = option(
        "the terminal closes: stop (the ranks save and end, as with Ctrl-C; the default), or detach (the run continues"
        " in the background)",
        default="stop",
        choices=("stop", "detach"),
        metavar="WHAT",
        group=_LIFE,
    )
    notify: str | None = option(
        "shell command that gets the verdict on its stdin when the run ends or restarts",
        default=None,
        metavar="CMD",
        group=_LIFE,
    )
    signals_to_handle: str = option(
        "signals that stop the run: passed on to the ranks, which have --grace to save and end (default:"
        " SIGTERM,SIGINT,SIGHUP,SIGQUIT, which always do)",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        metavar="NAMES",
        group=_LIFE,
    )

    name: str | None = option(
        "name of the run; given again, an unfinished run of that name continues", default=None, group=_RUN
    )
    again: bool = option(
        "run it again although a run of this name and these settings is complete", default=False, group=_RUN
    )
    runs_dir: str | None = option(
        "folder of the run directories (default: $STOKER_RUNS, else ./runs)", default=None, metavar="DIR", group=_RUN
    )
    config: str | None = option("YAML or JSON file with any of these options", default=None, metavar="FILE", group=_RUN)
    ladder: bool = option(
        "first the imports one by one, then 1, half and all ranks for a few steps (stoker ladder)",
        default=False,
        group=_RUN,
    )
    dry_run: bool = option("print the plan and start nothing", default=False, group=_RUN)
    json: bool = option("print the plan as JSON (with --dry-run)", default=False, group=_RUN)
    no_preflight: bool = option("skip the checks before the start", default=False, group=_RUN)

    hosts: str | None = option(
        "hosts in rank order: a hosts file (cluster.yaml), or a,b,c reached by ssh",
        default=None,
        metavar="FILE|A,B",
        group=_HOSTS,
    )
    min_hosts: int = option(
        "go on without lost hosts, from the last checkpoint, while at least this many are left (default: all)",
        default=0,
        metavar="K",
        group=_HOSTS,
    )
    rejoin: str = option(
        'a host that is back joins at a checkpoint (the default: rank 0 says stoker.mark("CHECKPOINT"), as our recipes'
        " do) or the next attempt; or never",
        default="checkpoint",
        choices=("checkpoint", "never"),
        metavar="WHEN",
        group=_HOSTS,
    )
    sync: bool = option(
        "copy the working directory to the hosts first, without what .gitignore names", default=False, group=_HOSTS
    )
    stage: tuple[str, ...] = option(
        "copy this file or folder to every host's disk first, to the same path or to THERE (a file keeps its name),"
        " once, checked by hash",
        default=(),
        metavar="PATH[=THERE]",
        many=True,
        group=_HOSTS,
    )
    ssh_option: tuple[str, ...] = option(
        "an option for the ssh client: --ssh-option=-p2222", default=(), metavar="OPT", many=True, group=_HOSTS
    )
    python: str | None = option(
        "the Python of the ranks (default: the hosts file's, else the one that runs Stoker)",
        default=None,
        metavar="PATH",
        group=_HOSTS,
    )

    master_port: int | None = option(
        "port of rank 0's store (default: a free one)", default=None, metavar="PORT", group=_TORCHRUN
    )
    master_addr: str | None = option(
        "address of rank 0's machine, with --nnodes started by hand on each",
        default=None,
        metavar="ADDR",
        group=_TORCHRUN,
    )
    standalone: bool = option("one machine and a free port: always so here", default=False, group=_TORCHRUN)
    nnodes: str = option(
        "number of machines, where `stoker run` is started by hand on each of them; MIN:MAX with --rdzv-endpoint",
        default="1",
        metavar="N",
        group=_TORCHRUN,
    )
    node_rank: int = option("number of this machine, from 0", default=0, group=_TORCHRUN)
    rdzv_backend: str | None = option(
        "static: --node-rank says who is who; c10d: the machines meet at --rdzv-endpoint and are numbered there",
        default=None,
        group=_TORCHRUN,
    )
    rdzv_endpoint: str | None = option(
        "HOST:PORT where the machines meet, on one of them; the same STOKER_RDZV_SECRET on all keeps strangers out",
        default=None,
        group=_TORCHRUN,
    )
    rdzv_id: str | None = option("becomes TORCHELASTIC_RUN_ID", default=None, group=_TORCHRUN)
    rdzv_conf: str | None = option(
        "last_call_timeout=SECONDS: how long --nnodes MIN:MAX waits for more than MIN (default: 30); no other key is"
        " needed",
        default=None,
        group=_TORCHRUN,
    )
    role: str = option("becomes ROLE_NAME", default="default", group=_TORCHRUN)
    shutdown_timeout: float | None = option("the same as --grace", default=None, metavar="SECONDS", group=_TORCHRUN)
    virtual_local_rank: bool = option("the same as --isolate", default=False, group=_TORCHRUN)
    monitor_interval: float | None = option("not needed: a rank's end is seen at once", default=None, group=_TORCHRUN)
    start_method: str | None = option(
        "not needed: ranks are always fresh processes",
        default=None,
        choices=("spawn", "fork", "forkserver"),
        group=_TORCHRUN,
    )
    run_path: bool = option("not needed: the script always runs as __main__", default=False, group=_TORCHRUN)
    local_addr: str | None = option(
        "not needed: the address is that of the route to the others", default=None, group=_TORCHRUN
    )
    event_log_handler: str | None = option(
        "not needed: events are in the run directory",
        default=None,
        choices=("null", "console", "dynamic_rendezvous"),
        group=_TORCHRUN,
    )
    logs_specs: str | None = option(
        "not needed: logs are in the run directory", default=None, choices=("default",), group=_TORCHRUN
    )
    duplicate_stdout_filters: str | None = option("not needed: grep the rank's log", default=None, group=_TORCHRUN)
    duplicate_stderr_filters: str | None = option("not needed: grep the rank's log", default=None, group=_TORCHRUN)


# The variables that torchrun reads as defaults of its flags, and no others: PET_NAME may be somebody's dog.
_PET = (
    "nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone", "max_restarts", "monitor_interval", "start_method",
    "event_log_handler", "role", "module", "no_python", "run_path", "log_dir", "redirects", "tee", "local_ranks_filter", "duplicate_stdout_filters",
    "duplicate_stderr_filters", "node_rank", "master_addr", "master_port", "local_addr", "signals_to_handle", "shutdown_timeout", "virtual_local_rank",
)  # fmt: skip
_PET_VARIABLES = {name: f"PET_{name.upper()}" for name in _PET}
_OTHER_VARIABLES = {
    "log_line_prefix_template": "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
    "shutdown_timeout": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
}
TORCHRUN_VARIABLES = frozenset((*_PET_VARIABLES.values(), *_OTHER_VARIABLES.values()))


def from_torchrun_environment(environment: Mapping[str, str], without: tuple[str, ...] = ()) -> dict[str, Any]:
    """The options that torchrun's variables give; PET_* wins over the others, as in torchrun. `without`: options that
    are not read.
    """
    found = {
        **from_environment(RunOptions, _OTHER_VARIABLES, environment),
        **from_environment(RunOptions, _PET_VARIABLES, environment),
    }
    return {name: value for name, value in found.items() if name not in without}
