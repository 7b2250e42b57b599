"""What `stoker web` answers: the page's own files, its stream, the questions it asks, and one action: stop."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from stoker.contract.frozen import replace
from stoker.contract.text import is_digits, parse_json
from stoker.control.record import run_record
from stoker.control.show.http_server import HttpRequest, HttpResponse, Stream, Work, failure
from stoker.control.show.web import run_details, run_texts
from stoker.control.show.web.access import SANDBOX, Guard, safe
from stoker.control.show.web.event_stream import Hub
from stoker.control.show.web.run_folders import Folders, NotThere

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
        self, guard: Guard, hub: Hub, folders: Folders, stop: Callable[[str], str], explain: run_texts.Explain
    ) -> None:
        self._guard, self._hub, self._folders, self._stop, self._explain = guard, hub, folders, stop, explain
        self._assets = _served(assets())
        self._questions: dict[str, Callable[[Query], Any]] = {
            "/api/curves": self._curves,
            "/api/sparks": lambda query: run_details.sparks(self._folders, _listed(query, "runs")),
            "/api/ranks": lambda query: run_details.over_time(
                self._folders, query.get("run", ""), _number(query, "since", 0.0), _within(query)
            ),
            "/api/compare": self._compare,
            "/api/settings": lambda query: run_details.settings(self._folders, query.get("run", "")),
            "/api/log": self._log,
            "/api/ending": lambda query: run_texts.ending(self._folders, query.get("run", ""), self._explain),
            "/api/files": lambda query: run_texts.listing(self._folders, query.get("run", "")),
            "/api/rows": lambda query: run_texts.rows(
                self._folders, query.get("run", ""), query.get("path", ""), _count(query, "from") or 0
            ),
            "/api/rollouts": lambda query: run_texts.rollouts(self._folders, query.get("run", ""), _count(query, "before")),
            "/api/reports": lambda _: run_texts.reports(self._folders),
        }

    def answer(self, request: HttpRequest) -> HttpResponse | Stream | Work:
        refused = self._guard.refused(request)
        if refused is not None:
            return refused
        exchanged = self._guard.exchange(request)
        if exchanged is not None:
            self._hub.expect()
            return exchanged
        return self._within(replace(request, path=request.path[len(self._guard.base) - 1 :]))

    def _within(self, request: HttpRequest) -> HttpResponse | Stream | Work:
        """`request.path`: below the page's own address."""
        if request.path == "/api/stop":
            return self._stopped(request)
        if request.method != "GET":
            return failure(405, ("Allow", "GET"), *safe())
        if request.path == "/events":
            stream = self._hub.open(request.query.get("run", ""), safe())
            return stream if stream is not None else failure(503, *safe())
        if request.path == "/file":
            return lambda: self._file(request.query)
        question = self._questions.get(request.path)
        if question is not None:
            return lambda: _asked(question, request.query)
        name = request.path[1:] or "index.html"
        if name in self._assets:
            body, kind = self._assets[name]
            return HttpResponse(200, body, kind, safe())
        return failure(404, *safe())

    # ---- questions ----

    def _curves(self, query: Query) -> Any:
        return run_details.curves(
            self._folders,
            query.get("run", ""),
            _listed(query, "names"),
            since=_count(query, "since") or 0,
            within=_within(query),
            most=_count(query, "most") or run_details.POINTS,
            smooth=min(_count(query, "smooth") or 1, 100_000),
        )

    def _compare(self, query: Query) -> Any:
        return run_details.compared(self._folders, _listed(query, "runs"), query.get("metric", ""))

    def _log(self, query: Query) -> Any:
        run, attempt = query.get("run", ""), _count(query, "attempt")
        rank = None if query.get("rank") == "stoker" else _count(query, "rank") or 0
        if query.get("find"):
            return run_texts.search(self._folders, run, attempt, rank, query["find"][:200])
        return run_texts.log(self._folders, run, attempt, rank, _count(query, "from"))

    def _file(self, query: Query) -> HttpResponse:
        try:
            data, kind = run_texts.read_file(self._folders, query.get("run", ""), query.get("path", ""))
        except NotThere as problem:
            return _json({"error": str(problem)}, 404)
        return HttpResponse(200, data, kind, safe(SANDBOX))

    # ---- the only action ----

    def _stopped(self, request: HttpRequest) -> HttpResponse | Work:
        if request.method != "POST":
            return failure(405, ("Allow", "POST"), *safe())
        if not self._guard.may_act(request):
            return failure(403, *safe())
        try:
            data = parse_json(request.body)
            run = data.get("run") if isinstance(data, dict) else None
        except ValueError:
            run = None
        if not isinstance(run, str):
            return failure(400, *safe())
        return lambda: self._stop_now(run)

    def _stop_now(self, run: str) -> HttpResponse:
        try:
            record = self._folders.record(run)
        except NotThere as problem:
            return _json({"error": str(problem)}, 404)
        status = run_record.run_status(record)
        if not record.mine or status not in ("running", "unknown"):
            why = f"run {record.id} is not running: {status}" if record.mine else f"run {record.id} is not yours"
            return _json({"error": why}, 409)
        return _json({"told": self._stop(record.dir)})


def _asked(question: Callable[[Query], Any], query: Query) -> HttpResponse:
    try:
        return _json(question(query))
    except NotThere as problem:
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
