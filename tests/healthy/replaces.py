"""Takes over what a launcher might lean on: signal handlers, the excepthook, stdout and stderr. Trains on regardless."""

import io
import os
import signal
import sys
import threading

from training import RANK, Tiny, arguments, finish

told = arguments(steps=250)
for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM"):
    signal.signal(getattr(signal, name), lambda *_: None)
signal.signal(signal.SIGRTMIN, lambda *_: None)
sys.excepthook = lambda *_: os._exit(41)
threading.excepthook = lambda *_: os._exit(42)
heard = io.StringIO()
sys.stdout = heard
sys.stderr = open(os.devnull, "w")  # noqa: SIM115  as such scripts do
tiny = Tiny()
tiny.train(told.steps)
finish()
sys.stdout = sys.__stdout__
print(f"rank {RANK} printed {len(heard.getvalue())} characters to itself")
