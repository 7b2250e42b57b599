"""A step whose loss or gradient is no number: replayed on every rank, explained, written down, and the run ends with
the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from stoker.contract.untrusted import printable_lines
from stoker.training.forensics import dump
from stoker.training.forensics.culprit import NonFinite, decide
from stoker.training.forensics.inject import Drill
from stoker.training.forensics.replay import MicroBatch, Replay, investigate
from stoker.training.forensics.report import Report
from stoker.training.loop.feeder import MicroBatch as Fed
from stoker.training.loop.feeder import StepBatch
from stoker.training.loop.say import Voice
from stoker.training.loop.step import Numbers, Stepper
from stoker.training.model import ready
from stoker.training.model.decoder import Decoder
from stoker.training.parallel.group import Group, no_sync


def explain(
    numbers: Numbers,
    batch: StepBatch,
    stepper: Stepper,
    model: Decoder,
    wrapped: nn.Module,
    drill: Drill,
    group: Group,
    voice: Voice,
    *,
    folder: str | None,
    decode: Callable[[list[int]], str],
) -> NonFinite:
    """All ranks call this at the same step. Gives what to raise."""
    drill.step = batch.step
    ready.unfuse(model)  # module by module, so that the first bad operation has a name
    stepper.scale(batch)

    def run(number: int, micro: Fed) -> Tensor:
        stepper.set_seed(batch.step, number)
        with no_sync(
            wrapped, last=group.strategy == "fsdp"
        ):  # whole gradients stay this rank's own; shards exist only after their exchange
            return stepper.forward_backward(micro)

    micro_batches = [
        MicroBatch(
            partial(run, number, micro), micro.ids, micro.inputs[: len(micro.ids)], micro.targets[: len(micro.ids)]
        )
        for number, micro in enumerate(batch.micro_batches)
    ]
    replay = Replay(micro_batches, after=drill.spoil_gradients)
    found = investigate(
        model,
        replay,
        step=batch.step,
        rank=group.rank,
        world=group.world,
        label=group.label,
        loss=numbers.loss,
        grad_norm=numbers.norm,
    )
    reports = [Report.from_json(one) for one in group.all(found.report.to_json())]
    culprits = decide(reports)
    where = ""
    if folder is not None:
        try:
            written = dump.write(
                folder,
                found,
                model,
                replay,
                decode=decode,
                parameters=group.first or group.strategy == "fsdp" or not culprits.ranks,
            )
            where = f"; `stoker nan {written}` shows it"
        except OSError as problem:
            voice.say(f"the dump could not be written: {problem}")
    guilty = group.rank in culprits.ranks or (not culprits.ranks and group.first)
    if guilty:
        from stoker.training.forensics.banner import banner

        print(printable_lines(banner(found.report)), flush=True)
        voice.say(f"{culprits.summary}{where}")
    return NonFinite(culprits.summary)
