"""Pretraining: text becomes a base model.

    stoker train pretrain --data texts/ --preset small
    torchrun --nproc-per-node 2 -m stoker.training.recipes.pretrain --preset debug --data notes.txt      # works too

Reads top to bottom: settings, data, ranks, model, steps. docs/config.yaml has every key; loop/job.py builds the parts, loop/steps.py makes the steps.
"""

from __future__ import annotations

import os
import sys

import torch

from stoker.contract.names import Refusal
from stoker.training.config.check import check_data, check_ranks
from stoker.training.config.lasting import with_tokenizer
from stoker.training.config.resolve import recipe_config
from stoker.training.data.prepare import prepare
from stoker.training.forensics.culprit import NonFinite
from stoker.training.loop.job import Job
from stoker.training.loop.loggers import check_loggers
from stoker.training.loop.stages import Stages
from stoker.training.model import ready
from stoker.training.model.attention import kernels
from stoker.training.parallel.group import Group


def main(argv: list[str]) -> int:
    stages = Stages()
    stages.done("imports")
    try:
        # Settings: a preset, a file, the environment, flags. Refused here, before anything is started, where they can't work.
        c = recipe_config(argv, torch.cuda.is_available(), say=_from_rank_0)
        check_ranks(c, int(os.environ.get("WORLD_SIZE", "1")))
        check_loggers(c.train.log_to)
        ready.environment(c.data.cache)
        on_gpu = torch.cuda.is_available() and c.parallel.device != "cpu"
        compiler = ready.warm_compiler() if on_gpu and ready.compiled(c.compute, torch.device("cuda")) and not c.nan.inject else None

        # Data: `stoker train` has prepared it, and this only opens it. Under torchrun one rank builds it and the others wait: there is no process group yet.
        if c.model.load and not c.tokenizer.path:
            c = with_tokenizer(c, _from_rank_0)
        prepared = prepare(c.data, c.tokenizer, _from_rank_0)
        check_data(c, prepared.train_tokens, prepared.vocab_size)
        stages.done("data")

        group = Group(c.parallel)
        stages.done("ranks")
        if compiler is not None:
            compiler.join()

        # Model, optimizer, micro-batch, checkpoint; then the steps.
        job = Job(c, prepared, group, stages)
        with kernels(ready.attention(c.compute, group.device)):
            job.build()
            stages.done("model")
            if job.position.step >= job.steps:
                job.voice.say_once(f"nothing to do: {job.position.step} of {job.steps} steps are done")
                job.export_if_missing()
                code = 0
            else:
                code = job.train()
        job.voice.close()
        group.close()
        return code
    except NonFinite as found:
        raise found.with_traceback(None) from None  # the banner has said it: no page of frames behind it
    except Refusal as refusal:
        print(f"stoker: {refusal.line}", file=sys.stderr, flush=True)
        return refusal.code


def _from_rank_0(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
