"""What a wheel has besides the package's files: the pages of docs/ for `stoker docs`, examples/, and the commit for `stoker --version`.

src/stoker/docs is a link to docs/; a source archive holds no links, and a wheel has no repository to ask.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMMIT = {"wheel": "stoker/commit.txt", "sdist": "src/stoker/commit.txt"}


class MoreFiles(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        added = build_data["force_include"]
        docs = os.path.join(self.root, "docs")
        if self.target_name == "wheel":
            pages = [entry.name for entry in os.scandir(docs) if entry.is_file()]
            added |= {os.path.join(docs, name): f"stoker/docs/{name}" for name in pages}
            added[os.path.join(self.root, "examples")] = "stoker/examples"
        if commit := self._commit():
            self.folder = tempfile.TemporaryDirectory()
            recorded = os.path.join(self.folder.name, "commit.txt")
            with open(recorded, "w", encoding="ascii") as text:
                text.write(f"{commit}\n")
            added[recorded] = COMMIT[self.target_name]

    def _commit(self) -> str:
        """Empty where there is no repository: a wheel made from a source archive takes the file that is there."""
        if not os.path.exists(os.path.join(self.root, ".git")):
            return ""
        command = ["git", "-C", self.root, "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+"]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError) as problem:
            self.app.display_warning(f"the commit is not recorded: {problem}")
            return ""

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()
