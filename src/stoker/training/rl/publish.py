"""A version of the weights as a folder in the run directory, for the servers that write the answers."""

from __future__ import annotations

import os
import shutil

import torch

from stoker.training.model import adapters, hf
from stoker.training.model.decoder import Decoder
from stoker.training.parallel.group import Group
from stoker.training.rl.dialects import Published

FOLDER = "published"


class Publisher:
    """Whole weights in the dtype that answers are computed in, or the adapters alone. `keeps`: so many versions."""

    def __init__(self, model: Decoder, own: adapters.Beside | None, run: str, group: Group, keeps: int) -> None:
        self._model, self._own, self._group, self._keeps = model, own, group, keeps
        self._place = os.path.join(os.path.abspath(run), FOLDER)

    def __call__(self, version: int) -> Published:
        """All ranks call it; the folder is there, whole, when it returns."""
        folder = os.path.join(self._place, f"version-{version:08d}")
        model, own, first = self._model, self._own, self._group.first
        if own is None:
            dtype = torch.float32 if model.dtype == torch.float32 else model.dtype
            hf.save(model, folder, say=_quiet, dtype=dtype, write=first)
        else:
            adapters.save(model, own.settings, own.base, folder, None, _quiet, first)
        return self._group.agreed(lambda: self._published(version, folder))

    def _published(self, version: int, folder: str) -> Published:
        there = sorted(name for name in os.listdir(self._place) if name.startswith("version-"))
        newest = [name for name in there if name <= os.path.basename(folder)][-self._keeps :]
        for name in there:
            if name not in newest:  # later ones are of a run that was resumed before them
                shutil.rmtree(os.path.join(self._place, name))
        base = "" if self._own is None else self._own.base
        return Published(version, folder, adapters.weights_digest(folder, base))

    def close(self) -> None:
        """Nobody needs them any more."""
        if self._group.first and os.path.isdir(self._place):
            shutil.rmtree(self._place)


def _quiet(line: str) -> None:
    """Each step."""
