"""Native code in rank 1 holds the GIL and never comes back: no Python thread of the rank runs any more."""

import ctypes
import time

from moment import HANG_S, fault, guilty
from training import steps

libc = ctypes.PyDLL(None)  # calls through it keep the GIL

for step in steps():
    if guilty(step):
        until = (ctypes.c_long * 2)(int(time.time() + HANG_S), 0)
        mutex = ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        fault()
        libc.pthread_mutex_timedlock(mutex, until)  # a signal does not end it, as it would end sleep()
