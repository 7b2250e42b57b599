"""Everything a script can see of how it was started. For visible.py and visible_module."""

import gc
import locale
import os
import signal
import sys
import threading
import traceback
import warnings


def everything(main: dict) -> dict:
    sitecustomize = sys.modules.get("sitecustomize")
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv[1:],
        "executable": sys.executable,
        "prefix": sys.prefix,
        "path": sys.path,
        "main": {
            "name": main["__name__"],
            "file": main["__file__"],
            "spec_is_none": main["__spec__"] is None,
            "package": main["__package__"],
            "spec": main["__spec__"] and main["__spec__"].name,
            "is_main": sys.modules["__main__"].__dict__ is main,
            "names": sorted(main),
        },
        "flags": str(sys.flags),
        "xoptions": sys._xoptions,
        "warnoptions": sys.warnoptions,
        "filters": [str(one) for one in warnings.filters],
        "environ": dict(os.environ),
        "pythonpath": os.environ.get("PYTHONPATH"),
        "traceback": caught(),
        "signals": {
            signal.Signals(number).name: str(signal.getsignal(number))
            for number in signal.valid_signals()
            if number < signal.SIGRTMIN
        },
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "cwd": os.getcwd(),
        "stdin": sys.stdin.read(),
        "encodings": [(s.encoding, s.errors, s.isatty()) for s in (sys.stdin, sys.stdout, sys.stderr)],
        "locale": locale.setlocale(locale.LC_ALL),
        "threads": threading.active_count(),
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()],
        "recursion": sys.getrecursionlimit(),
        "sitecustomize": getattr(sitecustomize, "__file__", None),
        "customized": getattr(sys, "customized", []),
        "inherited": [number for number in range(3, 256) if open_for_children(number)],
        "nice": os.nice(0),
        "affinity": len(os.sched_getaffinity(0)),
    }


def open_for_children(number: int) -> bool:
    try:
        return os.get_inheritable(number)
    except OSError:
        return False


def caught() -> str:
    try:
        first()
    except ZeroDivisionError:
        return traceback.format_exc()
    return ""


def first() -> float:
    return second()


def second() -> float:
    return third()


def third() -> float:
    return 1 / 0
