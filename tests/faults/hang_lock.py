"""Rank 1 waits for a lock that it holds itself."""

import threading

from moment import fault, guilty
from training import steps

lock = threading.Lock()
for step in steps():
    if guilty(step):
        fault()
        with lock, lock:
            pass
