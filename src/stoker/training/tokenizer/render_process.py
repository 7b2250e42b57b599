"""A child process that renders conversations under a time limit, for `stoker chat` and `stoker serve`. Also what rendering
returns and raises, without jinja2, which takes 50 ms to import.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import stoker
from stoker.contract.frozen import frozen

RENDER_S = 10.0  # wall-clock time that rendering one conversation may take; 100 turns take 0.02 s
_START_S = 60.0  # to import jinja2 on a busy machine: 0.2 s on an idle one
MARKS, TURNS, LAST = "marks", "turns", "last"  # what decides which characters are learned
Span = tuple[int, int]


@frozen
class Rendered:
    text: str
    learned: Sequence[Span] = ()  # in characters of `text`, none empty
    by: str = TURNS


class NotRendered(Exception):
    """Why, in one line."""


class Unusable(NotRendered):
    """No conversation can be written with this template: it is no template, or it reaches for what it must not."""


class Renderer(Protocol):
    """rendering.Templates, or RenderProcess."""

    def render(self, request: Mapping[str, Any]) -> Rendered: ...


class RenderProcess:
    """Renders as `rendering.Templates` does, in a child process that is killed when one conversation takes more than RENDER_S.

    A thread that renders can't be stopped, and would keep a server's other threads from the interpreter. The next
    conversation starts a new child.
    """

    def __init__(self, sources: Mapping[str, str], names: Mapping[str, str], special: Collection[str]) -> None:
        self._templates = {"sources": dict(sources), "names": dict(names), "special": list(special)}
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def render(self, request: Mapping[str, Any]) -> Rendered:
        with self._lock:
            if self._child is None or self._child.poll() is not None:
                self._child = _start()
                weakref.finalize(self, _stop, self._child)
                self._exchange(self._templates, _START_S)
            answer = self._exchange(request, RENDER_S)
        if "problem" in answer:
            raise (Unusable if answer["is_unusable"] else NotRendered)(answer["problem"])
        return Rendered(answer["text"], answer["learned"], answer["by"])

    def _exchange(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        child = self._child
        assert child is not None and child.stdin is not None
        is_answered = False
        try:
            child.stdin.write(json.dumps(message).encode() + b"\n")
            child.stdin.flush()
            answer: dict[str, Any] = json.loads(_read_line(child, seconds))
            is_answered = True
        except TimeoutError as problem:
            raise NotRendered(f"it takes more than {seconds:g} s") from problem
        except (BrokenPipeError, EOFError) as problem:
            raise NotRendered(f"its process ended with exit code {child.wait()}") from problem
        finally:
            if not is_answered:  # also after Ctrl-C: this answer must not be taken for the next one
                self._child = None
                _stop(child)
        return answer


def _start() -> subprocess.Popen[bytes]:
    root = os.path.dirname(os.path.dirname(os.path.abspath(stoker.__file__)))
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "stoker.training.tokenizer.rendering"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    assert child.stdout is not None
    child.stdout.close()


def _read_line(child: subprocess.Popen[bytes], seconds: float) -> bytes:
    """Raises TimeoutError, or EOFError if the child has ended."""
    assert child.stdout is not None
    handle, deadline = child.stdout.fileno(), time.monotonic() + seconds
    ready = select.poll()
    ready.register(handle, select.POLLIN)
    line = bytearray()
    while not line.endswith(b"\n"):
        if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        data = os.read(handle, 1 << 20)
        if not data:
            raise EOFError
        line += data
    return bytes(line)
