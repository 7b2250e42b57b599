"""The ladder's first rung: a script's imports, one by one in a process of their own."""

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

IMPORT_S = 120.0
_IMPORTER = """
import sys
if not sys.flags.safe_path: del sys.path[0]
import faulthandler, json, os, time
told = json.loads(sys.argv[1])
faulthandler.enable()
os.set_inheritable(told["pipe"], False)
sys.argv[:] = told["argv"]
if not sys.flags.safe_path: sys.path.insert(0, told["folder"])
page = os.sysconf("SC_PAGE_SIZE")
def tell(**words):
    with open("/proc/self/statm") as file: words["rss"] = int(file.read().split()[1]) * page
    os.write(told["pipe"], json.dumps(words).encode() + b"\\n")
tell()
for name, statements, may_fail in told["imports"]:
    tell(begins=name)
    began = time.perf_counter()
    problem = {}
    try:
        for statement in statements: exec(statement, {"__name__": "__main__"})
    except BaseException as raised:
        import traceback
        problem = {"type": type(raised).__qualname__, "message": str(raised)[:2000], "missing": isinstance(raised, ModuleNotFoundError) and raised.name or "",
                   "traceback": traceback.format_exc()[-4000:]}
    tell(ended=name, seconds=time.perf_counter() - began, **problem)
    if problem and not may_fail: break
os._exit(0)
"""


@frozen
class Import:
    """A module the script imports at its top level."""

    name: str
    line: int
    statements: tuple[str, ...]
    optional: str = ""  # why a failure proves nothing; empty: the script can't do without


@frozen
class Imported:
    name: str
    seconds: float
    grew: int  # bytes of resident memory it added
    rss: int
    problem: str = ""  # why an optional one is not there


def imports_of(source: bytes | str) -> tuple[Import, ...]:
    """What it imports whenever it starts, without the standard library. What a try holds may fail; an `if` is not read."""
    found: dict[str, Import] = {}
    for name, line, statement, optional in _imports(ast.parse(source).body, ""):
        known = found.get(name, Import(name, line, (), optional))
        statements = tuple(dict.fromkeys((*known.statements, statement)))
        found[name] = Import(name, known.line, statements, known.optional and optional)
    return tuple(found.values())


def _imports(body: Sequence[ast.stmt], optional: str) -> Iterator[tuple[str, int, str, str]]:
    for node in body:
        if isinstance(node, ast.Import):
            named = [(alias.name, f"import {alias.name}") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            named = [(node.module, ast.unparse(node))]
        else:
            named = []
            if isinstance(node, (ast.Try, ast.TryStar, ast.With)):
                yield from _imports(node.body, optional or "the script tries it")
            elif isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
                yield from _imports(node.body, optional)
            elif any(
                isinstance(part, ast.Attribute) and ast.unparse(part) in ("sys.path", "site.addsitedir")
                for part in ast.walk(node)
            ):
                optional = optional or "the script changes sys.path first"
        for name, statement in named:
            if name.partition(".")[0] not in sys.stdlib_module_names:
                yield name, node.lineno, statement, optional


def find_imports(request: Request, say: Callable[[str], None]) -> tuple[tuple[Import, ...], str, str]:
    """(imports, the file, what sys.path begins with for it)."""
    script, path, folder = request.script, request.script, os.path.dirname(os.path.realpath(request.script))
    if request.options.no_python:
        say(f"imports: {script} is not a Python script")
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
            return imports_of(file.read()), path, folder
    except (OSError, SyntaxError, ValueError) as problem:
        say(f"imports: skipped, {path or script} is not valid Python here: {problem}")
        return (), path, folder


def try_imports(
    request: Request, flags: list[str], done: list[Imported], say: Callable[[str], None], stopped: Callable[[], object]
) -> Verdict | None:
    """All of them in one child, which tells what it does; what came through is added to `done`."""
    wanted, path, folder = find_imports(request, say)
    if not wanted:
        return None
    say(f"imports: {len(wanted)} of {path}, one by one in a process of their own")
    # For modules that read them.
    env = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    env |= {name: value for name, equals, value in (word.partition("=") for word in request.options.env) if equals}
    answers, pipe = os.pipe()
    told = {
        "pipe": pipe,
        "argv": [request.script, *request.args],
        "folder": folder,
        "imports": [(one.name, one.statements, bool(one.optional)) for one in wanted],
    }
    argv = [request.options.python or sys.executable, *flags, "-c", _IMPORTER, json.dumps(told)]
    with os.fdopen(answers, "rb", 0), tempfile.TemporaryFile() as noise:
        try:
            child = start(argv, env, noise, noise, signal.SIGKILL, pipe)
        except OSError as problem:
            raise Refusal(f"{argv[0]} can't be started: {problem.strerror}", EX_NOINPUT) from problem
        finally:
            os.close(pipe)
        try:
            named = {one.name: one for one in wanted}
            under_way, late, verdict = _listen(child, answers, named, path, done, say, stopped)
        finally:
            # With whatever it left in its session: it is not reaped yet, so the number is still its own.
            signal_group(child.pid, signal.SIGKILL)
            code = child.wait()
        if verdict is not None or stopped() or (code == 0 and under_way is None):
            return verdict
        noise.seek(0)
        tail = mask_lines(noise.read().decode("utf-8", "replace"))[-8:]
    return _died(under_way, path, code, late, tail)


def _listen(
    child: subprocess.Popen[bytes],
    answers: int,
    wanted: dict[str, Import],
    path: str,
    done: list[Imported],
    say: Callable[[str], None],
    stopped: Callable[[], object],
) -> tuple[Import | None, bool, Verdict | None]:
    """Until the child's end, a failure or the deadline: (the import under way, was it too slow, a verdict)."""
    rest, rss, under_way = b"", 0, None
    deadline = time.monotonic() + IMPORT_S
    while not stopped():
        # Asked before the last read.
        over = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        data = os.read(answers, 65536) if select.select([answers], [], [], 0.0 if over else 0.1)[0] else b""
        *lines, rest = (rest + data).split(b"\n")
        for answer in (json.loads(line) for line in lines):
            deadline = time.monotonic() + IMPORT_S
            under_way = wanted.get(answer.get("begins", ""))
            if "ended" in answer:
                one = wanted[answer["ended"]]
                problem = f"{answer['type']}: {answer['message']}" if "type" in answer else ""
                if problem and not one.optional:
                    return one, False, _failed_import(one, path, answer, problem)
                done.append(Imported(one.name, answer["seconds"], answer["rss"] - rss, answer["rss"], problem))
                say(import_line(done[-1], one))
            rss = answer["rss"]
        if over and not data:
            break
        if time.monotonic() > deadline:
            return under_way, True, None
    return under_way, False, None


def import_line(done: Imported, one: Import) -> str:
    if done.problem:
        problem = done.problem.partition("\n")[0][:120]
        return f"  {done.name:<32} not there, and that may be meant: {one.optional} ({problem})"
    return f"  {done.name:<32} {done.seconds:>7.2f} s {done.grew / 2**20:>+9.1f} MiB {done.rss / 2**20:>9.1f} MiB"


def _failed_import(one: Import, path: str, answer: dict[str, Any], problem: str) -> Verdict:
    from stoker.control.verdict.rules.environment import install_advice

    missing = answer["missing"].partition(".")[0]
    fix = (
        *install_advice(missing),
        "is it the right Python environment? the ranks use the one that runs Stoker, or --python",
    )
    summary = f"import {one.name} fails at {path}:{one.line}: {problem.partition(chr(10))[0]}"
    return _failed(summary, 1, mask_lines(answer["traceback"])[-6:], fix)


def _failed(summary: str, code: int, evidence: list[str], fix: tuple[str, ...]) -> Verdict:
    return Verdict("failed", "env.import", summary, code, evidence=tuple(evidence), fix=fix)


def _died(one: Import | None, path: str, code: int, late: bool, tail: list[str]) -> Verdict:
    what = f"import {one.name} at {path}:{one.line}" if one else f"the process for the imports of {path}"
    alone = f'python -X faulthandler -c "{one.statements[0]}"   # shows it alone' if one else f"python {path}"
    fix: tuple[str, ...] = (alone,)
    if late:
        return _failed(f"{what} is not through after {IMPORT_S:.0f} s", EX_SOFTWARE, tail, fix)
    if code >= 0:
        return _failed(f"{what} ends the process with exit code {code}", code or EX_SOFTWARE, tail, fix)
    name = signal.Signals(-code).name
    if -code == signal.SIGKILL:
        fix = ("was it the OOM killer? dmesg knows, and free -h what is left", *fix)
    return _failed(f"{what} kills the process: {name}", 128 - code, tail, fix)


def start(
    argv: list[str], env: dict[str, str], out: Any, err: Any, at_our_death: int, *keep: int
) -> subprocess.Popen[bytes]:
    """In a session of its own, and it does not outlive us."""
    libc = ctypes.CDLL(None)
    return subprocess.Popen(
        argv,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        pass_fds=keep,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(1, int(at_our_death)),  # noqa: PLW1509  no thread runs here yet: the fork is safe. 1: PR_SET_PDEATHSIG
    )
