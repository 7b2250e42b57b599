"""Rank 1 is in uninterruptible sleep (state D), as in a read from a dead NFS server.

Made with clone(CLONE_VFORK): the kernel holds the parent in D until the child executes another program, and this child never does.
Linux calls that state killable: unlike with a dead disk, a fatal signal still ends it.
"""

import ctypes
import platform
import signal
import sys
import time

from moment import HANG_S, fault, guilty
from training import steps

SYS_CLONE = {"x86_64": 56, "aarch64": 220}
CLONE_VFORK = 0x4000
PR_SET_PDEATHSIG = 1

if platform.machine() not in SYS_CLONE:
    sys.exit(f"the number of clone() on {platform.machine()} is not known here")
libc = ctypes.PyDLL(None)  # keeps the GIL, so that the child's only thread has it
for step in steps():
    if guilty(step):
        fault()
        if libc.syscall(SYS_CLONE[platform.machine()], CLONE_VFORK | signal.SIGCHLD, 0, 0, 0, 0) == 0:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            time.sleep(HANG_S)
