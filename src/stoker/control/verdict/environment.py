"""env.*: the software around the script."""

from __future__ import annotations

from stoker.contract.shapes import Evidence, RankEnd, Verdict
from stoker.control.verdict.wording import base, first_line, place

_IMPORTS = {"ImportError", "ModuleNotFoundError"}


def explain(end: RankEnd, _evidence: Evidence) -> Verdict | None:
    error = end.error
    if error is None:
        return None
    if error.type in _IMPORTS:
        missing = error.import_name
        return base(
            end, "env.import", f"rank {end.rank} ({end.label}): {first_line(error.message)} at {place(end)}", retryable=False,
            evidence=[f"{error.type} at {place(end)}", *error.traceback.strip().splitlines()[-6:]],
            fix=([f"pip install {missing.partition('.')[0]}   # the package may have another name"] if missing and error.type == "ModuleNotFoundError" else [])
            + ["is it the right Python environment? the ranks use the one that runs Stoker"],
        )  # fmt: skip
    if error.type in ("SyntaxError", "IndentationError", "TabError"):
        return base(
            end, "env.syntax", f"rank {end.rank} ({end.label}): {error.type}: {first_line(error.message)}", retryable=False,
            evidence=error.traceback.strip().splitlines()[-6:], fix=[f"mend {error.file}:{error.line}"],
        )  # fmt: skip
    return None
