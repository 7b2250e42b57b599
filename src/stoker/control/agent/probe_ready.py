"""Is this host ready for its ranks: is the working directory there, the interpreter, the run directory, and is that one
the coordinator's own?
"""

from __future__ import annotations

import os
import shutil
from typing import Any


def ready(workdir: str, program: str, run_dir: str, token: str) -> Any:
    """`token`: a file the coordinator has put into the run directory. Who sees it shares that file system."""
    problems = []
    where = os.path.expanduser(workdir)
    if not os.path.isdir(where):
        problems.append(f"no folder {workdir} for the ranks (workdir: in the hosts file, or --sync)")
    elif not os.access(where, os.R_OK | os.X_OK):
        problems.append(f"the folder {workdir} may not be entered")
    found = shutil.which(os.path.expanduser(program), path=os.environ.get("PATH", os.defpath))
    if found is None and not os.access(os.path.join(where, program), os.X_OK):
        problems.append(f"no program {program} (python: in the hosts file, or --python)")
    shared = os.path.exists(os.path.join(run_dir, token))
    unwritable = ""
    try:
        os.makedirs(run_dir, 0o700, exist_ok=True)
        if not os.access(run_dir, os.W_OK):
            unwritable = "not writable"
    except OSError as problem:
        unwritable = problem.strerror or str(problem)
    return {"problems": problems, "shared": shared, "unwritable": unwritable}
