"""env.*: the software around the script."""

from __future__ import annotations

from stoker.control.verdict.catalogue import Case, Found, cause
from stoker.control.verdict.wording import first_line, place, traced

_RIGHT_PYTHON = "is it the right Python environment? the ranks use the one that runs Stoker"


@cause(
    "env.import",
    seen="an ImportError or ModuleNotFoundError ended the rank",
    contradicts="the module was found and something else in it failed: then that is the exception",
    fix=(_RIGHT_PYTHON,),
)
def missing_module(case: Case) -> Found | None:
    """A module that the script imports is not there, or lacks the name asked for."""
    error = case.end.error
    if error is None or error.type not in ("ImportError", "ModuleNotFoundError"):
        return None
    missing = error.import_name.partition(".")[0] if error.type == "ModuleNotFoundError" else ""
    install = (f"pip install {missing}   # the package may have another name",) if missing else ()
    return Found(f"{case.who}: {first_line(error.message)} at {place(case.end)}", traced(case.end), (*install, _RIGHT_PYTHON))


@cause("env.syntax", seen="a SyntaxError, IndentationError or TabError ended the rank", contradicts="", fix=("mend {place}",))
def syntax(case: Case) -> Found | None:
    """The script, or a file it imports, is not valid for this Python."""
    error = case.end.error
    if error is None or error.type not in ("SyntaxError", "IndentationError", "TabError"):
        return None
    return Found(
        f"{case.who}: {error.type}: {first_line(error.message)}", tuple(error.traceback.strip().splitlines()[-6:]), (f"mend {error.file}:{error.line}",)
    )
