"""All ranks print as fast as they can, from a thread, while rank 1 raises."""

import sys
import threading

from moment import fault, guilty
from training import steps


def flood() -> None:
    while True:
        sys.stdout.write("a line of noise, and nothing to read in it\n" * 200)


threading.Thread(target=flood, daemon=True).start()
for step in steps():
    if guilty(step):
        fault()
        raise ValueError("boom in the flood")
