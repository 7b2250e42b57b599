"""The runs that a page may ask about: by the name of a folder directly below the runs folder, and nothing else."""

from __future__ import annotations

import os
import stat
import time
from collections import OrderedDict

from stoker.contract.untrusted import printable
from stoker.control.record import ownership, reader
from stoker.control.show.folder import RunFolder
from stoker.control.show.job import folder_of
from stoker.control.show.web.timeline import Timeline

_KEPT = 8  # runs whose curves and timelines stay in memory
_LONGEST_NAME = 255


class NotThere(Exception):
    """One line for the page."""


class Folders:
    """`everybody`: other users' runs, too, as far as the system lets us read them."""

    def __init__(self, root: str, everybody: bool = False) -> None:
        self.root, self._everybody = root, everybody
        self._open: OrderedDict[str, tuple[RunFolder, Timeline]] = OrderedDict()

    def place(self, name: str) -> str:
        """The path of a folder that is ours to show: no link, no way out of the runs folder."""
        path = os.path.join(self.root, name)
        if not name or "/" in name or "\0" in name or name in (".", "..") or len(name) > _LONGEST_NAME:
            raise NotThere("no such run")
        try:
            about = os.lstat(path)
        except (OSError, ValueError):
            raise NotThere("this run does not exist, or no longer does") from None
        mine = ownership.is_mine(about.st_uid, self.root)
        if not stat.S_ISDIR(about.st_mode) or not (mine or self._everybody):
            raise NotThere("no such run")
        return path

    def record(self, name: str) -> reader.Run:
        path = self.place(name)
        try:
            run = reader.read(path)
        except (reader.Damaged, OSError) as problem:
            raise NotThere(printable(f"the record of this run is damaged: {problem}", 300)) from None
        if run is None:
            raise NotThere("there is no run in this folder")
        return run

    def watched(self, name: str) -> tuple[RunFolder, Timeline]:
        """With all that is new in its files."""
        record = self.record(name)
        known = self._open.pop(record.dir, None) or (folder_of(record), Timeline(record))
        self._open[record.dir] = known
        while len(self._open) > _KEPT:
            self._open.popitem(last=False)
        known[0].record = record
        known[0].run(time.time(), watched=True)
        return known
