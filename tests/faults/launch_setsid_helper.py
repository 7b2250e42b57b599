"""Every rank starts a helper in a session of its own and a daemon that forked twice; then rank 1 raises."""

import subprocess

from moment import HANG_S, fault, guilty
from training import steps

quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
for step in steps():
    if step == 0:
        helper = subprocess.Popen(["setsid", "sleep", str(HANG_S)], **quiet)
        subprocess.run(["sh", "-c", f"(setsid sleep {HANG_S} &) &"], check=True, **quiet)
    if guilty(step):
        fault()
        raise ValueError("boom, with helpers left behind")
