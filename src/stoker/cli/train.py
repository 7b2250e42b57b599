"""`stoker train STAGE [options]`: checks the settings, prepares the data, then runs the stage's recipe as `stoker run` would."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Collection
from typing import Any

from stoker.cli.machines import has_usable_gpus, observe_machine
from stoker.cli.train_fit import (
    kept_defaults,
    machines_to_plan,
    refuse_beyond_memory,
    refuse_too_large,
    with_kept_optimizer,
    with_memory_plan,
    without_memory_plan,
)
from stoker.contract import env_vars, errors, layout, schedulers
from stoker.contract.errors import EX_CONFIG, EX_NOINPUT, EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import options_of, replace
from stoker.contract.options import HelpFormatter, OptionParser, add_flags, build_options, options_from_mapping, suggest
from stoker.contract.terminal import print_text
from stoker.contract.text import is_digits
from stoker.contract.units import plural
from stoker.control.machine.model import Machine
from stoker.control.plan.options import RunOptions, from_torchrun_environment, requested_ranks
from stoker.control.plan.request import Request
from stoker.training.config.check import check, check_data, check_drill, check_needs
from stoker.training.config.derived import derivable
from stoker.training.config.flags import Shown, add_key_flags
from stoker.training.config.keys import DEFAULTS, KEYS, as_yaml, config_of, values_of
from stoker.training.config.layers import PREFIX, Layers, gather
from stoker.training.config.presets import PRESETS
from stoker.training.config.resolve import (
    Resolved,
    flags,
    lasting,
    on_cpu,
    pinned,
    pinned_words,
    settle,
    with_tokenizer,
)
from stoker.training.config.schema import SECTIONS, Config
from stoker.training.data.sources import check_there, fetch, is_hub_id, share_of
from stoker.training.loop.config import check_loggers
from stoker.training.model.config import OFF
from stoker.training.stages.inputs import input_digests
from stoker.training.stages.models import with_models
from stoker.training.stages.registry import STAGES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.training.config.derived import Situation
    from stoker.training.data.config import DataConfig
    from stoker.training.data.shards import Prepared
    from stoker.training.model.config import ModelConfig

# Options of `stoker run` that don't apply: the program is the recipe, and this module reads the config file.
_EXCLUDED_OPTIONS = ("config", "module", "no_python")
# Options of `stoker run` that a config file may set: they can't start a program, write elsewhere or reach another machine.
_FILE_OPTIONS = (
    "nproc_per_node", "init_slots", "init_timeout", "ram_limit", "numa_binding", "gpus", "gpu", "min_free_memory", "wait", "isolate", "exclude_bad",
    "legal_ranks", "share_gpus", "show", "quiet", "prefix", "local_ranks_filter", "max_restarts", "grace", "hang_timeout", "busy_timeout", "on_nan", "debug_retry",
    "stop_after_steps", "on_hangup", "signals_to_handle", "name", "no_preflight", "standalone", "monitor_interval", "shutdown_timeout",
)  # fmt: skip
_HELP = """usage: stoker train STAGE [options]

stages:
{stages}

  stoker train pretrain --data 'texts/*.txt'      large with GPUs, small without
  stoker train pretrain --debug --data book.txt   2 layers, 10 steps, all checks
  stoker train pretrain --config my.yaml --nproc-per-node 4 --max-steps 1000

`stoker train STAGE --help` lists the keys that this stage needs most, --help-all
every key and option.
"""
_DESCRIPTION = (
    "Checks the settings, prepares the data, then starts the stage's recipe as `stoker run` would. Takes the options of"
    " `stoker run` and every key of the configuration."
)
_EPILOG = """A key whose name is clear without its section may be given without it, with - or _: --max-steps 10, --learning-rate 1e-4. A name that
`stoker run` has, too, means the option of `stoker run`: --gpus 0,3 chooses GPUs, --needs.gpus 4 requires four.
preset < the stage's defaults (by model size and data, printed at the start) < config file < environment (STOKER_TRAIN_OPTIM_LEARNING_RATE)
< flags. `stoker docs config` prints every key.
exit codes: those of `stoker run`; 64 an invalid flag, 78 an invalid config file or variable, 65 and 66 data, 69 required GPUs are missing."""
_SHORT_EPILOG = """--help-all lists the other {count} keys and every option of `stoker run`; `stoker docs config` prints every key.
A key whose name is clear without its section may be given without it, with - or _: --max-steps 10.
preset < the stage's defaults (printed at the start) < config file < environment (STOKER_TRAIN_OPTIM_LEARNING_RATE) < flags"""
_KEYS_OF_LOADING = (
    "load",
    "engine",
    "trust_remote_code",
    "vocab_size",
)  # keys of `model` that still apply to a loaded one
_COMMON_RUN_OPTIONS = ("nproc_per_node", "gpus", "hosts", "name", "again", "max_restarts", "detach", "dry_run")
# Stages whose training data is not data.path, with the key that --data sets instead.
MAIN_INPUT = {"dpo": "dpo.pairs", "reward": "reward.pairs", "grpo": "grpo.prompts"}


def build_parser(
    stage: str | None = None, *, short: bool = False, default: Callable[[str], str] | None = None
) -> OptionParser:
    """Build the parser of a stage, or of all stages for completion.

    It accepts every key and option. With `short` its help lists only the common ones. `default` returns the text of a
    key's default.
    """
    definition = STAGES[stage] if stage is not None else None
    keys = definition.common if definition is not None and short else None
    unread = _keys_of_other_stages(stage) if stage is not None else ()
    prog = f"stoker train {stage or 'STAGE'}"
    parser = OptionParser(
        prog,
        f"{stage}: {definition.about}." if definition is not None and short else _DESCRIPTION,
        _SHORT_EPILOG.format(count=len(KEYS) - len(unread) - len(keys or ())) if short else _EPILOG,
        usage=f"{prog} [options]",
        allow_abbrev=False,
        formatter_class=_wide_formatter if short else HelpFormatter,
    )
    if stage is None:
        parser.add_argument("stage", choices=list(STAGES))
    parser.add_argument("--help-all", action="help", help="list every key of this stage and every option")
    add_key_flags(parser, Shown(keys, unread, default))
    add_flags(parser, RunOptions, without=_EXCLUDED_OPTIONS, shown=_COMMON_RUN_OPTIONS if short else None)
    return parser


class _KeyHelpFormatter(HelpFormatter):
    """Prints the value of an option once: --lr, --optim.learning_rate RATE."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, action.metavar if isinstance(action.metavar, str) else action.dest.upper())
        return f"{', '.join(action.option_strings)} {value}"


def _wide_formatter(prog: str) -> argparse.HelpFormatter:
    columns = min(shutil.get_terminal_size((80, 24)).columns, 140)
    return _KeyHelpFormatter(prog, max_help_position=max(columns // 3, 24), width=columns)


def _keys_of_other_stages(stage: str) -> tuple[str, ...]:
    """Return the keys that only other stages read."""
    definition = STAGES[stage]
    sections = {name for name in STAGES if name in SECTIONS} - {"tokenizer", *definition.sections}
    return tuple(dotted for dotted, key in KEYS.items() if key.section in sections and dotted not in definition.common)


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(
            _HELP.format(stages="\n".join(f"  {name:<10} {definition.about}" for name, definition in STAGES.items())),
            end="",
        )
        return 0 if argv else EX_USAGE
    stage, stage_argv = argv[0], argv[1:]
    if stage not in STAGES:
        problem = f"unknown stage {stage!r}{suggest(stage, STAGES)}"
        if stage.startswith("-"):
            problem = "the stage must come first: stoker train STAGE [options]"
        raise Refusal(f"{problem}; the stages are {', '.join(STAGES)}", EX_USAGE)
    if help_flags := [word for word in stage_argv if word in ("-h", "--help", "--help-all")]:
        short = "--help-all" not in help_flags
        print(_format_help(stage, [word for word in stage_argv if word not in help_flags], short=short), end="")
        return 0
    parser = build_parser(stage)
    args, unknown = parser.parse_known_args(stage_argv)
    if unknown:
        parser.refuse_unknown(unknown)
    options = vars(args)
    from stoker.cli.run import take_role_environment

    if role_env := take_role_environment():
        options["env"] = [*role_env, *options.get("env", [])]
    key_flags = options.pop("keys", ())
    layers = gather(key_flags, os.environ)
    for dotted in _keys_of_other_stages(stage):
        if dotted in layers.flags.values:  # only flags are refused, since one config file may serve several stages
            flag, owner = layers.flags.origins[dotted].words, KEYS[dotted].section
            raise Refusal(f"{flag}: stage {stage} does not read {dotted}, which applies to stage {owner}", EX_USAGE)
    if "allocation" in options:
        from stoker.cli.train_job import start_job

        return start_job(stage, key_flags, layers, options)
    return _train(stage, layers, options)


def _format_help(stage: str, argv: list[str], *, short: bool) -> str:
    """Return the help of a stage, with the defaults that a run here would have (with the --preset or --debug of `argv`)."""
    from stoker.training.stages.help import default_text

    args, _ = build_parser(stage).parse_known_args(argv)
    presets = [flag for flag in getattr(args, "keys", ()) if flag.name in ("preset", "debug")]
    has_gpus = has_usable_gpus(observe_machine(), getattr(args, "nproc_per_node", None))
    resolved = settle(gather(presets, {}), has_gpus, STAGES[stage].defaults)
    parser = build_parser(
        stage, short=short, default=lambda key: default_text(stage, key, resolved.config, gpus=has_gpus)
    )
    parser.description = f"{parser.description}\n\nDefaults below: {resolved.lines[0]}."
    return parser.format_help()


def _train(stage: str, layers: Layers, flag_options: dict[str, Any]) -> int:
    """Resolve configuration and options, refuse bad settings, prepare the data, plan the memory and start the recipe.

    Sets and removes environment variables of this process, which the ranks inherit.
    """
    trains = STAGES[stage].learning is not None
    run_layers = _run_layers(layers.run, layers.path, flag_options)
    machine = observe_machine()
    has_gpus = has_usable_gpus(
        machine, requested_ranks(build_options(RunOptions, *run_layers).nproc_per_node, os.environ)
    )
    resolved = settle(layers, has_gpus, STAGES[stage].defaults)
    file_options = dict(resolved.run_options)
    if any("gpus" in layer for layer in run_layers[1:]):  # --gpus wins over the GPU that the file's device_id names
        file_options.pop("gpu", None)
    run_layers = _run_layers(file_options, layers.path, flag_options)
    # Always print the prefix, also with one GPU and in files: people grep for GPU0:INFO.
    options = build_options(RunOptions, {"module": not STAGES[stage].is_script, "prefix": "always"}, *run_layers)
    root, remote = layout.runs_root(options.runs_dir, os.environ), options.hosts is not None
    config, models = with_models(resolved.config, root, _say, options.name, remote)
    config = _with_data_as_input(stage, config)
    resolved, command_line = replace(resolved, config=pinned(config)), pinned_words(sys.argv[1:], models)
    _refuse_early(stage, resolved, options, machine, has_gpus)
    for line in resolved.lines:
        _say(line)
    machines = (
        machines_to_plan(resolved.config, options, machine, _say) if trains and (has_gpus or options.hosts) else {}
    )
    resolved = _with_loaded_model(stage, resolved, options, machine, machines, has_gpus)
    ready: Prepared | None = None
    if not options.dry_run:
        resolved = replace(resolved, config=_fetch_hub_inputs(stage, resolved.config))
        if STAGES[stage].prepares:
            ready = _prepare_data(resolved, options)
    given = frozenset(key for layer in run_layers for key in layer) | {"module"}

    def make_request(config: Config) -> Request:
        return Request(options, STAGES[stage].recipe, (), given, tuple(flags(lasting(config))), command_line, ())

    situation: Situation | None = None
    if trains:
        from stoker.training.stages.situation import situation as describe_situation

        ranks, cpu = _max_ranks(resolved.config, options, machine, has_gpus), on_cpu(resolved.config, has_gpus)
        situation = describe_situation(stage, resolved.config, ranks, ready)
        resolved = _with_stage_defaults(stage, resolved, situation, cpu, make_request)
    # Make the request before the memory plan: the plan's values for this machine's GPUs must not identify another run.
    request = make_request(resolved.config)
    if trains:
        resolved = with_kept_optimizer(resolved, request)
    os.environ.pop(env_vars.MEMORY_PLAN, None)  # an outer run may have set its plan
    if machines:
        amount = situation.amount if situation is not None else None
        resolved, options, plan = with_memory_plan(stage, resolved, options, machines, ready, _say, amount)
        request = replace(request, options=options)
        if plan is not None:
            from stoker.training.fit.launch_plan import LaunchPlan

            os.environ.update(LaunchPlan.of(plan).to_environment())
    else:
        resolved = without_memory_plan(resolved, options, _say)
    if ready is not None:
        _check_resume(resolved.config, ready)
    if trains:
        _refuse_earlier_result(resolved.config, request)
    if resolved.config.parallel.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so that no GPU is locked and ranks run on the CPU
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]  # the ranks get these settings as flags
    if sys.stderr.isatty() and not options.detach:
        os.environ[env_vars.TERMINAL] = "1"
    if has_gpus and trains:
        os.environ[env_vars.EARLY_CONTEXT] = "1"
    from stoker.cli.run import start

    keep = (*STAGES[stage].defaults, *derivable(STAGES[stage].learning))
    contents = input_digests(STAGES[stage], resolved.config, ready.key if ready is not None else None)
    code = start(replace(request, args=tuple(flags(resolved.config, keep)), contents=contents), _show_loss)
    if options.dry_run and not options.json and not code:
        keys = _keys_to_show(stage, resolved, keep)
        print(as_yaml(resolved.config, keys), end="")
        if resolved.config.model.load and trains:
            print_text(f"# The model's shape is that of {resolved.config.model.load}{_describe_size(resolved.config)}.")
        unlisted = len(KEYS) - len(keys) - len(_keys_from_folders(resolved))
        print_text(f"# The other {unlisted} keys have their defaults: `stoker docs config` prints them.")
    return code


def _with_loaded_model(
    stage: str, resolved: Resolved, options: RunOptions, machine: Machine, machines: dict[str, Machine], has_gpus: bool
) -> Resolved:
    """Check the model of model.load, use its tokenizer and context length, and raise Refusal if it can't fit."""
    if not resolved.config.model.load:
        return resolved
    trains = STAGES[stage].learning is not None
    parameters = _check_model(resolved.config) if trains and not options.dry_run else 0
    if not resolved.config.tokenizer.path:
        resolved = replace(resolved, config=with_tokenizer(resolved.config, _say))
    if trains:
        from stoker.training.stages.situation import with_context_of_model

        cpu = on_cpu(resolved.config, has_gpus or options.hosts is not None)
        config = with_context_of_model(stage, resolved.config, resolved.given, cpu, _say)
        resolved = replace(resolved, config=config)
    if parameters:
        ranks = _max_ranks(resolved.config, options, machine, has_gpus)
        if ranks is not None and on_cpu(resolved.config, has_gpus):
            refuse_beyond_memory(resolved.config, ranks, machine.memory_total, parameters)
        if machines:
            refuse_too_large(stage, resolved, options, machines)
    return resolved


def _describe_size(config: Config) -> str:
    """Format the size of the loaded model: parameters, layers, width and vocabulary."""
    from stoker.training.model.config import parameters

    c = _loaded_shape(config.model)
    return f": {parameters(c):,} parameters, {c.layers} layers of width {c.dim}, {plural(c.vocab_size, 'token')}"


def _keys_from_folders(resolved: Resolved) -> set[str]:
    """Return the keys whose values come from the folders of model and tokenizer instead of the preset."""
    config, keys = resolved.config, set[str]()
    if config.model.load:
        keys |= {name for name, key in KEYS.items() if key.section == "model"}
        keys -= {f"model.{name}" for name in _KEYS_OF_LOADING}
    if config.tokenizer.path:
        keys |= {name for name, key in KEYS.items() if key.section == "tokenizer"} - {"tokenizer.path"}
    return keys - set(resolved.given)


def _keys_to_show(stage: str, resolved: Resolved, keep: Collection[str]) -> set[str]:
    """Return the common keys of this stage and those that a config file needs to reproduce the configuration."""
    values, preset = values_of(resolved.config), PRESETS[resolved.config.preset]
    unchanged = {key for key in KEYS if values[key] == DEFAULTS[key] == preset.get(key, values[key])}
    unread = set(_keys_of_other_stages(stage)) - set(resolved.given)
    shown = {*STAGES[stage].common, *keep, *resolved.given} | (set(KEYS) - unchanged)
    return shown - unread - _keys_from_folders(resolved)


def _run_layers(section: Any, path: str, flag_options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the options of `stoker run` from the config file, from torchrun's variables and from the flags, in this order."""
    source = f"config file {path}: run"
    for name in _EXCLUDED_OPTIONS:
        if name in section:
            raise Refusal(f"{source}.{name} does not apply to stoker train; remove it", errors.EX_CONFIG)
    for key in section:
        name = str(key).replace("-", "_")
        if name in options_of(RunOptions) and name not in _FILE_OPTIONS:
            why = "is not allowed in a file, which somebody else may have written"
            raise Refusal(f"{source}.{name} {why}; give it as a flag (--{name.replace('_', '-')})", errors.EX_CONFIG)
    return [
        options_from_mapping(RunOptions, section, source),
        from_torchrun_environment(os.environ, without=_EXCLUDED_OPTIONS),
        flag_options,
    ]


def _max_ranks(config: Config, options: RunOptions, machine: Machine, has_gpus: bool) -> int | None:
    """Return the maximum number of ranks, or None if it depends on other hosts or is decided by `stoker run`."""
    requested = requested_ranks(options.nproc_per_node, os.environ).strip().lower()
    has_hosts = options.hosts is not None or options.nnodes != "1" or schedulers.find_scheduler(os.environ) is not None
    if has_hosts or (requested and not is_digits(requested)):
        return None
    if requested:
        return int(requested)
    return 1 if on_cpu(config, has_gpus) else len(machine.gpus) or None


def _refuse_early(stage: str, resolved: Resolved, options: RunOptions, machine: Machine, has_gpus: bool) -> None:
    """Raise Refusal for every problem that shows before the data is read."""
    config, given = resolved.config, resolved.given
    remote = options.hosts is not None
    check(config, given, on_cpu(config, has_gpus or remote))
    STAGES[stage].check(config)
    if config.parallel.device == "cuda" and not has_gpus and not remote:
        origin = given.get("parallel.device")
        line = "parallel.device is cuda, but there is no usable GPU; leave it out to train on the CPU"
        raise Refusal(f"{origin.words}: {line}" if origin else line, EX_UNAVAILABLE, cause="gpu.too-few")
    if config.parallel.device == "cpu" and (options.gpus or options.gpu):
        flag = "--gpus" if options.gpus else "--gpu"
        raise Refusal(f"parallel.device is cpu, but {flag} selects GPUs; leave one of them out", EX_USAGE)
    if not remote:
        check_needs(config.needs, [gpu.memory_total for gpu in machine.gpus], given)
    elif config.needs.gpus or config.needs.vram:
        _say("needs: not checked, since the GPUs are on other hosts")
    ranks = _max_ranks(config, options, machine, has_gpus)
    if ranks is not None:
        check_drill(config, ranks, given)
        if on_cpu(config, has_gpus) and STAGES[stage].learning is not None and not options.dry_run:
            refuse_beyond_memory(config, ranks, machine.memory_total)
    if "wandb" in check_loggers(config.train.log_to) and not remote:  # on other hosts, rank 0 checks it there
        from stoker.control.plan.run_plan import read_added_environment
        from stoker.training.loop.wandb_login import check_wandb_login

        check_wandb_login({**os.environ, **read_added_environment(options, os.environ)})
    _check_inputs(stage, config)


def _with_data_as_input(stage: str, config: Config) -> Config:
    """Use --data as the stage's main input unless that is set."""
    key, values = MAIN_INPUT.get(stage), values_of(config)
    if key is None or values[key] or len(config.data.path) != 1:
        return config
    path = config.data.path[0]
    _say(f"--data {path} is used as --{key}")
    return config_of(config.preset, values | {key: path, "data.path": ()})


def _check_inputs(stage: str, config: Config) -> None:
    """Raise Refusal if data, model or another input of the stage is missing."""
    definition, values = STAGES[stage], values_of(config)
    if "data.path" in definition.inputs:
        if not config.data.path:
            raise Refusal("the data is missing; name files, a folder or a hub id with --data", EX_USAGE)
        from stoker.training.tokenizer.place import folder_here

        check_there(config.data.path)
        if share_of(config.data.validation) is None:
            check_there([config.data.validation])
        if config.tokenizer.path:
            folder_here(config.tokenizer.path)
    if "model.load" in definition.inputs and not config.model.load:
        raise Refusal(f"stage {stage} needs a model; name its folder or hub id with --model.load", EX_USAGE)
    if definition.prepares and config.checkpoint.resume not in ("auto", "never"):
        from stoker.training.loop.resume import located

        located(config.checkpoint.resume)
    for key, path in definition.files(values):
        if not path:
            line = f"stage {stage} needs --{key}"
            if config.data.path:
                line = f"stage {stage} does not read --data; give --{key} {config.data.path[0]}"
            raise Refusal(f"{line} ({KEYS[key].spec.help})", EX_USAGE)
        if not os.path.exists(path) and not is_hub_id(path):
            raise Refusal(f"{key} {path} does not exist", EX_NOINPUT)


def _fetch_hub_inputs(stage: str, config: Config) -> Config:
    """Fetch the stage's inputs from the hub once, so that the ranks don't. Return the config with their local paths."""
    values = values_of(config)
    path_keys = [name for name, key in KEYS.items() if key.section == stage and key.spec.metavar == "PATH"]
    hub_ids = {key: values[key] for key in path_keys if isinstance(values[key], str) and is_hub_id(values[key])}
    if not hub_ids:
        return config
    return config_of(
        config.preset, values | {key: fetch(path, config.data.cache, _say) for key, path in hub_ids.items()}
    )


def _prepare_data(resolved: Resolved, options: RunOptions) -> Prepared:
    """Prepare the data before any rank starts, outside of a process group, and run the checks that need the data."""
    from stoker.training.data.prepare import prepare

    config = resolved.config
    if options.hosts is not None:
        _say(_describe_data_of_hosts(config.data, options))
    ready = prepare(config.data, config.tokenizer, _say)
    check_data(config, ready.train_tokens, ready.vocab_size, resolved.given, ready.train_samples)
    if config.model.load:
        _check_weights(config.model, ready)
    return ready


def _describe_data_of_hosts(data: DataConfig, options: RunOptions) -> str:
    """Describe how other hosts get the data: each host's first rank prepares what its cache lacks."""
    sources = [*data.path, *([data.validation] if share_of(data.validation) is None else [])]
    files = [path for path in sources if not is_hub_id(path)]
    line = f"each host prepares its copy of the data, unless {data.cache} there has it already"
    if not files:
        return f"{line}: it fetches {', '.join(sources)} from the hub"
    working_dir = os.path.realpath(os.curdir)
    means = "in a shared folder, or copied with --sync or --stage PATH"
    if options.sync and all(os.path.realpath(path).startswith(f"{working_dir}{os.sep}") for path in files):
        means = "--sync copies what git does not ignore"
    elif options.sync:
        means = "in a shared folder, or copied with --stage PATH, since --sync copies the working directory only"
    return f"{line}: it needs {', '.join(files)} under the same path ({means})"


def _with_stage_defaults(
    stage: str, resolved: Resolved, situation: Situation, cpu: bool, make_request: Callable[[Config], Request]
) -> Resolved:
    """Return the settings with the defaults that follow from stage, model and data, and print these defaults."""
    from stoker.training.stages.situation import with_defaults

    config, derived, lines = with_defaults(stage, resolved.config, resolved.given, situation, cpu)
    if kept := kept_defaults(config, derived, make_request):
        earlier = config_of(config.preset, values_of(config) | kept)
        config, _, lines = with_defaults(stage, earlier, resolved.given, situation, cpu, kept)
    for line in lines:
        _say(line)
    return replace(resolved, config=config)


def _check_resume(config: Config, ready: Prepared) -> None:
    from stoker.training.loop.resume import check_before_launch, nothing_left

    model = _loaded_shape(config.model) if config.model.load else config.model
    first_step = check_before_launch(config.checkpoint, model, config.optim.kind, ready)
    # With auto this may be the same command again, for a run that is complete: that is no problem.
    if first_step is not None and config.checkpoint.resume != "auto":
        line = nothing_left(first_step, config.train.max_steps)
        if line:
            _say(line)


def _refuse_earlier_result(config: Config, request: Request) -> None:
    """Raise Refusal if --again would start a new run that resumes from an earlier run's last checkpoint."""
    from stoker.control.plan.run_dir import AlreadyEnded, open_run_dir
    from stoker.training.loop.resume import newest_in

    folder = config.checkpoint.folder
    newest = newest_in(folder) if request.options.again and folder and config.checkpoint.resume == "auto" else None
    if newest is None:
        return
    try:
        run_dir = open_run_dir(replace(request, options=replace(request.options, dry_run=True)), os.environ)
    except (AlreadyEnded, Refusal):
        return  # the start reports it
    if not run_dir.reopened:
        fix = "use another --checkpoint.folder, or start from scratch with --checkpoint.resume never"
        raise Refusal(f"--again would resume from {newest}, which an earlier run saved; {fix}", EX_USAGE)


def _check_model(config: Config) -> int:
    """Check the model's config.json and the headers of its weights before the data is prepared, which may take hours.

    Fetches a hub model into the cache for the ranks. Returns the number of parameters.
    """
    from stoker.training.model import hf_config, hf_files, hf_hub, targets
    from stoker.training.model.config import parameters

    model, adapter = config.model, config.adapter
    folder = hf_hub.folder_of(model.load, _say, code=model.trust_remote_code)
    hf_config.check_trainable(folder, adapter.method)
    shape = hf_config.shape_for(model, folder)
    if shape.engine == "transformers":
        hf_config.check_adapters_outside(adapter.method)
        return parameters(shape)
    hf_files.check(folder, shape)
    if adapter.method != OFF:
        targets.targets(shape, adapter)
        targets.extra(shape, adapter)
    return parameters(shape)


def _loaded_shape(model: ModelConfig) -> ModelConfig:
    """Return the shape of the model in the folder of model.load, with the configured vocabulary size."""
    from stoker.training.model import hf_config, hf_hub

    folder = hf_hub.folder_of(model.load, lambda line: None, code=model.trust_remote_code)
    shape = hf_config.shape_for(model, folder)
    return replace(shape, vocab_size=model.vocab_size or shape.vocab_size)


def _check_weights(model: ModelConfig, ready: Prepared) -> None:
    """Raise Refusal if the model's weights and tokenizer don't match the tokenizer of the data."""
    from stoker.training.model import hf_files, hf_hub
    from stoker.training.model.config import with_rows
    from stoker.training.tokenizer import place, tokenizer

    folder = hf_hub.folder_of(model.load, lambda line: None, code=model.trust_remote_code)
    shape = with_rows(_loaded_shape(model), ready.vocab_size)
    if shape.engine != "transformers":
        hf_files.check(folder, shape)
    if os.path.exists(os.path.join(folder, place.FILES[0])):
        difference = tokenizer.differs(tokenizer.load(folder), tokenizer.load(ready.tokenizer))
        if difference:
            fix = f"use --tokenizer.path {model.load}"
            raise Refusal(f"the data's tokenizer differs from that of {model.load}: {difference}; {fix}", EX_CONFIG)


def _show_loss(verdict: Verdict, run_dir: str, say: Callable[[str], None]) -> None:
    """Show the loss curve of a completed or stopped stage that has one, as a line and as a picture."""
    if verdict.status in ("completed", "stopped"):
        from stoker.control.show.charts import show_loss

        show_loss(run_dir, say)


def _say(line: str) -> None:
    print_text(line, sys.stderr)
