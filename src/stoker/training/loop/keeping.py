"""Which checkpoint a run resumes from, when it saves, and saving. Every stage that trains shares this."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stoker.contract import layout
from stoker.contract.errors import EX_CANTCREAT, EX_DATAERR, EX_NOINPUT, Refusal
from stoker.training.checkpoint import folders
from stoker.training.checkpoint.config import CheckpointConfig
from stoker.training.checkpoint.manifest import Manifest
from stoker.training.checkpoint.reading import Checkpoint, find, open_checkpoint, verify
from stoker.training.checkpoint.saver import Saver
from stoker.training.loop.resume import located, run_of
from stoker.training.loop.say import Voice
from stoker.training.optim.optimizer import Optimizer
from stoker.training.parallel.group import Group

BUSY, BROKEN = "busy", "broken"  # why a checkpoint is left out
_SHARED = (
    "a model in shards is saved and resumed only where all hosts see the same folder; give --runs-dir on a shared disk, or"
    " --parallel.strategy ddp"
)


def folder_of(c: CheckpointConfig, run: str) -> str:
    return os.path.abspath(c.folder or os.path.join(run, layout.CHECKPOINTS))


def newest(c: CheckpointConfig, run: str, group: Group, voice: Voice) -> Checkpoint | None:
    """Rank 0 looks and checks every byte; the others use its answer, or refuse with it. `run`: the run directory."""
    folder = folder_of(c, run)
    # What an earlier attempt of this run saved comes first: `never` or another run's folder only says how it began.
    again = bool(c.folder) and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    of_run = run_of(run) if again and c.resume != "auto" else ""  # other runs may save into the same folder

    def look() -> str | None:
        if (c.resume == "auto" or again or not c.folder) and os.path.isdir(folder):
            best = find(folder, voice.say, of_run=of_run)
            if best is not None:
                return best.path
            if not of_run and folders.steps_in(folder):
                voice.say(f"no valid checkpoint in {folder}; starting from scratch")
        if c.resume in ("auto", "never"):
            return None
        path = located(c.resume)
        wrong = verify(path)
        if wrong:
            raise Refusal(f"checkpoint.resume {path} is damaged: {wrong[0]}", EX_DATAERR)
        return path

    path = group.agreed(look)
    return opened(path, group) if path else None


def opened(path: str, group: Group) -> Checkpoint:
    """On every rank, also on those of hosts that don't have it."""
    if not group.several_hosts:
        return open_checkpoint(path)
    manifest = group.agreed(lambda: open_checkpoint(path).manifest)
    if all(group.all(_same(path, manifest))):
        return Checkpoint(path, manifest)
    if group.shards > 1:
        raise Refusal(f"{path} is not on all hosts: {_SHARED}", EX_NOINPUT)
    return _FromFirst(path, manifest, group)


def _same(path: str, manifest: Manifest) -> bool:
    """Another checkpoint of that name may lie on another host's disk."""
    try:
        return open_checkpoint(path).manifest == manifest
    except Refusal:
        return False


class _FromFirst(Checkpoint):
    """Rank 0 reads it, and sends it to the ranks that can't."""

    def __init__(self, path: str, manifest: Manifest, group: Group) -> None:
        super().__init__(path, manifest)
        self._group = group

    def _fill(self, tensors: Mapping[str, Tensor]) -> None:
        read = super()._fill
        self._group.agreed(lambda: read(tensors))
        for name in sorted(tensors):
            self._group.spread(tensors[name])


def best_in(folder: str) -> str | None:
    """The checkpoint with the lowest validation loss."""
    scores: dict[str, float] = {}
    for path in folders.steps_in(folder).values():
        score = open_checkpoint(path).score if folders.is_trusted(path) else None
        if score is not None:
            scores[path] = score
    return min(scores, key=lambda path: scores[path]) if scores else None


class Keeper:
    """Saves a run's tensors into its folder."""

    def __init__(
        self, c: CheckpointConfig, run: str, group: Group, voice: Voice, tensors: Mapping[str, Tensor], keep_best: bool
    ) -> None:
        self._c, self._run, self._group, self._voice, self.tensors = c, run, group, voice, tensors
        self.folder = folder_of(c, run)
        self.saver = self._saver(c.keep, keep_best)
        self._apart = self._choose_writers()
        self.saved_step: int | None = None
        self._saved_at = time.monotonic()
        self._reported: set[str] = set()  # why checkpoints were left out

    @property
    def wanted(self) -> bool:
        return self._c.every > 0 or self._c.every_steps > 0 or self._c.at_end

    def time_due(self) -> bool:
        """By rank 0's clock."""
        every = self._c.every
        return self._group.first and every > 0 and not self.saver.busy() and time.monotonic() - self._saved_at >= every

    def step_due(self, done: int, steps: int) -> bool:
        """The last step's checkpoint comes after its validation, at the end."""
        every = self._c.every_steps
        return every > 0 and done % every == 0 and not (done == steps and self._c.at_end)

    def end_due(self, whole: bool) -> bool:
        return self._c.at_end or not whole

    def skip(self, why: str, line: str) -> None:
        """Reported once for each reason; a broken step again after one that was saved."""
        if why not in self._reported:
            self._reported.add(why)
            self._voice.say_once(line)

    def save(self, step: int, meta: Mapping[str, Any], score: float | None, *, wait: bool) -> bool:
        """At a step that all ranks know. `wait`: until it is on the disk; False where that failed."""
        taken = self.saver.save(step, self.tensors, {**meta, "run": run_of(self._run)}, score, wait=wait)
        if wait and self._apart:
            taken = self._group.agreed(lambda: taken)
        self._saved_at, self.saved_step = time.monotonic(), step
        self._reported.discard(BROKEN)
        return taken

    def last_good(self) -> str:
        """For somebody whose run was stopped. Waits for a save under way."""
        self.saver.close()
        steps = folders.steps_in(self.folder)
        return f"the last good checkpoint is {steps[max(steps)]}" if steps else "no checkpoint was saved before it"

    def _saver(self, keep: int, keep_best: bool) -> Saver:
        """Rank 0 takes the folder first: if it can't, all refuse with its line, and nobody waits for anybody."""
        group = self._group
        about = {"rank": group.rank, "world": group.world, "token": group.from_first(os.urandom(4).hex())}
        # A run that continued no other leaves the others' checkpoints in its folder alone.
        only = run_of(self._run) if self._c.folder and self._c.resume == "never" else None
        make = partial(Saver, self.folder, say=self._voice.say, keep=keep, keep_best=keep_best, only=only, **about)
        made: list[Saver] = []
        group.agreed(lambda: made.append(make()))
        return made[0] if made else make()

    def _choose_writers(self) -> bool:
        """Those that see rank 0's folder. True: some don't."""
        group = self._group
        seeing = group.seeing(self.folder)
        if len(seeing) == group.world:
            return False
        if group.shards > 1:
            if not self.wanted:
                return False
            raise Refusal(f"{self.folder} is not the same folder on all hosts: {_SHARED}", EX_CANTCREAT)
        self.saver.write_by(seeing)
        self._voice.say_once(
            f"checkpoints are written on rank 0's host alone, in {self.folder}: other hosts don't see that folder; if the host"
            " is lost, so are they (--runs-dir on a disk that all hosts see keeps them)"
        )
        return True


def tensors_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """What a checkpoint holds: parameters and optimizer state under names that do not depend on ranks or strategy. Beside
    adapters the frozen weights stay in the folder they come from.
    """
    named = dict(model.named_parameters())
    if any(".adapter." in name or ".lora_A." in name for name in named):
        named = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    found: dict[str, Tensor] = {f"model.{name}": parameter.detach() for name, parameter in named.items()}
    for name, tensor, like in optimizer.state():
        found[f"optim.{name}"] = _sharded_like(tensor, like)
    return found


def _sharded_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Optimizer state is local pieces, cut by rows as their parameter is; its mesh around them tells a checkpoint which."""
    if not hasattr(parameter, "device_mesh") or hasattr(tensor, "device_mesh"):
        return tensor
    from torch.distributed.tensor import DTensor

    like: Any = parameter
    whole = torch.empty((like.shape[0], *tensor.shape[1:]), device="meta")
    if tensor.device.type != like.device_mesh.device_type:  # from_local would bring it to the mesh's device
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        about = TensorMeta(whole.shape, whole.stride(), tensor.dtype)
        spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=about)
        lying: Tensor = DTensor(tensor, spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return lying
    wrapped: Tensor = DTensor.from_local(
        tensor, like.device_mesh, like.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return wrapped
