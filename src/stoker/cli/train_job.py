"""`stoker train grpo --allocation 'stoker:d1+fsdp:d3'`: starts rollout servers and trainers as one job with two roles."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.cli import roles
from stoker.cli.machines import has_usable_gpus, observe_machine
from stoker.contract import layout
from stoker.contract.env_vars import API_KEY
from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.frozen import replace
from stoker.contract.terminal import print_text
from stoker.control.launch.children import stoker_command
from stoker.control.plan.options import requested_ranks
from stoker.control.roles import allocation, role
from stoker.control.roles.allocation import AllocationPart
from stoker.control.roles.role import ALWAYS, AUTO, ReadyRule, RoleSpec
from stoker.training.config.flags import Flag
from stoker.training.config.keys import values_of
from stoker.training.config.layers import Layers
from stoker.training.config.resolve import MODEL_KEYS, on_cpu, settle
from stoker.training.config.schema import Config
from stoker.training.rl.config import GROUP
from stoker.training.stages.inputs import input_digests
from stoker.training.stages.models import with_models
from stoker.training.stages.registry import STAGES

STAGE = "grpo"
SERVER, TRAINER = "server", "trainer"
STALENESS = 1  # the default of a job: with 0, servers and trainers would wait for each other
MAX_SLOTS = 64
READY_TIMEOUT_S = 1200.0  # a large model on a network disk takes long to load


def start_job(stage: str, key_flags: Sequence[Flag], layers: Layers, options: dict[str, Any]) -> int:
    """Start the job and return its exit code. `options` are those of `stoker run`, including the allocation."""
    text = str(options["allocation"])
    if stage != STAGE:
        raise Refusal(f"--allocation needs stage {STAGE}; stage {stage} has only one role", EX_USAGE)
    for name in ("role", "roles", "hosts"):
        if name in options:
            line = f"--{name} can't be combined with `stoker train {stage} --allocation`; use `stoker run --roles`"
            raise Refusal(line, EX_USAGE)
    roles.refuse_unused_options(options)
    serving, training = split_allocation(text)
    if layers.told("grpo.server") is not None:
        raise Refusal("--allocation starts the servers; leave grpo.server out", EX_USAGE)
    gpus = has_usable_gpus(observe_machine(), requested_ranks(None, os.environ))
    config = settle(layers, gpus, STAGES[stage].defaults).config
    # Look up names of runs here, since the trainer's runs folder is that of the job.
    runs_root = layout.runs_root(options.get("runs_dir"), os.environ)
    config, models = with_models(config, runs_root, _say, options.get("name"), False)
    values = values_of(config)
    model_paths = {key: values[key] for key in MODEL_KEYS if values[key] in models.values()}
    key_flags = [flag for flag in key_flags if flag.name not in model_paths]
    key_flags += [Flag(key, f"--{key}", path) for key, path in model_paths.items()]
    server = _make_server_role(config, serving, runs_root)
    specs = [server, _make_trainer_role(key_flags, layers, training, server.name, server.env)]
    if allocation.parse_allocation(text)[0] == training:
        specs.reverse()
    plan = roles.apply_allocation(role.check_roles(specs, "--allocation", EX_USAGE), text)
    if on_cpu(config, gpus):
        plan = replace(plan, specs=tuple(replace(spec, gpus=0) for spec in plan.specs))
    contents = input_digests(STAGES[stage], config, None)
    return roles.start_plan(replace(roles.make_request(options, plan.specs, ()), contents=contents), plan)


def split_allocation(text: str) -> tuple[AllocationPart, AllocationPart]:
    """Return the part that serves and the part that trains. Raises Refusal unless there is exactly one of each."""
    parts = allocation.parse_allocation(text)
    serving, training = ([part for part in parts if part.is_server is serves] for serves in (True, False))
    if len(serving) != 1 or len(training) != 1:
        line = f"--allocation must have one part that serves and one that trains, as in stoker:d1+fsdp:d3, got {text}"
        raise Refusal(line, EX_USAGE)
    if serving[0].engine != "stoker":
        line = f"--allocation {text}: `stoker train` serves with stoker only; for {serving[0].engine} use `stoker run --roles`"
        raise Refusal(f"{line} (`stoker docs grpo`)", EX_USAGE)
    if training[0].engine == "megatron" or training[0].gpu_count != training[0].size("d"):
        example = f"fsdp:d{training[0].gpu_count}"
        line = f"--allocation {text}: the trainers must be fsdp or ddp, with one replica per GPU; write {example}"
        raise Refusal(line, EX_USAGE)
    return serving[0], training[0]


def _make_server_role(config: Config, part: AllocationPart, runs_root: str) -> RoleSpec:
    from stoker.training.model import hf_config, hf_hub
    from stoker.training.model.config import ModelConfig

    if not config.model.load:
        raise Refusal(f"stage {STAGE} needs a model; name its folder or hub id with --model.load", EX_USAGE)
    folder = os.path.abspath(hf_hub.folder_of(config.model.load, _say))
    max_context = hf_config.shape_for(ModelConfig(), folder).longest
    context = min(config.data.context_length, max_context if max_context > 1 else config.data.context_length)
    slots = min(-(-config.grpo.prompts_per_step * config.grpo.group // part.size("d")), MAX_SLOTS)
    command = stoker_command(["serve", folder, "--port", "${port}", "--weights-from", os.path.abspath(runs_root)])
    if config.grpo.publish == GROUP:
        command += ["--weights-group", "127.0.0.1"]
    return RoleSpec(
        part.name or SERVER,
        (*command, "--slots", str(slots), "--context", str(context)),
        port=AUTO,
        env={API_KEY: os.environ.get(API_KEY) or secrets.token_urlsafe(24)},
        ready=ReadyRule("http", "/health", ready_timeout_s=READY_TIMEOUT_S),
        restart=ALWAYS,
        required=False,
        after=("",),
    )


def _make_trainer_role(
    key_flags: Sequence[Flag], layers: Layers, part: AllocationPart, server: str, env: Mapping[str, str]
) -> RoleSpec:
    trainer_flags = [f"{flag.spelling}={flag.text}" for flag in key_flags]
    trainer_flags.append(f"--grpo.server={server}")
    if layers.told("grpo.staleness") is None:
        trainer_flags.append(f"--grpo.staleness={STALENESS}")
    if part.engine and layers.told("parallel.strategy") is None:
        trainer_flags.append(f"--parallel.strategy={part.engine}")
    return RoleSpec(part.name or TRAINER, ("stoker", "train", STAGE, *trainer_flags), env=env, after=(server,))


def _say(line: str) -> None:
    print_text(line, sys.stderr)
