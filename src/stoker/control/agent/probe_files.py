"""Is the program here the one that is there: hashes of the script, of what it can import, and of data and weights."""

from __future__ import annotations

import os
from typing import Any

from stoker.control.machine.source import digest, digest_of_paths, hashes_of, module_files, script_files


def files(
    workdir: str, script: str = "", module: bool = False, python: str = "", paths: list[str] | None = None
) -> Any:
    """`script`: a path below the working directory, or a module's name. "names" is name -> hash, for saying which file
    differs.

    A hash is None where there is nothing of that kind here.
    """
    where = os.path.abspath(os.path.expanduser(workdir))
    at = os.path.join(where, os.path.expanduser(script))
    found = script_files(at) if os.path.exists(at) and not module else {}
    if module:
        found = module_files(script, where, os.path.expanduser(python))
    names = hashes_of(found) if script else {}
    own = "__main__.py" if os.path.isdir(at) else os.path.basename(at)
    data = {path: os.path.join(where, os.path.expanduser(path)) for path in paths or []}
    hashed = digest_of_paths(data.values())
    return {
        "script": None if module else names.get(own),
        "package": digest(names) if names else None,
        "names": names,
        "paths": {path: hashed[place] for path, place in data.items()},
    }
