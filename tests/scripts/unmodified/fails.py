"""Fails in the way its argument names: python fails.py chained"""

import sys
import threading
from collections.abc import Callable


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def chained() -> None:
    try:
        {}["a"]
    except KeyError as problem:
        raise ValueError("ünïcode, and\ntwo lines") from problem


def grouped() -> None:
    problem = RuntimeError("inside")
    problem.add_note("a note")
    raise ExceptionGroup("several", [problem, OSError(2, "No such file", "there")])


def unprintable() -> None:
    raise Unprintable


def surrogate() -> None:
    raise ValueError("half a character: \udc80")


def recursion() -> None:
    recursion()


def broken_import() -> None:
    import broken_module  # noqa: F401


def missing_import() -> None:
    import jsonn  # noqa: F401


def exit_text() -> None:
    sys.exit("a last word")


def exit_number() -> None:
    sys.exit(3)


def interrupt() -> None:
    raise KeyboardInterrupt


def thread_first() -> None:
    thread = threading.Thread(target=chained, name="side")
    thread.start()
    thread.join()
    raise LookupError("after the thread")


def own_hook() -> None:
    def say(kind: type[BaseException], value: BaseException, _trace: object) -> None:
        print(f"my own words: {kind.__name__} {value}", file=sys.stderr)

    sys.excepthook = say
    raise LookupError("own_hook")  # here


def hook_on_top() -> None:
    before = sys.excepthook

    def say(kind: type[BaseException], value: BaseException, trace: object) -> None:
        print("before the usual:", file=sys.stderr)
        before(kind, value, trace)

    sys.excepthook = say
    raise LookupError("hook_on_top")  # here


def original_hook() -> None:
    sys.excepthook = sys.__excepthook__
    raise LookupError("original_hook")  # here


def broken_hook() -> None:
    def say(*_: object) -> None:
        raise RuntimeError("the hook fails too")

    sys.excepthook = say
    raise LookupError("broken_hook")  # here


ways: dict[str, Callable[[], None]] = {
    name: way for name, way in list(globals().items()) if callable(way) and getattr(way, "__module__", "") == __name__
}
ways[sys.argv[1]]()
