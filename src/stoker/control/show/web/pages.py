"""What `stoker web` answers: the page's own files, its stream, the questions it asks, and one action: stop."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from stoker.contract.errors import EX_NOINPUT, Refusal
from stoker.contract.frozen import replace
from stoker.contract.text import escape, is_digits, parse_json
from stoker.control.record import run_record
from stoker.control.show.http_server import HttpRequest, HttpResponse, ResponseStream, Work, error_response
from stoker.control.show.snapshot import Snapshot
from stoker.control.show.web import page_data, run_files
from stoker.control.show.web.access import SANDBOX, AccessGuard, safe
from stoker.control.show.web.event_stream import EventHub
from stoker.control.show.web.page_data import rank_rows, shared_state
from stoker.control.show.web.run_files import PageNotFound, RunFolders

ASSETS = os.path.join(os.path.dirname(__file__), "assets")
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

Query = Mapping[str, str]
Assets = dict[str, tuple[bytes, str]]


def assets() -> Assets:
    """By name. They are the package's own, and few."""
    found = {}
    for name in sorted(os.listdir(ASSETS)):
        kind = _TYPES.get(os.path.splitext(name)[1])
        if kind is not None:
            with open(os.path.join(ASSETS, name), "rb") as file:
                found[name] = file.read(), kind
    return found


def bundled(files: dict[str, str]) -> str:
    """The modules as one, each in a function of its own: their names stay apart."""
    made: list[str] = []
    done: set[str] = set()

    def add(name: str) -> None:
        if name in done:
            return
        done.add(name)
        text = files[name]
        for needed in re.findall(r'^import \{[^}]*\} from "\./(\w+\.js)";$', text, re.M):
            add(needed)
        exported = re.findall(r"^export (?:class|function|const) (\w+)", text, re.M)
        text = re.sub(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', r"const \1 = \2_module;", text, flags=re.M)
        text = re.sub(r"^export ", "", text, flags=re.M)
        made.append(f"const {name[:-3]}_module = (() => {{\n{text}\nreturn {{ {', '.join(exported)} }};\n}})();\n")

    add("main.js")
    return "\n".join(made)


def _served(files: Assets) -> Assets:
    """The scripts as one: a browser that has to ask for ten of them, one after the other, shows the page 0.2 s later."""
    texts = {name: body.decode() for name, (body, _) in files.items() if name.endswith(".js")}
    kept = {name: file for name, file in files.items() if name not in texts}
    return kept | {"main.js": (bundled(texts).encode(), _TYPES[".js"])}


class Pages:
    """`stop` ends a run as `stoker stop` does, and says what it did. `explain`: a run's verdict, as `stoker why` has it."""

    def __init__(
        self,
        guard: AccessGuard,
        hub: EventHub,
        folders: RunFolders,
        stop: Callable[[str], str],
        explain: run_files.Explain,
    ) -> None:
        self._guard, self._hub, self._folders, self._stop, self._explain = guard, hub, folders, stop, explain
        self._assets = _served(assets())
        self._questions: dict[str, Callable[[Query], Any]] = {
            "/api/curves": self._curves,
            "/api/sparks": lambda query: page_data.read_sparklines(self._folders, _listed(query, "runs")),
            "/api/ranks": lambda query: page_data.read_timeline(
                self._folders, query.get("run", ""), _number(query, "since", 0.0), _within(query)
            ),
            "/api/compare": self._compare,
            "/api/settings": lambda query: page_data.read_settings(self._folders, query.get("run", "")),
            "/api/log": self._log,
            "/api/ending": lambda query: run_files.read_ending(self._folders, query.get("run", ""), self._explain),
            "/api/files": lambda query: run_files.list_files(self._folders, query.get("run", "")),
            "/api/rows": lambda query: run_files.read_rows(
                self._folders, query.get("run", ""), query.get("path", ""), _count(query, "from") or 0
            ),
            "/api/rollouts": lambda query: run_files.read_rollouts(
                self._folders, query.get("run", ""), _count(query, "before")
            ),
            "/api/reports": lambda _: run_files.list_reports(self._folders),
        }

    def answer(self, request: HttpRequest) -> HttpResponse | ResponseStream | Work:
        refused = self._guard.refused(request)
        if refused is not None:
            return refused
        exchanged = self._guard.exchange(request)
        if exchanged is not None:
            self._hub.expect()
            return exchanged
        return self._within(replace(request, path=request.path[len(self._guard.base) - 1 :]))

    def _within(self, request: HttpRequest) -> HttpResponse | ResponseStream | Work:
        """`request.path`: below the page's own address."""
        if request.path == "/api/stop":
            return self._stopped(request)
        if request.method != "GET":
            return error_response(405, ("Allow", "GET"), *safe())
        if request.path == "/events":
            stream = self._hub.open(request.query.get("run", ""), safe())
            return stream if stream is not None else error_response(503, *safe())
        if request.path == "/file":
            return lambda: self._file(request.query)
        question = self._questions.get(request.path)
        if question is not None:
            return lambda: _asked(question, request.query)
        name = request.path[1:] or "index.html"
        if name in self._assets:
            body, kind = self._assets[name]
            return HttpResponse(200, body, kind, safe())
        return error_response(404, *safe())

    # ---- questions ----

    def _curves(self, query: Query) -> Any:
        return page_data.read_curves(
            self._folders,
            query.get("run", ""),
            _listed(query, "names"),
            since=_count(query, "since") or 0,
            within=_within(query),
            most=_count(query, "most") or page_data.POINTS,
            smooth=min(_count(query, "smooth") or 1, 100_000),
        )

    def _compare(self, query: Query) -> Any:
        return page_data.compare_runs(self._folders, _listed(query, "runs"), query.get("metric", ""))

    def _log(self, query: Query) -> Any:
        run, attempt = query.get("run", ""), _count(query, "attempt")
        rank = None if query.get("rank") == "stoker" else _count(query, "rank") or 0
        if query.get("find"):
            return run_files.search_log(self._folders, run, attempt, rank, query["find"][:200])
        return run_files.read_log(self._folders, run, attempt, rank, _count(query, "from"))

    def _file(self, query: Query) -> HttpResponse:
        try:
            data, kind = run_files.read_file(self._folders, query.get("run", ""), query.get("path", ""))
        except PageNotFound as problem:
            return _json({"error": str(problem)}, 404)
        return HttpResponse(200, data, kind, safe(SANDBOX))

    # ---- the only action ----

    def _stopped(self, request: HttpRequest) -> HttpResponse | Work:
        if request.method != "POST":
            return error_response(405, ("Allow", "POST"), *safe())
        if not self._guard.may_act(request):
            return error_response(403, *safe())
        try:
            data = parse_json(request.body)
            run = data.get("run") if isinstance(data, dict) else None
        except ValueError:
            run = None
        if not isinstance(run, str):
            return error_response(400, *safe())
        return lambda: self._stop_now(run)

    def _stop_now(self, run: str) -> HttpResponse:
        try:
            record = self._folders.record(run)
        except PageNotFound as problem:
            return _json({"error": str(problem)}, 404)
        status = run_record.run_status(record)
        if not record.mine or status not in ("running", "unknown"):
            why = f"run {record.id} is not running: {status}" if record.mine else f"run {record.id} is not yours"
            return _json({"error": why}, 409)
        return _json({"told": self._stop(record.dir)})


def _asked(question: Callable[[Query], Any], query: Query) -> HttpResponse:
    try:
        return _json(question(query))
    except PageNotFound as problem:
        return _json({"error": str(problem)}, 404)


def _json(data: Any, status: int = 200) -> HttpResponse:
    body = json.dumps(data, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")
    return HttpResponse(status, body, "application/json", safe())


def _listed(query: Query, name: str) -> list[str]:
    """One in a line: a run's name may have a comma, a metric's a slash."""
    return [word for word in query.get(name, "").split("\n") if word]


def _count(query: Query, name: str) -> int | None:
    text = query.get(name, "")
    return int(text) if is_digits(text) else None


def _within(query: Query) -> tuple[float, float]:
    return _number(query, "first", -math.inf), _number(query, "last", math.inf)


def _number(query: Query, name: str, otherwise: float) -> float:
    try:
        value = float(query.get(name, ""))
    except ValueError:
        return otherwise
    return value if math.isfinite(value) else otherwise


POINTS = 2000  # of a curve
_METRICS = 60
_LOGS = 16  # ranks whose last lines are kept
_ROW_FILES = 10


def render_saved_page(record: run_record.RunRecord, explain: run_files.Explain) -> bytes:
    """Refusal: it can't be read."""
    root, run = os.path.split(os.path.realpath(record.dir))
    folders = RunFolders(root, everybody=True)  # its user has named it
    try:
        data = {"run": run, "time": time.time(), **_answers(folders, run, explain)}
    except PageNotFound as problem:
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


def _answers(folders: RunFolders, run: str, explain: run_files.Explain) -> dict[str, Any]:
    folder, _ = folders.watched(run)
    seen = folder.run(time.time(), watched=True)
    state = {**shared_state(Snapshot(time.time(), runs=(seen,))), "ranks": rank_rows(seen)}
    names = page_data.metric_names(folder)[:_METRICS]
    curves: dict[str, Any] = {"names": names, "curves": {}, "interval": folder.interval, "problem": ""}
    for name in names:
        curves["curves"] |= page_data.read_curves(folders, run, [name], most=POINTS)["curves"]
    files = run_files.list_files(folders, run)
    answers: dict[str, Any] = {
        "curves": curves,
        "ranks": page_data.read_timeline(folders, run, 0.0),
        "ending": run_files.read_ending(folders, run, explain),
        "settings": page_data.read_settings(folders, run),
        "logs": _logs(folders, run, seen.verdict.rank if seen.verdict is not None else None),
        "files": files,
        "reports": {"reports": []},
        "sparks": {},
    }
    with contextlib.suppress(PageNotFound):  # a run without rollouts
        answers["rollouts"] = run_files.read_rollouts(folders, run, None)
    for path in [one["path"] for one in files["files"] if one["kind"] == "rows"][:_ROW_FILES]:
        answers[f"rows:{path}"] = run_files.read_rows(folders, run, path, 0)
    return {"state": state, "answers": answers}


def _logs(folders: RunFolders, run: str, guilty: int | None) -> dict[str, Any]:
    """The end of Stoker's own log and of some ranks' in the last attempt, the guilty one's among them."""
    own = run_files.read_log(folders, run, None, None, None)
    ranks = own["ranks"]
    kept = sorted({*ranks[:_LOGS], *([guilty] if guilty in ranks else [])})
    found = {f"{own['attempt']}/{rank}": run_files.read_log(folders, run, own["attempt"], rank, None) for rank in kept}
    return {
        "attempt": own["attempt"],
        "attempts": [own["attempt"]] if kept else [],
        "ranks": kept,
        "stoker": own,
        **found,
    }
