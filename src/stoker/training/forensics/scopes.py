"""Where in the model the code is: modules by hooks; code outside of any by `scope("loss")`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

OUTSIDE = "(outside of any module)"
_NOTHING: AbstractContextManager[None] = nullcontext()
_active: Stack | None = None


class Stack:
    """The modules and scopes that are entered. A backward that starts inside one of them is not part of it."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, bool]] = []

    def push(self, name: str, in_backward: bool) -> None:
        self._entries.append((name, in_backward))

    def pop(self) -> None:
        self._entries.pop()

    def path(self, in_backward: bool) -> str | None:
        """The innermost; None where nothing was entered since the backward began."""
        if self._entries and (self._entries[-1][1] or not in_backward):
            return self._entries[-1][0]
        return None


@contextmanager
def _entered(stack: Stack, name: str) -> Iterator[None]:
    stack.push(name, in_backward=False)
    try:
        yield
    finally:
        stack.pop()


def scope(name: str) -> AbstractContextManager[None]:
    """with scope("loss"): ...   Does nothing unless an investigation is under way."""
    return _NOTHING if _active is None else _entered(_active, name)


def follow(stack: Stack | None) -> None:
    """From now on scopes are entered on this stack; None: no more."""
    global _active
    _active = stack
