"""A run as one HTML file: the page's own files and all its answers, in one piece that any browser opens without a server."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import time
from typing import Any

from stoker.contract.errors import EX_NOINPUT, Refusal
from stoker.contract.text import escape
from stoker.control.record import run_record
from stoker.control.show.snapshot import Snapshot
from stoker.control.show.web import run_details, run_texts
from stoker.control.show.web.page_state import ranks_of, shared
from stoker.control.show.web.pages import assets, bundled
from stoker.control.show.web.run_folders import Folders, NotThere

POINTS = 2000  # of a curve
_METRICS = 60
_LOGS = 16  # ranks whose last lines are kept
_ROW_FILES = 10


def saved_page(record: run_record.RunRecord, explain: run_texts.Explain) -> bytes:
    """Refusal: it can't be read."""
    root, run = os.path.split(os.path.realpath(record.dir))
    folders = Folders(root, everybody=True)  # its user has named it
    try:
        data = {"run": run, "time": time.time(), **_answers(folders, run, explain)}
    except NotThere as problem:
        raise Refusal(f"run {escape(run)}: {problem}", EX_NOINPUT) from None
    # `<` ends no element, and starts none.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    files = {name: body.decode() for name, (body, _) in assets().items()}
    script, style = bundled(files), files["style.css"]
    policy = f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; img-src data:; base-uri 'none'; form-action 'none'"
    page = files["index.html"]
    page = re.sub(r'<link rel="(icon|stylesheet)"[^>]*>\n', "", page)
    page = page.replace(
        '<script type="module" src="main.js"></script>',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<meta name="referrer" content="no-referrer">\n'
        f"<style>{style}</style>",
    )
    parts = (
        f'<script type="application/json" id="saved">{text}</script>\n<script type="module">{script}</script>\n</body>'
    )
    return page.replace("</body>", parts).encode("utf-8", "backslashreplace")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _answers(folders: Folders, run: str, explain: run_texts.Explain) -> dict[str, Any]:
    folder, _ = folders.watched(run)
    seen = folder.run(time.time(), watched=True)
    state = {**shared(Snapshot(time.time(), runs=(seen,))), "ranks": ranks_of(seen)}
    names = run_details.metric_names(folder)[:_METRICS]
    curves: dict[str, Any] = {"names": names, "curves": {}, "interval": folder.interval, "problem": ""}
    for name in names:
        curves["curves"] |= run_details.curves(folders, run, [name], most=POINTS)["curves"]
    files = run_texts.listing(folders, run)
    answers: dict[str, Any] = {
        "curves": curves,
        "ranks": run_details.over_time(folders, run, 0.0),
        "ending": run_texts.ending(folders, run, explain),
        "settings": run_details.settings(folders, run),
        "logs": _logs(folders, run, seen.verdict.rank if seen.verdict is not None else None),
        "files": files,
        "reports": {"reports": []},
        "sparks": {},
    }
    with contextlib.suppress(NotThere):  # a run without rollouts
        answers["rollouts"] = run_texts.rollouts(folders, run, None)
    for path in [one["path"] for one in files["files"] if one["kind"] == "rows"][:_ROW_FILES]:
        answers[f"rows:{path}"] = run_texts.rows(folders, run, path, 0)
    return {"state": state, "answers": answers}


def _logs(folders: Folders, run: str, guilty: int | None) -> dict[str, Any]:
    """The end of Stoker's own log and of some ranks' in the last attempt, the guilty one's among them."""
    own = run_texts.log(folders, run, None, None, None)
    ranks = own["ranks"]
    kept = sorted({*ranks[:_LOGS], *([guilty] if guilty in ranks else [])})
    found = {f"{own['attempt']}/{rank}": run_texts.log(folders, run, own["attempt"], rank, None) for rank in kept}
    return {
        "attempt": own["attempt"],
        "attempts": [own["attempt"]] if kept else [],
        "ranks": kept,
        "stoker": own,
        **found,
    }
