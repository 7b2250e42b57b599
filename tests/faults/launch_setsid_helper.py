"""Every rank starts a helper in a session of its own and a daemon that forked twice; then rank 1 raises."""

import subprocess

from moment import HANG_S, fault, guilty
from training import steps

for step in steps():
    if step == 0:
        helper = subprocess.Popen(
            ["setsid", "sleep", str(HANG_S)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        subprocess.run(["sh", "-c", f"(setsid sleep {HANG_S} >/dev/null 2>&1 &) &"], check=True)
    if guilty(step):
        fault()
        raise ValueError("boom, with helpers left behind")
