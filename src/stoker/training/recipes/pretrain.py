"""Pretraining: text becomes a base model.

    stoker train pretrain --data texts/ --preset small
    torchrun --nproc-per-node 2 -m stoker.training.recipes.pretrain --preset debug --data notes.txt      # works too

Reads top to bottom: settings, data, ranks, model, steps. docs/config.yaml has every key; supervised.py makes the
steps, build.py the parts they need. Midtraining and fine-tuning are the same with other data: they call `learn`.
"""

from __future__ import annotations

import sys
from functools import partial

import torch

from stoker.training.config.check import check_data
from stoker.training.config.resolve import recipe_settings, with_tokenizer
from stoker.training.data.prepare import prepare
from stoker.training.loop.config import check_loggers
from stoker.training.loop.feeder import from_prepared
from stoker.training.loop.learner import Learner
from stoker.training.loop.say import Voice
from stoker.training.loop.speed import Startup
from stoker.training.model import ready
from stoker.training.model.attention import kernels
from stoker.training.parallel.group import Group
from stoker.training.recipes import stage, supervised
from stoker.training.stages.registry import STAGES


def learn(name: str, argv: list[str]) -> int:
    startup = Startup()
    startup.done("imports")
    # Settings: a preset, a file, the environment, flags. Refused here, before anything is started, where they can't
    # work.
    resolved = recipe_settings(argv, torch.cuda.is_available(), say=stage.from_rank_0, defaults=STAGES[name].defaults)
    c = stage.with_rows_for_model(name, resolved.config, resolved.given)
    STAGES[name].check(c)
    check_loggers(c.train.log_to)
    ready.environment(stage.from_rank_0)
    on_gpu = torch.cuda.is_available() and c.parallel.device != "cpu"
    compiles = on_gpu and ready.compiled(c.compute, torch.device("cuda")) and not c.nan.inject
    compiler = ready.warm_compiler() if compiles else None

    # Data: `stoker train` has prepared it, and this only opens it. Under torchrun one rank builds it and the others
    # wait: there is no process group yet.
    if c.model.load and not c.tokenizer.path:
        c = with_tokenizer(c, stage.from_rank_0)
    prepared = prepare(c.data, c.tokenizer, stage.of_data)
    check_data(c, prepared.train_tokens, prepared.vocab_size)
    c = stage.with_stage_defaults(name, c, resolved.given, prepared)
    startup.done("data")

    group = Group(c.parallel)
    startup.done("ranks")
    if compiler is not None:
        compiler.join()

    # Model, optimizer, micro-batch, checkpoint; then the steps.
    material = from_prepared(prepared, c.data)
    voice = Voice(group, c.train.log_every)
    with kernels(ready.attention(c.compute, group.device)):
        trained = supervised.train(c, material, Learner(), group, voice, startup)
    if group.first and trained.whole:
        stage.finish(c, name, trained.metrics, model="hf" if c.checkpoint.export else None)
    voice.close()
    group.close()
    return trained.code


main = partial(learn, "pretrain")

if __name__ == "__main__":
    sys.exit(stage.run(main))
