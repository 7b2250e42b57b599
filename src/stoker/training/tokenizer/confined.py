"""A stranger's tokenizer or chat template, in a process of its own: its patterns or loops may take hours or any amount of
memory for some texts, and a regex engine can't be stopped once it has begun. The kernel ends the process at its limit of
CPU time or memory, and one line says so.

python -m stoker.training.tokenizer.confined: requests on stdin, answers on stdout.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

import stoker
from stoker.contract.names import EX_DATAERR, Refusal
from stoker.contract.quantities import counted
from stoker.training.tokenizer.definition import define
from stoker.training.tokenizer.encoders import Encoder, FastPlan, Ids, Library, SpanEncoder

MAKING_S = 30  # of CPU time, to load it, in all requests together: 4 s with 200,000 tokens
BURST_S = 10  # of CPU time, that texts may take besides the two below; `tokenizers` needs 0.03 s for 64 KB
PER_BYTE_S, PER_TEXT_S = 1e-5, 0.01  # a twentieth of the speed of `tokenizers`
RENDERING_S = 2  # of CPU time, for all renderings of one conversation: 100 turns take 0.02 s
PER_RENDERING_S = 0.05  # of CPU time, on average, besides BURST_S and PER_BYTE_S
MOST_MEMORY = 2 << 30  # 200,000 tokens take 0.5 GB
SILENCE_S = 1800  # a process that uses no CPU time either is stuck

# What to do; with which encoder, or how many bytes earn CPU time; bytes that follow.
_REQUEST = struct.Struct("<cIQ")
_ANSWER = struct.Struct("<cQ")
_TOKENIZER, _PLAN, _MAKE, _ENCODE, _SPANS = b"T", b"P", b"M", b"E", b"S"
_TEMPLATES, _RENDER = b"C", b"R"
_TEXTS = (_ENCODE, _SPANS)
_FINE, _PROBLEM, _MEMORY = b"F", b"P", b"M"
_MOST = 0xFFFFFFFF


class Confined:
    """Does what `Library` does."""

    def __init__(self, data: bytes, eos: str | None, where: str) -> None:
        self._data, self._eos, self._where = data, eos, where
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # a fork of this process needs one of its own
        self._encoders: dict[FastPlan | None, int] = {}

    def plan(self) -> FastPlan | str:
        with self._lock:
            plan = json.loads(self._ask(_PLAN))
        return plan if isinstance(plan, str) else FastPlan(tuple(plan))

    def encoder(self, plan: FastPlan | None) -> Encoder:
        def encode(text: str) -> Ids:
            with self._lock:
                self._ready()
                if plan not in self._encoders:
                    unreachable = None if plan is None else plan.unreachable
                    self._encoders[plan] = int(self._ask(_MAKE, json.dumps(unreachable).encode()))
                return np.frombuffer(self._ask(_ENCODE, text.encode(), self._encoders[plan]), dtype=np.uint32)

        return encode

    def span_encoder(self) -> SpanEncoder:
        def encode(text: str, due: int) -> tuple[Ids, Ids]:
            with self._lock:
                table = np.frombuffer(self._ask(_SPANS, text.encode(), min(due, _MOST)), dtype=np.uint32).reshape(-1, 3)
            return table[:, 0], table[:, 1:]

        return encode

    def _begin(self) -> None:
        self._ask(_TOKENIZER, json.dumps(self._eos).encode() + b"\n" + self._data)

    def _ready(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner == os.getpid():
            return self._process
        root = os.path.dirname(os.path.dirname(os.path.abspath(stoker.__file__)))
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        threads = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "stoker.training.tokenizer.confined"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what a library prints when it crashes
            env={**os.environ, "PYTHONPATH": path, **threads},
            bufsize=0,
        )
        self._process, self._owner, self._encoders = process, os.getpid(), {}
        weakref.finalize(self, _end, process, self._owner)
        self._begin()
        return process

    def _ask(self, what: bytes, payload: bytes = b"", number: int = 0) -> bytes:
        process = self._ready()
        answered = False
        try:
            try:
                _send(process, _REQUEST.pack(what, number, len(payload)) + payload)
                kind, size = _ANSWER.unpack(_receive(process, _ANSWER.size))
                answer = _receive(process, size)
            except (BrokenPipeError, EOFError) as ended:
                raise self._refusal(_why_ended(process), what, payload) from ended
            except TimeoutError as silent:
                raise self._refusal(f"no answer within {SILENCE_S} s", what, payload) from silent
            answered = True
        finally:
            if not answered:  # also after Ctrl-C: the answer to this request must not be taken for that to the next one
                self._process = None
                _end(process, self._owner)
        if kind == _MEMORY:
            raise self._refusal(_TOO_LARGE, what, payload)
        if kind == _PROBLEM:
            raise self._problem(answer.decode("utf-8", "replace"))
        return answer

    def _problem(self, why: str) -> Refusal:
        return Refusal(f"tokenizer {self._where}: tokenizer.json can't be used: {why}", EX_DATAERR)

    def _refusal(self, why: str, what: bytes, payload: bytes) -> Refusal:
        begins = payload[:40].decode("utf-8", "replace")
        doing = f"encoding {counted(len(payload), 'byte')} that begin {begins!r}" if what in _TEXTS else "loading it"
        line = f"tokenizer {self._where}: tokenizer.json can't be used: {doing}: {why}; choose another --tokenizer.path"
        return Refusal(line, EX_DATAERR)


class ConfinedTemplate(Confined):
    """Renders conversations (rendering.py)."""

    def __init__(self, templates: dict[str, Any], where: str) -> None:
        super().__init__(json.dumps(templates).encode(), None, where)

    def render(self, request: bytes) -> Any:
        with self._lock:
            return json.loads(self._ask(_RENDER, request))

    def _begin(self) -> None:
        self._ask(_TEMPLATES, self._data)

    def _refusal(self, why: str, what: bytes, payload: bytes) -> Refusal:
        limits = {_TOO_SLOW: _TEMPLATE_TOO_SLOW, _TOO_LARGE: _TEMPLATE_TOO_LARGE}
        return self._problem(f"rendering a conversation: {limits.get(why, why)}")

    def _problem(self, why: str) -> Refusal:
        return Refusal(f"tokenizer {self._where}: its chat template can't be used: {why}", EX_DATAERR)


_TEMPLATE_TOO_SLOW = f"it takes more than {RENDERING_S} s of CPU time, or than {BURST_S} s and {PER_RENDERING_S} s per conversation in all"
_TEMPLATE_TOO_LARGE = f"it takes more than {MOST_MEMORY >> 30} GB of memory"
_TOO_LARGE = f"more than the {MOST_MEMORY >> 30} GB of memory that an unknown kind of tokenizer may take"
_TOO_SLOW = (
    f"too slow: more CPU time than an unknown kind of tokenizer may take ({MAKING_S} s to load; to encode {BURST_S} s, and"
    f" {PER_BYTE_S * 1e6:.0f} s per MB)"
)


def _why_ended(process: subprocess.Popen[bytes]) -> str:
    code = process.wait()
    if code == -signal.SIGXCPU:
        return _TOO_SLOW
    if code == -signal.SIGABRT:  # Rust where an allocation fails
        return _TOO_LARGE
    return f"its process {'was killed by signal' if code < 0 else 'ended with exit code'} {abs(code)}"


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _send(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin is not None
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(process.stdin.fileno(), rest) :]


def _receive(process: subprocess.Popen[bytes], size: int) -> bytes:
    assert process.stdout is not None
    handle, deadline = process.stdout.fileno(), time.monotonic() + SILENCE_S
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    received = bytearray()
    while len(received) < size:
        if not waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        part = os.read(handle, min(size - len(received), 1 << 20))
        if not part:
            raise EOFError
        received += part
    return bytes(received)


# ---- in the process ----


class _Budget:
    """CPU time, enforced by the kernel."""

    def __init__(self) -> None:
        self.for_texts = float(BURST_S)  # to encode or to render
        self.making = 0.0  # what was used for anything else
        self.hard = resource.getrlimit(resource.RLIMIT_CPU)[1]

    @contextlib.contextmanager
    def for_request(self, what: bytes, size: int) -> Iterator[None]:
        began, is_text = time.process_time(), what in (*_TEXTS, _RENDER)
        if is_text:
            self.for_texts += (PER_RENDERING_S if what == _RENDER else PER_TEXT_S) + size * PER_BYTE_S
        longest = began + RENDERING_S if what == _RENDER else math.inf
        limit = math.ceil(min(longest, self.making + self.for_texts) if is_text else began + MAKING_S - self.making)
        resource.setrlimit(resource.RLIMIT_CPU, (limit if self.hard < 0 else min(limit, self.hard), self.hard))
        yield
        if not is_text:
            self.making += time.process_time() - began


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: who asked decides
    answers, requests = os.fdopen(os.dup(1), "wb"), os.fdopen(0, "rb", closefd=False)
    os.dup2(2, 1)  # a library that prints must not speak here
    with contextlib.suppress(ValueError, OSError):  # a lower limit than ours stays
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    budget, encoding = _Budget(), _Encoding()
    while header := requests.read(_REQUEST.size):
        what, number, size = _REQUEST.unpack(header)
        payload = requests.read(size)
        with budget.for_request(what, min(size, number) if what == _SPANS else size):
            kind, answer = _answered(encoding, what, payload, number)
        answers.write(_ANSWER.pack(kind, len(answer)) + answer)
        answers.flush()


def _answered(encoding: _Encoding, what: bytes, payload: bytes, number: int) -> tuple[bytes, bytes]:
    try:
        return _FINE, encoding.answer(what, payload, number)
    except MemoryError:
        return _MEMORY, b""
    except BaseException as problem:
        if not isinstance(problem, Exception) and type(problem).__name__ != "PanicException":
            raise
        return _PROBLEM, f"{type(problem).__name__}: {problem}".encode("utf-8", "replace")[:1000]


class _Encoding:
    def __init__(self) -> None:
        self.encoders: list[Encoder] = []
        self.library: Any = None
        self.spans: SpanEncoder | None = None
        self.templates: Any = None

    def answer(self, what: bytes, payload: bytes, number: int) -> bytes:
        if what == _TOKENIZER:
            eos, data = payload.split(b"\n", 1)
            self.library = Library(define(data, "here", json.loads(eos)), data)
            return b""
        if what == _TEMPLATES:
            from stoker.training.tokenizer.rendering import Templates  # only here: jinja2 takes 50 ms

            self.templates = Templates(payload)
            return b""
        if what == _RENDER:
            rendered: bytes = self.templates.answer(payload)
            return rendered
        if what == _SPANS:
            if self.spans is None:
                self.spans = self.library.span_encoder()
            ids, offsets = self.spans(payload.decode(), number)
            self._check(ids, payload)
            return np.column_stack((ids, offsets)).astype(np.uint32).tobytes()
        if what == _PLAN:
            plan = self.library.plan()
            return json.dumps(plan if isinstance(plan, str) else plan.unreachable).encode()
        if what == _MAKE:
            unreachable = json.loads(payload)
            self.encoders.append(self.library.encoder(None if unreachable is None else FastPlan(tuple(unreachable))))
            return str(len(self.encoders) - 1).encode()
        ids = self.encoders[number](payload.decode())
        self._check(ids, payload)
        return ids.tobytes()

    def _check(self, ids: Ids, payload: bytes) -> None:
        if len(ids) > (len(payload) if self.library.told.is_exact else 8 * len(payload) + 8):
            raise ValueError("it gives more tokens than a text has bytes")


if __name__ == "__main__":
    main()
