"""Answers the requests of `stoker web`: assets, event stream, API requests and the stop action. Also renders the saved page."""

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
from stoker.control.show.web.access import SANDBOX, AccessGuard, security_headers
from stoker.control.show.web.event_stream import EventHub
from stoker.control.show.web.page_data import make_rank_rows, make_shared_state
from stoker.control.show.web.run_files import Explain, PageNotFound, RunFolders

# ---- the page's files ----

ASSETS = os.path.join(os.path.dirname(__file__), "assets")
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

Assets = dict[str, tuple[bytes, str]]  # name -> (content, content type)


def read_assets() -> Assets:
    assets = {}
    for name in sorted(os.listdir(ASSETS)):
        content_type = _TYPES.get(os.path.splitext(name)[1])
        if content_type is not None:
            with open(os.path.join(ASSETS, name), "rb") as file:
                assets[name] = file.read(), content_type
    return assets


def bundle_modules(files: Mapping[str, str]) -> str:
    """Join main.js and the modules it imports into one script. Each becomes a function, so that their names don't collide."""
    functions: list[str] = []
    added: set[str] = set()

    def add(name: str) -> None:
        if name in added:
            return
        added.add(name)
        text = files[name]
        for imported in re.findall(r'^import \{[^}]*\} from "\./(\w+\.js)";$', text, re.M):
            add(imported)
        exported = re.findall(r"^export (?:class|function|const) (\w+)", text, re.M)
        text = re.sub(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', r"const \1 = \2_module;", text, flags=re.M)
        text = re.sub(r"^export ", "", text, flags=re.M)
        functions.append(f"const {name[:-3]}_module = (() => {{\n{text}\nreturn {{ {', '.join(exported)} }};\n}})();\n")

    add("main.js")
    return "\n".join(functions)


# ---- the live page ----

Query = Mapping[str, str]
ApiHandler = Callable[[RunFolders, str, Query], Any]  # (folders, name of the run, query) -> JSON


def _read_log(folders: RunFolders, run: str, query: Query) -> Any:
    attempt = _parse_count(query, "attempt")
    rank = None if query.get("rank") == "stoker" else _parse_count(query, "rank") or 0
    if query.get("find"):
        return run_files.search_log(folders, run, attempt, rank, query["find"][:200])
    return run_files.read_log(folders, run, attempt, rank, _parse_count(query, "from"))


def _parse_lines(query: Query, name: str) -> list[str]:
    """Parse a list separated by line ends, because names of runs may contain commas and names of metrics slashes."""
    return [line for line in query.get(name, "").split("\n") if line]


def _parse_count(query: Query, name: str) -> int | None:
    text = query.get(name, "")
    return int(text) if is_digits(text) else None


def _parse_range(query: Query) -> tuple[float, float]:
    return _parse_number(query, "first", -math.inf), _parse_number(query, "last", math.inf)


def _parse_number(query: Query, name: str, default: float) -> float:
    try:
        value = float(query.get(name, ""))
    except ValueError:
        return default
    return value if math.isfinite(value) else default


_API_HANDLERS: dict[str, ApiHandler] = {
    "/api/curves": lambda folders, run, query: page_data.read_curves(
        folders,
        run,
        _parse_lines(query, "names"),
        since=_parse_count(query, "since") or 0,
        step_range=_parse_range(query),
        max_points=_parse_count(query, "most") or page_data.POINTS,
        smooth=min(_parse_count(query, "smooth") or 1, 100_000),
    ),
    "/api/sparks": lambda folders, run, query: page_data.read_sparklines(folders, _parse_lines(query, "runs")),
    "/api/ranks": lambda folders, run, query: page_data.read_timeline(
        folders, run, _parse_number(query, "since", 0.0), _parse_range(query)
    ),
    "/api/compare": lambda folders, run, query: page_data.compare_runs(
        folders, _parse_lines(query, "runs"), query.get("metric", "")
    ),
    "/api/settings": lambda folders, run, query: page_data.read_settings(folders, run),
    "/api/log": _read_log,
    "/api/files": lambda folders, run, query: run_files.list_files(folders, run),
    "/api/rows": lambda folders, run, query: run_files.read_rows(
        folders, run, query.get("path", ""), _parse_count(query, "from") or 0
    ),
    "/api/rollouts": lambda folders, run, query: run_files.read_rollouts(folders, run, _parse_count(query, "before")),
    "/api/reports": lambda folders, run, query: run_files.list_reports(folders),
}


class Pages:
    """Answers requests. `stop` stops the run in a directory and returns a note; `explain` returns a run's verdict."""

    def __init__(
        self, guard: AccessGuard, hub: EventHub, folders: RunFolders, stop: Callable[[str], str], explain: Explain
    ) -> None:
        self._guard, self._hub, self._folders, self._stop = guard, hub, folders, stop
        self._api_handlers: dict[str, ApiHandler] = {
            **_API_HANDLERS,
            "/api/ending": lambda folders, run, query: run_files.read_ending(folders, run, explain),
        }
        # Serve one script: a browser that loads ten modules one after the other shows the page 0.2 s later.
        assets = read_assets()
        scripts = {name: assets.pop(name)[0].decode() for name in tuple(assets) if name.endswith(".js")}
        self._assets = {**assets, "main.js": (bundle_modules(scripts).encode(), _TYPES[".js"])}

    def answer(self, request: HttpRequest) -> HttpResponse | ResponseStream | Work:
        refusal = self._guard.check_access(request)
        if refusal is not None:
            return refusal
        redirect = self._guard.make_token_redirect(request)
        if redirect is not None:
            self._hub.expect_viewer()
            return redirect
        return self._answer_page(replace(request, path=request.path[len(self._guard.base) - 1 :]))

    def _answer_page(self, request: HttpRequest) -> HttpResponse | ResponseStream | Work:
        """Answer a request that has access. Its path is relative to the path of the page."""
        path, query = request.path, request.query
        if path == "/api/stop":
            return self._answer_stop(request)
        if request.method != "GET":
            return error_response(405, ("Allow", "GET"), *security_headers())
        if path == "/events":
            stream = self._hub.open(query.get("run", ""), security_headers())
            return stream if stream is not None else error_response(503, *security_headers())
        if path == "/file":
            return _answer_or_404(lambda: self._read_file(query))
        handler = self._api_handlers.get(path)
        if handler is not None:
            return _answer_or_404(lambda: json_response(handler(self._folders, query.get("run", ""), query)))
        name = path[1:] or "index.html"
        if name in self._assets:
            body, content_type = self._assets[name]
            return HttpResponse(200, body, content_type, security_headers())
        return error_response(404, *security_headers())

    def _read_file(self, query: Query) -> HttpResponse:
        data, content_type = run_files.read_file(self._folders, query.get("run", ""), query.get("path", ""))
        return HttpResponse(200, data, content_type, security_headers(SANDBOX))

    def _answer_stop(self, request: HttpRequest) -> HttpResponse | Work:
        if request.method != "POST":
            return error_response(405, ("Allow", "POST"), *security_headers())
        if not self._guard.may_act(request):
            return error_response(403, *security_headers())
        try:
            data = parse_json(request.body)
            run = data.get("run") if isinstance(data, dict) else None
        except ValueError:
            run = None
        if not isinstance(run, str):
            return error_response(400, *security_headers())
        return _answer_or_404(lambda: self._stop_run(run))

    def _stop_run(self, run: str) -> HttpResponse:
        record = self._folders.record(run)
        if not record.mine:
            return json_response(
                {"error": f"run {record.id} belongs to another user, and only that user can stop it"}, 409
            )
        status = run_record.run_status(record)
        if status not in ("running", "unknown"):
            return json_response({"error": f"run {record.id} is not running: {status}"}, 409)
        return json_response({"told": self._stop(record.dir)})


def _answer_or_404(work: Work) -> Work:
    """Return work that answers 404 instead of raising PageNotFound."""

    def answer() -> HttpResponse:
        try:
            return work()
        except PageNotFound as problem:
            return json_response({"error": str(problem)}, 404)

    return answer


def json_response(data: Any, status: int = 200) -> HttpResponse:
    body = json.dumps(data, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")
    return HttpResponse(status, body, "application/json", security_headers())


# ---- the saved page: one HTML file with the assets and all answers, which needs no server ----

_CURVE_POINTS = 2000
_MAX_CURVES = 60
_MAX_LOGS = 16  # ranks whose last lines are saved
_MAX_ROW_FILES = 10


def render_saved_page(record: run_record.RunRecord, explain: Explain) -> bytes:
    """Return a run as one HTML file. Raises Refusal if the run can't be read."""
    root, run = os.path.split(os.path.realpath(record.dir))
    folders = RunFolders(root, everybody=True)  # the user has named this run, so it may be another user's
    try:
        data = {"run": run, "time": time.time(), **_collect_answers(folders, run, explain)}
    except PageNotFound as problem:
        raise Refusal(f"run {escape(run)}: {problem}", EX_NOINPUT) from None
    # Escape `<`, so that no text can end the script element or start another.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    files = {name: body.decode() for name, (body, _) in read_assets().items()}
    script, style = bundle_modules(files), files["style.css"]
    policy = (
        f"default-src 'none'; script-src {_csp_digest(script)}; style-src {_csp_digest(style)}; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )
    page = files["index.html"]
    page = re.sub(r'<link rel="(icon|stylesheet)"[^>]*>\n', "", page)
    page = page.replace(
        '<script type="module" src="main.js"></script>',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<meta name="referrer" content="no-referrer">\n'
        f"<style>{style}</style>",
    )
    body_end = (
        f'<script type="application/json" id="saved">{text}</script>\n<script type="module">{script}</script>\n</body>'
    )
    return page.replace("</body>", body_end).encode("utf-8", "backslashreplace")


def _csp_digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _collect_answers(folders: RunFolders, run: str, explain: Explain) -> dict[str, Any]:
    """Return the run's state and the answers to all API requests that the page may send."""
    tail, _ = folders.open(run)
    view = tail.view(time.time(), watched=True)
    state = {**make_shared_state(Snapshot(time.time(), runs=(view,))), "ranks": make_rank_rows(view)}
    names = page_data.list_metric_names(tail)[:_MAX_CURVES]
    curves = page_data.read_curves(folders, run, names, max_points=_CURVE_POINTS)["curves"]
    files = run_files.list_files(folders, run)
    answers: dict[str, Any] = {
        "curves": {"names": names, "curves": curves, "interval": tail.interval, "problem": ""},
        "ranks": page_data.read_timeline(folders, run, 0.0),
        "ending": run_files.read_ending(folders, run, explain),
        "settings": page_data.read_settings(folders, run),
        "logs": _collect_logs(folders, run, view.verdict.rank if view.verdict is not None else None),
        "files": files,
        "reports": {"reports": []},
        "sparks": {},
    }
    with contextlib.suppress(PageNotFound):  # only GRPO runs have rollouts
        answers["rollouts"] = run_files.read_rollouts(folders, run, None)
    for path in [file["path"] for file in files["files"] if file["kind"] == "rows"][:_MAX_ROW_FILES]:
        answers[f"rows:{path}"] = run_files.read_rows(folders, run, path, 0)
    return {"state": state, "answers": answers}


def _collect_logs(folders: RunFolders, run: str, guilty_rank: int | None) -> dict[str, Any]:
    """Return the ends of Stoker's log and of some ranks' logs of the last attempt, including the rank to blame."""
    own_log = run_files.read_log(folders, run, None, None, None)
    attempt, ranks = own_log["attempt"], own_log["ranks"]
    saved_ranks = sorted({*ranks[:_MAX_LOGS], *([guilty_rank] if guilty_rank in ranks else [])})
    logs = {f"{attempt}/{rank}": run_files.read_log(folders, run, attempt, rank, None) for rank in saved_ranks}
    return {
        "attempt": attempt,
        "attempts": [attempt] if saved_ranks else [],
        "ranks": saved_ranks,
        "stoker": own_log,
        **logs,
    }
