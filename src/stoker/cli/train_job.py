"""stoker train grpo --allocation 'stoker:d1+fsdp:d3': servers that write the answers and trainers, as one job of two roles."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from typing import Any

from stoker.cli import roles
from stoker.cli.sight import gpus_to_use, look
from stoker.contract import layout
from stoker.contract.env_vars import API_KEY
from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.frozen import replace
from stoker.contract.terminal import print_text
from stoker.control.launch.children import stoker_command
from stoker.control.plan.options import ranks_asked
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
STALENESS = 1  # where nobody gave one: else servers and trainers would wait for each other
MOST_SLOTS = 64
READY_S = 1200.0  # a large model from a network disk


def start(stage: str, keys: Sequence[Flag], layers: Layers, told: dict[str, Any]) -> int:
    """`told`: options of `stoker run`, among them the allocation."""
    text = str(told["allocation"])
    if stage != STAGE:
        raise Refusal(f"--allocation: stage {stage} has one role alone; it is for stage {STAGE}", EX_USAGE)
    for name in ("role", "roles", "hosts"):
        if name in told:
            line = (
                f"--{name} with `stoker train {stage} --allocation`: such a job is described for `stoker run --roles`"
            )
            raise Refusal(line, EX_USAGE)
    roles.refuse_useless(told)
    serving, training = parts_of(text)
    if layers.told("grpo.server") is not None:
        raise Refusal("--allocation starts the servers: leave grpo.server out", EX_USAGE)
    gpus = gpus_to_use(look(), ranks_asked(None, os.environ))
    config = settle(layers, gpus, STAGES[stage].defaults).config
    # The trainer's own runs folder is the job's: names of runs are looked up here.
    config, models = with_models(
        config, layout.runs_root(told.get("runs_dir"), os.environ), _say, told.get("name"), False
    )
    values = values_of(config)
    replaced = {key: values[key] for key in MODEL_KEYS if values[key] in models.values()}
    keys = [flag for flag in keys if flag.name not in replaced]
    keys += [Flag(key, f"--{key}", value) for key, value in replaced.items()]
    server = _server(config, serving, layout.runs_root(told.get("runs_dir"), os.environ))
    specs = [server, _trainer(keys, layers, training, server.name, server.env)]
    if allocation.parse_allocation(text)[0] == training:
        specs.reverse()
    plan = roles.by_allocation(role.check_roles(specs, "--allocation", EX_USAGE), text)
    if on_cpu(config, gpus):
        plan = replace(plan, specs=tuple(replace(spec, gpus=0) for spec in plan.specs))
    contents = input_digests(STAGES[stage], config, None)
    return roles.start_plan(replace(roles.request_for(told, plan.specs, ()), contents=contents), plan)


def parts_of(text: str) -> tuple[AllocationPart, AllocationPart]:
    """(the servers, the trainers)."""
    parts = allocation.parse_allocation(text)
    serving, training = ([part for part in parts if part.serves is serves] for serves in (True, False))
    if len(serving) != 1 or len(training) != 1:
        line = f"--allocation {text}: one part serves and one trains, such as stoker:d1+fsdp:d3"
        raise Refusal(line, EX_USAGE)
    if serving[0].engine != "stoker":
        line = f"--allocation {text}: here stoker serves; a job with {serving[0].engine} is one of `stoker run --roles`"
        raise Refusal(f"{line} (`stoker docs grpo`)", EX_USAGE)
    if training[0].engine == "megatron" or training[0].world != training[0].size("d"):
        line = (
            f"--allocation {text}: trainers are fsdp or ddp, one replica for each GPU: write fsdp:d{training[0].world}"
        )
        raise Refusal(line, EX_USAGE)
    return serving[0], training[0]


def _server(c: Config, part: AllocationPart, runs: str) -> RoleSpec:
    from stoker.training.model import hf_config, hf_hub
    from stoker.training.model.config import ModelConfig

    if not c.model.load:
        line = f"no model: stage {STAGE} needs one; name its folder or hub id with --model.load"
        raise Refusal(line, EX_USAGE)
    folder = os.path.abspath(hf_hub.folder_of(c.model.load, _say))
    longest = hf_config.shape_for(ModelConfig(), folder).longest
    context = min(c.data.context_length, longest if longest > 1 else c.data.context_length)
    slots = min(-(-c.grpo.prompts_per_step * c.grpo.group // part.size("d")), MOST_SLOTS)
    command = stoker_command(["serve", folder, "--port", "${port}", "--weights-from", os.path.abspath(runs)])
    if c.grpo.publish == GROUP:
        command += ["--weights-group", "127.0.0.1"]
    sizes = ("--slots", str(slots), "--context", str(context))
    key = os.environ.get(API_KEY) or secrets.token_urlsafe(24)
    ready = ReadyRule("http", "/health", timeout=READY_S)
    name = part.name or SERVER
    return RoleSpec(
        name,
        (*command, *sizes),
        port=AUTO,
        env={API_KEY: key},
        ready=ready,
        restart=ALWAYS,
        required=False,
        after=("",),
    )


def _trainer(keys: Sequence[Flag], layers: Layers, part: AllocationPart, server: str, env: Any) -> RoleSpec:
    words = [f"{flag.spelling}={flag.text}" for flag in keys]
    words.append(f"--grpo.server={server}")
    if layers.told("grpo.staleness") is None:
        words.append(f"--grpo.staleness={STALENESS}")
    if part.engine and layers.told("parallel.strategy") is None:
        words.append(f"--parallel.strategy={part.engine}")
    return RoleSpec(part.name or TRAINER, ("stoker", "train", STAGE, *words), env=env, after=(server,))


def _say(line: str) -> None:
    print_text(line, sys.stderr)
