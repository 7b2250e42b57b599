"""Implements the ladder's first rung: imports a script's modules one by one in a separate process."""

from __future__ import annotations

import ast
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stoker.contract.errors import EX_NOINPUT, EX_SOFTWARE, Refusal
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import frozen
from stoker.contract.masking import mask_lines
from stoker.contract.process import signal_group
from stoker.control.plan.request import Request

IMPORT_S = 120.0  # longest time for one import
_IMPORTER = """
import sys
if not sys.flags.safe_path: del sys.path[0]
import faulthandler, json, os, time
job = json.loads(sys.argv[1])
faulthandler.enable()
os.set_inheritable(job["pipe"], False)
sys.argv[:] = job["argv"]
if not sys.flags.safe_path: sys.path.insert(0, job["folder"])
page = os.sysconf("SC_PAGE_SIZE")
def report(**fields):
    with open("/proc/self/statm") as file: fields["rss"] = int(file.read().split()[1]) * page
    os.write(job["pipe"], json.dumps(fields).encode() + b"\\n")
report()
for name, statements, may_fail in job["imports"]:
    report(begins=name)
    start = time.perf_counter()
    problem = {}
    try:
        for statement in statements: exec(statement, {"__name__": "__main__"})
    except BaseException as raised:
        import traceback
        problem = {"type": type(raised).__qualname__, "message": str(raised)[:2000], "missing": isinstance(raised, ModuleNotFoundError) and raised.name or "",
                   "traceback": traceback.format_exc()[-4000:]}
    report(ended=name, seconds=time.perf_counter() - start, **problem)
    if problem and not may_fail: break
os._exit(0)
"""


@frozen
class ScriptImport:
    """A module that the script imports at its top level."""

    name: str
    line: int
    statements: tuple[str, ...]
    optional: str = ""  # why a failure proves nothing, or "" if the script needs it


@frozen
class ImportResult:
    """The time and memory of a module's import."""

    name: str
    seconds: float
    grew: int  # bytes of resident memory that the import added
    rss: int
    problem: str = ""  # why an optional module is missing


# ---- which imports ----


def parse_imports(source: bytes | str) -> tuple[ScriptImport, ...]:
    """Return the modules that a script imports at each start, without the standard library.

    Imports inside a `try` or `with` may fail. An `if` is not read, except for that of __name__.
    """
    imports: dict[str, ScriptImport] = {}
    for name, line, statement, optional in _find_imports(ast.parse(source).body, ""):
        entry = imports.get(name, ScriptImport(name, line, (), optional))
        statements = tuple(dict.fromkeys((*entry.statements, statement)))
        imports[name] = ScriptImport(name, entry.line, statements, entry.optional and optional)
    return tuple(imports.values())


def _find_imports(body: Sequence[ast.stmt], optional: str) -> Iterator[tuple[str, int, str, str]]:
    """Yield the name, line and statement of each import, and why it may fail."""
    for node in body:
        imports = []
        if isinstance(node, ast.Import):
            imports = [(alias.name, f"import {alias.name}") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imports = [(node.module, ast.unparse(node))]
        elif isinstance(node, (ast.Try, ast.TryStar, ast.With)):
            yield from _find_imports(node.body, optional or "it is in a try or with block")
        elif isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            yield from _find_imports(node.body, optional)
        elif _changes_path(node):
            optional = optional or "the script changes sys.path first"
        for name, statement in imports:
            if name.partition(".")[0] not in sys.stdlib_module_names:
                yield name, node.lineno, statement, optional


def _changes_path(node: ast.stmt) -> bool:
    attributes = (part for part in ast.walk(node) if isinstance(part, ast.Attribute))
    return any(ast.unparse(attribute) in ("sys.path", "site.addsitedir") for attribute in attributes)


def find_imports(request: Request, log: Callable[[str], None]) -> tuple[tuple[ScriptImport, ...], str, str]:
    """Return the imports, the file that has them, and the first entry of its sys.path."""
    script, path, folder = request.script, request.script, os.path.dirname(os.path.realpath(request.script))
    if request.options.no_python:
        log(f"imports: {script} is not a Python script")
        return (), script, folder
    if request.options.module:
        folder = os.getcwd()
        bases = [os.path.join(entry, *script.split(".")) for entry in (folder, *sys.path)]
        files = (file for base in bases for file in (base + ".py", os.path.join(base, "__main__.py")))
        path = next(filter(os.path.isfile, files), "")
    elif os.path.isdir(script):
        path, folder = os.path.join(script, "__main__.py"), os.path.realpath(script)
    try:
        with open(path, "rb") as file:
            return parse_imports(file.read()), path, folder
    except (OSError, SyntaxError, ValueError) as problem:
        log(f"imports: skipped, {path or script} is not valid Python here: {problem}")
        return (), path, folder


# ---- importing ----


def try_imports(
    request: Request,
    python_flags: list[str],
    imported: list[ImportResult],
    log: Callable[[str], None],
    stopped: Callable[[], object],
) -> Verdict | None:
    """Import the script's modules in one child and add them to `imported`. Returns a verdict if one fails, else None."""
    imports, path, folder = find_imports(request, log)
    if not imports:
        return None
    log(f"imports: {len(imports)} of {path}, one by one in a separate process")
    # Some modules read these variables when they are imported.
    env = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    env |= {name: value for name, equals, value in (word.partition("=") for word in request.options.env) if equals}
    answers, pipe = os.pipe()
    job = {
        "pipe": pipe,
        "argv": [request.script, *request.args],
        "folder": folder,
        "imports": [(entry.name, entry.statements, bool(entry.optional)) for entry in imports],
    }
    argv = [request.options.python or sys.executable, *python_flags, "-c", _IMPORTER, json.dumps(job)]
    with os.fdopen(answers, "rb", 0), tempfile.TemporaryFile() as output:
        try:
            child = start_child(argv, env, output, output, signal.SIGKILL, pipe)
        except OSError as problem:
            raise Refusal(f"{argv[0]} can't be started: {problem.strerror}", EX_NOINPUT) from problem
        finally:
            os.close(pipe)
        try:
            by_name = {entry.name: entry for entry in imports}
            current, is_late, verdict = _read_answers(child, answers, by_name, path, imported, log, stopped)
        finally:
            # Kill all processes of its session. The child is not reaped yet, so no other process can have its pid.
            signal_group(child.pid, signal.SIGKILL)
            code = child.wait()
        if verdict is not None or stopped() or (code == 0 and current is None):
            return verdict
        output.seek(0)
        tail = mask_lines(output.read().decode("utf-8", "replace"))[-8:]
    return _make_child_verdict(current, path, code, is_late, tail)


def _read_answers(
    child: subprocess.Popen[bytes],
    answers: int,
    imports: dict[str, ScriptImport],
    path: str,
    imported: list[ImportResult],
    log: Callable[[str], None],
    stopped: Callable[[], object],
) -> tuple[ScriptImport | None, bool, Verdict | None]:
    """Read until the child's end, a failure or the deadline. Returns (current import, whether it is too slow, verdict)."""
    rest, rss, current = b"", 0, None
    deadline = time.monotonic() + IMPORT_S
    while not stopped():
        # Check for the end before the read, so that the last read finds everything that the child wrote.
        has_ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        data = os.read(answers, 65536) if select.select([answers], [], [], 0.0 if has_ended else 0.1)[0] else b""
        *lines, rest = (rest + data).split(b"\n")
        for answer in (json.loads(line) for line in lines):
            deadline = time.monotonic() + IMPORT_S
            current = imports.get(answer.get("begins", ""))
            if "ended" in answer:
                entry = imports[answer["ended"]]
                problem = f"{answer['type']}: {answer['message']}" if "type" in answer else ""
                if problem and not entry.optional:
                    return entry, False, _make_import_verdict(entry, path, answer, problem)
                imported.append(
                    ImportResult(entry.name, answer["seconds"], answer["rss"] - rss, answer["rss"], problem)
                )
                log(format_import(imported[-1], entry))
            rss = answer["rss"]
        if has_ended and not data:
            break
        if time.monotonic() > deadline:
            return current, True, None
    return current, False, None


def format_import(imported: ImportResult, entry: ScriptImport) -> str:
    if imported.problem:
        problem = imported.problem.partition("\n")[0][:120]
        return f"  {imported.name:<32} missing, which may be intended: {entry.optional} ({problem})"
    memory = f"{imported.grew / 2**20:>+9.1f} MiB {imported.rss / 2**20:>9.1f} MiB"
    return f"  {imported.name:<32} {imported.seconds:>7.2f} s {memory}"


def start_child(
    argv: list[str], env: dict[str, str], out: Any, err: Any, death_signal: int, *pass_fds: int
) -> subprocess.Popen[bytes]:
    """Start a process in a new session. It gets `death_signal` when this process ends."""
    libc = ctypes.CDLL(None)
    return subprocess.Popen(
        argv,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        pass_fds=pass_fds,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(1, int(death_signal)),  # noqa: PLW1509  no thread runs here yet: the fork is safe. 1: PR_SET_PDEATHSIG
    )


# ---- verdicts ----


def _make_import_verdict(entry: ScriptImport, path: str, answer: dict[str, Any], problem: str) -> Verdict:
    from stoker.control.verdict.rules.environment import install_advice

    advice = "check the Python environment: the ranks use the one that runs Stoker, or --python"
    fixes = (*install_advice(answer["missing"].partition(".")[0]), advice)
    summary = f"import {entry.name} fails at {path}:{entry.line}: {problem.partition(chr(10))[0]}"
    return _make_verdict(summary, 1, mask_lines(answer["traceback"])[-6:], fixes)


def _make_child_verdict(entry: ScriptImport | None, path: str, code: int, is_late: bool, tail: list[str]) -> Verdict:
    if entry is not None:
        subject = f"import {entry.name} at {path}:{entry.line}"
        fixes: tuple[str, ...] = (f'python -X faulthandler -c "{entry.statements[0]}"   # imports only this module',)
    else:
        subject, fixes = f"the process for the imports of {path}", (f"python {path}",)
    if is_late:
        return _make_verdict(f"{subject} has not finished after {IMPORT_S:.0f} s", EX_SOFTWARE, tail, fixes)
    if code >= 0:
        return _make_verdict(f"{subject} ends the process with exit code {code}", code or EX_SOFTWARE, tail, fixes)
    if -code == signal.SIGKILL:
        fixes = ("check dmesg and free -h: it may have been the OOM killer", *fixes)
    return _make_verdict(f"{subject} kills the process: {signal.Signals(-code).name}", 128 - code, tail, fixes)


def _make_verdict(summary: str, code: int, evidence: list[str], fixes: tuple[str, ...]) -> Verdict:
    return Verdict("failed", "env.import", summary, code, evidence=tuple(evidence), fix=fixes)
